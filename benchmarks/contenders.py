"""One tiny training, done by hand, by Trainwright, by Lightning and by Accelerate: what `overhead.py` compares.

Every contender sees the same in-memory batches, the same network and the same optimizer. Frameworks are measured from
`on_train_start` to `on_train_end`, so that building a Trainer costs nothing here.
"""

from __future__ import annotations

import gc
import logging
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from trainwright import Callback, CSVLogger, TaskModule, Trainer

Batches = list[tuple[Tensor, Tensor]]
Watch = Callable[[], AbstractContextManager[Any]]
"""Makes a context that is entered around the steps, to count something in them."""

NUM_FEATURES, NUM_OUTPUTS, WIDTH, BATCH_SIZE = 32, 2, 32, 4


def make_batches(num_steps: int) -> Batches:
    """Return `num_steps` batches of inputs `(4, 32)` and targets `(4, 2)`, 64 different ones in turn."""
    generator = torch.Generator().manual_seed(0)
    pool = [
        (
            torch.randn(BATCH_SIZE, NUM_FEATURES, generator=generator),
            torch.randn(BATCH_SIZE, NUM_OUTPUTS, generator=generator),
        )
        for _ in range(64)
    ]
    return [pool[i % len(pool)] for i in range(num_steps)]


def make_net() -> nn.Sequential:
    """Return a multi-layer perceptron of 1,122 parameters."""
    return nn.Sequential(nn.Linear(NUM_FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, NUM_OUTPUTS))


def make_optimizer(net: nn.Module) -> Optimizer:
    """Return plain SGD."""
    return torch.optim.SGD(net.parameters(), lr=0.01)


class _Loader:
    """The batches as Lightning takes them: it reads a plain list as a list of loaders."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return iter(self._batches)


class Stopwatch:
    """Times the steps of one run, and holds a `Watch` open meanwhile.

    Attributes:
        clock: seconds of the wall, or `time.thread_time`: of the processor, which on a busy machine leaves out the
            time that other programs have had. One thread computes here, so that an idle machine gives both alike.
    """

    clock: ClassVar[Callable[[], float]] = time.perf_counter

    def __init__(self, watch: Watch | None) -> None:
        self.seconds = 0.0
        self._context = nullcontext() if watch is None else watch()
        self._started = 0.0

    def start(self) -> None:
        """Begin; collects garbage first, so that no contender pays for another's."""
        gc.collect()
        self._context.__enter__()
        self._started = Stopwatch.clock()

    def stop(self) -> None:
        """End."""
        self.seconds = Stopwatch.clock() - self._started
        self._context.__exit__(None, None, None)


def run_by_hand(batches: Batches, watch: Watch | None = None) -> float:
    """Train with the loop that everyone writes; returns seconds."""
    net = make_net()
    optimizer = make_optimizer(net)
    stopwatch = Stopwatch(watch)
    stopwatch.start()
    for inputs, targets in batches:
        loss = nn.functional.mse_loss(net(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]  # torch has no types here
        optimizer.step()
        optimizer.zero_grad()
    stopwatch.stop()
    return stopwatch.seconds


def _make_task(base: Any, names: Sequence[str], stopwatch: Stopwatch) -> Any:
    """Return the same task as a sub-class of our TaskModule or of the LightningModule; it logs under `names`."""

    class Task(base):  # type: ignore[misc]  # either base
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, targets = batch
            return nn.functional.mse_loss(self.net(inputs), targets)

        def configure_optimizers(self) -> Optimizer:
            return make_optimizer(self)

        def on_train_start(self) -> None:
            stopwatch.start()

        def on_train_end(self) -> None:
            stopwatch.stop()

    class LoggingTask(Task):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            inputs, targets = batch
            loss = nn.functional.mse_loss(self.net(inputs), targets)
            for name in names:
                self.log(name, loss)
            return loss

    return LoggingTask() if names else Task()


_BARE = {
    "accelerator": "cpu",
    "devices": 1,
    "max_epochs": 1,
    "enable_progress_bar": False,
    "enable_checkpointing": False,
    "enable_model_summary": False,
}


def run_trainwright(
    batches: Batches, watch: Watch | None = None, *, metrics: Sequence[str] = (), num_callbacks: int = 0
) -> float:
    """Train with Trainwright; returns seconds.

    Args:
        batches: the data.
        watch: entered around the steps.
        metrics: logged in every step, with a CSV logger; none: without any logger.
        num_callbacks: callbacks that override nothing.
    """
    with tempfile.TemporaryDirectory() as folder:
        stopwatch = Stopwatch(watch)
        trainer = Trainer(
            logger=CSVLogger(folder) if metrics else False,
            callbacks=[type(f"Idle{i}", (Callback,), {})() for i in range(num_callbacks)],
            default_root_dir=folder,
            **_BARE,  # type: ignore[arg-type]  # one dict for both trainers
        )
        trainer.fit(_make_task(TaskModule, metrics, stopwatch), batches)
    return stopwatch.seconds


def run_lightning(
    batches: Batches,
    watch: Watch | None = None,
    *,
    metrics: Sequence[str] = (),
    num_callbacks: int = 0,
    barebones: bool = False,
) -> float:
    """Train with Lightning; the arguments are those of `run_trainwright`, and its barebones mode. Returns seconds."""
    from lightning.pytorch import Callback as LightningCallback
    from lightning.pytorch import LightningModule
    from lightning.pytorch import Trainer as LightningTrainer
    from lightning.pytorch.loggers import CSVLogger as LightningCSVLogger

    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # advice about workers and sanity checks, which the comparison turns off
        stopwatch = Stopwatch(watch)
        arguments: dict[str, Any]
        if barebones:
            arguments = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "barebones": True}
        else:
            idle = [type(f"Idle{i}", (LightningCallback,), {})() for i in range(num_callbacks)]
            arguments = {**_BARE, "callbacks": idle, "logger": LightningCSVLogger(folder) if metrics else False}
        trainer = LightningTrainer(default_root_dir=folder, **arguments)
        trainer.fit(_make_task(LightningModule, metrics, stopwatch), _Loader(batches))
    return stopwatch.seconds


def run_accelerate(batches: Batches, watch: Watch | None = None) -> float:
    """Train with a hand-written loop over Accelerate's objects, as its documentation writes it; returns seconds."""
    from accelerate import Accelerator  # type: ignore[import-untyped]  # it has none

    return _run_loop(Accelerator(cpu=True), batches, watch)


def run_accelerator(batches: Batches, watch: Watch | None = None) -> float:
    """Train with the same loop over Trainwright's objects; returns seconds."""
    from trainwright import Accelerator

    return _run_loop(Accelerator(cpu=True), batches, watch)


def _run_loop(accelerator: Any, batches: Batches, watch: Watch | None) -> float:
    net = make_net()
    net, optimizer = accelerator.prepare(net, make_optimizer(net))
    stopwatch = Stopwatch(watch)
    stopwatch.start()
    for inputs, targets in batches:
        with accelerator.accumulate(net):
            loss = nn.functional.mse_loss(net(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    stopwatch.stop()
    return stopwatch.seconds
