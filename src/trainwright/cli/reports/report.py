"""`trainwright report RUN_FOLDER`: a report of a run as one HTML file, which needs no network."""

from __future__ import annotations

import argparse
import base64
import datetime
import html
import json
import zlib
from collections.abc import Mapping, Sequence
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
_MAX_NOT_FINITE = 20  # events for each curve
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
_ELSEWHERE = frozenset({*_PLAN, "event", "step", "time", "settings", "hyperparameters", "folders", "packages", "code"})


def report(argv: Sequence[str]) -> int:
    """Write the report of a run and print its path."""
    parser = argparse.ArgumentParser(prog="trainwright report", description="Write a run as one HTML file.")
    parser.add_argument("run", help="folder of a run, such as runs/version_0, or a folder above it: its newest run")
    parser.add_argument("--output", "-o", metavar="FILE", help=f"default: {REPORT_FILE} in the folder of the run")
    wanted = parser.parse_args(argv)
    run = read_run(wanted.run)
    path = Path(wanted.output) if wanted.output else run.folder / REPORT_FILE
    if path.is_dir() or not path.parent.is_dir():
        raise ConfigurationError(f"--output {path}: write the name of a file in a folder that exists.")
    with damage_named(run.record):
        text = page(run)
    path.write_text(text, encoding="utf-8")
    print(path)
    return 0


def page(run: RunFiles) -> str:
    """Return the report as HTML."""
    text = (_HERE / "report.html").read_text(encoding="utf-8")
    # In HTML, both </script> and <!--<script> in a name would change where the data ends.
    content = _content(run)
    values = json.dumps(content, allow_nan=False).replace("<", "\\u003c")
    for mark, value in (
        ("{{title}}", html.escape(content["title"])),
        ("/*UPLOT_CSS*/", (_HERE / "uplot.min.css").read_text(encoding="utf-8")),
        ("/*UPLOT_JS*/", (_HERE / "uplot.min.js").read_text(encoding="utf-8")),
        ("/*DATA*/", values),
    ):
        before, _, after = text.partition(mark)
        text = before + value + after
    return text


def _content(run: RunFiles) -> dict[str, Any]:
    """Return the data of the page for the script in report.html."""
    start, (steps, times) = run.start, times_of(run)
    curves = {name: curve for name, curve in run.curves.items() if len(curve.steps) > 1}
    shown = [step for curve in curves.values() for step in curve.steps.tolist()] + [
        each["step"] for each in run.progress
    ]
    began = None if not start else datetime.datetime.fromtimestamp(run.events[0]["time"])
    return {
        "title": f"{start.get('task', 'Run')} in {run.folder}",
        "subtitle": "" if began is None else f"started {began:%Y-%m-%d %H:%M:%S}, seed {start.get('seed')}",
        "facts": _facts(run, times),
        "range": [min(shown, default=0), max(shown, default=0)],
        "clock": {"steps": steps, "times": [round(time, 2) for time in times]},
        "charts": [*_metric_charts(curves), *_progress_charts(run, has_rate=any(n.startswith("lr-") for n in curves))],
        "events": _events(run, steps, times),
        "tables": [table for table in _tables(run) if table["rows"]],
    }


def _facts(run: RunFiles, times: list[float]) -> list[tuple[str, str]]:
    start = run.start
    last = max((line["step"] for line in (*run.progress, *run.events)), default=None)
    if last is None:
        last = max((int(curve.steps[-1]) for curve in run.curves.values()), default=0)
    ends = [event["status"] for event in run.events if event["event"] == "end" and event["stage"] == "fit"]
    found = [("steps", f"{last:,}")]
    if run.events:
        running = run.events[-1]["event"] != "end"
        found.insert(0, ("status", "running, or killed" if running else (ends or [run.events[-1]["status"]])[-1]))
    if times:
        found.append(("time", str(datetime.timedelta(seconds=round(times[-1])))))
    if start:
        found += [
            ("strategy", f"{start['strategy']} on {start['processes']} × {start['device']}"),
            ("precision", start["precision"]["name"]),
            ("parameters", f"{start['parameters']:,}"),
        ]
    peaks = [line["memory"] for line in run.progress if line["memory"] is not None]
    if peaks:
        found.append(("peak memory", f"{max(peaks) / 2**30:.2f} GiB"))
    best = _best(run)
    return found if best is None else [*found, ("best checkpoint", best)]


def _best(run: RunFiles) -> str | None:
    """Return the name of the checkpoint that was the best when it was written last; None if there is none."""
    return next((event["name"] for event in reversed(run.events) if event.get("is_best")), None)


def _metric_charts(curves: Mapping[str, Curve]) -> list[dict[str, Any]]:
    """Return charts of metrics. Training and validation metrics of the same name are in one chart."""
    groups: dict[str, list[str]] = {}
    for name in curves:
        groups.setdefault(_subject(name), []).append(name)
    ordered = sorted(groups, key=lambda subject: ("loss" not in subject.lower(), subject.lower()))
    return [_chart(subject, {name: curves[name] for name in groups[subject]}) for subject in ordered]


def _subject(name: str) -> str:
    """Return a metric's name without the prefix `train`, `val` or `test` and the suffix `_step` or `_epoch`."""
    for separator in ("_", "/", "-"):
        first, found, rest = name.partition(separator)
        if found and first.lower() in _PREFIXES:
            name = rest
            break
    return name.removesuffix("_step").removesuffix("_epoch") or name


def _progress_charts(run: RunFiles, *, has_rate: bool) -> list[dict[str, Any]]:
    """Return charts of learning rate, gradient norm, throughput and memory from the run's progress file."""
    lines = run.progress
    series: dict[str, dict[str, list[tuple[int, float]]]] = {}
    for line, before in zip(lines, [None, *lines], strict=False):
        step = line["step"]
        if not has_rate:
            rates = line["lr"]
            for i, rate in enumerate(rates):
                name = "lr" if len(rates) == 1 else f"group {i}"
                series.setdefault("Learning rate", {}).setdefault(name, []).append((step, rate))
        if "grad_norm" in line:
            norms = series.setdefault("Gradient norm before clipping", {}).setdefault("norm", [])
            norms.append((step, float(line["grad_norm"])))
        if before is not None and line["seconds"] > before["seconds"]:
            for unit in ("samples", "tokens"):
                if line[unit] > before[unit]:
                    per_second = (line[unit] - before[unit]) / (line["seconds"] - before["seconds"])
                    rate_of = series.setdefault(f"Throughput in {unit} per second", {})
                    rate_of.setdefault(f"{unit}/s", []).append((step, per_second))
        if line["memory"] is not None:
            memory = series.setdefault("Peak memory of the main process in GiB", {})
            memory.setdefault("GiB", []).append((step, line["memory"] / 2**30))
    return [
        _chart(title, {name: Curve(*_columns(points)) for name, points in of_title.items()})
        for title, of_title in series.items()
    ]


def _columns(points: list[tuple[int, float]]) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    return np.array([p[0] for p in points], np.int64), np.array([p[1] for p in points], np.float64)


def _chart(title: str, curves: Mapping[str, Curve]) -> dict[str, Any]:
    series = [
        {"name": name, "steps": _packed(np.diff(curve.steps, prepend=0)), "values": _packed(curve.values)}
        for name, curve in curves.items()
    ]
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
        finite = np.isfinite(bits.view("<f4"))
        half = np.uint32(1 << (_DROPPED_BITS - 1))
        bits = np.where(finite, (bits + half) & ~np.uint32((1 << _DROPPED_BITS) - 1), bits).astype("<u4")
    shuffled = bits.view(np.uint8).reshape(-1, 4).T.tobytes()
    return base64.b64encode(zlib.compress(shuffled, 6)).decode()


def _events(run: RunFiles, steps: list[int], times: list[float]) -> list[dict[str, Any]]:
    """Return the events of the run in the order of time."""
    first = run.events[0]["time"] if run.events else 0.0
    found = [
        {"kind": kind, "step": step, "seconds": round(event["time"] - first, 2), "text": text}
        for event in run.events
        for kind, step, text in [_event(event)]
        if kind
    ]
    for name, curve in run.curves.items():
        for step in curve.steps[~np.isfinite(curve.values)][:_MAX_NOT_FINITE].tolist():
            seconds = float(np.interp(step, steps, times)) if steps else None
            found.append({"kind": "not finite", "step": step, "seconds": seconds, "text": f"{name} is not finite"})
    return sorted(found, key=lambda event: event["step"])


def _event(event: Mapping[str, Any]) -> tuple[str, int, str]:
    """Return the kind, step and description of a line of the record. Lines with an empty kind are not shown."""
    kind, step = str(event["event"]), int(event["step"])
    if kind == "fit":
        resumed = event.get("resumed_from")
        return kind, step, f"resumed from {resumed}" if resumed else "started"
    if kind == "save":
        return kind, event["of_step"], f"{event['name']} ({event['bytes'] / 2**20:.1f} MiB)"
    if kind == "end":
        return (kind, step, event["status"]) if event["stage"] == "fit" else ("", step, "")
    texts = {
        "validation": lambda: f"took {event['seconds']:.3g} s",
        "preemption": lambda: f"{event['signal']}: {event['text']}",
        "rollback": lambda: f"{event['reason']}; back to {Path(event['path']).name}",
        "skipped": lambda: _skipped(event),
        "error": lambda: f"{event['type']}: {event['text']}",
    }
    return (kind, step, texts[kind]()) if kind in texts else ("", step, "")


def _skipped(event: Mapping[str, Any]) -> str:
    ids = [str(i) for of_rank in event.get("sample_ids") or [] for i in of_rank]
    samples = f"; samples {', '.join(ids[:16])}{' …' if len(ids) > 16 else ''}" if ids else ""
    return f"{event['reason']}; batch {event['first_batch']} of epoch {event['epoch']}{samples}"


def _tables(run: RunFiles) -> list[dict[str, Any]]:
    start = run.start
    best = _best(run)
    saves = {event["name"]: event for event in run.events if event["event"] == "save"}
    folder = run.folder / start.get("folders", {}).get("checkpoints", "")
    checkpoints = [
        [
            name + (" (best)" if name == best else ""),
            str(event["of_step"]),
            f"{event['bytes'] / 2**20:.1f} MiB",
            "yes" if (folder / name).is_dir() else "deleted",
        ]
        for name, event in saves.items()
    ]
    finals = [
        [name, f"{curve.values[-1]:.6g}", f"{np.nanmin(curve.values):.6g}", f"{np.nanmax(curve.values):.6g}"]
        for name, curve in run.curves.items()
        if np.isfinite(curve.values).any()
    ]
    shown = [[event["kind"], str(event["step"]), event["text"]] for event in _events(run, *times_of(run))]
    facts = {name: value for name, value in start.items() if name not in _ELSEWHERE}
    environment = {**facts, **start.get("packages", {}), "code": start.get("code")}
    stages = [[event["event"], str(event["step"])] for event in run.events if event["event"] in STAGES]
    return [
        {"title": "Metrics", "head": ["name", "last", "smallest", "largest"], "rows": finals},
        {"title": "Checkpoints", "head": ["name", "step", "size", "on the disk"], "rows": checkpoints},
        {"title": "Events", "head": ["event", "step", "description"], "rows": shown, "marks": True},
        {"title": "Stages", "head": ["stage", "at step"], "rows": stages},
        {"title": "Hyper-parameters", "head": ["name", "value"], "rows": _rows(start.get("hyperparameters", {}))},
        {"title": "Settings", "head": ["argument", "value", "from"], "rows": _settings(start)},
        {"title": "Plan", "head": ["name", "value"], "rows": _rows({name: start.get(name) for name in _PLAN})},
        {"title": "Environment", "head": ["name", "value"], "rows": _rows(environment)},
    ]


def _settings(start: Mapping[str, Any]) -> list[list[str]]:
    """Return the Trainer's arguments with their sources. Arguments with other than default values come first."""
    settings = start.get("settings", {}).items()
    rows = [[name, *_rows({name: value})[0][1:], source] for name, (value, source) in settings]
    return sorted(rows, key=lambda row: row[2] == "default")


def _rows(values: Mapping[str, Any]) -> list[list[str]]:
    return [[name, value if isinstance(value, str) else json.dumps(value)] for name, value in values.items()]
