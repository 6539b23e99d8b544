"""`trainwright diff RUN_A RUN_B`: differences between two runs, and the first step at which their curves differ."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trainwright.cli.main import table_lines
from trainwright.cli.reports.run_files import Curve, RunFiles, damage_named, read_run, run_folders
from trainwright.core.errors import ConfigurationError, visible
from trainwright.loggers.hyperparams import json_safe

_ABSENT = "–"
# Keys of the line that a stage writes into `run.jsonl` when it begins, by the topic that shows them.
_ENVIRONMENT = ("device", "processes", "python", "platform", "host", "command")
_MODEL = ("task", "parameters", "strategy", "options", "mesh", "precision", "callbacks", "loggers")


def diff(argv: Sequence[str]) -> int:
    """Print the differences of two runs.

    Returns:
        The exit code: 0 if only times and folders differ, else 1.

    Raises:
        ConfigurationError: a folder contains no run, both paths name the same run, or the runs have nothing in common.
        RunFileError: a file of a run is damaged.
    """
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
    first = read_run(wanted.first)
    second = read_run(wanted.second)
    # A folder above several runs stands for its newest run, which may be the second run as well.
    inside = run_folders(wanted.first)
    if first.folder.resolve() == second.folder.resolve() and len(inside) > 1:
        names = ", ".join(map(str, inside))
        raise ConfigurationError(f"both paths name the run {first.folder}. Pass two of: {names}.")
    with damage_named(f"{first.named_in_errors} or {second.named_in_errors}"):
        differences = compare(first, second, tolerance=wanted.tolerance)
        if wanted.json:
            text = json.dumps(json_safe(differences), indent=2, allow_nan=False)
        else:
            text = visible(_text(differences, first, second))
    print(text)
    return 1 if any(differences.values()) else 0


def _fraction(text: str) -> float:
    if not float(text) >= 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0.")
    return float(text)


def compare(first: RunFiles, second: RunFiles, *, tolerance: float = 0.01) -> dict[str, list[list[Any]]]:
    """Return the differences of two runs.

    Returns:
        Rows by topic. If a run has no `run.jsonl`, the topics are `metrics` and `curves`. A row has a name and the
        value of each run. A row of `curves` has the name, the first step with unequal values, the first step whose
        values differ by more than `tolerance` (relative to the larger value; None without such a step), and both values
        at the last common step. Equal curves have no row.

    Raises:
        ConfigurationError: the runs have no metric and no record in common, or are the same folder.
    """
    if first.folder.resolve() == second.folder.resolve():
        raise ConfigurationError(f"both paths name the run {first.folder}. Pass two runs.")
    common = sorted(first.curves.keys() & second.curves.keys())
    have_records = bool(first.start and second.start)
    if not common and not have_records:
        first_names = ", ".join(sorted(first.curves)) or "no metrics"
        second_names = ", ".join(sorted(second.curves)) or "no metrics"
        raise ConfigurationError(
            f"the runs share nothing: {first.folder} has {first_names}, and {second.folder} has {second_names}. Pass "
            "runs of one task."
        )
    differences: dict[str, list[list[Any]]] = {}
    if have_records:
        differences |= _of_records(first, second)
    # Metrics of both runs give no row here: their values are compared as curves.
    differences["metrics"] = _rows(dict.fromkeys(first.curves, "logged"), dict.fromkeys(second.curves, "logged"))
    differences["curves"] = []
    for name in common:
        parting = _parting(first.curves[name], second.curves[name], tolerance)
        if parting is not None:
            row = [name, parting.unequal_step, parting.far_step, parting.last_first, parting.last_second]
            differences["curves"].append(row)
    return differences


def _of_records(first: RunFiles, second: RunFiles) -> dict[str, list[list[Any]]]:
    """Return the rows of all topics that are in the records, by topic."""
    a = first.start
    b = second.start
    return {
        "code": _rows(a.get("code") or {}, b.get("code") or {}),
        "model": _rows(_selected(a, _MODEL), _selected(b, _MODEL)),
        "hyperparameters": _rows(a.get("hyperparameters", {}), b.get("hyperparameters", {})),
        "settings": _rows(_setting_values(a), _setting_values(b)),
        "data order": _data_order(first, second),
        "environment": _rows(_selected(a, _ENVIRONMENT), _selected(b, _ENVIRONMENT)),
        "packages": _rows(a.get("packages", {}), b.get("packages", {})),
    }


def _selected(start: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """Return the values with these names. A record of an older version may lack one."""
    return {name: start.get(name) for name in names}


def _setting_values(start: Mapping[str, Any]) -> dict[str, Any]:
    # "settings": {"max_epochs": [10, "argument"], …}: each value is followed by its source, which is not compared.
    return {name: value_and_source[0] for name, value_and_source in start.get("settings", {}).items()}


def _rows(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[list[Any]]:
    """Return a row [name, value of the first run, value of the second run] for each value that differs."""
    rows: list[list[Any]] = []
    for name in dict.fromkeys((*first, *second)):
        value_first = first.get(name, _ABSENT)
        value_second = second.get(name, _ABSENT)
        if value_first != value_second:
            rows.append([name, value_first, value_second])
    return rows


def _data_order(first: RunFiles, second: RunFiles) -> list[list[Any]]:
    """Compare the seeds of the data order, and find the first step with different numbers of consumed samples."""
    rows = _rows({"seed": first.start.get("seed")}, {"seed": second.start.get("seed")})
    samples_first = {line["step"]: line["samples"] for line in first.progress}
    samples_second = {line["step"]: line["samples"] for line in second.progress}
    for step in sorted(samples_first.keys() & samples_second.keys()):
        if samples_first[step] != samples_second[step]:
            rows.append([f"samples after step {step}", samples_first[step], samples_second[step]])
            break  # all later steps differ, too
    return rows


@dataclass(frozen=True)
class _Parting:
    """Where two curves differ.

    Attributes:
        unequal_step: first common step with unequal values, or the first step of all if no step is common.
        far_step: first common step whose values differ by more than the tolerance. None without such a step.
        last_first: the first curve's value at the last common step, or its last value if no step is common.
        last_second: the second curve's value at that step, or its last value.
    """

    unequal_step: int
    far_step: int | None
    last_first: float
    last_second: float


def _parting(first: Curve, second: Curve, tolerance: float) -> _Parting | None:
    """Return where two curves differ, or None for curves with equal values at all common steps."""
    first = _without_repeats(first)
    second = _without_repeats(second)
    steps, at_first, at_second = np.intersect1d(first.steps, second.steps, return_indices=True)
    if not len(steps):
        start = int(min(first.steps[0], second.steps[0]))
        return _Parting(start, None, float(first.values[-1]), float(second.values[-1]))
    a = first.values[at_first]
    b = second.values[at_second]
    unequal = ~((a == b) | (np.isnan(a) & np.isnan(b)))
    if not unequal.any():
        return None
    # `not <=` instead of `>`: a number and a NaN, or two opposite infinities, are far from each other.
    with np.errstate(invalid="ignore"):
        far = unequal & ~(np.abs(a - b) <= tolerance * np.maximum(np.abs(a), np.abs(b)))
    far_step = int(steps[far.argmax()]) if far.any() else None
    return _Parting(int(steps[unequal.argmax()]), far_step, float(a[-1]), float(b[-1]))


def _without_repeats(curve: Curve) -> Curve:
    """Return the last value of each step. A run that resumes, or rolls back, logs steps again."""
    is_last = np.append(np.diff(curve.steps) > 0, True)
    return Curve(curve.steps[is_last], curve.values[is_last])


def _text(differences: Mapping[str, list[list[Any]]], first: RunFiles, second: RunFiles) -> str:
    """Return one table for each topic with differences, the names of equal topics, and what is not known."""
    lines = [f"A  {first.folder}", f"B  {second.folder}"]
    equal: list[str] = []
    for topic, rows in differences.items():
        if not rows:
            equal.append(topic)
            continue
        lines += ["", topic]
        lines += [f"  {line}" for line in table_lines(_cells(topic, rows))]
    lines.append("")
    if equal:
        lines.append(f"equal: {', '.join(equal)}")
    unknown = [str(run.folder) for run in (first, second) if not run.start]
    if unknown:
        lines.append(f"not known: code, settings and environment, because {' and '.join(unknown)} has no record")
    return "\n".join(lines).rstrip()


def _cells(topic: str, rows: Sequence[Sequence[Any]]) -> list[list[str]]:
    """Return the head and the rows of a topic's table as text."""
    if topic != "curves":
        return [["", "A", "B"], *([str(cell) for cell in row] for row in rows)]
    table = [["", "first unequal", "parted at", "last A", "last B"]]
    for name, unequal_step, far_step, last_first, last_second in rows:
        parted = _ABSENT if far_step is None else f"step {far_step}"
        table.append([name, f"step {unequal_step}", parted, f"{last_first:.6g}", f"{last_second:.6g}"])
    return table
