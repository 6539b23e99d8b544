"""Options of `torch.profiler`: its schedules, and `ProfileKwargs` for user-written training loops."""

from __future__ import annotations

import gzip
import inspect
import shutil
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.names.kwargs_handler import KwargsHandler

RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_ACTIVITIES = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
_SCHEDULE_KEYS = tuple(inspect.signature(torch.profiler.schedule).parameters)
_SEARCHED_STEPS = 10_000

Schedule = Callable[[int], ProfilerAction]


def make_schedule(given: Mapping[str, int] | Schedule) -> Schedule:
    """Return a schedule that can be pickled.

    Args:
        given: Arguments of `torch.profiler.schedule`, or a function of the step, which is returned unchanged. In a
            dictionary, `active` is required, and `wait` and `warmup` default to 0.

    Raises:
        ConfigurationError: A key is unknown, `active` is missing, or a value is out of its range.
    """
    if callable(given):
        return given
    for key in given:
        if key not in _SCHEDULE_KEYS:
            raise ConfigurationError(
                f"a schedule has no key {key!r}.{nearest(str(key), _SCHEDULE_KEYS)} Known: {', '.join(_SCHEDULE_KEYS)}."
            )
    if "active" not in given:
        raise ConfigurationError(f"schedule={dict(given)} has no active: the number of steps to record in a cycle.")
    schedule = partial(_action, {"wait": 0, "warmup": 0, **given})
    try:
        schedule(0)
    except (AssertionError, TypeError) as error:
        raise ConfigurationError(
            f"schedule={dict(given)}: expected whole numbers, at least 1 for active and at least 0 for the others."
        ) from error
    return schedule


def _action(options: dict[str, int], step: int) -> ProfilerAction:
    return _torch_schedule(**options)(step)


@cache
def _torch_schedule(**options: int) -> Schedule:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # it was requested
        schedule: Schedule = torch.profiler.schedule(**options)
    return schedule


def warn_without_records(schedule: Schedule, num_steps: int) -> None:
    """Warn that `schedule` recorded none of `num_steps` steps."""
    if not num_steps:
        text = "the profiler recorded no step: the loop did not call step() of the profiler: call it after each step."
        return warnings.warn(text, TrainwrightWarning, stacklevel=3)
    first = next((step for step in range(_SEARCHED_STEPS) if schedule(step) in RECORDING), None)
    return warnings.warn(
        f"the profiler recorded no step: the loop ran {num_steps} steps, and the schedule becomes active "
        f"{'never' if first is None else f'after {first} steps'}. Decrease wait, warmup or skip_first.",
        TrainwrightWarning,
        stacklevel=3,
    )


def check_activities(given: Iterable[object] | None) -> None:
    """Raise a ConfigurationError for the first activity that torch cannot record on this machine."""
    held = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]  # torch has no types here
    for activity in given or ():
        if activity not in held:
            names = ", ".join(name for name, each in _ACTIVITIES.items() if each in held)
            wrong = next((name for name, each in _ACTIVITIES.items() if each == activity), activity)
            raise ConfigurationError(f"the activity {wrong!r} cannot be recorded on this machine. Supported: {names}.")


def adapt(profiler: torch.profiler.profile) -> None:
    """Let a profiler export each cycle several times: torch can write a cycle once, and the first file is copied. A
    step does not warn that events of the last cycle are cleared, since they were exported.
    """
    export, step, cycle, first = profiler.export_chrome_trace, profiler.step, None, ""

    def stepped() -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*Profiler clears events at the end of each cycle")
            step()

    def exported(path: str, *args: Any, **options: Any) -> None:
        nonlocal cycle, first
        if cycle is not profiler.profiler or not Path(first).exists():
            export(str(path), *args, **options)
            cycle, first = profiler.profiler, str(path)
            return
        with _opener(first)(first, "rb") as source, _opener(path)(path, "wb") as target:
            shutil.copyfileobj(source, target)

    vars(profiler).update(export_chrome_trace=exported, step=stepped)


def _opener(path: str) -> Callable[..., Any]:
    return gzip.open if str(path).endswith(".gz") else open


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
        output_trace_dir: Folder in which each process writes `profile_{process_index}.json`; further cycles and
            contexts write `profile_{process_index}-1.json` and so on. Default: None.

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
        """Return a profiler of torch with these options.

        Raises:
            ConfigurationError: This machine does not have an activity.
        """
        activities = None if self.activities is None else [_ACTIVITIES[name] for name in self.activities]
        check_activities(activities)
        return torch.profiler.profile(
            activities=activities,
            schedule=None if self.schedule_option is None else make_schedule(self.schedule_option),
            on_trace_ready=self.on_trace_ready,
            record_shapes=self.record_shapes,
            profile_memory=self.profile_memory,
            with_stack=self.with_stack,
            with_flops=self.with_flops,
            with_modules=self.with_modules,
        )


@contextmanager
def profiled(
    options: ProfileKwargs, process_index: int, wait: Callable[[], None], written: list[str]
) -> Iterator[torch.profiler.profile]:
    """Yield a profiler that records the `with` block, and write its traces.

    Args:
        options: Options of the profiler.
        process_index: Rank of this process.
        wait: Function that waits for all processes. It is called after the traces are written.
        written: The traces of earlier contexts. Those of this one are appended.

    Raises:
        ConfigurationError: `options` are of another type, or this machine does not have an activity.
    """
    if not isinstance(options, ProfileKwargs):
        raise ConfigurationError(f"accelerator.profile({options!r}): expected ProfileKwargs(…).")
    folder = None if options.output_trace_dir is None else Path(options.output_trace_dir)
    schedule = None if options.schedule_option is None else make_schedule(options.schedule_option)
    is_over = False

    def ready(profiler: torch.profiler.profile) -> None:
        at = profiler.step_num
        if is_over and schedule is not None and at and schedule(at - 1) != ProfilerAction.RECORD:
            return  # the loop ended before a step of this cycle
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            names = (str(folder / f"profile_{process_index}{f'-{i}' if i else ''}.json") for i in count())
            written.append(next(path for path in names if path not in written))
            profiler.export_chrome_trace(written[-1])
        if options.on_trace_ready is not None:
            options.on_trace_ready(profiler)

    profiler = options.build()
    profiler.on_trace_ready = ready
    adapt(profiler)
    with profiler:
        yield profiler
        is_over = True
    steps = profiler.step_num
    if process_index == 0 and schedule is not None and all(schedule(i) not in RECORDING for i in range(steps)):
        warn_without_records(schedule, steps)
    if folder is not None:
        wait()
