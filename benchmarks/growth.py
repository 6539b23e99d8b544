"""How costs grow with the work: metric names, callbacks, parameter tensors, workers, samples, and steps in a report.

    python benchmarks/growth.py [--rounds 3]

Each row of the table compares the cost of one unit of work (a logged value, a callback's hook, a step with a number of
parameter tensors, a batch, an index, a step of history) at a small and at a large amount of work. A cost that grows in
proportion to the work has the ratio 1. Steps and batches are given as ratios to the hand-written loop and to torch's
loader with the same number of tensors and workers.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from measuring import Bars, describe_machine, print_table
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from trainwright import Callback, CSVLogger, TaskModule, Trainer
from trainwright.cli.main import main as command_line
from trainwright.data import LoaderOptions, ShuffledOrder, prepare_loader

MOST = 1.5  # bar for the ratio; a cost that grows with the square of the work would have a ratio of 10 or more


@dataclass(frozen=True)
class Growth:
    """Something whose cost may grow.

    Attributes:
        what: the work, and its unit.
        measure: returns the cost of one unit, given the amount of work.
        small, large: the two amounts of work.
        unit: of the cost: `"µs"`, or `"×"` for a ratio to a hand-written loop or to torch's loader.
    """

    what: str
    measure: Callable[[int], float]
    small: int
    large: int
    unit: str = "µs"


class Sum(TaskModule):
    """Task with any number of parameter tensors and metrics, which notes the time of each step."""

    def __init__(self, num_tensors: int = 1, num_names: int = 0) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.ones(8) for _ in range(num_tensors)])
        self.names = [f"metric_{i}" for i in range(num_names)]
        self.begun: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Return the sum of the weights, which are each used once."""
        self.begun.append(time.perf_counter())
        loss = torch.stack([weight.sum() for weight in self.weights]).sum() * batch.mean()
        for name in self.names:
            self.log(name, 0.5)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return SGD."""
        return torch.optim.SGD(self.parameters(), lr=1e-9)


class Idle(Callback):
    """Callback with an empty hook of each step."""

    def on_train_batch_end(self, trainer: Any, task: Any, *args: Any, **kwargs: Any) -> None:
        pass


def fit(task: Sum, steps: int, **options: Any) -> float:
    """Train, and return the seconds of `Trainer.fit`."""
    trainer = Trainer(
        max_epochs=1, limit_val_batches=0, enable_progress_bar=False, enable_model_summary=False,
        enable_checkpointing=False, **{"logger": False, **options},
    )  # fmt: skip
    loader = DataLoader([torch.ones(4)] * steps, batch_size=None)  # type: ignore[arg-type]  # a list will do
    begun = time.perf_counter()
    trainer.fit(task, loader)
    return time.perf_counter() - begun


def median_step(task: Sum) -> float:
    """Return the median seconds of the steps of a task that was trained."""
    return statistics.median(end - begin for begin, end in zip(task.begun, task.begun[1:], strict=False))


def names(number: int) -> float:
    """Log that many metrics in each step, 400,000 values in all, and write them as CSV; return the µs of a value."""
    num_values = 400_000
    num_steps = num_values // number
    with tempfile.TemporaryDirectory() as folder:
        logged = fit(Sum(num_names=number), num_steps, logger=CSVLogger(folder), log_every_n_steps=1)
    return 1e6 * (logged - fit(Sum(), num_steps)) / num_values


def callbacks(number: int) -> float:
    """Train with that many callbacks that have a hook of each step; return the µs of a hook."""
    seconds = []
    for count in (number, 0):
        task = Sum()
        fit(task, 1000, callbacks=[Idle() for _ in range(count)])
        seconds.append(median_step(task))
    return 1e6 * (seconds[0] - seconds[1]) / number


def tensors(number: int) -> float:
    """Return a step of the Trainer over one of the hand-written loop, with that many parameter tensors."""
    num_steps = 40
    ours, by_hand = Sum(number), Sum(number)
    fit(ours, num_steps)
    optimizer = by_hand.configure_optimizers()
    for i, batch in enumerate([torch.ones(4)] * num_steps):
        by_hand.training_step(batch, i).backward()
        optimizer.step()
        optimizer.zero_grad()
    return median_step(ours) / median_step(by_hand)


class Virtual(Dataset[Tensor]):
    """Samples that exist when they are read."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


def workers(number: int) -> float:
    """Read 1,000 batches with that many workers; return the time of a prepared loader over that of torch's."""
    seconds = []
    for is_ours in (True, False):
        loader = DataLoader(Virtual(1000 * 64), 64, shuffle=True, num_workers=number)
        batches = prepare_loader(loader, LoaderOptions(seed=1)).iterate() if is_ours else iter(loader)
        next(batches)  # after the start of the workers
        begun = time.perf_counter()
        for _ in batches:
            pass
        seconds.append(time.perf_counter() - begun)
    return seconds[0] / seconds[1]


def order(length: int) -> float:
    """Return the µs of one of 200,000 indices at the end of the order of `length` samples."""
    shuffled = ShuffledOrder(length, 1, 0)
    count = min(length, 200_000)
    begun = time.perf_counter()
    for _ in range(200_000 // count):
        shuffled.slice(length - count, length)
    return 1e6 * (time.perf_counter() - begun) / 200_000


def report(number: int) -> float:
    """Write the report of a run with that many steps; return the µs of a step."""
    with tempfile.TemporaryDirectory() as folder:
        rows = "".join(json.dumps({"step": step, "loss": 1 / (1 + step)}) + "\n" for step in range(number))
        Path(folder, "metrics.jsonl").write_text(rows)
        begun = time.perf_counter()
        with contextlib.redirect_stdout(io.StringIO()):
            code = command_line(["report", folder, "--output", f"{folder}/report.html"])
        assert code == 0, code
        return 1e6 * (time.perf_counter() - begun) / number


GROWTHS = [
    Growth("metric names in a row of a CSV file, a value", names, 10, 20_000),
    Growth("callbacks with a hook of each step, a hook", callbacks, 20, 200),
    Growth("parameter tensors, a step", tensors, 10, 5_000, "×"),
    Growth("workers of a loader, a batch", workers, 1, 8, "×"),
    Growth("samples of a data set, an index", order, 10**3, 10**12),
    Growth("steps of history in a report, a step", report, 10**4, 10**6),
]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Growth of costs with the amount of work.")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each amount; the median counts")
    rounds = parser.parse_args().rounds
    warnings.simplefilter("ignore")  # torch's, about more workers than cores
    print(f"\n{describe_machine()}\n")
    rows = []
    bars = Bars()
    for growth in GROWTHS:
        small, large = (
            statistics.median(growth.measure(amount) for _ in range(rounds)) for amount in (growth.small, growth.large)
        )
        ratio = large / small
        costs = [f"{small:.3f} {growth.unit}", f"{large:.3f} {growth.unit}"]
        rows.append([growth.what, f"{growth.small:,}", costs[0], f"{growth.large:,}", costs[1], f"{ratio:.2f}"])
        bars.add(growth.what, ratio, MOST, "×")
    print()
    print_table(["work, and its unit", "few", "cost of a unit", "many", "cost of a unit", "ratio"], rows)
    bars.print()


if __name__ == "__main__":
    main()
