"""What a step costs on one GPU, in a given number of minutes and without hand work.

    python benchmarks/gpu.py [--minutes 10] [--output gpu-figures] [--parts overhead graphs] [--device cuda]

Each part has a share of the time. Contenders run in this process in interleaved rounds, as many as its share allows. A
time is the median over rounds, and a ratio the median of each round's ratio to the hand-written loop. Steps are timed
by CUDA events, so that nothing waits for the device within a run. Peaks are those of the allocator.

`figures.json` and `figures.md` in the output folder are written again after each part: what was measured is kept if the
machine goes away. `--device cpu --tiny` tries all parts out with small sizes; such times say nothing.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import math
import statistics
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import tuned
from gpt_loops import (
    Contenders,
    Device,
    EndOfStep,
    Setting,
    Size,
    Steps,
    Task,
    by_hand,
    by_trainer,
    fp8,
    frameworks,
    graphs,
    strategies,
)
from measuring import Bar, Bars, describe_machine
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from tuned_models import WORKS

from trainwright import Callback, ModelCheckpoint, OffloadStrategy, Trainer, cpu_offload

GIB = 2**30


@dataclass(frozen=True)
class Sizes:
    """How large the work of each part is.

    Attributes:
        small: a model whose steps consist of launching kernels.
        gpt2: GPT-2 with 124 million parameters.
        wide: a model whose matrices are large enough for fp8.
        streamed_width, streamed_layers: linear layers whose weights are copied to the device in each forward.
        link_bytes: of a copy that measures the link.
        allocator_bytes: the memory that a model larger than the GPU's memory may use.
        saves: in the fit that measures them.
        rounds: of a comparison, at most.
        compile: arguments of `torch.compile`.
        graphs: those for CUDA graphs.
    """

    small: Size
    gpt2: Size
    wide: Size
    streamed_width: int
    streamed_layers: int
    link_bytes: int
    allocator_bytes: int
    saves: int
    rounds: int
    compile: dict[str, Any]
    graphs: dict[str, Any]


FULL = Sizes(
    small=Size(64, 32, 2, 1, 16, 4, 20, 220),
    gpt2=Size(50304, 768, 12, 12, 1024, 16, 8, 28),
    wide=Size(8192, 4096, 32, 4, 2048, 4, 8, 20),
    streamed_width=4096,
    streamed_layers=64,
    link_bytes=GIB,
    allocator_bytes=16 * GIB,
    saves=3,
    rounds=20,
    compile={},
    graphs={"mode": "reduce-overhead"},
)
TINY = Sizes(
    small=Size(32, 16, 2, 1, 8, 2, 2, 12),
    gpt2=Size(64, 32, 2, 2, 16, 2, 2, 6),
    wide=Size(32, 16, 2, 1, 8, 2, 2, 6),
    streamed_width=64,
    streamed_layers=4,
    link_bytes=2**20,
    allocator_bytes=2**20,
    saves=2,
    rounds=1,
    compile={"backend": "eager"},
    graphs={"backend": "eager"},
)


class Skipped(Exception):
    """A part that this machine cannot run. The message is the reason."""


@dataclass
class Part:
    """The figures of one part.

    Attributes:
        title: its heading.
        header: of its table.
        rows: of its table.
        figures: the same numbers for programs, by name.
        bars: figures that must be reached.
        seconds: that it took.
        problem: why it has no figures. None: it has run to its end.
    """

    title: str
    header: list[str] = field(default_factory=list)
    rows: list[list[str]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    bars: list[Bar] = field(default_factory=list)
    seconds: float = 0.0
    problem: str | None = None


# Comparisons of loops


def compare(part: Part, setting: Setting, contenders: Contenders, seconds: float, max_rounds: int) -> dict[str, float]:
    """Time contenders in interleaved rounds, fill the part's table, and return the ratio of each to the first one.

    A round before all others is not counted: it pays for imports, compilation and caches.

    Args:
        part: to fill.
        setting: of the contenders.
        contenders: the first one is the hand-written loop.
        seconds: for all rounds. At least one is counted.
        max_rounds: that are counted.
    """
    deadline = time.perf_counter() + seconds
    names = list(contenders)
    times: dict[str, list[float]] = {name: [] for name in names}
    peaks: dict[str, float] = {}

    def measure(name: str) -> float:
        gc.collect()
        setting.device.forget_peak()
        per_step = contenders[name]().per_step_s(setting.size.warm_up)
        peaks[name] = setting.device.peak_mib()
        return per_step

    for name in names:
        measure(name)
    num_rounds, longest_s = 0, 0.0
    while num_rounds < max_rounds and (num_rounds == 0 or time.perf_counter() + longest_s < deadline):
        began = time.perf_counter()
        turn = num_rounds % len(names)
        for name in names[turn:] + names[:turn]:
            times[name].append(measure(name))
        num_rounds += 1
        longest_s = max(longest_s, time.perf_counter() - began)
    base = times[names[0]]
    ratios = {}
    part.header = [f"{num_rounds} round(s)", "ms per step", "of the hand-written loop", "peak MiB"]
    for name in names:
        ratios[name] = statistics.median(mine / hand for mine, hand in zip(times[name], base, strict=True))
        ms = 1000 * statistics.median(times[name])
        part.rows.append([name, f"{ms:.2f}", f"{ratios[name]:.3f}", f"{peaks[name]:.0f}"])
        part.figures |= {f"{name}, ms": ms, f"{name}, ratio": ratios[name], f"{name}, peak MiB": peaks[name]}
    return ratios


def part_overhead(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Time GPT-2 in bf16, compiled, by hand, by the Trainer and by Lightning."""
    part.title = "GPT-2 in bf16, compiled"
    setting = Setting(device, sizes.gpt2, compile=sizes.compile)
    ratios = compare(part, setting, frameworks(setting), seconds, sizes.rounds)
    part.bars.append(Bar("Trainer, bf16 and compiled, of the hand-written loop", ratios["Trainer"], 1.0, "×"))


def part_small(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Time steps that consist of launching kernels, by all frameworks."""
    part.title = "A model of 20,000 parameters in float32"
    setting = Setting(device, sizes.small, half=False)
    compare(part, setting, frameworks(setting), seconds, sizes.rounds)


def part_strategies(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Time the strategies on one process."""
    part.title = "GPT-2 in bf16, strategies on one process"
    setting = Setting(device, sizes.gpt2)
    compare(part, setting, strategies(setting), seconds, sizes.rounds)


def part_graphs(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Time small steps with and without CUDA graphs."""
    part.title = "CUDA graphs, a model of 20,000 parameters"
    setting = Setting(device, sizes.small, half=False, compile=sizes.graphs)
    compare(part, setting, graphs(setting), seconds, sizes.rounds)
    ratio = part.figures["Trainer, graphs, ms"] / part.figures["hand-written loop, graphs, ms"]
    part.figures["Trainer over the hand-written loop, both with graphs"] = ratio


def part_fp8(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Time large matrices in fp8 and bf16."""
    part.title = "fp8 against bf16, 4 layers of width 4,096"
    if device.is_cuda and torch.cuda.get_device_capability() < (8, 9):
        raise Skipped("fp8 needs a GPU of compute capability 8.9 or higher.")
    setting = Setting(device, sizes.wide, compile=sizes.compile)
    compare(part, setting, fp8(setting), seconds, sizes.rounds)


# Waits for the device


class _Reads(TorchDispatchMode):  # type: ignore[misc]  # torch has no types here
    """Counts reads of a tensor's value, which on a GPU wait for it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # likewise
        self.num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count one."""
        self.num += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


class CountWaits(Callback):
    """Counts waits for the device from the end of the second step to the end of the last but one.

    Attributes:
        num: the waits; on a CPU, the reads of values.
        num_steps: in which they were counted.
    """

    def __init__(self, device: Device, last_step: int) -> None:
        self.device, self.last_step = device, last_step
        self.num = self.num_steps = 0
        self._counting = ExitStack()
        self._warnings: list[Any] = []
        self._reads = _Reads()

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        """Start or stop to count."""
        if trainer.state.step == 2:
            self._start()
        elif trainer.state.step == self.last_step - 1:
            self._stop()

    def _start(self) -> None:
        if not self.device.is_cuda:
            self._counting.enter_context(self._reads)
            return
        torch.cuda.set_sync_debug_mode("warn")
        self._counting.callback(torch.cuda.set_sync_debug_mode, "default")
        self._warnings = self._counting.enter_context(warnings.catch_warnings(record=True))
        warnings.simplefilter("always")

    def _stop(self) -> None:
        self._counting.close()
        waits = [each for each in self._warnings if "synchronizing CUDA operation" in str(each.message)]
        self.num = len(waits) + self._reads.num
        self.num_steps = self.last_step - 3


def part_waits(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Count the waits of steps between two points at which values are logged.

    On a CPU, where nothing waits, reads of values are counted. `on_nonfinite` reads the loss in each step there, and
    later on a GPU.
    """
    part.title = "Waits for the device between log points"
    part.header = ["", "steps", "waits"]
    for name, half, options in (
        ("float32", False, {}),
        ("bf16-mixed", True, {}),
        ("bf16-mixed, accumulate_grad_batches=2", True, {"accumulate_grad_batches": 2}),
        ("bf16-mixed, on_nonfinite='raise'", True, {"on_nonfinite": "raise"}),
    ):
        num_steps = sizes.small.steps // options.get("accumulate_grad_batches", 1)
        waits = CountWaits(device, num_steps)
        setting = Setting(device, sizes.small, half)
        by_trainer(setting, callbacks=[waits], log_every_n_steps=sizes.small.steps, **options)
        part.rows.append([name, str(waits.num_steps), str(waits.num)])
        part.figures[f"{name}, waits"] = waits.num
        part.bars.append(Bar(f"waits for the device, {name}", waits.num, 0, ""))


# Offload


def link_rate(device: Device, num_bytes: int) -> float:
    """Return the bytes per second of copies from pinned host memory to the device."""
    source = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=device.is_cuda)
    target = torch.empty(num_bytes, dtype=torch.uint8, device=device.device)
    num_copies = 8
    target.copy_(source, non_blocking=True)
    start = device.mark()
    for _ in range(num_copies):
        target.copy_(source, non_blocking=True)
    return num_copies * num_bytes / device.seconds(start, device.mark())


class Streamed(nn.Module):
    """Linear layers with few rows: their weights take longer to copy than to use."""

    def __init__(self, width: int, num_layers: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(num_layers))

    @property
    def num_bytes(self) -> int:
        """Size of the weights."""
        return sum(parameter.numel() * parameter.element_size() for parameter in self.parameters())

    def forward(self, x: Tensor) -> Tensor:
        """Return a number."""
        for block in self.blocks:
            x = block(x)
        return x.float().square().mean()


class EndOfValidationBatch(Callback):
    """Marks the end of each batch of a validation."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps

    def on_validation_batch_end(self, trainer: Any, task: Any, *_: Any) -> None:
        self.steps.end_step()


def part_offload(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Compare the rate at which weights arrive on the device with that of the link, and time a training."""
    part.title = "Weights on the host"
    part.header = ["", "ms", "GB/s", "of the link", "peak MiB"]
    link = link_rate(device, sizes.link_bytes)
    part.figures["link, GB/s"] = link / 1e9
    part.rows.append(["copies from pinned memory", "", f"{link / 1e9:.2f}", "1", ""])

    def add_forward(name: str, num_bytes: int, per_forward_s: float) -> None:
        rate = num_bytes / per_forward_s
        ms, peak = 1000 * per_forward_s, device.peak_mib()
        part.rows.append([name, f"{ms:.2f}", f"{rate / 1e9:.2f}", f"{rate / link:.3f}", f"{peak:.0f}"])
        part.figures |= {f"{name}, GB/s": rate / 1e9, f"{name}, of the link": rate / link}
        part.bars.append(Bar(f"{name}, of the link's rate", rate / link, 0.85, "×", at_least=True))

    num_forwards = 6
    inputs = torch.ones(num_forwards, 8, sizes.streamed_width, dtype=torch.bfloat16)

    device.forget_peak()
    model = Streamed(sizes.streamed_width, sizes.streamed_layers).bfloat16()
    steps, num_bytes = Steps(device), model.num_bytes
    Trainer(
        **Setting(device, sizes.wide).trainer_options, strategy=OffloadStrategy("cpu", stream=True),
        precision="bf16-true", callbacks=[EndOfValidationBatch(steps)],
    ).validate(Task(model), torch.utils.data.DataLoader(inputs, batch_size=None), verbose=False)  # type: ignore[arg-type]  # a Tensor can be a Dataset  # fmt: skip
    add_forward("validation, OffloadStrategy", num_bytes, steps.per_step_s(2))

    device.forget_peak()
    offloaded = cpu_offload(Streamed(sizes.streamed_width, sizes.streamed_layers).bfloat16(), device.device)
    steps = Steps(device)
    with torch.no_grad():
        for rows in inputs:
            offloaded(rows.to(device.device))
            steps.end_step()
    add_forward("forward, cpu_offload", num_bytes, steps.per_step_s(2))
    del offloaded

    setting = Setting(device, sizes.wide)
    for name, run in (
        ("training step, all on the device", partial(by_hand, setting)),
        (
            "training step, OffloadStrategy",
            lambda: by_trainer(setting, strategy=OffloadStrategy("cpu", stream=True)),
        ),
    ):
        gc.collect()
        device.forget_peak()
        ms = 1000 * run().per_step_s(setting.size.warm_up)
        part.rows.append([name, f"{ms:.2f}", "", "", f"{device.peak_mib():.0f}"])
        part.figures[f"{name}, ms"] = ms


@contextmanager
def allocator_limit(device: Device, num_bytes: int) -> Iterator[None]:
    """Let tensors take no more than so many bytes of the device."""
    if not device.is_cuda:
        yield
        return
    total = torch.cuda.get_device_properties(device.device).total_memory
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(min(1.0, num_bytes / total))
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def part_larger(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Train a model whose weights, gradients and Adam's state take 1.5 times the memory that may be used."""
    limit = sizes.allocator_bytes
    if device.is_cuda:
        limit = min(limit, torch.cuda.get_device_properties(device.device).total_memory)
    part.title = f"A model larger than the memory: the allocator is limited to {limit / GIB:.3g} GiB"
    part.header = ["", "billion parameters", "state, GiB", "s per step", "peak GiB"]
    width = sizes.streamed_width
    bytes_of_layer = 16 * (width * width + width)  # float32: weights, gradients and two moments
    num_layers = math.ceil(1.5 * limit / bytes_of_layer)
    model = Streamed(width, num_layers)
    state_bytes = 4 * model.num_bytes
    steps = Steps(device)
    batches = torch.ones(4, 8, width)
    with allocator_limit(device, limit):
        device.forget_peak()
        Trainer(
            **Setting(device, sizes.wide).trainer_options, strategy=OffloadStrategy("cpu", stream=True),
            callbacks=[EndOfStep(steps)], limit_val_batches=0,
        ).fit(Task(model), torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]  # likewise  # fmt: skip
        peak = device.peak_mib() / 1024
    per_step = steps.per_step_s(1)
    billions = sum(parameter.numel() for parameter in model.parameters()) / 1e9
    row = [f"{billions:.3g}", f"{state_bytes / GIB:.3g}", f"{per_step:.3g}", f"{peak:.2f}"]
    part.rows.append(["Trainer, OffloadStrategy", *row])
    part.figures |= {"billion parameters": billions, "s per step": per_step, "peak GiB": peak}
    part.bars.append(Bar("peak of a model larger than the memory, of the limit", peak * GIB / limit, 1.0, "×"))


# Saves


def part_saves(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Compare fits with and without saves, which copy through pinned buffers beside the steps."""
    part.title = "Saves of GPT-2 with AdamW during training"
    part.header = ["", "fit s", "slowest over median step", "s per save"]
    steps_per_save = sizes.gpt2.steps
    size = Size(**{**asdict(sizes.gpt2), "steps": steps_per_save * sizes.saves})
    setting = Setting(device, size)
    seconds_of_fit: dict[bool, float] = {}
    for saves in (False, True, False, True):  # the first two pay for imports and caches
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            options: dict[str, Any] = {}
            if saves:
                options = {
                    "enable_checkpointing": True,
                    "callbacks": [ModelCheckpoint(folder, every_n_train_steps=steps_per_save, save_top_k=1)],
                }
            began = time.perf_counter()
            steps = by_trainer(setting, **options)
            seconds_of_fit[saves] = time.perf_counter() - began
    slowest = steps.slowest_over_median(size.warm_up)
    cost = (seconds_of_fit[True] - seconds_of_fit[False]) / sizes.saves
    part.rows.append(["without saves", f"{seconds_of_fit[False]:.2f}", "", ""])
    part.rows.append([f"{sizes.saves} saves", f"{seconds_of_fit[True]:.2f}", f"{slowest:.2f}", f"{cost:.3f}"])
    part.figures |= {"s per save": cost, "slowest over median step": slowest}
    part.bars.append(Bar("slowest step over the median step, with saves", slowest, 2.0, "×"))


# Tuned configurations


def part_tuned(part: Part, device: Device, sizes: Sizes, seconds: float) -> None:
    """Compare what `trainwright profile --apply` writes for nanoGPT's small model with the loop."""
    part.title = "trainwright profile --apply, nanoGPT's model for a CPU"
    part.header = ["", "kept", "loop, ms", "Trainer", "tuned"]
    work = WORKS[0]
    # Two thirds of the time for the trials; the rounds after them take seconds.
    found, times = tuned.compare(work, device.device, minutes=seconds * 2 / 3 / 60, rounds=1)
    ratios = {name: tuned.ratio(times, name) for name in (tuned.PLAIN, tuned.TUNED)}
    loop_ms = 1000 * statistics.median(times[tuned.HAND])
    row = [f"{loop_ms:.2f}", f"{ratios[tuned.PLAIN]:.3f}", f"{ratios[tuned.TUNED]:.3f}"]
    part.rows.append([work.name, ", ".join(found.kept) or "nothing", *row])
    part.figures |= {"loop, ms": loop_ms, "Trainer, ratio": ratios[tuned.PLAIN], "tuned, ratio": ratios[tuned.TUNED]}
    part.bars.append(Bar("tuned nanoGPT, of the hand-written loop", ratios[tuned.TUNED], 1.0, "×"))


Run = Callable[[Part, Device, Sizes, float], None]
# The parts in the order of their weight, and their shares of the time.
PARTS: dict[str, tuple[Run, float]] = {
    "waits": (part_waits, 3),
    "overhead": (part_overhead, 25),
    "small": (part_small, 8),
    "graphs": (part_graphs, 8),
    "saves": (part_saves, 8),
    "offload": (part_offload, 12),
    "larger": (part_larger, 10),
    "fp8": (part_fp8, 15),
    "tuned": (part_tuned, 15),
    "strategies": (part_strategies, 12),
}


def run(names: list[str], device: Device, sizes: Sizes, minutes: float, output: Path) -> dict[str, Part]:
    """Run parts, and write all figures after each one.

    A part that fails is recorded with its error, and the next one runs. A part that takes longer than its share leaves
    less for those after it; without time left a part is skipped.
    """
    deadline = time.perf_counter() + 60 * minutes
    found: dict[str, Part] = {}
    machine = f"{describe_machine(['torch', 'lightning', 'accelerate', 'torchao', 'deepspeed'])} · {device}"
    output.mkdir(parents=True, exist_ok=True)
    for i, name in enumerate(names):
        work, share = PARTS[name]
        left_s = deadline - time.perf_counter()
        seconds = left_s * share / sum(PARTS[other][1] for other in names[i:])
        part = found[name] = Part(name)
        began = time.perf_counter()
        if left_s <= 0:
            part.problem = "skipped: no time is left"
        else:
            print(f"\n== {name}: {seconds:.0f} s", flush=True)
            try:
                work(part, device, sizes, seconds)
            except Skipped as reason:
                part.problem = f"skipped: {reason}"
            except Exception as error:  # noqa: BLE001  # the other parts are worth their time
                traceback.print_exc()
                part.problem = f"failed: {type(error).__name__}: {error}"
        part.seconds = time.perf_counter() - began
        print("\n".join(page_of(part)), flush=True)
        write(found, machine, output)
        gc.collect()
        device.forget_peak()
    return found


def write(parts: dict[str, Part], machine: str, output: Path) -> None:
    """Write `figures.json` and `figures.md`."""
    content = {"machine": machine, "parts": {name: asdict(part) for name, part in parts.items()}}
    (output / "figures.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    lines = ["# Figures of one GPU", "", machine, ""]
    for part in parts.values():
        lines += page_of(part)
    lines += ["## Bars", "", "| figure | measured | bar | |", "|---|---:|---:|---|"]
    for part in parts.values():
        lines += [f"| {bar.what} | {bar.measured:.4g} {bar.unit} | {bar.bound} | {bar.verdict} |" for bar in part.bars]
    (output / "figures.md").write_text("\n".join(lines) + "\n", encoding="utf-8")


def page_of(part: Part) -> list[str]:
    """Return the lines of a part in Markdown."""
    lines = [f"## {part.title}", "", f"{part.seconds:.0f} s.", ""]
    if part.problem is not None:
        lines += [f"**{part.problem}**", ""]
    if part.rows:
        lines += [f"| {' | '.join(part.header)} |", f"|---|{'---:|' * (len(part.header) - 1)}"]
        lines += [f"| {' | '.join(row)} |" for row in part.rows]
        lines.append("")
    return lines


def main() -> int:
    """Run the parts; return the number of those that failed."""
    parser = argparse.ArgumentParser(description="Figures of one GPU: a JSON file and a page.")
    parser.add_argument("--minutes", type=float, default=10, help="for all parts")
    parser.add_argument(
        "--output", type=Path, default=Path("gpu-figures"), help="folder of figures.json and figures.md"
    )
    parser.add_argument("--parts", nargs="+", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="small sizes, to try the script out")
    options = parser.parse_args()
    if options.device.startswith("cuda") and not torch.cuda.is_available():
        print("No CUDA device: nothing is measured. --device cpu --tiny tries the script out.")
        return 0
    warnings.simplefilter("ignore")  # peers' advice about workers
    logging.disable(logging.WARNING)
    sizes = TINY if options.tiny else FULL
    if options.tiny:
        tuned.WARM_UP, tuned.STEPS = 2, 4
    found = run(options.parts, Device(options.device), sizes, options.minutes, options.output)
    bars = Bars()
    for part in found.values():
        for bar in part.bars:
            bars.add(bar.what, bar.measured, bar.limit, bar.unit, at_least=bar.at_least)
    bars.print()
    return sum(part.problem is not None and part.problem.startswith("failed") for part in found.values())


if __name__ == "__main__":
    sys.exit(main())
