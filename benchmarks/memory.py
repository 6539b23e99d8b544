"""Peak memory of a training by hand and by Trainwright: 30 million parameters with Adam, each in a fresh process.

    python benchmarks/memory.py [--steps 4] [--rounds 3]

Two measures. Resident: how far the process's peak (`ru_maxrss`) rose from just before the model was made. Tensors: the
peak of the bytes in live tensor storages, counted at every operation, forward and backward.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import subprocess
import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

from measuring import Bars, describe_machine, interleave, print_table

if TYPE_CHECKING:
    from torch import Tensor, nn

WIDTH, NUM_LAYERS, BATCH_SIZE = 2236, 6, 256  # 30,011,592 parameters
LOOPS, MEASURES = ("hand", "trainwright"), ("resident", "tensors")
MB = 1e6


def make_net() -> nn.Sequential:
    """Return six wide linear layers with ReLU between them."""
    from torch import nn

    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_batches(steps: int) -> list[Tensor]:
    """Return the same batch `(256, 2236)` so many times."""
    import torch

    return [torch.randn(BATCH_SIZE, WIDTH)] * steps


def train_by_hand(steps: int) -> None:
    """Train with the loop that everyone writes."""
    import torch

    net = make_net()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-4)
    for batch in make_batches(steps):
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def train_with_trainwright(steps: int) -> None:
    """Train through `Trainer.fit`."""
    import torch

    from trainwright import TaskModule, Trainer

    class Task(TaskModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make_net()

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            outputs: Tensor = self.net(batch)
            return outputs.square().mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=1e-4)

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(Task(), make_batches(steps))


def count_tensors() -> Any:
    """Return a TorchDispatchMode whose `peak_bytes` is the largest sum of live storages that it has seen born."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch has no types here
        def __init__(self) -> None:
            super().__init__()  # type: ignore[no-untyped-call]  # likewise
            self.live_bytes = 0
            self.peak_bytes = 0
            self._known: set[int] = set()

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            for tensor in result if isinstance(result, (list, tuple)) else [result]:
                if isinstance(tensor, torch.Tensor):
                    self._see(tensor.untyped_storage())
            return result

        def _see(self, storage: torch.UntypedStorage) -> None:
            key, size = storage._cdata, storage.nbytes()
            if key in self._known:
                return
            self._known.add(key)
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._forget, key, size)

        def _forget(self, key: int, size: int) -> None:
            self._known.discard(key)
            self.live_bytes -= size

    return Counter()


def measure_here(loop: str, measure: str, steps: int) -> float:
    """Train in this process and return the peak in bytes."""
    import torch

    import trainwright  # both processes have imported the same when the measuring begins

    assert trainwright.Trainer is not None
    torch.set_num_threads(1)
    torch.manual_seed(0)
    counter = count_tensors() if measure == "tensors" else None
    context: AbstractContextManager[Any] = nullcontext() if counter is None else counter
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with context:
        (train_by_hand if loop == "hand" else train_with_trainwright)(steps)
    after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return (after - before) * 1024.0 if counter is None else float(counter.peak_bytes)  # Linux counts in KiB


def measure_fresh(loop: str, measure: str, steps: int) -> float:
    """Do the same in a fresh process."""
    command = [sys.executable, __file__, "--steps", str(steps), "--here", loop, measure]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines()[-1])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Peak memory against a hand-written loop.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--here", nargs=2, metavar=("LOOP", "MEASURE"), help="measure in this process")
    options = parser.parse_args()
    if options.here:
        loop, measure = options.here
        print(measure_here(loop, measure, options.steps))
        return
    runs: dict[str, Callable[[], float]] = {
        f"{loop}, {measure}": partial(measure_fresh, loop, measure, options.steps)
        for measure in MEASURES
        for loop in LOOPS
    }
    found = interleave(runs, options.rounds)
    print(f"\n{describe_machine()}")
    print(f"{options.rounds} rounds of {options.steps} steps in fresh processes; peak in MB\n")
    rows, bars = [], Bars()
    for measure in MEASURES:
        hand, ours = (statistics.median(found[f"{loop}, {measure}"]) for loop in LOOPS)
        rows.append([measure, f"{hand / MB:.1f}", f"{ours / MB:.1f}", f"{ours / hand:.4f}"])
        bars.add(f"{measure}, more than by hand", (ours / hand - 1) * 100, 2, "%")
    print_table(["peak", "hand-written loop", "Trainwright", "of the hand-written"], rows)
    bars.print()


if __name__ == "__main__":
    main()
