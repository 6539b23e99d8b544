"""Sharding: however a model is cut, it trains as one process would, and is whole again when the stage is over."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from tests.strategies.fsdp.sharded import Block, Blocks, assert_trained_alike, batches, train
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import ConfigurationError, NonFiniteError
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy
from trainwright.strategies.fsdp.strategy import FSDPStrategy

_OPTIONS: dict[str, dict[str, Any]] = {
    "by name": {"auto_wrap_policy": "Block", "forward_prefetch": 2},
    "by function": {"auto_wrap_policy": lambda module: isinstance(module, (Block, nn.Linear))},
    "by size": {"min_num_params": 50},
    "not at all": {"sharding_strategy": "NO_SHARD"},
    "hybrid, kept": {"sharding_strategy": "HYBRID_SHARD_ZERO2", "device_mesh": (1, 2)},
    "on the host": {"cpu_offload": True},
}


def _train_with_all() -> dict[str, Any]:
    return {name: train(FSDPStrategy(**options), 2) for name, options in _OPTIONS.items()}


@pytest.mark.distributed
def test_however_it_is_cut_a_model_trains_as_in_one_process() -> None:
    alone = train("single", 1)
    assert float(alone["norms"].max()) > 0.5  # something is clipped
    by_rank = run_distributed(_train_with_all, 2, timeout=300)
    for name in _OPTIONS:
        assert_trained_alike([found[name] for found in by_rank], alone)
        assert by_rank[0][name]["reported"] == pytest.approx(alone["norms"].tolist(), abs=1e-6), name


_OTHERS: dict[str, dict[str, Any]] = {
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    **{name: {"precision": name} for name in ("16-mixed", "bf16-true")},
}


@pytest.fixture(scope="module")
def otherwise() -> list[dict[str, Any]]:
    return run_distributed(lambda: {name: train("fsdp", 2, **given) for name, given in _OTHERS.items()}, 2, timeout=120)


@pytest.mark.distributed
@pytest.mark.parametrize("name", _OTHERS)
def test_other_clipping_and_precisions_come_close_to_one_process(name: str, otherwise: list[dict[str, Any]]) -> None:
    alone = train("single", 1, **_OTHERS[name])
    by_rank = [found[name] for found in otherwise]
    assert_trained_alike(by_rank, alone, atol=0.02 if "16" in name else 1e-6)
    assert {k: v.dtype for k, v in by_rank[0]["weights"].items()} == {k: v.dtype for k, v in alone["weights"].items()}


_STAGES: dict[str, list[Any]] = {
    "fsdp": [FSDPStrategy(activation_checkpointing=True), FSDPStrategy()],
    "deepspeed 3": [DeepSpeedStrategy(stage=3)],
}


def _after(strategies: list[Any]) -> dict[str, Any]:
    task, plain, linear = Blocks(), Blocks(), functional.linear
    for strategy in strategies:
        trainer = quiet_trainer(devices="auto", strategy=strategy, max_epochs=1)
        trainer.fit(task, batches(), batches(3))
    same = [
        (type(one), set(vars(one)), type(one._parameters)) == (type(other), set(vars(other)), dict)
        for one, other in zip([*task.modules()][1:], [*plain.modules()][1:], strict=True)
    ]
    hooks = [key for m in task.modules() for key, value in vars(m).items() if key.endswith("_hooks") and value]
    traces = {name for parameter in task.parameters() for name in vars(parameter)}
    kept = (task.tied.weight is task.inputs.weight, not task.inputs.bias.requires_grad, functional.linear is linear)
    again = pickle.loads(pickle.dumps(copy.deepcopy(task)))
    found = {
        "plain": (same.count(False), hooks, traces, kept), "outputs": again(batches()[3]).detach(),
        "predictions": trainer.predict(task, batches(3)), "weights": weights_of(task),
        "validated": trainer.validate(task, batches(3), verbose=False)[0]["val_loss"],
    }  # fmt: skip
    quiet_trainer(devices="auto", strategy=strategies[-1], max_epochs=1).fit(task, batches())
    alive = weakref.ref(task)
    found["moved"] = weights_of(task)
    del task, trainer
    gc.collect()
    return found | {"alive": alive() is not None}


@pytest.mark.distributed
@pytest.mark.parametrize(
    "strategies", [_STAGES["fsdp"], pytest.param(_STAGES["deepspeed 3"], marks=pytest.mark.engines)], ids=list(_STAGES)
)
def test_after_a_stage_the_task_is_a_plain_one_with_whole_weights_and_can_be_used_again(strategies: list[Any]) -> None:
    first, second = run_distributed(_after, 2, strategies, timeout=120, init=False)
    for found in (first, second):
        assert found["plain"] == (0, [], set(), (True, True, True))
        assert not found["alive"]
        assert_equal_weights(found["weights"], first["weights"])
        assert_equal_weights(found["moved"], first["moved"])
    task = Blocks()
    task.load_state_dict(first["weights"])
    with torch.no_grad():
        torch.testing.assert_close(first["outputs"], task(batches()[3]))
        torch.testing.assert_close(first["predictions"], [task(batch) for batch in batches(3)])
    assert first["validated"] == second["validated"]
    assert not torch.equal(first["moved"]["outputs.weight"], first["weights"]["outputs.weight"])


class _BadOnRankOne(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        if (self.global_rank, self.current_epoch, batch_idx) == (1, 0, 2):
            loss = loss + (0 * self.outputs.bias.sum()).sqrt()  # its gradient is not a number
        return loss


def _train_on_bad(strategy: Any, policy: str) -> Any:
    task, options = _BadOnRankOne(), {"accumulate_grad_batches": 2, "on_nonfinite": policy}
    trainer = quiet_trainer(devices="auto", strategy=strategy, max_epochs=1, num_sanity_val_steps=0, **options)
    try:
        trainer.fit(task, batches())
    except NonFiniteError as error:
        return str(error)
    return trainer.global_step, len(trainer.skipped_batches), weights_of(task)


def _skip_and_raise_on_bad(strategies: list[Any]) -> list[list[Any]]:
    return [[*_train_on_bad(each, "skip"), _train_on_bad(each, "raise")] for each in strategies]


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*left out.*:UserWarning", "ignore:.*finite.*:UserWarning")
@pytest.mark.parametrize(
    "strategies", [["fsdp"], [DeepSpeedStrategy(stage=stage) for stage in (1, 3)]], ids=["fsdp", "deepspeed"]
)
def test_ranks_agree_on_a_gradient_that_is_not_finite_in_one_ranks_piece(strategies: list[Any]) -> None:
    for of_rank in run_distributed(_skip_and_raise_on_bad, 2, strategies, init=False, timeout=200):
        for *skipped, weights, text in of_rank:
            assert skipped == [1, 1]
            assert all(tensor.isfinite().all() for tensor in weights.values())
            torch.testing.assert_close(weights, of_rank[0][2], rtol=0, atol=1e-5)
            assert "outputs.bias" in text


class StateWatcher(Callback):
    def __init__(self) -> None:
        self.seen: set[tuple[str, str]] = set()

    def on_save_checkpoint(self, trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
        self.seen = {(type(value).__name__, value.device.type) for value in checkpoint["state_dict"].values()}
        self.shape = checkpoint["state_dict"]["blocks.0.mix.weight"].shape


def _save(folder: Path) -> set[tuple[str, str]]:
    watcher = StateWatcher()
    # What wraps the units is not in their names.
    strategy = FSDPStrategy(activation_checkpointing=True, state_dict_type="full")
    train(strategy, 2, callbacks=[watcher, ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)])
    assert watcher.shape == (7, 7)
    return watcher.seen


@pytest.mark.distributed
def test_a_full_checkpoint_within_a_run_holds_all_tensors_and_ties_and_loads_into_one_process(tmp_path: Path) -> None:
    seen = run_distributed(_save, 2, tmp_path / "run")
    assert seen == [{("Tensor", "cpu")}, {("Tensor", "meta"), ("Tensor", "cpu")}]
    path = next(path for path in (tmp_path / "run").iterdir() if "step=2" in path.name)
    snapshot = read_checkpoint(path)
    assert snapshot.model["tied.weight"].data_ptr() == snapshot.model["inputs.weight"].data_ptr()
    assert snapshot.optimizers[0]["state"]["blocks.0.mix.weight"]["exp_avg"].shape == (7, 7)
    continued = train("single", 1, ckpt_path=path)
    torch.testing.assert_close(continued["weights"], train("single", 1)["weights"], rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"sharding_strategy": "HYBRID_SHARD"}, r"device_mesh=\(1, 2\)"),
        ({"device_mesh": (2, 2)}, r"Use device_mesh=\(2, 1\)"),
        ({"device_mesh": (3, 1)}, r"Use device_mesh=\(1, 2\)"),
    ],
)
def test_a_mesh_that_does_not_fit_the_processes_is_refused_before_anything_is_touched(
    options: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigurationError, match=text):
        quiet_trainer(devices=2, strategy=FSDPStrategy(**options))


def _task(**changes: Any) -> RegressionTask:
    """Return a task with attributes of its own; `configure_optimizers` is given the task."""
    task = RegressionTask()
    if make := changes.pop("configure_optimizers", None):
        task.configure_optimizers = lambda: make(task)  # type: ignore[method-assign]
    for name, value in changes.items():
        setattr(task, name, value)
    return task


class FromMetaWithoutReset(RegressionTask):
    def configure_model(self) -> None:
        self.scale = nn.Parameter(torch.empty(2, device="meta"))


_REFUSED: list[tuple[Callable[[], RegressionTask], dict[str, Any], str]] = [
    (lambda: _task(automatic_optimization=False), {}, "strategy='ddp'"),
    (lambda: _task(configure_optimizers=lambda task: torch.optim.LBFGS(task.parameters())), {}, "strategy='ddp'"),
    (lambda: _task(configure_optimizers=lambda task: torch.optim.Rprop(task.parameters())), {}, "Rprop cannot step"),
    (lambda: _task(words=nn.Embedding(4, 2, sparse=True)), {}, "words has sparse=True"),
    (FromMetaWithoutReset, {}, "reset_parameters"),
    (RegressionTask, {"auto_wrap_policy": "Linaer"}, "Did you mean 'Linear'"),
    (RegressionTask, {"auto_wrap_policy": 5}, "classes of modules"),
    (RegressionTask, {"activation_checkpointing": True}, "shard_units"),
]


def _refusals() -> list[str]:
    texts = []
    for make, options, _ in _REFUSED:
        with pytest.raises(ConfigurationError) as raised:
            quiet_trainer(devices="auto", strategy=FSDPStrategy(**options), max_steps=1).fit(
                make(), regression_loader(4)
            )
        texts.append(str(raised.value))
    return texts


@pytest.mark.distributed
def test_what_cannot_be_sharded_is_refused_with_a_way_out() -> None:
    (texts,) = run_distributed(_refusals, 1, init=False)
    for text, (_, _, part) in zip(texts, _REFUSED, strict=True):
        assert part in text


class EncoderTask(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(4, 2, 8, 0.0, batch_first=True) for _ in range(3))
        self.net, self.head = nn.Identity(), nn.Linear(4, 1)

    def forward(self, x: Any) -> Any:
        x = x.unsqueeze(1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.squeeze(1))

    def shard_units(self) -> Any:
        return list(self.layers)


def _count_graphs(strategy: str, compile: Any) -> int:
    from torch._dynamo.testing import CompileCounter  # imports much of torch

    counter = CompileCounter()  # type: ignore[no-untyped-call]  # torch has no types here
    options = {"compile": {"backend": counter, **compile}}
    quiet_trainer(strategy=strategy, devices="auto", max_steps=2, **options).fit(
        EncoderTask(), regression_loader(16, 2)
    )
    return int(counter.frame_count)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("strategy", "options"), [("fsdp", {}), ("ddp", {"regional": True})])
def test_layers_of_torch_are_compiled_as_units(strategy: str, options: Any) -> None:
    for graphs in run_distributed(_count_graphs, 2, strategy, options, timeout=300):
        assert 1 <= graphs <= 3  # one for all layers, and again when shapes or the training mode differ


_num_steps = 0


class KeepsOutputs(Blocks):
    """Keeps what its steps see; computes gradients in them if told, as force fields do."""

    def __init__(self, with_gradients: bool = False) -> None:
        super().__init__()
        self.with_gradients = with_gradients
        self.outs: list[int] = []
        self.num_rows = 0

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        global _num_steps
        _num_steps += 1
        self.outs.append(len(batch))
        self.num_rows += len(batch)
        if self.with_gradients:
            with torch.enable_grad():
                self(batch.clone().requires_grad_()).sum().backward()
        self.blocks[1](inputs=torch.zeros(1, 7))
        assert self.all_gather(torch.tensor(float(self(batch).sum()))).shape == (2,)

    predict_step = validation_step  # type: ignore[assignment]  # they return nothing


def _keep_outputs() -> list[tuple[int, list[int], int]]:
    global _num_steps
    found = []
    trainer = quiet_trainer(devices="auto", strategy="fsdp")
    for run, with_gradients, num in (
        (trainer.validate, False, 3),
        (trainer.predict, False, 3),
        (trainer.validate, True, 3),
        (trainer.validate, False, 1),
    ):
        task, _num_steps = KeepsOutputs(with_gradients), 0
        run(task, batches(num))
        found.append((_num_steps, task.outs, task.num_rows))
    return found


@pytest.mark.distributed
def test_a_step_of_an_evaluation_runs_once_for_each_batch() -> None:
    rows = [len(batch) for batch in batches(3)]
    for rank, (*stages, computes_gradients, has_one) in enumerate(run_distributed(_keep_outputs, 2)):
        mine = rows[rank::2]
        assert stages == [(len(mine), mine, sum(mine))] * 2
        # The step itself runs again where it computes gradients or the rank has no batch; its attributes are restored.
        assert computes_gradients[1:] == (mine, sum(mine))
        assert has_one[1:] == ((rows[:1], rows[0]) if rank == 0 else ([], 0))
