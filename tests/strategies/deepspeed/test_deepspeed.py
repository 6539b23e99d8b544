"""DeepSpeed: whatever it cuts, a task trains as in one process, and is a plain one when the stage is over."""

from __future__ import annotations

import gc
import pickle
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.strategies.ddp.test_ddp import GroupWatcher
from tests.strategies.fsdp.sharded import Blocks, assert_trained_alike, batches, train
from tests.strategies.fsdp.test_fsdp import _LeavesGroup, _train_on_bad
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import TaskError
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.distributed


_OPTIONS: dict[str, dict[str, Any]] = {
    "nothing": {"stage": 0},
    "states": {"stage": 1},
    "states, without overlap": {"stage": 1, "overlap_comm": False, "contiguous_gradients": False},
    "gradients": {"stage": 2},
    "gradients, in small buckets": {"stage": 2, "reduce_bucket_size": 20, "allgather_bucket_size": 20},
    "parameters": {"stage": 3},
    "parameters, group by group": {"stage": 3, "sub_group_size": 40, "overlap_comm": False},
    "every parameter": {
        "config": {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 30},
            "zero_allow_untested_optimizer": True,
        }
    },
}


class Inside(Callback):
    def __init__(self) -> None:
        self.empty = 0
        self.numel = 0

    def on_train_end(self, trainer: Any, task: Any) -> None:
        self.numel = sum(p.numel() for group in trainer.optimizers[0].param_groups for p in group["params"])
        states = trainer.optimizers[0].state.values()
        self.numel += sum(state["exp_avg"].numel() for state in states)
        self.empty = sum(p.numel() == 0 for p in task.parameters())


class Whole(Callback):
    """Asks for whole gradients and parameters in each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.parameters: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        self.gradients.append({n: g.clone() for n, g in trainer.strategy.state.full_gradients().items()})

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.parameters.append({n: p.clone() for n, p in trainer.strategy.state.full_parameters().items()})


def _train_with_all() -> dict[str, Any]:
    found = {}
    for name, options in _OPTIONS.items():
        inside, whole = Inside(), Whole()
        found[name] = train(DeepSpeedStrategy(**options), 2, callbacks=[inside, whole])
        found[name] |= {"empty": inside.empty, "held": inside.numel}
        found[name] |= {"gradients": whole.gradients, "parameters": whole.parameters}
    by_value = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}
    found["by value"] = [train(DeepSpeedStrategy(stage=stage), 2, **by_value) for stage in (0, 2, 3)]
    found["left"] = [
        train(DeepSpeedStrategy(stage=stage), 2, _LeavesGroup(), accumulate_grad_batches=2) for stage in (1, 2, 3)
    ]
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_distributed(_train_with_all, 2, timeout=290, init=False)


@pytest.mark.parametrize("name", _OPTIONS)
@pytest.mark.exhaustive
def test_whatever_is_cut_a_task_trains_as_in_one_process(name: str, trained: list[dict[str, Any]]) -> None:
    alone = train("single", 1)
    assert max(alone["reported"]) > 0.5  # something is clipped
    assert_trained_alike([found[name] for found in trained], alone)
    assert trained[0][name]["reported"] == pytest.approx(alone["reported"], abs=1e-6)


def test_each_rank_holds_its_pieces_only(trained: list[dict[str, Any]]) -> None:
    total = sum(p.numel() for p in Blocks().parameters() if p.requires_grad)
    for stage in ("states", "gradients"):
        assert max(found[stage]["held"] for found in trained) < 1.2 * total  # values and one state, of one half
    assert trained[0]["every parameter"]["empty"] > 5
    assert trained[0]["gradients"]["empty"] == 0


@pytest.mark.parametrize("name", _OPTIONS)
def test_gradients_and_parameters_can_be_seen_whole_in_each_step(name: str, trained: list[dict[str, Any]]) -> None:
    whole = Whole()
    train("single", 1, callbacks=[whole])
    for found in trained:
        for kind, expected in (("gradients", whole.gradients), ("parameters", whole.parameters)):
            assert [list(step) for step in found[name][kind]] == [list(step) for step in expected]
            torch.testing.assert_close(found[name][kind], expected, rtol=0, atol=1e-5)


def test_gradients_are_clipped_by_value(trained: list[dict[str, Any]]) -> None:
    alone = train("single", 1, gradient_clip_val=0.01, gradient_clip_algorithm="value")
    for number in range(3):
        assert_trained_alike([found["by value"][number] for found in trained], alone)


def test_a_group_that_is_left_between_its_micro_batches_leaves_no_gradient_behind(trained: list[Any]) -> None:
    alone = train("single", 1, _LeavesGroup())
    for number in range(3):
        assert_trained_alike([found["left"][number] for found in trained], alone)


# After a stage


def _after() -> dict[str, Any]:
    groups: list[weakref.ref[Any]] = []
    linear, found = nn.functional.linear, {}
    for stage in (1, 3):
        task, plain = Blocks(), Blocks()
        watcher = GroupWatcher(groups)
        trainer = quiet_trainer(devices="auto", strategy=f"deepspeed_stage_{stage}", max_epochs=1, callbacks=[watcher])
        trainer.fit(task, batches(), batches(3))
        gc.disable()
        same = [
            (type(one), set(vars(one)), type(one._parameters)) == (type(other), set(vars(other)), dict)
            for one, other in zip([*task.modules()][1:], [*plain.modules()][1:], strict=True)
        ]
        hooks = [key for m in task.modules() for key, value in vars(m).items() if key.endswith("_hooks") and value]
        traces = {name for parameter in task.parameters() for name in vars(parameter)}
        again = pickle.loads(pickle.dumps(task))
        found[stage] = {
            "plain": (same.count(False), hooks, traces, task.tied.weight is task.inputs.weight),
            "outputs": again(batches()[3]).detach(), "weights": weights_of(task),
            "predictions": trainer.predict(task, batches(3)),
            "validated": trainer.validate(task, batches(3), verbose=False)[0]["val_loss"],
        }  # fmt: skip
        quiet_trainer(devices="auto", strategy=f"deepspeed_stage_{stage}", max_epochs=1).fit(task, batches())
        found[stage]["moved"] = weights_of(task)
        alive = weakref.ref(task)
        del task, plain, watcher, trainer
        gc.collect()
        found[stage]["alive"] = alive() is not None
        gc.disable()
    found["groups"] = [group() is not None for group in groups[1:]]
    found["linear"] = nn.functional.linear is linear
    return found


def test_after_a_stage_the_task_is_a_plain_one_with_whole_weights_and_can_be_used_again() -> None:
    by_rank = run_distributed(_after, 2, timeout=280, init=False)
    for stage in (1, 3):
        first, second = (found[stage] for found in by_rank)
        for found in (first, second):
            assert found["plain"] == (0, [], set(), True)
            assert_equal_weights(found["weights"], first["weights"])
            assert_equal_weights(found["moved"], first["moved"])
        task = Blocks()
        task.load_state_dict(first["weights"])
        with torch.no_grad():
            torch.testing.assert_close(first["outputs"], task(batches()[3]))
            torch.testing.assert_close(first["predictions"], [task(batch) for batch in batches(3)])
        assert first["validated"] == second["validated"]
        assert not first["alive"]
        assert not torch.equal(first["moved"]["outputs.weight"], first["weights"]["outputs.weight"])
    assert by_rank[0]["groups"] == [False]
    assert by_rank[0]["linear"]


# Steps that do not end


class _ReturnsNone(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def _not_ending() -> dict[str, Any]:
    import warnings

    warnings.simplefilter("ignore")
    found: dict[str, Any] = {
        policy: [_train_on_bad(DeepSpeedStrategy(stage=stage), policy, 1) for stage in (0, 1, 2, 3)]
        for policy in ("skip", "raise")
    }
    with pytest.raises(TaskError) as none:
        quiet_trainer(devices="auto", strategy="deepspeed_stage_2", max_epochs=1).fit(_ReturnsNone(), batches())
    found["none"] = str(none.value)
    return found


def test_ranks_agree_on_a_gradient_that_is_not_finite() -> None:
    first, second = run_distributed(_not_ending, 2, timeout=280, init=False)
    for one, other in zip(first["skip"], second["skip"], strict=True):
        assert one[:2] == other[:2] == (1, 1)
        assert all(tensor.isfinite().all() for tensor in one[2].values())
        torch.testing.assert_close(one[2], first["skip"][0][2], rtol=0, atol=1e-5)
    assert all("outputs.bias" in text for text in first["raise"])
    assert "Return a zero loss" in first["none"]


# Checkpoints


class Names(Callback):
    def __init__(self) -> None:
        self.seen: set[str] = set()

    def on_save_checkpoint(self, trainer: Any, task: Any, checkpoint: dict[str, Any]) -> None:
        self.seen |= {value.device.type for value in checkpoint["state_dict"].values()}


_SAVES = [(1, "sharded"), (2, "sharded"), (2, "full"), (3, "sharded"), (3, "full")]


def _save(folder: Path) -> list[set[str]]:
    seen = []
    for stage, kind in _SAVES:
        watcher = Names()
        saver = ModelCheckpoint(folder / f"{stage}-{kind}", every_n_train_steps=2, save_top_k=-1)
        train(DeepSpeedStrategy(stage=stage, state_dict_type=kind), 2, callbacks=[watcher, saver])
        seen.append(watcher.seen)
    return seen


@pytest.mark.exhaustive
def test_a_checkpoint_within_a_run_holds_whole_tensors_or_pieces_and_loads_into_one_process(tmp_path: Path) -> None:
    first, second = run_distributed(_save, 2, tmp_path, timeout=280, init=False)
    for (stage, kind), on_main, on_other in zip(_SAVES, first, second, strict=True):
        assert on_main == ({"cpu"} if kind == "full" else {"cpu", "meta"})  # buffers are whole
        assert on_other == (on_main if kind == "sharded" else {"meta"})
        path = next(path for path in (tmp_path / f"{stage}-{kind}").iterdir() if "step=2" in path.name)
        assert bool([*(path / "optimizer").rglob("rank-*")]) == (kind == "sharded")
        snapshot = read_checkpoint(path)
        assert snapshot.model is not None
        assert snapshot.model["tied.weight"].data_ptr() == snapshot.model["inputs.weight"].data_ptr()
        state = snapshot.optimizers[0]["state"]["blocks.0.mix.weight"]
        assert set(state) == {"step", "exp_avg", "exp_avg_sq"}
        assert state["exp_avg"].shape == (7, 7)
        continued = train("single", 1, ckpt_path=path)
        torch.testing.assert_close(continued["weights"], train("single", 1)["weights"], rtol=0, atol=1e-5)
