"""Pruning, against torch's own functions in a hand-written loop, with exact resumes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.utils import prune

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import ConfigurationError
from trainwright.callbacks import ModelCheckpoint, ModelPruning

pytestmark = pytest.mark.filterwarnings("ignore:.*holds the state of a callback:UserWarning")
_EPOCHS = 3


def _fit(folder: Path, callback: ModelPruning, task: Any = None, **arguments: Any) -> RegressionTask:
    task = task or RegressionTask(momentum=0.9)
    callbacks: list[Any] = [callback]
    if "ckpt_path" not in arguments:
        callbacks.append(ModelCheckpoint(folder, filename="{step}", save_top_k=-1, every_n_train_steps=4))
    ckpt_path = arguments.pop("ckpt_path", None)
    quiet_trainer(max_epochs=_EPOCHS, callbacks=callbacks, **arguments).fit(
        task, regression_loader(batch_size=8), ckpt_path=ckpt_path
    )
    return task


def _by_hand(*, ticket: bool) -> RegressionTask:
    task = RegressionTask(momentum=0.9)
    targets = [(layer, name) for layer in (task.net[0], task.net[3]) for name in ("weight", "bias")]
    first = [getattr(layer, name).detach().clone() for layer, name in targets]
    optimizer = task.configure_optimizers()
    for _ in range(_EPOCHS):
        for batch in regression_loader(batch_size=8):
            optimizer.zero_grad()
            task.loss(batch).backward()
            optimizer.step()
        prune.global_unstructured(targets, prune.L1Unstructured, amount=0.3)
        for (layer, name), value in zip(targets, first, strict=True):
            if ticket:
                with torch.no_grad():
                    getattr(layer, f"{name}_orig").copy_(value)
    for layer, name in targets:
        prune.remove(layer, name)
    return task


@pytest.mark.slow
@pytest.mark.parametrize("ticket", [False, True])
def test_it_prunes_as_by_hand_and_a_resume_is_exact(ticket: bool, tmp_path: Path) -> None:
    def callback() -> ModelPruning:
        return ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=ticket)

    task = _fit(tmp_path, callback())
    assert_equal_weights(weights_of(task), weights_of(_by_hand(ticket=ticket)))
    zeros = sum(int((p == 0).sum()) for p in task.parameters())
    assert zeros == round(49 * (1 - 0.7**3))
    for step in (4, 8, 12, 20):  # before the first pruning, at it and in the middle of an epoch
        again = _fit(tmp_path, callback(), ckpt_path=tmp_path / f"step={step}")
        assert_equal_weights(weights_of(again), weights_of(task))


def test_a_resume_may_end_the_resets_to_initial_weights(tmp_path: Path) -> None:
    _fit(tmp_path, ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=True))
    plain = ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False)
    task = _fit(tmp_path, plain, ckpt_path=tmp_path / "step=8")
    assert sum(int((p == 0).sum()) for p in task.parameters()) == round(49 * (1 - 0.7**3))


@pytest.mark.parametrize(
    "arguments",
    [
        {"pruning_fn": "ln_structured", "pruning_dim": 0, "pruning_norm": 2},
        {"pruning_fn": "random_structured", "pruning_dim": 0},
        {"pruning_fn": prune.l1_unstructured},
        {"pruning_fn": prune.RandomUnstructured},
    ],
)
def test_each_parameter_may_be_pruned_by_itself(arguments: dict[str, Any], tmp_path: Path) -> None:
    task = RegressionTask(momentum=0.9)
    callback = ModelPruning(
        **arguments,
        parameters_to_prune=[(task.net[0], "weight")],
        use_global_unstructured=False,
        amount=0.5,
        make_pruning_permanent=False,
        resample_parameters=True,
    )
    _fit(tmp_path, callback, task)
    mask = task.net[0].weight_mask
    assert sorted(dict(task.net[0].named_buffers())) == ["weight_mask"]
    assert float(mask.mean()) == pytest.approx(0.5**_EPOCHS, abs=0.07)


def test_functions_of_the_epoch_choose(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    callback = ModelPruning(
        "l1_unstructured",
        parameter_names=["weight"],
        amount=lambda epoch: 4 * (epoch + 1),
        apply_pruning=lambda epoch: epoch != 1,
        use_lottery_ticket_hypothesis=lambda epoch: epoch == 0,
        verbose=2,
    )
    _fit(tmp_path, callback)
    out = capsys.readouterr().out
    assert [line for line in out.splitlines() if "pruned" in line] == [
        "pruned: 4 of 40 weights (10.0%)",
        "pruned: 16 of 40 weights (40.0%)",
    ]
    assert "  net.0.weight: " in out


def test_what_cannot_be_pruned_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="has none named kernel"):
        _fit(tmp_path, ModelPruning("l1_unstructured", parameter_names=["kernel"]))
    with pytest.raises(ConfigurationError, match="strategy='ddp'"):
        _fit(tmp_path, ModelPruning("l1_unstructured"), strategy="fsdp")


def test_the_generator_of_an_accelerator_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    # `torch.manual_seed` seeds every device, so that all ranks would draw the same dropout masks afterwards.
    task = RegressionTask()
    states = ["of the run"]
    cuda = SimpleNamespace(
        get_rng_state=lambda device: states[-1],
        set_rng_state=lambda state, device: states.append(state),
    )
    monkeypatch.setattr(torch, "get_device_module", lambda device: cuda)
    monkeypatch.setattr(torch, "manual_seed", lambda seed: states.append("seeded"))
    callback = ModelPruning("random_unstructured", use_lottery_ticket_hypothesis=False)
    run: Any = SimpleNamespace(current_epoch=0, world_size=1, device=torch.device("cuda"))
    callback.on_fit_start(run, task)
    callback.on_train_epoch_end(run, task)
    assert states == ["of the run", "seeded", "of the run"]


@pytest.mark.parametrize("ticket", [False, True])
def test_a_second_fit_prunes_further(ticket: bool, tmp_path: Path) -> None:
    callback = ModelPruning(
        "l1_unstructured", amount=0.3, make_pruning_permanent=False, use_lottery_ticket_hypothesis=ticket
    )
    task = _fit(tmp_path / "first", callback)
    _fit(tmp_path / "second", callback, task)
    callback.make_pruning_permanent(task)
    assert sum(int((p == 0).sum()) for p in task.parameters()) == round(49 * (1 - 0.7**6))


def test_a_module_of_another_task_is_an_error(tmp_path: Path) -> None:
    other = torch.nn.Linear(2, 2)
    with pytest.raises(ConfigurationError, match="Linear of parameter 'weight' is not in RegressionTask"):
        _fit(tmp_path, ModelPruning("l1_unstructured", [(other, "weight")]))


@pytest.mark.parametrize("is_global", [False, True])
def test_only_a_fit_prunes(is_global: bool, tmp_path: Path) -> None:
    callback = ModelPruning(
        "l1_unstructured", use_global_unstructured=is_global, prune_on_train_epoch_end=False, verbose=1
    )
    task = RegressionTask()
    before = weights_of(task)
    trainer = quiet_trainer(max_epochs=1, callbacks=[callback])
    trainer.validate(task, regression_loader(batch_size=8))
    assert_equal_weights(weights_of(task), before)
    trainer.fit(task, regression_loader(batch_size=8), regression_loader(batch_size=8))
    assert sum(int((p == 0).sum()) for p in task.parameters()) >= 24


def test_an_evaluation_of_a_checkpoint_leaves_the_callback_and_the_task_unpruned(tmp_path: Path) -> None:
    callback = ModelPruning("l1_unstructured", amount=0.5, make_pruning_permanent=False)
    fitted = _fit(tmp_path, callback)
    evaluated = RegressionTask()
    quiet_trainer(callbacks=[callback]).validate(
        evaluated, regression_loader(batch_size=8), ckpt_path=tmp_path / "step=20"
    )
    assert not any("weight_orig" in name for name in evaluated.state_dict())
    assert sum(int((p == 0).sum()) for p in evaluated.parameters()) >= 36
    # A task that is pruned already is evaluated, too.
    quiet_trainer(callbacks=[callback]).validate(
        fitted, regression_loader(batch_size=8), ckpt_path=tmp_path / "step=20"
    )
    callback.make_pruning_permanent(fitted)
    assert_equal_weights(weights_of(fitted), weights_of(evaluated))


def test_the_callback_can_evaluate_one_task_and_train_another(tmp_path: Path) -> None:
    _fit(tmp_path, ModelPruning("l1_unstructured", amount=0.5))
    callback = ModelPruning("l1_unstructured", amount=0.5)
    quiet_trainer(callbacks=[callback]).validate(
        RegressionTask(), regression_loader(batch_size=8), ckpt_path=tmp_path / "step=20"
    )
    task = _fit(tmp_path / "second", callback)
    assert sum(int((p == 0).sum()) for p in task.parameters()) >= 42


def test_tensors_of_a_module_keep_their_gradients(tmp_path: Path) -> None:
    task = RegressionTask()
    task.net[0].scale = torch.ones(1, requires_grad=True)
    _fit(tmp_path, ModelPruning("l1_unstructured"), task)
    assert task.net[0].scale.requires_grad


def test_a_function_prunes_each_parameter_only() -> None:
    with pytest.raises(ConfigurationError, match="l1_unstructured\\) is a function"):
        ModelPruning(prune.l1_unstructured)
    ModelPruning(prune.l1_unstructured, use_global_unstructured=False)
