"""What Trainwright adds to a data-parallel step: two gloo processes, 5 million parameters.

    python benchmarks/ddp.py [--steps 40] [--rounds 15]

Both loops run in the same two processes, in alternating rounds over the same batches: one over a
DistributedDataParallel module written by hand, one through `Trainer.fit`. A round's figure is the time of rank 0,
from a barrier before its first step to a barrier after its last one.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import io
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from measuring import Bars, describe_machine, interleave, print_table
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from trainwright import TaskModule, Trainer

WORLD_SIZE = 2
WIDTH, NUM_LAYERS, BATCH_SIZE = 1118, 4, 32  # 5,004,168 parameters
HAND, OURS = "hand-written loop over DDP", "Trainwright, DDP"


def make_net() -> nn.Sequential:
    """Return four wide linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for _ in range(NUM_LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def make_optimizer(net: nn.Module) -> Optimizer:
    """Return SGD with momentum."""
    return torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)


class Batches(torch.utils.data.IterableDataset[Tensor]):
    """The same in-memory batches `(32, 1118)` in every epoch, this rank's own."""

    def __init__(self, num_steps: int, rank: int) -> None:
        generator = torch.Generator().manual_seed(rank)
        pool = [torch.randn(BATCH_SIZE, WIDTH, generator=generator) for _ in range(4)]
        self.batches = [pool[i % len(pool)] for i in range(num_steps)]

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Any:
        return iter(self.batches)


class Stopwatch:
    """Times from one barrier to another.

    Attributes:
        clock: seconds of the wall, or `time.process_time`: of the processor, which on a busy machine leaves out the
            time that other programs have had, and everywhere the time that is spent in waiting for the other rank.
    """

    clock: ClassVar[Callable[[], float]] = time.perf_counter

    def __init__(self) -> None:
        self.seconds = 0.0
        self._started = 0.0

    def start(self) -> None:
        """Begin together. Collective."""
        gc.collect()
        dist.barrier()
        self._started = Stopwatch.clock()

    def stop(self) -> None:
        """End together. Collective."""
        dist.barrier()
        self.seconds = Stopwatch.clock() - self._started


def run_by_hand(data: Batches) -> float:
    """Train with a hand-written loop; returns seconds. Collective."""
    torch.manual_seed(0)
    net = DistributedDataParallel(make_net(), gradient_as_bucket_view=True)
    optimizer = make_optimizer(net)
    stopwatch = Stopwatch()
    stopwatch.start()
    for batch in data:
        loss = net(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    stopwatch.stop()
    return stopwatch.seconds


class Task(TaskModule):
    """The same training as a task."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = make_net()
        self.stopwatch = stopwatch

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the mean square of the output."""
        outputs: Tensor = self.net(batch)
        return outputs.square().mean()

    def configure_optimizers(self) -> Optimizer:
        """Return what the hand-written loop uses."""
        return make_optimizer(self)

    def on_train_start(self) -> None:
        """Start the clock."""
        self.stopwatch.start()

    def on_train_end(self) -> None:
        """Stop it."""
        self.stopwatch.stop()


def run_trainwright(data: Batches) -> float:
    """Train through the Trainer, in the process group that exists; returns seconds. Collective."""
    stopwatch = Stopwatch()
    trainer = Trainer(
        accelerator="cpu",
        strategy="ddp",
        devices=WORLD_SIZE,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    with contextlib.redirect_stdout(io.StringIO()):  # it says where its rank comes from, every time
        trainer.fit(Task(stopwatch), data)
    return stopwatch.seconds


def work(rank: int, port: int, steps: int, rounds: int, result: Path) -> None:
    """One of the two processes; rank 0 writes what it measured to `result`."""
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    try:
        data = Batches(steps, rank)
        found = interleave({HAND: lambda: run_by_hand(data), OURS: lambda: run_trainwright(data)}, rounds)
    finally:
        dist.destroy_process_group()
    if rank == 0:
        result.write_text(json.dumps(found))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A data-parallel step against a hand-written one.")
    parser.add_argument("--steps", type=int, default=40, help="steps in one run")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each loop")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        result = Path(folder, "seconds.json")
        spawn(work, (port, options.steps, options.rounds, result), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]
        found: dict[str, list[float]] = json.loads(result.read_text())

    millis = {name: [s / options.steps * 1e3 for s in seconds] for name, seconds in found.items()}
    ratio = statistics.median(ours / hand for ours, hand in zip(millis[OURS], millis[HAND], strict=True))
    parameters = sum(p.numel() for p in make_net().parameters())
    print(f"\n{describe_machine()}")
    print(
        f"{options.rounds} alternating rounds of {options.steps} steps, 2 gloo processes, {parameters:,} parameters\n"
    )
    rows = [
        [name, f"{statistics.median(values):.2f}", f"{min(values):.2f}", f"{share:.3f}"]
        for (name, values), share in zip(millis.items(), (1.0, ratio), strict=True)
    ]
    print_table(["loop", "median, ms a step", "least, ms a step", "of the hand-written"], rows)
    bars = Bars()
    bars.add("slower than the hand-written loop by", (ratio - 1) * 100, 3, "%")
    bars.print()


if __name__ == "__main__":
    main()
