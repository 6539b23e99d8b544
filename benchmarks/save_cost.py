"""What asynchronous saves cost a whole fit: its seconds with them less those without, and the slowest step.

    python benchmarks/save_cost.py [--parameters 100_000_000] [--steps 18] [--every 6] [--rounds 3] [--threads N]

Everything comes through `Trainer.fit` with `ModelCheckpoint`, of Trainwright and of Lightning: the first save, which
allocates memory, the wait at the end of the fit, and what the steps lose beside a write are all in the figures. A
callback of a few lines, which copies all tensors and writes them in a thread without a hash, shows what any
asynchronous save costs on this machine. The contenders run in this process in interleaved rounds, with torch's own
number of threads, and again with one.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
import statistics
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measuring import Bars, describe_machine, print_table
from torch import Tensor, nn
from torch.utils.data import DataLoader

from trainwright import Callback, ModelCheckpoint, TaskModule, Trainer

WIDTH, BATCH_SIZE = 1024, 16
OURS, BY_HAND, LIGHTNING = "Trainwright", "by hand", "Lightning"


class CopyAndWrite(Callback):
    """The least that an asynchronous save does: copy all tensors into buffers, and write the buffers in a thread.

    Args:
        every_n_train_steps: steps from save to save.
        save_top_k: ignored.
    """

    def __init__(self, every_n_train_steps: int, save_top_k: int) -> None:
        self._every = every_n_train_steps
        self._buffers: list[Tensor] = []
        self._thread: threading.Thread | None = None

    def on_train_batch_end(self, trainer: Trainer, task: TaskModule, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Save after every few steps."""
        if (batch_idx + 1) % self._every:
            return
        self._wait()
        tensors = [parameter.detach() for parameter in task.parameters()]
        for state in trainer.optimizers[0].state.values():
            tensors += [value for value in state.values() if value.dim()]
        if not self._buffers:
            self._buffers = [torch.empty_like(tensor) for tensor in tensors]
        for buffer, tensor in zip(self._buffers, tensors, strict=True):
            buffer.copy_(tensor)
        self._thread = threading.Thread(target=self._write, args=(Path(trainer.default_root_dir) / "state",))
        self._thread.start()

    def on_train_end(self, trainer: Trainer, task: TaskModule) -> None:
        """Wait for the last save."""
        self._wait()

    def _wait(self) -> None:
        if self._thread is not None:
            self._thread.join()

    def _write(self, path: Path) -> None:
        with path.open("wb") as file:
            for buffer in self._buffers:
                file.write(memoryview(buffer.numpy()))
            file.flush()
            os.fsync(file.fileno())


@dataclass
class Fit:
    """One fit.

    Attributes:
        seconds: of the whole `Trainer.fit`.
        steps: seconds from the start of each step to that of the next, what happens between them included.
    """

    seconds: float
    steps: list[float]

    @property
    def slowest(self) -> float:
        """The slowest step over the median step."""
        return max(self.steps) / statistics.median(self.steps)


@dataclass
class Workload:
    """What every contender trains.

    Attributes:
        num_parameters: about, in layers of 1024 × 1024.
        num_steps: of a fit.
        every: steps from save to save.
        folder: on the disk to be measured.
    """

    num_parameters: int
    num_steps: int
    every: int
    folder: Path

    def task(self, base: Any) -> Any:
        """Return the same task as a sub-class of our TaskModule or of the LightningModule."""
        num_layers = max(1, round(self.num_parameters / (WIDTH * WIDTH + WIDTH)))

        class Task(base):  # type: ignore[misc]  # either base
            def __init__(self) -> None:
                super().__init__()
                self.net = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(num_layers)])
                self.begun: list[float] = []

            def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
                self.begun.append(time.perf_counter())
                return self.net(batch).square().mean()

            def configure_optimizers(self) -> torch.optim.Optimizer:
                return torch.optim.AdamW(self.parameters(), lr=1e-4)

        return Task()

    def run(self, base: Any, trainer_type: Any, checkpoint_type: Any, *, saves: bool) -> Fit:
        """Fit once with one of the frameworks."""
        task = self.task(base)
        batches = [torch.ones(BATCH_SIZE, WIDTH)] * self.num_steps
        with tempfile.TemporaryDirectory(dir=self.folder, prefix="save-cost-") as folder:
            trainer = trainer_type(
                max_epochs=1, accelerator="cpu", devices=1, logger=False, default_root_dir=folder,
                enable_progress_bar=False, enable_model_summary=False,
                enable_checkpointing=saves and checkpoint_type is not CopyAndWrite,
                callbacks=[checkpoint_type(every_n_train_steps=self.every, save_top_k=1)] if saves else [],
            )  # fmt: skip
            gc.collect()
            os.sync()  # nobody pays for what another left to be written
            started = time.perf_counter()
            trainer.fit(task, DataLoader(batches, batch_size=None))
            seconds = time.perf_counter() - started
        steps = [after - before for before, after in zip(task.begun, task.begun[1:], strict=False)]
        return Fit(seconds, steps)


def frameworks() -> dict[str, tuple[Any, Any, Any]]:
    """Return the bases, Trainers and callbacks that save that are compared; Lightning if it is installed."""
    found: dict[str, tuple[Any, Any, Any]] = {
        OURS: (TaskModule, Trainer, ModelCheckpoint),
        BY_HAND: (TaskModule, Trainer, CopyAndWrite),
    }
    if find_spec("lightning"):
        from lightning.pytorch import LightningModule
        from lightning.pytorch import Trainer as LightningTrainer
        from lightning.pytorch.callbacks import ModelCheckpoint as LightningCheckpoint

        logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
        found[LIGHTNING] = (LightningModule, LightningTrainer, LightningCheckpoint)
    return found


def measure(workload: Workload, rounds: int) -> dict[tuple[str, bool], list[Fit]]:
    """Return the fits of every framework without and with saves, a turning order within each round."""
    contenders: dict[tuple[str, bool], Callable[[], Fit]] = {
        (name, saves): lambda kinds=kinds, saves=saves: workload.run(*kinds, saves=saves)  # type: ignore[misc]
        for name, kinds in frameworks().items()
        for saves in (False, True)
        if saves or name != BY_HAND  # without saves, it is the same as ours
    }
    keys = list(contenders)
    found: dict[tuple[str, bool], list[Fit]] = {key: [] for key in keys}
    for i in range(rounds):
        turn = i % len(keys)
        for key in keys[turn:] + keys[:turn]:
            found[key].append(contenders[key]())
    return found


def report(workload: Workload, found: dict[tuple[str, bool], list[Fit]]) -> Bars:
    """Print what was found, and return its bars.

    Args:
        workload: what was trained.
        found: of `measure`.
    """
    num_saves = workload.num_steps // workload.every
    names = [name for name in (OURS, BY_HAND, LIGHTNING) if (name, True) in found]
    costs: dict[str, list[float]] = {}
    for name in names:
        baseline = found.get((name, False), found[OURS, False])
        costs[name] = [
            (with_saves.seconds - without.seconds) / num_saves
            for with_saves, without in zip(found[name, True], baseline, strict=True)
        ]
    rows = []
    for name in names:
        for saves in (False, True):
            if (name, saves) not in found:
                continue
            fits = found[name, saves]
            rows.append([
                f"{name}, {num_saves if saves else 'no'} saves",
                f"{statistics.median(fit.seconds for fit in fits):.2f}",
                f"{statistics.median(statistics.median(fit.steps) for fit in fits):.3f}",
                f"{statistics.median(fit.slowest for fit in fits):.2f}",
                f"{statistics.median(costs[name]):.2f}" if saves else "–",
            ])  # fmt: skip
    print_table(["", "fit s", "median step s", "slowest over median", "s per save"], rows)
    bars = Bars()
    threads = f"{torch.get_num_threads()} thread(s)"
    if LIGHTNING in names:
        ratio = statistics.median(costs[OURS]) / statistics.median(costs[LIGHTNING])
        bars.add(f"cost of a save over Lightning's, {threads}", ratio, 0.1, "×")
    ratio = statistics.median(costs[OURS]) / statistics.median(costs[BY_HAND])
    bars.add(f"cost of a save over that of the callback by hand, {threads}", ratio, 1.5, "×")
    slowest = statistics.median(fit.slowest for fit in found[OURS, True])
    bars.add(f"slowest step over the median step, with saves, {threads}", slowest, 2.0, "×")
    return bars


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Cost of asynchronous saves in a whole fit.")
    parser.add_argument("--parameters", type=int, default=100_000_000, help="size of the model")
    parser.add_argument("--steps", type=int, default=18, help="steps of a fit")
    parser.add_argument("--every", type=int, default=6, help="steps from save to save")
    parser.add_argument("--rounds", type=int, default=3, help="fits of each contender")
    parser.add_argument("--threads", type=int, help="of torch; default: its own number, and then one")
    parser.add_argument("--folder", default=".", type=Path, help="on the disk to be measured; cleaned up afterwards")
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # peers' advice about workers
    workload = Workload(options.parameters, options.steps, options.every, options.folder)
    print(describe_machine(("torch", "lightning")))
    default = torch.get_num_threads()
    for num_threads in [options.threads] if options.threads else sorted({default, 1}, reverse=True):
        torch.set_num_threads(num_threads)
        print(f"\n{options.rounds} interleaved rounds of {options.steps} steps, {num_threads} thread(s) in torch\n")
        report(workload, measure(workload, options.rounds)).print()


if __name__ == "__main__":
    main()
