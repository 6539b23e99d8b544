"""`trainwright report RUN_FOLDER`: a report of a run as one HTML file, which needs no network."""

from __future__ import annotations

import argparse
import base64
import datetime
import html
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainwright.cli.reports.run_files import STAGES, Curve, RunFiles, damage_named, read_run, times_of
from trainwright.core.errors import ConfigurationError

REPORT_FILE = "report.html"
_HERE = Path(__file__).parent
_DROPPED_BITS = 9  # of the 23 bits of a float32's fraction: about 4 digits are kept
_PREFIXES = ("train", "val", "valid", "test")
_MAX_NOT_FINITE = 20  # steps with NaN or infinity that are listed for each curve
# Keys of a stage's first line that are in the table "Plan".
_PLAN = (
    "task",
    "parameters",
    "strategy",
    "options",
    "mesh",
    "processes",
    "device",
    "precision",
    "callbacks",
    "loggers",
)
# Keys of a stage's first line that are not in the table "Environment". Other tables show some of them.
_NOT_ENVIRONMENT = frozenset(
    {*_PLAN, "event", "step", "time", "settings", "hyperparameters", "folders", "packages", "code"}
)


def report(argv: Sequence[str]) -> int:
    """Write the report of a run and print its path.

    Returns:
        The exit code 0.

    Raises:
        ConfigurationError: the folder does not exist or contains no run, or `--output` is not in a folder that exists.
        RunFileError: a file of the run is damaged.
    """
    parser = argparse.ArgumentParser(prog="trainwright report", description="Write a run as one HTML file.")
    parser.add_argument("run", help="folder of a run, such as runs/version_0, or a folder above it: its newest run")
    parser.add_argument("--output", "-o", metavar="FILE", help=f"default: {REPORT_FILE} in the folder of the run")
    wanted = parser.parse_args(argv)
    run = read_run(wanted.run)
    path = Path(wanted.output) if wanted.output else run.folder / REPORT_FILE
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigurationError(f"--output {path}: write the name of a file in a folder that exists.")
    with damage_named(run.named_in_errors):
        text = page(run)
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0


def page(run: RunFiles) -> str:
    """Return the report as HTML."""
    text = (_HERE / "report.html").read_text(encoding="utf-8")
    content = _content(run)
    # In HTML, both </script> and <!--<script> in a name would change where the data ends.
    values = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    # From the end of the page to its start: a value that contains a mark comes after all marks that are still there.
    for mark, value in (
        ("/*UPLOT_JS*/", (_HERE / "uplot.min.js").read_text(encoding="utf-8")),
        ("/*DATA*/", values),
        ("/*UPLOT_CSS*/", (_HERE / "uplot.min.css").read_text(encoding="utf-8")),
        ("{{title}}", html.escape(content["title"])),
    ):
        text_before, _, text_after = text.partition(mark)
        text = text_before + value + text_after
    return text


def _content(run: RunFiles) -> dict[str, Any]:
    """Return the data of the page for the script in report.html."""
    start = run.start
    steps, times = times_of(run)
    # A chart cannot show a line with one point. Its value is in the table of metrics.
    curves = {name: curve for name, curve in run.curves.items() if len(curve.steps) > 1}
    has_rate = any(name.startswith("lr-") for name in curves)  # by LearningRateMonitor
    charted_steps = [line["step"] for line in run.progress]
    for curve in curves.values():
        charted_steps += curve.steps.tolist()
    subtitle = ""
    if start:
        began = datetime.datetime.fromtimestamp(run.events[0]["time"])
        subtitle = f"started {began:%Y-%m-%d %H:%M:%S}, seed {start.get('seed')}"
    return {
        "title": f"{start.get('task', 'Run')} in {run.folder}",
        "subtitle": subtitle,
        "facts": _facts(run, times),
        "range": [min(charted_steps, default=0), max(charted_steps, default=0)],
        "clock": {"steps": steps, "times": [round(time, 2) for time in times]},
        "charts": [*_metric_charts(curves), *_progress_charts(run, has_rate=has_rate)],
        "events": _events(run, steps, times),
        "tables": [table for table in _tables(run) if table["rows"]],
    }


def _facts(run: RunFiles, times: list[float]) -> list[tuple[str, str]]:
    """Return the names and values at the top of the page."""
    start = run.start
    facts: list[tuple[str, str]] = []
    if run.events:
        facts.append(("status", _status(run)))
    facts.append(("steps", f"{_last_step(run):,}"))
    if times:
        facts.append(("time", str(datetime.timedelta(seconds=round(times[-1])))))
    if start:
        facts += [
            ("strategy", f"{start['strategy']} on {start['processes']} × {start['device']}"),
            ("precision", start["precision"]["name"]),
            ("parameters", f"{start['parameters']:,}"),
        ]
    peaks = [line["memory"] for line in run.progress if line["memory"] is not None]
    if peaks:
        facts.append(("peak memory", f"{max(peaks) / 2**30:.2f} GiB"))
    best = _best(run)
    if best is not None:
        facts.append(("best checkpoint", best))
    return facts


def _status(run: RunFiles) -> str:
    """Return the status of the last fit or, without a fit, of the last stage.

    The status is `"running, or killed"` if the last stage has no end.
    """
    last = run.events[-1]
    if last["event"] != "end":  # a killed process writes no end
        return "running, or killed"
    ends = [event for event in run.events if event["event"] == "end" and event["stage"] == "fit"]
    status: str = (ends or [last])[-1]["status"]
    return status


def _last_step(run: RunFiles) -> int:
    """Return the last step of the record or, without a record, of the curves."""
    recorded: list[int] = [line["step"] for line in (*run.progress, *run.events)]
    if recorded:
        return max(recorded)
    return max((int(curve.steps[-1]) for curve in run.curves.values()), default=0)


def _best(run: RunFiles) -> str | None:
    """Return the name of the last checkpoint that was the best one when it was written, or None."""
    for event in reversed(run.events):
        if event.get("is_best"):
            name: str = event["name"]
            return name
    return None


def _metric_charts(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Return charts of metrics. Training and validation metrics of the same name are in one chart."""
    groups: dict[str, list[str]] = {}
    for name in curves:
        groups.setdefault(_subject(name), []).append(name)
    # False comes before True: losses first, and then by name.
    ordered = sorted(groups, key=lambda subject: ("loss" not in subject.lower(), subject.lower()))
    return [_chart(subject, {name: curves[name] for name in groups[subject]}) for subject in ordered]


def _subject(name: str) -> str:
    """Return a metric's name without its prefix (see `_PREFIXES`) and the suffix `_step` or `_epoch`."""
    for separator in ("_", "/", "-"):
        first, found, rest = name.partition(separator)
        if found and first.lower() in _PREFIXES:
            name = rest
            break
    return name.removesuffix("_step").removesuffix("_epoch") or name


def _progress_charts(run: RunFiles, *, has_rate: bool) -> list[dict[str, Any]]:
    """Return charts of learning rate, gradient norm, throughput and memory from the run's progress file."""
    series: dict[str, dict[str, list[tuple[int, float]]]] = {}  # chart → curve → (step, value)

    def add(chart: str, curve: str, step: int, value: float) -> None:
        series.setdefault(chart, {}).setdefault(curve, []).append((step, value))

    previous: dict[str, Any] | None = None
    for line in run.progress:
        step = line["step"]
        if not has_rate:
            rates = line["lr"]
            for i, rate in enumerate(rates):
                add("Learning rate", "lr" if len(rates) == 1 else f"group {i}", step, rate)
        if "grad_norm" in line:
            add("Gradient norm before clipping", "norm", step, float(line["grad_norm"]))
        # `seconds`, `samples` and `tokens` are totals of the run. Equal totals give no throughput.
        if previous is not None and line["seconds"] > previous["seconds"]:
            seconds = line["seconds"] - previous["seconds"]
            for unit in ("samples", "tokens"):
                if line[unit] > previous[unit]:
                    rate = (line[unit] - previous[unit]) / seconds
                    add(f"Throughput in {unit} per second", f"{unit}/s", step, rate)
        if line["memory"] is not None:
            add("Peak memory of the main process in GiB", "GiB", step, line["memory"] / 2**30)
        previous = line
    charts: list[dict[str, Any]] = []
    for title, points_by_name in series.items():
        charts.append(_chart(title, {name: _curve(points) for name, points in points_by_name.items()}))
    return charts


def _curve(points: list[tuple[int, float]]) -> Curve:
    steps = np.array([step for step, _ in points], np.int64)
    values = np.array([value for _, value in points], np.float64)
    return Curve(steps, values)


def _chart(title: str, curves: Mapping[str, Curve]) -> dict[str, Any]:
    """Return a chart for the script: `{"title": …, "series": [{"name": "loss", "steps": "eJx…", "values": …}]}`."""
    series: list[dict[str, str]] = []
    for name, curve in curves.items():
        # Differences of steps repeat, and compress to almost nothing. The script adds them up again.
        steps = _packed(np.diff(curve.steps, prepend=0))
        series.append({"name": name, "steps": steps, "values": _packed(curve.values)})
    return {"title": title, "series": series}


def _packed(values: NDArray[Any]) -> str:
    """Return numbers as text: grouped by byte, compressed with zlib and encoded as base64.

    Integers are stored as int32, other numbers as float32 with 14 bits of fraction. A million noisy values take about 3
    MB.
    """
    if values.dtype.kind == "i":
        bits = values.astype("<i4").view("<u4")
    else:
        with np.errstate(over="ignore"):
            bits = values.astype("<f4").view("<u4")
        # Round to the nearest value whose last bits are 0: add half of the last kept bit, and clear the bits below it.
        # An infinity would become a NaN, and a NaN could become a number.
        half = np.uint32(1 << (_DROPPED_BITS - 1))
        mask = ~np.uint32((1 << _DROPPED_BITS) - 1)
        finite = np.isfinite(bits.view("<f4"))
        bits = np.where(finite, (bits + half) & mask, bits).astype("<u4")
    # All first bytes, then all second bytes, and so on: equal bytes are next to each other for the compression.
    shuffled = bits.view(np.uint8).reshape(-1, 4).T.tobytes()
    return base64.b64encode(zlib.compress(shuffled, 6)).decode()


def _events(run: RunFiles, steps: list[int], times: list[float]) -> list[dict[str, Any]]:
    """Return the events of the run and the values of curves that are not finite, sorted by step.

    `seconds` are those since the first event. They are interpolated for values, and None without a record.
    """
    events: list[dict[str, Any]] = []
    for line in run.events:
        event = _event(line)
        if event is not None:
            seconds = round(line["time"] - run.events[0]["time"], 2)
            events.append({"kind": event.kind, "step": event.step, "seconds": seconds, "text": event.text})
    for name, curve in run.curves.items():
        for step in curve.steps[~np.isfinite(curve.values)][:_MAX_NOT_FINITE].tolist():
            interpolated = float(np.interp(step, steps, times)) if steps else None
            text = f"{name} is not finite"
            events.append({"kind": "not finite", "step": step, "seconds": interpolated, "text": text})
    return sorted(events, key=lambda event: event["step"])


@dataclass(frozen=True)
class _Event:
    kind: str  # `event` of the line
    step: int
    text: str  # the description


def _event(line: Mapping[str, Any]) -> _Event | None:
    """Return the event to show for a line of the record, or None for a line that is not shown."""
    kind = str(line["event"])
    step = int(line["step"])
    match kind:
        case "fit":
            resumed = line.get("resumed_from")
            return _Event(kind, step, f"resumed from {resumed}" if resumed else "started")
        case "save":
            # `step` is that of the end of writing, before which other steps may have passed.
            return _Event(kind, line["of_step"], f"{line['name']} ({line['bytes'] / 2**20:.1f} MiB)")
        case "end":
            return _Event(kind, step, line["status"]) if line["stage"] == "fit" else None
        case "validation":
            return _Event(kind, step, f"took {line['seconds']:.3g} s")
        case "preemption":
            return _Event(kind, step, f"{line['signal']}: {line['text']}")
        case "rollback":
            return _Event(kind, step, f"{line['reason']}; back to {Path(line['path']).name}")
        case "skipped":
            return _Event(kind, step, _skipped(line))
        case "error":
            return _Event(kind, step, f"{line['type']}: {line['text']}")
    return None


def _skipped(line: Mapping[str, Any]) -> str:
    ids: list[str] = []
    for ids_of_rank in line.get("sample_ids") or []:
        ids += map(str, ids_of_rank)
    text = f"{line['reason']}; batch {line['first_batch']} of epoch {line['epoch']}"
    if not ids:
        return text
    more = " …" if len(ids) > 16 else ""
    return f"{text}; samples {', '.join(ids[:16])}{more}"


def _tables(run: RunFiles) -> list[dict[str, Any]]:
    """Return all tables in the order of the page. A table may have no rows."""
    start = run.start
    events = [[event["kind"], str(event["step"]), event["text"]] for event in _events(run, *times_of(run))]
    facts = {name: value for name, value in start.items() if name not in _NOT_ENVIRONMENT}
    environment = {**facts, **start.get("packages", {}), "code": start.get("code")}
    stages = [[event["event"], str(event["step"])] for event in run.events if event["event"] in STAGES]
    return [
        {"title": "Metrics", "head": ["name", "last", "smallest", "largest"], "rows": _metric_rows(run)},
        {"title": "Checkpoints", "head": ["name", "step", "size", "on the disk"], "rows": _checkpoint_rows(run)},
        {"title": "Events", "head": ["event", "step", "description"], "rows": events, "marks": True},
        {"title": "Stages", "head": ["stage", "at step"], "rows": stages},
        {"title": "Hyper-parameters", "head": ["name", "value"], "rows": _rows(start.get("hyperparameters", {}))},
        {"title": "Settings", "head": ["argument", "value", "from"], "rows": _settings(start)},
        {"title": "Plan", "head": ["name", "value"], "rows": _rows({name: start.get(name) for name in _PLAN})},
        {"title": "Environment", "head": ["name", "value"], "rows": _rows(environment)},
    ]


def _metric_rows(run: RunFiles) -> list[list[str]]:
    """Return the last, smallest and largest value of each metric with finite values."""
    rows: list[list[str]] = []
    for name, curve in run.curves.items():
        if np.isfinite(curve.values).any():
            values = (curve.values[-1], np.nanmin(curve.values), np.nanmax(curve.values))
            rows.append([name, *(f"{value:.6g}" for value in values)])
    return rows


def _checkpoint_rows(run: RunFiles) -> list[list[str]]:
    """Return the step and size of each checkpoint that the run wrote, and whether it still exists."""
    best = _best(run)
    folder = run.folder / run.start.get("folders", {}).get("checkpoints", "")
    saves = {event["name"]: event for event in run.events if event["event"] == "save"}  # the last one of each name
    rows: list[list[str]] = []
    for name, save in saves.items():
        label = f"{name} (best)" if name == best else name
        size = f"{save['bytes'] / 2**20:.1f} MiB"
        rows.append([label, str(save["of_step"]), size, "yes" if (folder / name).is_dir() else "deleted"])
    return rows


def _settings(start: Mapping[str, Any]) -> list[list[str]]:
    """Return the Trainer's arguments with their sources. Arguments with other than default values come first."""
    # {"max_epochs": [10, "argument"], "precision": ["32-true", "default"]}
    settings = start.get("settings", {}).items()
    rows = [[name, _cell(value), source] for name, (value, source) in settings]
    return sorted(rows, key=lambda row: row[2] == "default")  # False comes before True


def _rows(values: Mapping[str, Any]) -> list[list[str]]:
    return [[name, _cell(value)] for name, value in values.items()]


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
