"""torch's profiler with checks for its schedule and activities, and `ProfileKwargs` for user-written training loops."""

from __future__ import annotations

import gzip
import inspect
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest, unknown
from trainwright.core.names.kwargs_handler import KwargsHandler

_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_ACTIVITIES = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
_SEARCHED_STEPS = 10_000

Schedule = Callable[[int], ProfilerAction]


def make_schedule(given: Mapping[str, int] | Schedule) -> Schedule:
    """Return a function of the step, from one or from arguments of `torch.profiler.schedule`. Of those, `active` is
    required, and `wait` and `warmup` default to 0.

    Raises:
        ConfigurationError: A key is unknown, `active` is missing, or a value is out of its range.
    """
    if callable(given):
        return given
    known = list(inspect.signature(torch.profiler.schedule).parameters)
    for key in given:
        if key not in known:
            raise ConfigurationError(
                f"a schedule has no key {key!r}.{nearest(str(key), known)} Known: {', '.join(known)}."
            )
    if "active" not in given:
        raise ConfigurationError(f"schedule={dict(given)} has no active: the number of steps to record in a cycle.")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # it was requested
            schedule: Schedule = torch.profiler.schedule(**{"wait": 0, "warmup": 0, **given})
    except (AssertionError, TypeError) as error:
        raise ConfigurationError(
            f"schedule={dict(given)}: expected whole numbers, at least 1 for active and at least 0 for the others."
        ) from error
    return schedule


class CycleProfile(torch.profiler.profile):
    """torch's profiler, which can export each cycle several times and counts the recorded steps.

    Args:
        schedule: See `make_schedule`. None records everything.
        handlers: Called with this profiler after each cycle in which a step ended. None is skipped.
        options: Further arguments of `torch.profiler.profile`.

    Raises:
        ConfigurationError: torch cannot record an activity on this machine.
    """

    def __init__(
        self,
        schedule: Mapping[str, int] | Schedule | None,
        *handlers: Callable[..., Any] | None,
        **options: Any,
    ) -> None:
        held = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]  # torch has no types here
        supported = {activity: name for name, activity in _ACTIVITIES.items() if activity in held}
        for activity in options.get("activities") or ():
            if activity not in supported:
                raise ConfigurationError(
                    f"the activity {str(activity).rpartition('.')[2].lower()!r} cannot be recorded on this machine. "
                    f"Supported: {', '.join(supported.values())}."
                )
        schedule = None if schedule is None else make_schedule(schedule)
        super().__init__(schedule=schedule, on_trace_ready=CycleProfile._call_handlers, **options)
        self.num_recorded = self.num_exported = 0  # steps, and those of earlier cycles
        self.handlers = [each for each in handlers if each is not None]
        self._is_exporting = False
        self._first = ""  # the first file of this cycle

    @property
    def is_recording(self) -> bool:
        """True if the schedule records the current step."""
        return self.current_action in _RECORDING

    def step(self) -> None:
        """End a step."""
        self.num_recorded += self.is_recording
        with warnings.catch_warnings():  # they were exported
            warnings.filterwarnings("ignore", ".*Profiler clears events at the end of each cycle")
            super().step()

    def _call_handlers(self) -> None:
        self._first = ""
        # After a failed export, torch crashes in another one.
        if self._is_exporting or (self.step_num and self.num_recorded == self.num_exported):
            return
        self._is_exporting = True
        for handler in self.handlers:
            handler(self)
        self._is_exporting, self.num_exported = False, self.num_recorded

    def export_chrome_trace(self, path: str, *args: Any, **options: Any) -> None:
        """Write the trace of a cycle. torch can do so once, so that further files are copies of the first one."""
        if not self._first:
            self._first = str(path)
            super().export_chrome_trace(self._first, *args, **options)
            return
        with _opener(self._first)(self._first, "rb") as source, _opener(path)(path, "wb") as target:
            shutil.copyfileobj(source, target)

    def warn_if_empty(self) -> None:
        """Warn if the schedule recorded no step."""
        if self.num_recorded or not self.record_steps:
            return
        reason = "the loop did not call step() of the profiler: call it after each step."
        if self.step_num:
            first = next((step for step in range(_SEARCHED_STEPS) if self.schedule(step) in _RECORDING), None)
            reason = (
                f"the loop ran {self.step_num} steps, and the schedule becomes active "
                f"{'never' if first is None else f'after {first} steps'}. Decrease wait, warmup or skip_first."
            )
        warnings.warn(f"the profiler recorded no step: {reason}", TrainwrightWarning, stacklevel=3)


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
                raise unknown("activities", name, _ACTIVITIES)
        if self.schedule_option is not None:
            make_schedule(self.schedule_option)

    def build(self) -> CycleProfile:
        """Return a profiler of torch with these options.

        Raises:
            ConfigurationError: This machine does not have an activity.
        """
        options = self.to_dict()
        del options["output_trace_dir"]
        options["activities"] = self.activities and [_ACTIVITIES[name] for name in self.activities]
        return CycleProfile(options.pop("schedule_option"), options.pop("on_trace_ready"), **options)


@contextmanager
def profiled(
    options: ProfileKwargs, process_index: int, wait: Callable[[], None], written: list[str]
) -> Iterator[torch.profiler.profile]:
    """Yield a profiler that records the `with` block; see `Accelerator.profile`. Its traces are appended to `written`,
    and `wait` is called after they are written.
    """
    if not isinstance(options, ProfileKwargs):
        raise ConfigurationError(f"accelerator.profile({options!r}): expected ProfileKwargs(…).")
    folder = None if options.output_trace_dir is None else Path(options.output_trace_dir)

    def export(profiler: torch.profiler.profile) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            number = sum(Path(path).parent == folder for path in written)
            written.append(str(folder / f"profile_{process_index}{f'-{number}' if number else ''}.json"))
            profiler.export_chrome_trace(written[-1])

    profiler = options.build()
    profiler.handlers.insert(0, export)
    with profiler:
        yield profiler
    if process_index == 0:
        profiler.warn_if_empty()
    if folder is not None:
        wait()
