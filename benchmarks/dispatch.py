"""Dispatched loaders against divided ones: two gloo processes, a convolutional network, images of 3×64×64.

    python benchmarks/dispatch.py [--network small]

The first process reads all samples with `dispatch_batches=True`. Rounds of both loaders are interleaved in one run.
Without workers, a step of the first process takes the time of reading two batches and of computing one, and a step of a
divided loader that of one each: a small network shows the cost of reading, a residual one that of usual training.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from measuring import Bars
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainwright import Accelerator, DataLoaderConfiguration, debug_launcher

BATCH_SIZE, NUM_BATCHES, LEAST_RATIO = 32, 24, 0.9


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images that are made when they are read, and normalized."""

    def __len__(self) -> int:
        return 2 * BATCH_SIZE * NUM_BATCHES

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.rand(3, 64, 64, generator=torch.Generator().manual_seed(index))
        return (image - image.mean()) / image.std(), index % 10


class Residual(nn.Module):
    """Two convolutions beside a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        parts = [(nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)) for _ in range(2)]
        self.inner = nn.Sequential(*parts[0], nn.ReLU(), *parts[1])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum of both paths; (batch, width, height, width of the image)."""
        return nn.functional.relu(x + self.inner(x))


def network(kind: str) -> nn.Module:
    """Return a network of two convolutions, or a residual network of ten."""
    if kind == "small":
        layers = [nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.Flatten()]
    else:
        deeper = [nn.Conv2d(3, 32, 3, 2, 1), *(Residual(32) for _ in range(2)), nn.Conv2d(32, 64, 3, 2, 1)]
        layers = [*deeper, *(Residual(64) for _ in range(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    net = nn.Sequential(*layers, nn.LazyLinear(10))
    net(torch.zeros(2, 3, 64, 64))
    return net


def samples_per_s(kind_of_network: str, rounds: int, num_workers: int) -> dict[str, float]:
    """Return the median number of samples of all processes per second, for each kind of loader."""
    kinds = {"divided": False, "dispatched": True}
    loops = {}
    for kind, dispatches in kinds.items():
        accelerator = Accelerator(
            cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=dispatches, data_seed=0)
        )
        net = network(kind_of_network)
        loader = DataLoader(Images(), BATCH_SIZE, num_workers=num_workers, persistent_workers=num_workers > 0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
        loops[kind] = (accelerator, *accelerator.prepare(net, optimizer, loader))
    found: dict[str, list[float]] = {kind: [] for kind in kinds}
    for _ in range(rounds + 1):
        for kind, (accelerator, model, optimizer, loader) in loops.items():
            accelerator.wait_for_everyone()
            start_s = time.perf_counter()
            for images, labels in loader:
                accelerator.backward(nn.functional.cross_entropy(model(images), labels))
                optimizer.step()
                optimizer.zero_grad()
            accelerator.wait_for_everyone()
            found[kind].append(len(Images()) / (time.perf_counter() - start_s))
    return {kind: statistics.median(values[1:]) for kind, values in found.items()}


def main() -> None:
    """Print the throughput of both loaders."""
    parser = argparse.ArgumentParser(description="Throughput of a dispatched loader over that of a divided one.")
    parser.add_argument("--network", choices=["small", "residual"], default="residual")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--num-workers", type=int, default=0, help="of each loader")
    arguments = parser.parse_args()
    given = (arguments.network, arguments.rounds, arguments.num_workers)
    found = debug_launcher(samples_per_s, given, num_processes=2)
    for kind, value in found.items():
        print(f"{kind:<12} {value:8.0f} samples/s")
    bars = Bars()
    ratio = found["dispatched"] / found["divided"]
    bars.add(f"dispatched over divided loader, {arguments.network} network", ratio, LEAST_RATIO, "×", at_least=True)
    bars.print()


if __name__ == "__main__":
    main()
