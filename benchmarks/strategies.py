"""What Trainwright adds to a step of a sharded model: two gloo processes, a GPT of 20 million parameters.

    python benchmarks/strategies.py [--engine ddp|fsdp|tp|deepspeed] [--steps 8] [--rounds 5] [--no-memory]

All loops of an engine run in the same two processes, in rounds whose order turns, over the same batches: one written by
hand over the engine, one through `Trainer.fit`, one with `Accelerator`, and those of the peers where they run on a CPU.
A round's figure is the time of rank 0, from a barrier before its first step to a barrier after its last one. Peak
memory is how far the resident size of a fresh process rose from just before the model was made, the larger one of the
two ranks; the mean of two runs. `--clock cpu` measures processor time, for a machine that others use.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import logging
import os
import resource
import socket
import statistics
import sys
import tempfile
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ddp import Stopwatch
from measuring import Bars, describe_machine, interleave, print_table
from sharded_loops import (
    BATCH_SIZE,
    CONTENDERS,
    CONTEXT,
    HAND,
    OUR_LOOP,
    OURS,
    WORLD_SIZE,
    Loop,
    make_batches,
    make_net,
)
from torch.multiprocessing.spawn import spawn

from trainwright import FSDPStrategy, TensorParallelStrategy

MEMORY_ROUNDS = 2
NEEDS = {"Lightning": "lightning", "Accelerate": "accelerate"}  # packages, by how a loop's name begins


def names_of(engine: str) -> list[str]:
    """Return the loops of an engine whose packages are installed."""
    return [name for name in CONTENDERS[engine] if find_spec(NEEDS.get(name.partition(",")[0], "torch"))]


def import_all(engine: str) -> None:
    """Import what any loop of the engine imports, so that no loop's memory counts it."""
    FSDPStrategy(), TensorParallelStrategy()  # imported when they are named
    names = [*NEEDS.values(), "lightning.pytorch.strategies"] + (["deepspeed"] if engine == "deepspeed" else [])
    for name in names:
        if find_spec(name.partition(".")[0]):
            importlib.import_module(name)


def work(rank: int, port: int, engine: str, only: str | None, options: argparse.Namespace, folder: Path) -> None:
    """One of the two processes; writes seconds by loop, or with `only` the bytes that it rose by, and losses."""
    place = {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(WORLD_SIZE), "LOCAL_WORLD_SIZE": str(WORLD_SIZE),
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    os.environ |= place
    os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))  # of deepspeed
    os.environ["PATH"] = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ["PATH"]])  # ninja
    logging.disable(logging.INFO)  # deepspeed tells of everything
    torch.set_num_threads(1)
    if options.clock == "cpu":
        Stopwatch.clock = time.process_time
    dist.init_process_group("gloo")
    batches = make_batches(options.steps, 0 if engine == "tp" else rank)  # ranks that split layers see the same ones
    losses: dict[str, float] = {}

    def run(name: str, loop: Loop) -> float:
        os.environ |= place  # Lightning takes a part of it away
        watch = Stopwatch()
        losses[name] = loop(batches, watch)
        return watch.seconds

    loops = {name: CONTENDERS[engine][name] for name in names_of(engine)}
    import_all(engine)
    gc.collect()
    gc.freeze()  # else each pass of the collector over what the peers' imports have left falls into somebody's round
    found: Any
    if only is None:
        found = interleave({name: partial(run, name, loop) for name, loop in loops.items()}, options.rounds)
    else:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(only, loops[only])
        found = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    (folder / f"{rank}.json").write_text(json.dumps({"found": found, "losses": losses}))
    dist.barrier()
    dist.destroy_process_group()


def measure(engine: str, only: str | None, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run two fresh processes; returns what each wrote."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        spawn(work, (port, engine, only, options, Path(folder)), nprocs=WORLD_SIZE)  # type: ignore[no-untyped-call]
        return [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(WORLD_SIZE)]


def measure_peak(engine: str, name: str, options: argparse.Namespace) -> float:
    """Return by how many bytes the larger one of two fresh processes rose."""
    return float(max(rank["found"] for rank in measure(engine, name, options)))


def report(engine: str, options: argparse.Namespace, bars: Bars) -> None:
    """Measure one engine and print its table."""
    first, _ = measure(engine, None, options)
    seconds: dict[str, list[float]] = first["found"]
    losses: dict[str, float] = first["losses"]
    base = seconds[HAND]
    ratios = {n: statistics.median(a / b for a, b in zip(v, base, strict=True)) for n, v in seconds.items()}
    peaks: dict[str, float] = {}
    if options.memory:
        risen: dict[str, list[float]] = {name: [] for name in seconds}
        for _ in range(MEMORY_ROUNDS):
            for name, values in risen.items():
                values.append(measure_peak(engine, name, options))
        peaks = {name: statistics.median(values) for name, values in risen.items()}
    print(f"\n{engine}: {options.rounds} rounds of {options.steps} steps, {options.clock} clock, 2 gloo processes\n")
    rows = [
        [
            name, f"{statistics.median(values) / options.steps * 1e3:.1f}", f"{min(values) / options.steps * 1e3:.1f}",
            f"{ratios[name]:.3f}", f"{peaks[name] / 1e6:.0f}" if name in peaks else "", f"{losses[name]:.6f}",
        ]
        for name, values in seconds.items()
    ]  # fmt: skip
    print_table(["loop", "median, ms a step", "least", "of the first", "peak, MB", "last loss"], rows)
    bars.add(f"{engine}: slower than the hand-written loop by", (ratios[OURS] - 1) * 100, 3, "%")
    if peaks:
        bars.add(f"{engine}: more memory than it by", (peaks[OURS] / peaks[HAND] - 1) * 100, 3, "%")
    bars.add(f"{engine}: time of {OUR_LOOP} over that of {OURS}", ratios[OUR_LOOP] / ratios[OURS], 1.02, "")
    bars.add(f"{engine}: time of {OUR_LOOP} over the hand-written loop", ratios[OUR_LOOP], 1.02, "")
    for name in list(seconds)[3:]:
        bars.add(f"{engine}: time of {OURS} over that of {name}", ratios[OURS] / ratios[name], 1, "")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="A step of a sharded model against a hand-written one.")
    parser.add_argument("--engine", choices=CONTENDERS, action="append", help="which; all unless told")
    parser.add_argument("--steps", type=int, default=8, help="steps in one run")
    parser.add_argument("--rounds", type=int, default=5, help="runs of each loop")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall", help="cpu: on a machine that others use")
    parser.add_argument("--no-memory", dest="memory", action="store_false", help="measure times only")
    options = parser.parse_args()
    print(f"\n{describe_machine(('torch', 'lightning'))}")
    print(f"GPT of {sum(p.numel() for p in make_net().parameters()):,} parameters, {BATCH_SIZE} × {CONTEXT} tokens")
    bars = Bars()
    for engine in options.engine or [name for name in CONTENDERS if name != "deepspeed" or find_spec(name)]:
        report(engine, options, bars)
    bars.print()


if __name__ == "__main__":
    main()
