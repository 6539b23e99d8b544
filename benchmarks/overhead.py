"""What a framework adds to one optimizer step of a tiny model, in microseconds and in Python calls.

    python benchmarks/overhead.py [--steps 1000] [--rounds 15] [--clock cpu]

All contenders run in this process, on one thread, in interleaved rounds; a figure is the median over rounds of the
difference to the hand-written loop in the same round.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib.util import find_spec
from types import FrameType
from typing import Any

import torch
from contenders import (
    Stopwatch,
    Watch,
    make_batches,
    run_accelerate,
    run_accelerator,
    run_by_hand,
    run_lightning,
    run_trainwright,
)
from measuring import Bars, describe_machine, interleave, median_difference, print_table

Run = Callable[..., float]  # (batches, watch) -> seconds
HAND = "hand-written loop"
FIVE = ("loss", "metric_1", "metric_2", "metric_3", "metric_4")


def contenders() -> dict[str, Run]:
    """Return what is compared; peers that are not installed are left out."""
    found: dict[str, Run] = {
        HAND: run_by_hand,
        "Trainwright, bare": run_trainwright,
        "Trainwright, 8 idle callbacks": partial(run_trainwright, num_callbacks=8),
        "Trainwright, 1 metric": partial(run_trainwright, metrics=FIVE[:1]),
        "Trainwright, 5 metrics": partial(run_trainwright, metrics=FIVE),
        "Trainwright's Accelerator": run_accelerator,
    }
    if find_spec("lightning"):
        found |= {
            "Lightning, bare": run_lightning,
            "Lightning, barebones": partial(run_lightning, barebones=True),
            "Lightning, 8 idle callbacks": partial(run_lightning, num_callbacks=8),
            "Lightning, 1 metric": partial(run_lightning, metrics=FIVE[:1]),
            "Lightning, 5 metrics": partial(run_lightning, metrics=FIVE),
        }
    if find_spec("accelerate"):
        found["Accelerate"] = run_accelerate
    return found


def count_calls(run: Run) -> float:
    """Return the Python function calls of one step: of 300 steps less those of 100, over 200."""

    def total(num_steps: int) -> int:
        calls = 0

        def profile(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal calls
            if event == "call":
                calls += 1

        @contextmanager
        def counting() -> Iterator[None]:
            sys.setprofile(profile)
            try:
                yield
            finally:
                sys.setprofile(None)

        watch: Watch = counting
        run(make_batches(num_steps), watch)
        return calls

    total(100)  # what is cached at the first call
    return (total(300) - total(100)) / 200


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Overhead per optimizer step over a hand-written loop.")
    parser.add_argument("--steps", type=int, default=1000, help="steps in one run")
    parser.add_argument("--rounds", type=int, default=15, help="runs of each contender")
    parser.add_argument("--clock", choices=["wall", "cpu"], default="wall", help="cpu: for a machine that others use")
    options = parser.parse_args()
    if options.clock == "cpu":
        Stopwatch.clock = time.thread_time
    torch.set_num_threads(1)

    runs = contenders()
    batches = make_batches(options.steps)
    calls = {name: count_calls(run) for name, run in runs.items()}
    seconds = interleave({name: partial(run, batches) for name, run in runs.items()}, options.rounds)
    micros = {name: [s / options.steps * 1e6 for s in found] for name, found in seconds.items()}
    over = {name: median_difference(found, micros[HAND]) for name, found in micros.items()}

    print(f"\n{describe_machine(('torch', 'lightning', 'accelerate'))}")
    print(f"{options.rounds} interleaved rounds of {options.steps} steps, one thread; µs ({options.clock}) per step\n")
    rows = [
        [
            name,
            f"{statistics.median(micros[name]):.1f}",
            f"{min(micros[name]):.1f}",
            f"{over[name]:+.1f}",
            f"{calls[name]:.1f}",
        ]
        for name in runs
    ]
    print_table(["contender", "median", "least", "over the hand-written", "Python calls"], rows)
    _bars(over, calls).print()


def _bars(over: dict[str, float], calls: dict[str, float]) -> Bars:
    bars = Bars()
    bare, one, five = (over[f"Trainwright, {what}"] for what in ("bare", "1 metric", "5 metrics"))
    bars.add("bare", bare, 15, "µs")
    bars.add("one metric", one, 25, "µs")
    bars.add("each further metric", (five - one) / 4, 5, "µs")
    extra_calls = calls["Trainwright, 8 idle callbacks"] - calls["Trainwright, bare"]
    bars.add("calls that 8 idle callbacks add", abs(extra_calls), 0, "calls")
    if "Lightning, bare" in over:
        bars.add("bare, of Lightning's overhead", bare / over["Lightning, bare"], 1 / 10, "")
        bars.add("one metric, of Lightning's overhead", one / over["Lightning, 1 metric"], 1 / 20, "")
    return bars


if __name__ == "__main__":
    main()
