"""What a step and a save cost, where it can be counted: none of these figures may grow."""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from tests.conftest import is_present
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.pinned.stored import PinnedTask
from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule
from trainwright.trainer.checkpoints.loads import Loads

# Of one optimizer step of `_Plain` with gradient clipping, in one process: calls of functions of the package, and
# operations of torch.
PYTHON_CALLS = 17 if sys.version_info < (3, 12) else 15  # where comprehensions are no calls
OPERATIONS = 51 if is_present("torch>=2.13") else 56  # torch 2.9 detaches 5 times more
# Of a step in two processes, on each, without what is agreed upon every few steps: the buffer, the gradients, FSDP's
# one unit and the norm.
COLLECTIVES = {"ddp": {"gloo:all_reduce": 1, "gloo:broadcast": 1}, "fsdp": {"gloo:all_gather": 1, "gloo:all_reduce": 2}}
# Modules of the package that are entered by a save whose caller waits for it, and by finding, reading and restoring the
# complete state of a run.
SAVE_MODULES, LOAD_MODULES = 38, 29
WRITTEN = {"model/model-00001-of-00001.safetensors": 716, "rng/rank-00000.safetensors": 7752}


class _Plain(PinnedTask):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def _fit(num_steps: int, task: TaskModule | None = None, **arguments: Any) -> None:
    trainer = quiet_trainer(max_epochs=1, gradient_clip_val=1.0, **arguments)
    trainer.fit(task or _Plain(), DataLoader([torch.ones(2, 4)] * num_steps, batch_size=None))


def _per_step(count: Callable[[int], int]) -> float:
    count(8)  # what is cached at the first call
    return (count(24) - count(8)) / 16


def _operations(num_steps: int) -> int:
    class Counting(TorchDispatchMode):
        num = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            Counting.num += 1
            return func(*args, **(kwargs or {}))

    with Counting():
        _fit(num_steps)
    return Counting.num


def _own_calls(num_steps: int) -> int:
    num = 0

    def profile(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal num
        num += event == "call" and frame.f_globals.get("__name__", "").startswith("trainwright.")

    gc.disable()  # what it finalizes was left by others
    sys.setprofile(profile)
    try:
        _fit(num_steps)
    finally:
        sys.setprofile(None)
        gc.enable()
    return num


@pytest.mark.slow
def test_a_step_s_calls_and_operations() -> None:
    assert 0 < _per_step(_own_calls) <= PYTHON_CALLS
    assert 0 < _per_step(_operations) <= OPERATIONS


def _collectives(strategy: str) -> dict[str, int]:
    counts = []
    for num_steps in (8, 24):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            _fit(2 * num_steps, devices="auto", strategy=strategy)
        counts.append(Counter(event.name for event in profiler.events() if event.name.startswith("gloo:")))
    few, many = counts
    per_step = {name: (many[name] - few[name]) // 16 for name in many}
    return {name: number for name, number in per_step.items() if number}


@pytest.mark.distributed
def test_a_step_s_collectives() -> None:
    found = run_distributed(lambda: {strategy: _collectives(strategy) for strategy in COLLECTIVES}, 2, init=False)
    assert found == [COLLECTIVES] * 2


@contextmanager
def _noting(entered: set[str]) -> Iterator[None]:
    def profile(frame: FrameType, event: str, arg: Any) -> None:
        name = frame.f_globals.get("__name__", "")
        if event == "call" and name.startswith("trainwright."):
            entered.add(name)

    sys.setprofile(profile)
    try:
        yield
    finally:
        sys.setprofile(None)


class _Entered(Callback):
    """Saves, and notes what that enters."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.entered: set[str] = set()

    def on_train_end(self, trainer: Any, task: Any) -> None:
        with _noting(self.entered):
            trainer.save_checkpoint(self.path)


def test_what_a_resume_enters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = _Entered(tmp_path / "saved")
    _fit(4, callbacks=[saved], async_save=False)
    entered: set[str] = set()

    def noted(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            with _noting(entered):
                return method(*args, **options)

        return call

    monkeypatch.setattr(Loads, "open", noted(Loads.open))
    monkeypatch.setattr(Loads, "load", noted(Loads.load))
    trainer = quiet_trainer(max_epochs=2, gradient_clip_val=1.0)
    trainer.fit(_Plain(), DataLoader([torch.ones(2, 4)] * 4, batch_size=None), ckpt_path=saved.path)
    assert trainer.global_step == 8
    assert 0 < len(entered) <= LOAD_MODULES


def test_what_a_save_enters_and_writes(tmp_path: Path) -> None:
    found = _Entered(tmp_path / "saved")
    _fit(4, callbacks=[found], async_save=False)
    written = {str(file.relative_to(found.path)): file.stat().st_size for file in found.path.rglob("*.safetensors")}
    assert 0 < len(found.entered) <= SAVE_MODULES
    assert written == WRITTEN
