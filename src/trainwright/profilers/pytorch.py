"""Profiles by `torch.profiler`: PyTorchProfiler for a Trainer, and `ProfileKwargs` for user-written training loops."""

from __future__ import annotations

import gzip
import inspect
import json
import re
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity, record_function

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest, unknown
from trainwright.core.names.kwargs_handler import KwargsHandler
from trainwright.profilers.profiler import Profiler

_RECORDING = (ProfilerAction.RECORD, ProfilerAction.RECORD_AND_SAVE)
_ACTIVITIES = {name.lower(): activity for name, activity in ProfilerActivity.__members__.items()}
_SEARCHED_STEPS = 10_000  # steps of a schedule in which a warning looks for the first recorded one
_TIMES = ("cpu_time", "device_time", "cpu_time_total", "device_time_total", "self_cpu_time_total")
_MEMORY = ("cpu_memory_usage", "device_memory_usage", "self_cpu_memory_usage", "self_device_memory_usage")
_COLUMNS = (*_TIMES, "self_device_time_total", *_MEMORY, "count", "flops")
_DEFAULT_SCHEDULE = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}

Schedule = Callable[[int], ProfilerAction]


@dataclass(slots=True)
class _OpenRegion:
    """An action that has started and not ended, with its region in the trace."""

    name: str
    region: Any


def make_schedule(value: Mapping[str, int] | Schedule | None) -> Schedule | None:
    """Return a schedule, which is a function of the step, from arguments of `torch.profiler.schedule`.

    `active` is required. `wait` and `warmup` default to 0. A function, and None, are returned unchanged.

    Raises:
        ConfigurationError: A key is unknown, `active` is missing, or a value is out of its range.
    """
    if value is None or callable(value):
        return value
    known = list(inspect.signature(torch.profiler.schedule).parameters)
    for key in value:
        if key not in known:
            raise ConfigurationError(f"a schedule has no key {key!r}.{nearest(key, known)} Known: {', '.join(known)}.")
    if "active" not in value:
        raise ConfigurationError(
            f"schedule={dict(value)} has no 'active', which is the number of steps to record in a cycle. Add it."
        )
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Profiler won't be using warmup")  # it was requested
            schedule: Schedule = torch.profiler.schedule(**{"wait": 0, "warmup": 0, **value})
    except (AssertionError, TypeError) as error:
        raise ConfigurationError(
            f"schedule={dict(value)}: expected whole numbers, at least 1 for active and at least 0 for the others."
        ) from error
    return schedule


class CycleProfile(torch.profiler.profile):
    """torch's profiler. It can export a cycle of its schedule several times, and counts the recorded steps.

    Args:
        schedule: See `make_schedule`. None records everything.
        handlers, on_trace_ready: Called in this order, with this profiler, after each cycle in which a step ended.
        options: Further arguments of `torch.profiler.profile`.

    Attributes:
        num_recorded: Number of steps that were recorded, in all cycles.
        num_exported: Number of them in the cycles whose handlers were called.
        _first_trace: Path of the first trace of the current cycle. Empty before it is written.

    Raises:
        ConfigurationError: torch cannot record an activity on this machine.
    """

    def __init__(
        self,
        schedule: Mapping[str, int] | Schedule | None,
        *handlers: Callable[..., Any],
        on_trace_ready: Callable[..., Any] | None = None,
        **options: Any,
    ) -> None:
        supported = torch.profiler.supported_activities()  # type: ignore[no-untyped-call]  # torch has no types here
        for activity in options.get("activities") or ():
            if activity not in supported:
                known = [name for name, each in _ACTIVITIES.items() if each in supported]
                raise ConfigurationError(
                    f"the activity {str(activity).rpartition('.')[2].lower()!r} cannot be recorded on this machine. "
                    f"Supported: {', '.join(known)}."
                )
        # torch calls the handler with this profiler, so that the unbound method becomes a call of the method.
        super().__init__(schedule=make_schedule(schedule), on_trace_ready=CycleProfile._call_handlers, **options)
        self.num_recorded = 0
        self.num_exported = 0
        self.handlers = list(handlers)
        if on_trace_ready is not None:
            self.handlers.append(on_trace_ready)
        self._first_trace = ""

    @property
    def is_recording(self) -> bool:
        """True if the schedule records the current step."""
        return self.current_action in _RECORDING

    def step(self) -> None:
        """End a step."""
        if self.is_recording:
            self.num_recorded += 1
        with warnings.catch_warnings():  # the handlers have exported the events
            warnings.filterwarnings("ignore", ".*Profiler clears events at the end of each cycle")
            super().step()

    def _call_handlers(self) -> None:
        """Call the handlers at the end of a cycle, unless no step of the cycle has ended."""
        counts_steps = self.step_num > 0  # otherwise the whole block is recorded as one cycle
        if counts_steps and self.num_recorded == self.num_exported:
            return
        handlers = self.handlers
        self._first_trace = ""
        # If a handler raises, torch calls this method again at the end of the profile, and would crash in the export.
        # The list then stays empty.
        self.handlers = []
        for handler in handlers:
            handler(self)
        self.handlers = handlers
        self.num_exported = self.num_recorded

    def export_chrome_trace(self, path: str, *args: Any, **options: Any) -> None:
        """Write the trace of a cycle. torch can write it only once, so further files are copies of the first."""
        if not self._first_trace:
            self._first_trace = str(path)
            super().export_chrome_trace(self._first_trace, *args, **options)
            return
        if Path(path).resolve() == Path(self._first_trace).resolve():
            return  # opening it for the copy would empty it
        open_source = _opener(self._first_trace)
        open_target = _opener(path)
        with open_source(self._first_trace, "rb") as source, open_target(path, "wb") as target:
            shutil.copyfileobj(source, target)

    def warn_if_empty(self) -> None:
        """Warn if the schedule recorded no step."""
        if self.num_recorded or not self.record_steps:
            return
        if self.step_num:
            first = next((step for step in range(_SEARCHED_STEPS) if self.schedule(step) in _RECORDING), None)
            when = "never" if first is None else f"after {first} steps"
            reason = (
                f"the loop ran {self.step_num} steps, and the schedule becomes active {when}. Decrease wait, warmup or "
                "skip_first."
            )
        else:
            reason = "the loop did not call step() of the profiler: call it after each step."
        warnings.warn(f"the profiler recorded no step: {reason}", TrainwrightWarning, stacklevel=3)


def _opener(path: str) -> Callable[..., Any]:
    """Return the function that opens a trace. torch compresses traces whose name ends in `.gz`."""
    return gzip.open if str(path).endswith(".gz") else open


class PyTorchProfiler(Profiler):
    """Profiler of operators, kernels and the Trainer's actions in chosen steps.

    Each rank writes a chrome trace `{stage}-{filename}-{rank}.json`, and rank 0 merges them in
    `{stage}-{filename}-merged.json`.

    Args:
        dirpath, filename: see `Profiler`.
        group_by_input_shapes: List operators with different input shapes separately in the table. Default: False.
        emit_nvtx: Only mark operators for NVIDIA's tools, by `torch.autograd.profiler.emit_nvtx`. Default: False.
        export_to_chrome: Write the traces. Default: True.
        row_limit: Rows of the table. -1 shows all rows. Default: 20.
        sort_by_key: Column that sorts the table, such as `cpu_time_total`. Default: None, which is the total time on
            the GPU with CUDA, and otherwise on the CPU.
        record_module_names: Mark the forward of each module with its name. Default: True.
        table_kwargs: Further arguments of torch's `table`. Default: None.
        schedule: The steps to record: `wait`, `warmup`, `active`, `repeat` and `skip_first`, or a function of the step.
            Default: None, which is `wait=1, warmup=1, active=3, repeat=1`.
        memory_timeline: Write `{stage}-{filename}-{rank}-memory.json`, memory by category over time. Default: False.
        memory_snapshot: On CUDA, write `{stage}-{filename}-{rank}-memory.pickle` for pytorch.org/memory_viz. Default:
            False.
        peak_flops: A device's peak in FLOP/s, with which FLOPs are compared if `with_flops=True`. Default: None.
        **profiler_kwargs: Arguments of `torch.profiler.profile`.

    Raises:
        ConfigurationError: An argument, a key of `schedule` or `sort_by_key` is unknown, or a value of `schedule` is
            out of its range. In `setup`: this machine cannot record an activity, or has no NVIDIA GPU for `emit_nvtx`.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        group_by_input_shapes: bool = False,
        emit_nvtx: bool = False,
        export_to_chrome: bool = True,
        row_limit: int = 20,
        sort_by_key: str | None = None,
        record_module_names: bool = True,
        table_kwargs: Mapping[str, Any] | None = None,
        *,
        schedule: Mapping[str, int] | Callable[[int], ProfilerAction] | None = None,
        memory_timeline: bool = False,
        memory_snapshot: bool = False,
        peak_flops: float | None = None,
        **profiler_kwargs: Any,
    ) -> None:
        super().__init__(dirpath, filename)
        known = [*inspect.signature(torch.profiler.profile).parameters]
        for name in profiler_kwargs:
            if name not in known:
                raise ConfigurationError(f"PyTorchProfiler has no argument {name!r}.{nearest(name, known)}")
        # torch treats the columns of all kinds of devices as the same ones.
        if re.sub("cuda|xpu|privateuse1", "device", sort_by_key or "count") not in _COLUMNS:
            raise unknown("sort_by_key", sort_by_key, _COLUMNS)
        self.group_by_input_shapes = group_by_input_shapes
        self.emit_nvtx = emit_nvtx
        self.export_to_chrome = export_to_chrome
        self.row_limit = row_limit
        self.sort_by_key = sort_by_key
        self.record_module_names = record_module_names
        self.table_kwargs = dict(table_kwargs or {})
        self.memory_timeline = memory_timeline
        self.memory_snapshot = memory_snapshot
        self.peak_flops = peak_flops
        self.schedule = _DEFAULT_SCHEDULE if schedule is None else schedule
        make_schedule(self.schedule)  # an error before the stage
        self.profiler_kwargs = dict(profiler_kwargs)
        if group_by_input_shapes:
            self.profiler_kwargs["record_shapes"] = True
        if memory_timeline:  # torch refuses to export it without them
            self.profiler_kwargs.update(record_shapes=True, profile_memory=True, with_stack=True)
        # Set by `setup`. None between stages, and with emit_nvtx.
        self.profiler: CycleProfile | None = None
        self._text = ""  # the summary of the last cycle
        self._resources = ExitStack()  # the profile, hooks of modules and the recording of memory, which `close` ends
        self._cycles: list[str] = []  # part of the names of the files of each finished cycle: "", "-1", "-2"

    def setup(self, stage: str, rank: int = 0, world_size: int = 1, root: str | Path = ".") -> None:
        super().setup(stage, rank, world_size, root)
        self._open = []
        self._text = ""
        self._resources = ExitStack()
        self._cycles = []
        for path in (self.path(".json"), *self.path("").parent.glob(f"{self.path('').name}-*.json")):
            path.unlink(missing_ok=True)  # of an earlier run; it must not be merged with this one
        if self.emit_nvtx:
            if not torch.cuda.is_available():
                raise ConfigurationError("PyTorchProfiler(emit_nvtx=True) needs an NVIDIA GPU. Leave it out.")
            self._resources.enter_context(torch.autograd.profiler.emit_nvtx())  # type: ignore[no-untyped-call]  # torch's
            return
        profiler = CycleProfile(self.schedule, self._receive, **self.profiler_kwargs)
        # Memory is recorded from before the profile starts until after it ends.
        if self.memory_snapshot and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history()
            self._resources.callback(self._write_snapshot)
        elif self.memory_snapshot and not rank:
            text = "PyTorchProfiler(memory_snapshot=True) needs CUDA; no snapshot is written."
            warnings.warn(text, TrainwrightWarning, stacklevel=2)
        self.profiler = self._resources.enter_context(profiler)

    def watch(self, model: torch.nn.Module) -> None:
        """Mark the forward of each module of `model` with its name from now on, if `record_module_names`."""
        if not self.record_module_names:
            return
        for name, module in model.named_modules():
            if not name:  # the model itself, whose forward is the whole step
                continue
            label = f"[Module]{name}: {type(module).__name__}"
            start = module.register_forward_pre_hook(lambda *_, label=label: self.start(label))
            stop = module.register_forward_hook(lambda *_, label=label: self.stop(label), always_call=True)
            self._resources.callback(start.remove)
            self._resources.callback(stop.remove)

    def start(self, action_name: str) -> None:
        is_recording = self.emit_nvtx if self.profiler is None else self.profiler.is_recording
        if is_recording:
            region = record_function(action_name)
            region.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
            self._open.append(_OpenRegion(action_name, region))

    def stop(self, action_name: str) -> None:
        with suppress(ValueError):  # it may have started before the first step that is recorded
            index = self._innermost(action_name)
            self._open.pop(index).region.__exit__(None, None, None)

    def end_step(self) -> None:
        if self.profiler is not None:
            self.profiler.step()

    def _receive(self, profiler: CycleProfile) -> None:
        """Export a finished cycle of the schedule, and write the text of the summary."""
        self._text = self._describe(profiler)  # before `_cycles` grows: the title counts this cycle as len + 1
        cycle = f"-{len(self._cycles)}" if self._cycles else ""
        self.path("").parent.mkdir(parents=True, exist_ok=True)
        if self.export_to_chrome:
            profiler.export_chrome_trace(str(self.path(f"{cycle}.json")))
        self._cycles.append(cycle)
        if self.memory_timeline:
            device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch has no other one for the CPU
                profiler.export_memory_timeline(str(self.path(f"{cycle}-memory.json")), device=device)

    def _describe(self, profiler: CycleProfile) -> str:
        """Return the summary of a finished cycle."""
        averages = profiler.key_averages(group_by_input_shape=self.group_by_input_shapes)
        key = self.sort_by_key or f"{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
        table = averages.table(**{"sort_by": key, "row_limit": self.row_limit, **self.table_kwargs})
        num_steps = profiler.num_recorded - profiler.num_exported
        title = f"Profile of {self.stage or 'the program'} on rank {self.rank}: {num_steps} steps recorded"
        if self._cycles:
            title += f", in the last of {len(self._cycles) + 1} cycles"
        lines = [title, table]
        flops = sum(row.flops for row in averages)
        # torch marks each step by a region "ProfilerStep#n", with times in microseconds.
        seconds = sum(row.cpu_time_total for row in averages if row.key.startswith("ProfilerStep")) / 1e6
        if flops and num_steps:
            lines.append(f"FLOPs of a step: {flops / num_steps:.6g} (matrix products and convolutions)")
            if self.peak_flops is not None and seconds:
                lines.append(f"Share of the device's peak: {100 * flops / seconds / self.peak_flops:.2f} %")
        return "\n".join(lines)

    def _write_snapshot(self) -> None:
        torch.cuda.memory._dump_snapshot(str(self.path("-memory.pickle")))  # type: ignore[no-untyped-call]  # torch's
        torch.cuda.memory._record_memory_history(enabled=None)

    def close(self) -> None:
        while self._open:
            self._open.pop().region.__exit__(None, None, None)
        self._resources.close()
        if self.profiler is not None and self.profiler.step_num and not self.rank:
            self.profiler.warn_if_empty()
        self.profiler = None

    def summary(self) -> str:
        """Return torch's table of the last cycle, and the FLOPs of a step if they were recorded."""
        return self._text

    def teardown(self, stage: str) -> None:
        """On rank 0, merge the traces of all ranks. Each rank has separate lanes."""
        if self.rank or not self.export_to_chrome or not self._cycles:
            return
        traces: list[tuple[int, dict[str, Any]]] = []
        for rank in range(self.world_size):
            for cycle in self._cycles:
                path = self.path(f"{cycle}.json", rank)
                if path.exists():  # not that of a rank on another node
                    traces.append((rank, json.loads(path.read_text(encoding="utf-8"))))
        merged = _merge_traces(traces)
        self.path(".json", "merged").write_text(json.dumps(merged), encoding="utf-8")

    def __getstate__(self) -> dict[str, Any]:
        """Omit the open profiler. A copy in another process starts a new profiler."""
        return {**vars(self), "profiler": None, "_open": [], "_resources": None}


def _merge_traces(traces: list[tuple[int, dict[str, Any]]]) -> dict[str, Any]:
    """Return one chrome trace with the events of the traces of all ranks, in lanes of their own."""
    start_ns = min((trace.get("baseTimeNanoseconds", 0) for _, trace in traces), default=0)
    events: list[dict[str, Any]] = []
    lanes: dict[tuple[int, Any], int] = {}  # (rank, process in its trace) → process in the merged trace
    for rank, trace in traces:
        shift_us = (trace.get("baseTimeNanoseconds", 0) - start_ns) / 1000  # times of events are microseconds
        for event in trace["traceEvents"]:
            lane = lanes.setdefault((rank, event.get("pid")), len(lanes))
            event["pid"] = lane
            if event.get("ph") != "M" and "ts" in event:  # M: a name or an index, without a time
                event["ts"] += shift_us
            if "id" in event:
                event["id"] = f"{rank}-{event['id']}"
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank}: {event['args'].get('name', '')}"}
            elif event.get("name") == "process_sort_index":
                event["args"] = {"sort_index": lane}
            events.append(event)
    return {"schemaVersion": 1, "baseTimeNanoseconds": start_ns, "displayTimeUnit": "ms", "traceEvents": events}


@dataclass
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
        make_schedule(self.schedule_option)

    def build(self) -> CycleProfile:
        """Return a profiler of torch with these options.

        Raises:
            ConfigurationError: This machine does not have an activity.
        """
        self.__post_init__()  # an option may have been assigned since
        options = self.to_dict()
        del options["output_trace_dir"]
        if self.activities:
            options["activities"] = [_ACTIVITIES[name] for name in self.activities]
        return CycleProfile(options.pop("schedule_option"), **options)


@contextmanager
def profiled(
    options: ProfileKwargs, process_index: int, wait: Callable[[], None], written: list[str]
) -> Iterator[torch.profiler.profile]:
    """Yield a profiler that records the `with` block; see `Accelerator.profile`.

    Args:
        options: Options of the profiler.
        process_index: Index of this process, in the names of the traces.
        wait: Called after the traces are written, if there is a folder for them. Not called if the block raises.
        written: List to which the paths of the traces are appended.

    Raises:
        ConfigurationError: `options` is not a ProfileKwargs, or this machine cannot record an activity.
    """
    if not isinstance(options, ProfileKwargs):
        raise ConfigurationError(f"accelerator.profile({options!r}): expected ProfileKwargs(…).")
    folder = None if options.output_trace_dir is None else Path(options.output_trace_dir)

    def export(profiler: torch.profiler.profile) -> None:
        if folder is None:
            return
        folder.mkdir(parents=True, exist_ok=True)
        number = sum(Path(path).parent == folder for path in written)  # of earlier traces in the folder
        suffix = f"-{number}" if number else ""
        written.append(str(folder / f"profile_{process_index}{suffix}.json"))
        profiler.export_chrome_trace(written[-1])

    profiler = options.build()
    profiler.handlers.insert(0, export)
    with profiler:
        yield profiler
    if process_index == 0:
        profiler.warn_if_empty()
    if folder is not None:
        wait()
