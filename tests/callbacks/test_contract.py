"""What every ready-made callback keeps: it pickles, its state is JSON, it fits into a run."""

from __future__ import annotations

import copy
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.callbacks.fake_run import FakeRun
from trainwright import callbacks as public
from trainwright.callbacks import CALLBACKS, Callback, ProgressBar
from trainwright.checkpoint import encode


def say_nothing(trainer: Any, task: Any) -> None:
    """Stands for a user's function."""


# How those are made that want arguments, or that are of more interest with some.
MAKE: dict[str, Callable[[Path], Callback]] = {
    "early_stopping": lambda root: public.EarlyStopping("loss"),
    "ema_weight_averaging": lambda root: public.EMAWeightAveraging(decay=0.5),
    "gradient_accumulation_scheduler": lambda root: public.GradientAccumulationScheduler({1: 2}),
    "lambda": lambda root: public.LambdaCallback(on_fit_end=say_nothing),
    "loss_spike_detector": lambda root: public.LossSpikeDetector(window=4),
    "model_checkpoint": lambda root: public.ModelCheckpoint(monitor="loss", save_last=True),
    "model_pruning": lambda root: public.ModelPruning("l1_unstructured", parameter_names=["weight"]),
    "on_exception_checkpoint": lambda root: public.OnExceptionCheckpoint(root),
    "quantization_aware_training": lambda root: public.QuantizationAwareTraining("int8_weight"),
    "stochastic_weight_averaging": lambda root: public.StochasticWeightAveraging(0.1, swa_epoch_start=1),
    "timer": lambda root: public.Timer("00:00:01:00"),
}
ABSTRACT = {Callback, ProgressBar, public.BaseFinetuning, public.BasePredictionWriter}
NEEDS = {"quantization_aware_training": pytest.mark.requires("torchao", reason="it quantizes layers")}


@pytest.fixture(params=[pytest.param(name, marks=NEEDS.get(name, ())) for name in sorted(CALLBACKS)])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Callback]:
    name = request.param
    return lambda: MAKE[name](tmp_path) if name in MAKE else CALLBACKS.get(name)()


def log_loss(run: FakeRun) -> None:
    run.callback_metrics["loss"] = float(10 - run.state.step)


def used(callback: Callback, root: Path) -> FakeRun:
    run = FakeRun([callback], root, has_validation=True, max_epochs=2)
    run.optimizers = [torch.optim.SGD(run.task.parameters(), lr=0.1)]
    run.fit(epochs=2, batches=3, on_step=log_loss)
    return run


def written(state: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return what a checkpoint's files hold of a state: strict JSON, and its tensors as lists."""
    value, tensors = encode(state)
    if not tensors:
        assert value == state, "a state without tensors is JSON as it is"
    return json.loads(json.dumps(value, allow_nan=False)), {name: tensor.tolist() for name, tensor in tensors.items()}


def test_it_pickles_before_and_after_a_run_and_the_copy_works(make: Callable[[], Callback], tmp_path: Path) -> None:
    callback = make()
    for _ in range(2):
        again = pickle.loads(pickle.dumps(callback))
        assert written(again.state_dict()) == written(callback.state_dict())
        assert copy.deepcopy(callback).state_key == callback.state_key
        assert used(again, tmp_path).state.epoch == 2
        callback = again


def test_every_public_class_has_a_short_name() -> None:
    classes = {getattr(public, name) for name in public.__all__ if isinstance(getattr(public, name), type)}
    registered = {CALLBACKS.get(name) for name in CALLBACKS}
    assert {cls for cls in classes if issubclass(cls, Callback)} - ABSTRACT == registered


def test_it_lives_through_an_exception(make: Callable[[], Callback], tmp_path: Path) -> None:
    callback = make()
    run = FakeRun([callback], tmp_path)
    run.optimizers = [torch.optim.SGD(run.task.parameters(), lr=0.1)]
    run.max_epochs = 1

    def fail(run: FakeRun) -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        run.fit(epochs=1, batches=1, on_step=fail)
    callback.on_exception(run, run.task, ValueError("no"))  # type: ignore[arg-type]
    callback.teardown(run, run.task, "fit")  # type: ignore[arg-type]
