"""`trainwright diff RUN_A RUN_B`: differences between two runs, and the first step at which their curves differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from trainwright.cli.main import table_lines
from trainwright.cli.reports.run_files import Curve, RunFiles, damage_named, read_run, run_folders
from trainwright.core.errors import ConfigurationError, visible

_ABSENT = "–"
_ENVIRONMENT = ("device", "processes", "python", "platform", "host", "command")
_MODEL = ("task", "parameters", "strategy", "options", "mesh", "precision", "callbacks", "loggers")


def diff(argv: Sequence[str]) -> int:
    """Print the differences. Return 0 if only times and folders differ, else 1."""
    parser = argparse.ArgumentParser(prog="trainwright diff", description="Show what differs between two runs.")
    parser.add_argument("first", help="folder of a run, or a folder above it: its newest run")
    parser.add_argument("second", help="folder of the other run")
    parser.add_argument(
        "--tolerance",
        type=_fraction,
        default=0.01,
        metavar="X",
        help="curves part where values differ by more than X of the larger one. Default: 0.01",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    wanted = parser.parse_args(argv)
    runs = read_run(wanted.first), read_run(wanted.second)
    inside = run_folders(wanted.first)
    if runs[0].folder.resolve() == runs[1].folder.resolve() and len(inside) > 1:
        names = ", ".join(map(str, inside))
        raise ConfigurationError(f"both paths name the run {runs[0].folder}. Pass two of: {names}.")
    with damage_named(f"{runs[0].record} or {runs[1].record}"):
        found = compare(*runs, tolerance=wanted.tolerance)
        text = json.dumps(found, indent=2) if wanted.json else visible(_text(found, *runs))
    print(text)
    return 1 if any(found.values()) else 0


def _fraction(text: str) -> float:
    if not float(text) >= 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0.")
    return float(text)


def compare(first: RunFiles, second: RunFiles, *, tolerance: float = 0.01) -> dict[str, list[list[Any]]]:
    """Return the differences of two runs.

    Returns:
        Rows by topic. If a run has no `run.jsonl`, the topics are `metrics` and `curves`. A row has a name and the
        value of each run. A row of `curves` has the name, the first step with unequal values, the first step whose
        values differ by more than `tolerance` (relative to the larger value), and both values at the last common step.
        Equal curves have no row.

    Raises:
        ConfigurationError: the runs have no metric and no record in common, or are the same folder.
    """
    common = sorted(first.curves.keys() & second.curves.keys())
    if first.folder.resolve() == second.folder.resolve():
        raise ConfigurationError(f"both paths name the run {first.folder}. Pass two runs.")
    a, b = first.start, second.start
    if not common and not (a and b):
        names = [", ".join(sorted(run.curves)) or "no metrics" for run in (first, second)]
        raise ConfigurationError(
            f"the runs share nothing: {first.folder} has {names[0]}, and {second.folder} has {names[1]}. Pass runs of "
            "one task."
        )
    found: dict[str, list[list[Any]]] = {}
    if a and b:
        found |= _of_records(first, second)
    found["metrics"] = _rows(*(dict.fromkeys(run.curves, "logged") for run in (first, second)))
    rows = [[name, *_parting(first.curves[name], second.curves[name], tolerance)] for name in common]
    found["curves"] = [row for row in rows if row[1] is not None]
    return found


def _of_records(first: RunFiles, second: RunFiles) -> dict[str, list[list[Any]]]:
    a, b = first.start, second.start
    return {
        "code": _rows(a.get("code") or {}, b.get("code") or {}),
        "model": _rows(*({name: start.get(name) for name in _MODEL} for start in (a, b))),
        "hyperparameters": _rows(a.get("hyperparameters", {}), b.get("hyperparameters", {})),
        "settings": _rows(*({name: each[0] for name, each in start.get("settings", {}).items()} for start in (a, b))),
        "data order": _data_order(first, second),
        "environment": _rows(*({name: start.get(name) for name in _ENVIRONMENT} for start in (a, b))),
        "packages": _rows(a.get("packages", {}), b.get("packages", {})),
    }


def _rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[list[Any]]:
    names = dict.fromkeys((*first, *second))
    return [
        [name, first.get(name, _ABSENT), second.get(name, _ABSENT)]
        for name in names
        if first.get(name, _ABSENT) != second.get(name, _ABSENT)
    ]


def _data_order(first: RunFiles, second: RunFiles) -> list[list[Any]]:
    """Compare the seeds of the data order, and find the first step with different numbers of consumed samples."""
    rows = _rows({"seed": first.start.get("seed")}, {"seed": second.start.get("seed")})
    samples = [{line["step"]: line["samples"] for line in run.progress} for run in (first, second)]
    for step in sorted(samples[0].keys() & samples[1].keys()):
        if samples[0][step] != samples[1][step]:
            return [*rows, [f"samples after step {step}", samples[0][step], samples[1][step]]]
    return rows


def _parting(first: Curve, second: Curve, tolerance: float) -> tuple[int | None, int | None, float, float]:
    """Return the first step with unequal values, the first beyond the tolerance, and both values at the last step."""
    steps, at_first, at_second = np.intersect1d(first.steps, second.steps, return_indices=True)
    a, b = first.values[at_first], second.values[at_second]
    if not len(steps):
        return int(min(first.steps[0], second.steps[0])), None, float(first.values[-1]), float(second.values[-1])
    unequal = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    with np.errstate(invalid="ignore"):
        far = unequal & ~(np.abs(a - b) <= tolerance * np.maximum(np.abs(a), np.abs(b)))
    where = [int(steps[mask.argmax()]) if mask.any() else None for mask in (unequal, far)]
    return where[0], where[1], float(a[-1]), float(b[-1])


def _text(found: Mapping[str, list[list[Any]]], first: RunFiles, second: RunFiles) -> str:
    lines = [f"A  {first.folder}", f"B  {second.folder}"]
    for topic, rows in found.items():
        if not rows:
            continue
        head = ["", "A", "B"]
        cells = [[str(cell) for cell in row] for row in rows]
        if topic == "curves":
            head = ["", "first unequal", "parted at", "last A", "last B"]
            cells = [
                [name, f"step {unequal}", _ABSENT if parted is None else f"step {parted}", f"{a:.6g}", f"{b:.6g}"]
                for name, unequal, parted, a, b in rows
            ]
        lines += ["", topic, *(f"  {line}" for line in table_lines([head, *cells]))]
    same = [topic for topic, rows in found.items() if not rows]
    unknown = [str(run.folder) for run in (first, second) if not run.start]
    notes = [f"not known: code, settings and environment, because {' and '.join(unknown)} has no record"] * bool(
        unknown
    )
    return "\n".join([*lines, "", *([f"equal: {', '.join(same)}"] if same else []), *notes]).rstrip()
