"""PyTorchProfiler: the operators and kernels of chosen steps, by `torch.profiler`."""

from __future__ import annotations

import inspect
import json
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, record_function

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest
from trainwright.profilers.profile_kwargs import (
    RECORDING,
    adapt,
    check_activities,
    make_schedule,
    warn_without_records,
)
from trainwright.profilers.profiler import Profiler

_TIMES = ("cpu_time", "device_time", "cpu_time_total", "device_time_total", "self_cpu_time_total")
_MEMORY = ("cpu_memory_usage", "device_memory_usage", "self_cpu_memory_usage", "self_device_memory_usage")
_COLUMNS = (*_TIMES, "self_device_time_total", *_MEMORY, "count", "flops")
_DEFAULT_SCHEDULE = {"wait": 1, "warmup": 1, "active": 3, "repeat": 1}


class PyTorchProfiler(Profiler):
    """Records operators, kernels and the Trainer's actions in chosen steps. Each rank writes a chrome trace
    `{stage}-{filename}-{rank}.json`, and rank 0 merges them in `{stage}-{filename}-merged.json`.

    Args:
        dirpath, filename: see `Profiler`.
        group_by_input_shapes: List operators with different input shapes separately in the table. Default: False.
        emit_nvtx: Mark operators for NVIDIA's tools instead of recording them; see
            `torch.autograd.profiler.emit_nvtx`. Default: False.
        export_to_chrome: Write the traces. Default: True.
        row_limit: Rows of the table; -1: all. Default: 20.
        sort_by_key: Column that the table is sorted by, for example `cpu_time_total`. Default: None, which
            is the total time on the device.
        record_module_names: Mark the forward of each module with its name. Default: True.
        table_kwargs: Further arguments of torch's `table`. Default: None.
        schedule: The steps to record: `wait`, `warmup`, `active`, `repeat` and `skip_first`, or a function of
            the step. Default: None, which is `wait=1, warmup=1, active=3, repeat=1`.
        memory_timeline: Write `{stage}-{filename}-{rank}-memory.json` with the memory by its use. Default: False.
        memory_snapshot: On CUDA, write `{stage}-{filename}-{rank}-memory.pickle` for pytorch.org/memory_viz. Default:
            False.
        peak_flops: Peak of one device in FLOP/s, for comparison with the FLOPs of a step (`with_flops=True`). Default:
            None.
        **profiler_kwargs: Arguments of `torch.profiler.profile`.

    Raises:
        ConfigurationError: An argument, a key of `schedule` or `sort_by_key` is unknown.
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
        if sort_by_key is not None and _device_key(sort_by_key) not in _COLUMNS:
            raise ConfigurationError(
                f"PyTorchProfiler(sort_by_key={sort_by_key!r}) is unknown.{nearest(sort_by_key, _COLUMNS)} Known: "
                f"{', '.join(_COLUMNS)}."
            )
        self.group_by_input_shapes, self.emit_nvtx = group_by_input_shapes, emit_nvtx
        self.export_to_chrome, self.row_limit, self.sort_by_key = export_to_chrome, row_limit, sort_by_key
        self.record_module_names, self.table_kwargs = record_module_names, dict(table_kwargs or {})
        self.memory_timeline, self.memory_snapshot, self.peak_flops = memory_timeline, memory_snapshot, peak_flops
        self.schedule = make_schedule(_DEFAULT_SCHEDULE if schedule is None else schedule)
        needs = ("record_shapes", "profile_memory", "with_stack") if memory_timeline else ()
        needs = ("record_shapes", *needs) if group_by_input_shapes else needs
        self.profiler_kwargs = {**profiler_kwargs, **dict.fromkeys(needs, True)}
        self.profiler: Any = None
        self._forget()

    def _forget(self) -> None:
        self._open: list[tuple[str, Any]] = []
        self._handles: list[Any] = []
        self._traces: list[Path] = []
        self._num_steps = self._num_recorded = 0
        self._in_cycles: list[int] = []  # recorded steps of each cycle
        self._text, self._flops, self._seconds = "", 0, 0.0
        self._records = self._is_exporting = False
        self._resources = ExitStack()

    def setup(self, stage: str, rank: int = 0, world_size: int = 1, root: str | Path = ".") -> None:
        super().setup(stage, rank, world_size, root)
        self._forget()
        for path in (self.path(".json"), *self.path("").parent.glob(f"{self.path('').name}-*.json")):
            path.unlink(missing_ok=True)  # of an earlier run; it must not be merged with this one
        check_activities(self.profiler_kwargs.get("activities"))
        if self.emit_nvtx:
            if not torch.cuda.is_available():
                raise ConfigurationError("PyTorchProfiler(emit_nvtx=True) needs an NVIDIA GPU. Leave it out.")
            self._resources.enter_context(torch.autograd.profiler.emit_nvtx())  # type: ignore[no-untyped-call]  # torch's
            self._records = True
            return
        if self.memory_snapshot and not torch.cuda.is_available():
            if not rank:
                text = "PyTorchProfiler(memory_snapshot=True) needs CUDA; no snapshot is written."
                warnings.warn(text, TrainwrightWarning, stacklevel=2)
        elif self.memory_snapshot:
            torch.cuda.memory._record_memory_history()
        options = {"on_trace_ready": None, **self.profiler_kwargs}
        own = options.pop("on_trace_ready")

        def ready(profiler: Any) -> None:
            done = sum(self._in_cycles)
            if self._is_exporting:  # an export failed; torch crashes if its profiler is exported again
                return
            if self._num_recorded == done:  # the stage ended before a step of this cycle
                return
            self._in_cycles.append(self._num_recorded - done)
            self._is_exporting = True
            self._receive(profiler)
            if own is not None:
                own(profiler)
            self._is_exporting = False

        self.profiler = torch.profiler.profile(schedule=self.schedule, on_trace_ready=ready, **options)
        adapt(self.profiler)
        self._resources.enter_context(self.profiler)
        self._note()

    def watch(self, model: torch.nn.Module) -> None:
        """Mark the forward of each module of `model` with its name from now on, if `record_module_names`."""
        if not self.record_module_names:
            return
        for name, module in model.named_modules():
            if name:
                label = f"[Module]{name}: {type(module).__name__}"
                self._handles.append(module.register_forward_pre_hook(lambda *_, label=label: self.start(label)))
                hook = module.register_forward_hook(lambda *_, label=label: self.stop(label), always_call=True)
                self._handles.append(hook)

    def _note(self) -> None:
        self._records = self.schedule(self._num_steps) in RECORDING

    def start(self, name: str) -> None:
        if self._records:
            region = record_function(name)
            region.__enter__()  # type: ignore[no-untyped-call]  # torch has no types here
            self._open.append((name, region))

    def stop(self, name: str) -> None:
        at = len(self._open) - 1
        while at >= 0 and self._open[at][0] != name:  # it may have started before the first step that is recorded
            at -= 1
        if at >= 0:
            self._open.pop(at)[1].__exit__(None, None, None)

    def end_step(self) -> None:
        self._num_recorded += self._records
        self._num_steps += 1
        if self.profiler is not None:
            self.profiler.step()
            self._note()

    def _receive(self, profiler: Any) -> None:
        """Export a finished cycle of the schedule."""
        averages = profiler.key_averages(group_by_input_shape=self.group_by_input_shapes)
        self._flops += sum(each.flops for each in averages)
        self._seconds += sum(each.cpu_time_total for each in averages if each.key.startswith("ProfilerStep")) / 1e6
        key = self.sort_by_key or f"{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
        options = {"sort_by": key, "row_limit": self.row_limit, **self.table_kwargs}
        self._text = averages.table(**options)
        cycle = f"-{len(self._traces)}" if self._traces else ""
        self.path("").parent.mkdir(parents=True, exist_ok=True)
        if self.export_to_chrome:
            self._traces.append(self.path(f"{cycle}.json"))
            profiler.export_chrome_trace(str(self._traces[-1]))
        if self.memory_timeline:
            device = f"cuda:{torch.cuda.current_device()}" if torch.cuda.is_available() else "cpu"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # torch has no other one for the CPU
                profiler.export_memory_timeline(str(self.path(f"{cycle}-memory.json")), device=device)

    def close(self) -> None:
        while self._open:
            self._open.pop()[1].__exit__(None, None, None)
        self._records = False
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._resources.close()
        if self.profiler is not None and self.memory_snapshot and torch.cuda.is_available():
            path = str(self.path("-memory.pickle"))
            torch.cuda.memory._dump_snapshot(path)  # type: ignore[no-untyped-call]  # torch has no types here
            torch.cuda.memory._record_memory_history(enabled=None)
        self.profiler = None

    def summary(self) -> str:
        """Return torch's table of the last cycle, and the FLOPs of a step if they were recorded."""
        if not self._text:
            return ""
        cycles = len(self._in_cycles)
        of = f", in the last of {cycles} cycles" if cycles > 1 else ""
        lines = [f"Profile of {self.stage} on rank {self.rank}: {self._in_cycles[-1]} steps recorded{of}", self._text]
        if self._flops and self._num_recorded:
            lines.append(f"FLOPs of a step: {self._flops / self._num_recorded:.6g} (matrix products and convolutions)")
            if self.peak_flops is not None and self._seconds:
                share = self._flops / self._seconds / self.peak_flops
                lines.append(f"Share of the device's peak: {100 * share:.2f} %")
        return "\n".join(lines)

    def teardown(self, stage: str) -> None:
        """Merge the traces of all ranks on rank 0, and warn if no step was recorded."""
        if self.rank:
            return
        if not self._num_recorded and self._num_steps and not self.emit_nvtx:
            warn_without_records(self.schedule, self._num_steps)
        if not self._traces:
            return
        endings = [".json", *(f"-{cycle}.json" for cycle in range(1, len(self._traces)))]
        paths = [(rank, self.path(ending, rank)) for rank in range(self.world_size) for ending in endings]
        merge_traces([(rank, path) for rank, path in paths if path.exists()], self.path(".json", "merged"))

    def __getstate__(self) -> dict[str, Any]:
        """Omit the open profiler: a copy in another process starts its own."""
        return {**vars(self), "profiler": None, "_open": [], "_handles": [], "_resources": ExitStack()}


def _device_key(key: str) -> str:
    """Return a column's name as torch reads it: those of devices are the same column."""
    return key.replace("cuda", "device").replace("xpu", "device").replace("privateuse1", "device")


def merge_traces(paths: Iterable[tuple[int, Path]], target: Path) -> None:
    """Write one chrome trace with the events of all ranks, in which each rank has separate lanes.

    Args:
        paths: Pairs of a rank and a file that `torch.profiler` exported on it.
        target: The file to write.
    """
    events: list[dict[str, Any]] = []
    first: int | None = None
    lanes: dict[tuple[int, Any], int] = {}
    for rank, path in paths:
        trace = json.loads(path.read_text(encoding="utf-8"))
        base = int(trace.get("baseTimeNanoseconds", 0))
        first = base if first is None else first
        shift = (base - first) / 1000  # times of events are microseconds since the base
        for event in trace["traceEvents"]:
            lane = lanes.setdefault((rank, event.get("pid")), len(lanes))
            event["pid"] = lane
            if event.get("ph") != "M" and "ts" in event:
                event["ts"] += shift
            if "id" in event:
                event["id"] = f"{rank}-{event['id']}"
            if event.get("name") == "process_name":
                event["args"] = {"name": f"rank {rank}: {event['args'].get('name', '')}"}
            elif event.get("name") == "process_sort_index":
                event["args"] = {"sort_index": lane}
            events.append(event)
    merged = {"schemaVersion": 1, "baseTimeNanoseconds": first or 0, "displayTimeUnit": "ms", "traceEvents": events}
    target.write_text(json.dumps(merged), encoding="utf-8")
