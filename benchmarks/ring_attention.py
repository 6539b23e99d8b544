"""Ring attention against its parts: two gloo processes, one thread each, causal attention in zigzag order.

    python benchmarks/ring_attention.py

The bar compares a forward and backward of ring attention with the sum of what it consists of: the blocks of one rank,
computed without communication, and the bytes that a rank receives over the bandwidth that the two processes reach
when they only exchange. Rounds are interleaved in one run. Communication that overlaps with compute makes the ratio
less than 1.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from measuring import Bars, interleave

from trainwright import Accelerator, debug_launcher
from trainwright.strategies.context.blocks import backward_block, forward_block
from trainwright.strategies.context.ring import Ring, ring_attention

BATCH_SIZE, HEADS, HEAD_SIZE, LARGEST_RATIO = 1, 8, 64, 1.1


def seconds(length: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of each part in each round; a rank's part of the sequence has `length` positions."""
    Accelerator(cpu=True)
    torch.set_num_threads(1)
    q, k, v = (torch.randn(BATCH_SIZE, HEADS, length, HEAD_SIZE) for _ in range(3))
    gradient = torch.randn_like(q)
    rank, half = dist.get_rank(), length // 2
    ring = Ring(None)

    def attend() -> None:
        inputs = [tensor.detach().requires_grad_() for tensor in (q, k, v)]
        ring_attention(*inputs, None, is_causal=True).backward(gradient)

    def compute() -> None:
        out, lse = forward_block(q, k, v, is_causal=True, scale=None)
        backward_block(gradient, q, k, v, out, lse, is_causal=True, scale=None)
        queries, keys = (slice(half, None), slice(None)) if rank == 0 else (slice(None), slice(0, half))
        block = q[:, :, queries], k[:, :, keys], v[:, :, keys]
        forward_block(*block, is_causal=False, scale=None)
        backward_block(
            gradient[:, :, queries], *block, out[:, :, queries], lse[:, :, queries], is_causal=False, scale=None
        )

    def exchange() -> None:
        for _ in range(4):  # keys and values forward and backward, and two steps of their gradients
            ring.start((k, v))()

    return interleave({"ring": _timed(attend), "compute": _timed(compute), "exchange": _timed(exchange)}, rounds)


def _timed(call: Callable[[], None]) -> Callable[[], float]:
    def run() -> float:
        dist.barrier()
        start_s = time.perf_counter()
        call()
        dist.barrier()
        return time.perf_counter() - start_s

    return run


def main() -> None:
    """Print the ratio of the medians."""
    parser = argparse.ArgumentParser(description="Seconds of ring attention over those of its compute and exchanges.")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--length", type=int, default=2048, help="positions of a rank's part of the sequence")
    arguments = parser.parse_args()
    found = debug_launcher(seconds, (arguments.length, arguments.rounds), num_processes=2)
    rows = zip(found["ring"], found["compute"], found["exchange"], strict=True)
    ratio = statistics.median(ring / (compute + exchange) for ring, compute, exchange in rows)
    parts = ", ".join(f"{name} {statistics.median(values) * 1e3:.1f} ms" for name, values in found.items())
    print(parts)
    bars = Bars()
    bars.add("ring attention over its computation and exchanges", ratio, LARGEST_RATIO, "×")
    bars.print()


if __name__ == "__main__":
    main()
