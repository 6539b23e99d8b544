"""How fast the order of the data is: seeking anywhere in it, and computing it in bulk.

    python benchmarks/data_order.py [--rounds 9]

A virtual data set of 10¹² samples; a figure is the median over rounds. What can be counted (memory, samples fetched) is
a test as well.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable

import torch
from measuring import Bars, describe_machine, interleave, print_table
from torch.utils.data import DataLoader, Dataset

from trainwright.data import KeyedPermutation, LoaderOptions, ShuffledOrder, prepare_loader

_SAMPLES, _PLACE, _BATCH_SIZE = 10**12, 10**9, 256
_BULK = 2_000_000


class Virtual(Dataset[torch.Tensor]):
    """Samples that exist when they are asked for; counts how often."""

    def __init__(self) -> None:
        self.num_fetched = 0

    def __len__(self) -> int:
        return _SAMPLES

    def __getitem__(self, index: int) -> torch.Tensor:
        self.num_fetched += 1
        return torch.tensor(index)


def seek(data: Virtual) -> float:
    """Prepare a shuffled loader, go to the place and fetch the batch there; returns seconds."""
    began = time.perf_counter()
    loader = prepare_loader(DataLoader(data, _BATCH_SIZE, shuffle=True), LoaderOptions(seed=1))
    batch = _PLACE // _BATCH_SIZE
    loader.set_epoch(3, {"batch": batch, "samples": _PLACE})
    next(loader.iterate(batch))
    return time.perf_counter() - began


def seek_memory() -> tuple[int, int]:
    """Return the most bytes that Python and numpy held while seeking, and how many samples were fetched."""
    data = Virtual()
    tracemalloc.start()
    try:
        seek(data)
        return tracemalloc.get_traced_memory()[1], data.num_fetched
    finally:
        tracemalloc.stop()


def bulk_rate(num_samples: int) -> float:
    """Return indices a second of a long slice of the order of `num_samples`."""
    order = ShuffledOrder(num_samples, 1, 0)
    began = time.perf_counter()
    order.slice(num_samples - _BULK, num_samples)
    return _BULK / (time.perf_counter() - began)


def stored_rate() -> float:
    """Return indices a second of `torch.randperm`, which stores its order and cannot seek; a list, as samplers want."""
    began = time.perf_counter()
    torch.randperm(_BULK).tolist()
    return _BULK / (time.perf_counter() - began)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The order of the data: seeking and computing.")
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    data = Virtual()
    most_walked = 4**20 + 1  # the worst case of the cipher's domain: three of four words are walked on
    rates: dict[str, Callable[[], float]] = {
        f"order of {_SAMPLES:.0e} samples": lambda: bulk_rate(_SAMPLES),
        f"order of {4**20:.2e} samples (best)": lambda: bulk_rate(4**20),
        f"order of {most_walked - 1:.2e} + 1 samples (worst)": lambda: bulk_rate(most_walked),
        f"torch.randperm({_BULK}).tolist()": stored_rate,
    }
    found = interleave({"seek": lambda: seek(data), **rates}, rounds)
    one = KeyedPermutation(_SAMPLES, 1)
    singles = [_timed(lambda: one[_PLACE]) for _ in range(200)]
    peak_bytes, fetched = seek_memory()

    print(f"\n{describe_machine(('torch', 'numpy'))}")
    print(f"{rounds} interleaved rounds\n")
    print_table(
        ["computing the order", "median, M indices/s", "most"],
        [[name, f"{statistics.median(found[name]) / 1e6:.2f}", f"{max(found[name]) / 1e6:.2f}"] for name in rates],
    )
    seconds = statistics.median(found["seek"])
    print(f"\nseek to sample {_PLACE:.0e} of {_SAMPLES:.0e} and fetch {_BATCH_SIZE} there: {seconds * 1e3:.2f} ms")
    print(f"one index by itself: {statistics.median(singles) * 1e6:.0f} µs")
    bars = Bars()
    bars.add("seek to sample 10⁹ of 10¹²", seconds * 1e3, 10, "ms")
    bars.add("… its memory", peak_bytes / 1e6, 1, "MB")
    bars.add("… samples fetched besides the batch", fetched - _BATCH_SIZE, 0, "samples")
    for name in list(rates)[:-1]:
        bars.add(f"one index in bulk, {name}", 1e9 / statistics.median(found[name]), 200, "ns")
    bars.print()


def _timed(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
