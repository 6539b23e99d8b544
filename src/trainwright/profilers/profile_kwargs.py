"""Profiling of user-written loops with `torch.profiler`."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.names.kwargs_handler import KwargsHandler
from trainwright.profilers.schedules import first_active_step, make_schedule

_ACTIVITIES = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}


@dataclass(frozen=True)
class ProfileKwargs(KwargsHandler):
    """Options of `accelerator.profile`; see `torch.profiler.profile`.

    Attributes:
        activities: `"cpu"`, `"cuda"`, `"xpu"`, … Default: None, which is all that the machine has.
        schedule_option: The steps to record: `wait`, `warmup`, `active`, `repeat` and `skip_first`. The loop calls
            `step()` of the profiler. Default: None, which records everything.
        on_trace_ready: Called with the profiler after each cycle of the schedule. Default: None.
        record_shapes: Record the shapes of inputs. Default: False.
        profile_memory: Record allocations. Default: False.
        with_stack: Record the lines of Python. Default: False.
        with_flops: Estimate the FLOPs of matrix products and convolutions. Default: False.
        with_modules: Record the modules of TorchScript models. Default: False.
        output_trace_dir: Folder in which each process writes `profile_{process_index}.json`. Default: None.

    Raises:
        ConfigurationError: An activity or a key of `schedule_option` is unknown.
    """

    activities: list[str] | None = None
    schedule_option: dict[str, int] | None = None
    on_trace_ready: Callable[..., Any] | None = None
    record_shapes: bool = False
    profile_memory: bool = False
    with_stack: bool = False
    with_flops: bool = False
    with_modules: bool = False
    output_trace_dir: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.activities or ():
            if name not in _ACTIVITIES:
                raise ConfigurationError(
                    f"ProfileKwargs(activities=[{name!r}]) is unknown.{nearest(str(name), _ACTIVITIES)} Known: "
                    f"{', '.join(_ACTIVITIES)}."
                )
        if self.schedule_option is not None:
            make_schedule(self.schedule_option)

    def build(self) -> torch.profiler.profile:
        """Return a profiler of torch with these options."""
        return torch.profiler.profile(
            activities=None if self.activities is None else [_ACTIVITIES[name] for name in self.activities],
            schedule=None if self.schedule_option is None else make_schedule(self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@contextmanager
def profiled(options: ProfileKwargs, process_index: int, wait: Callable[[], None]) -> Iterator[torch.profiler.profile]:
    """Yield a profiler that records what runs inside, and write its trace.

    Args:
        options: of the profiler.
        process_index: rank of this process.
        wait: Waits for all processes; called once the traces are written.
    """
    profiler = options.build()
    with profiler:
        yield profiler
    first = None if options.schedule_option is None else first_active_step(make_schedule(options.schedule_option))
    if first is not None and profiler.step_num < first:
        if process_index == 0:
            warnings.warn(
                f"the profiler recorded no step: the loop called step() {profiler.step_num} times, and schedule_option="
                f"{options.schedule_option} becomes active after {first} steps. Lower wait, warmup or skip_first.",
                TrainwrightWarning,
                stacklevel=3,
            )
    elif options.output_trace_dir is not None:
        folder = Path(options.output_trace_dir)
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"profile_{process_index}.json"))
    if options.output_trace_dir is not None:
        wait()
