"""`trainwright parity`: train the same steps under several strategies, and report where they first differ. Every
strategy runs in separate processes, from one seed, on the same micro-batches in each step. The first one named is the
reference.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.cli.configs.overrides import read_command_line
from trainwright.cli.parity.parity_run import STEP_ARGUMENTS, Plan
from trainwright.core.errors import ConfigurationError

if TYPE_CHECKING:
    from trainwright.cli.parity.parity_compare import Comparison, Difference
    from trainwright.cli.parity.parity_tape import Tape

_MODULE = "trainwright.cli.parity.parity_run"
_SHOWN = 4  # number of tensors of a step that are shown
_SUFFIXES = (".yaml", ".yml")


def parity(argv: Sequence[str]) -> int:
    """Compare strategies; see `trainwright parity --help`.

    Returns:
        0 if all results are equal, 1 if one differs or could not train.
    """
    wanted, rest = _parser().parse_known_args(argv)
    _check(wanted)
    defaults, configs = _configuration(wanted.target, wanted.data)
    line = read_command_line(rest)
    _check_assignments(line.assignments)
    labels = [name.strip() for name in wanted.strategies.split(",") if name.strip()]
    strategies = _check_strategies(labels)
    with tempfile.TemporaryDirectory(prefix="trainwright-parity-") as folder:
        runs: list[Tape | str] = []
        for i, (label, strategy) in enumerate(zip(labels, strategies, strict=True)):
            plan = Plan(
                strategy=strategy,
                devices=wanted.devices,
                steps=wanted.steps,
                seed=wanted.seed,
                defaults=defaults,
                configs=[str(path) for path in (*configs, *line.configs)],
                assignments=[list(assignment) for assignment in line.assignments],
            )
            runs.append(_run(plan, label, Path(folder, f"{i}")))
            if isinstance(runs[0], str):
                print(f"{label} could not train, so that there is no reference: {runs[0]}")
                return 1
        return _report(runs, labels, wanted)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainwright parity",
        description="Train the same steps under several strategies, and report where they first differ.",
        epilog="Further arguments override the configuration: task.lr=0.1 trainer.precision=bf16-mixed",
        allow_abbrev=False,
    )
    parser.add_argument(
        "target",
        metavar="TASK_OR_CONFIG",
        help="file.py:Class, package.module:Class, or a configuration file of `trainwright fit`",
    )
    parser.add_argument("--strategies", default="single,ddp", help="names, or module:Class; the first is the reference")
    parser.add_argument("--data", metavar="CLASS", help="data module, if the task has no data of its own")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps (default: 5)")
    parser.add_argument("--devices", type=int, default=2, help="processes of each strategy that can run several")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atol", type=float, help="allowed: atol + rtol × largest element (default: by precision)")
    parser.add_argument("--rtol", type=float)
    return parser


def _check(wanted: argparse.Namespace) -> None:
    from trainwright.core.process import detect

    for name in ("steps", "devices"):
        if getattr(wanted, name) < 1:
            raise ConfigurationError(f"--{name} {getattr(wanted, name)} is not at least 1.")
    for name in ("atol", "rtol"):
        value = getattr(wanted, name)
        if value is not None and not 0 <= value < math.inf:
            raise ConfigurationError(f"--{name} {value} is not a valid bound. Write a number of at least 0.")
    topology = detect()
    if topology.launcher != "none":
        raise ConfigurationError(
            f"parity starts the processes of every strategy itself, but a launcher has started it ({topology}). Start "
            "it without a launcher, and set the number of processes with --devices."
        )


def _configuration(target: str, data: str | None) -> tuple[dict[str, Any], list[Path]]:
    """Return the configuration of the target and `--data`, and its files."""
    defaults: dict[str, Any] = {}
    if data is not None:
        defaults["data"] = {"class_path": class_path(data)}
    if target.endswith(_SUFFIXES):
        return defaults, [Path(target)]
    return {**defaults, "task": {"class_path": class_path(target)}}, []


def class_path(text: str) -> str:
    """Return the dotted path of `file.py:Class` or `package.module:Class`; a file's folder becomes importable."""
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise ConfigurationError(
            f"{text!r} names no class and no configuration file. Write file.py:Class, package.module:Class or a path "
            f"that ends in {' or '.join(_SUFFIXES)}."
        )
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise ConfigurationError(f"{text!r}: there is no file {module}.")
        folder = str(file.parent.resolve())
        if folder not in sys.path:
            sys.path.insert(0, folder)
        module = file.stem
    return f"{module}.{name}"


def _check_assignments(assignments: Sequence[tuple[str, str]]) -> None:
    known = {f"trainer.{name}" for name in (*STEP_ARGUMENTS, "accumulate_grad_batches")}
    for key, _ in assignments:
        if key.startswith("trainer.") and key not in known:
            raise ConfigurationError(
                f"{key} cannot be set here: --steps are trained under --strategies with --devices, without loggers, "
                f"callbacks and validation. Arguments of a step can be set: {', '.join(sorted(known))}."
            )


def _check_strategies(labels: Sequence[str]) -> list[str]:
    """Return the import path or registry name for each label."""
    from trainwright.strategies.registry import STRATEGIES

    if len(labels) < 2:
        raise ConfigurationError("--strategies names fewer than two. Write, for example, --strategies single,ddp.")
    found = []
    for label in labels:
        if ":" in label:
            found.append(":".join(class_path(label).rsplit(".", 1)))
            continue
        if label != "auto":
            STRATEGIES.get(label)  # raises, naming the nearest
        found.append(label)
    return found


def _run(plan: Plan, label: str, folder: Path) -> Tape | str:
    """Run one strategy; return its record, or the error."""
    from trainwright.cli.parity.parity_tape import Tape
    from trainwright.processes.launcher import run_module

    print(f"parity: {label} …", file=sys.stderr)
    folder.mkdir()
    plan.write(folder)
    code = run_module(_MODULE, [str(folder)])
    error = folder / "error.txt"
    if error.exists():
        return error.read_text().strip()
    if code != 0 or not (folder / "facts.json").exists():
        return f"its process ended with exit code {code} before it had trained"
    return Tape.read(label, folder)


# The report


def _report(runs: Sequence[Tape | str], labels: Sequence[str], wanted: argparse.Namespace) -> int:
    from trainwright.cli.parity.parity_compare import Tolerance, compare

    reference = runs[0]
    assert not isinstance(reference, str)  # checked before
    facts = reference.facts
    tolerance = Tolerance.of(facts.precision, wanted.atol, wanted.rtol)
    micro_batches = len(reference.steps[1].data) if len(reference.steps) > 1 else 0
    print(
        f"{facts.task}: {len(reference.steps) - 1} step(s) of {micro_batches} micro-batch(es), seed {wanted.seed}, "
        f"precision {facts.precision}; allowed: {tolerance.atol:g} + {tolerance.rtol:g} × largest element"
    )
    compared = [run if isinstance(run, str) else compare(reference, run, tolerance) for run in runs]
    _print_table(labels, compared)
    for label, result in zip(labels, compared, strict=True):
        if isinstance(result, str):
            print(f"\n{label} could not train: {result}")
        elif not result.equal:
            _print_difference(result)
        else:
            _print_notes(result)
    equal = all(not isinstance(result, str) and result.equal for result in compared)
    return 0 if equal and len(reference.steps) > 1 else 1


def _print_table(labels: Sequence[str], compared: Sequence[Comparison | str]) -> None:
    from trainwright.cli.parity.parity_compare import KINDS

    rows = [["strategy", "processes", "loss", *(f"{kind} ±" for kind in KINDS), ""]]
    for i, (label, result) in enumerate(zip(labels, compared, strict=True)):
        if isinstance(result, str):
            rows.append([label, "", "", *([""] * len(KINDS)), "failed"])
            continue
        run = result.other
        losses = [step.loss for step in run.steps[1:] if step.loss is not None]
        shown = f"{losses[0]:.6g} … {losses[-1]:.6g}" if losses else "–"
        worst = ["" if i == 0 else _figure(result.worst.get(kind)) for kind in KINDS]
        verdict = "reference" if i == 0 else "equal" if result.equal else f"differs in step {result.found[0].step}"
        rows.append([label, f"{run.facts.processes}", shown, *worst, verdict])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip())


def _print_difference(result: Comparison) -> None:
    reference, label, first = result.reference.label, result.other.label, result.found[0]
    headline: dict[str, str] = {}  # the first number, the first gradient and so on
    for difference in result.found:
        headline.setdefault(difference.kind, difference.what)
    print(f"\n{label} differs from {reference} first in step {first.step}: {', '.join(headline.values())}")
    for difference in result.found[:_SHOWN]:
        print(f"  {difference.what}: {_describe(difference, reference, label)}")
    if len(result.found) > _SHOWN:
        names = [difference.what for difference in result.found[_SHOWN:]]
        print(f"  and {len(names)} more: {', '.join(names[:8])}{' …' if len(names) > 8 else ''}")
    _print_notes(result)


def _print_notes(result: Comparison) -> None:
    from trainwright.cli.parity.parity_compare import notes

    for note in notes(result):
        print(f"  note ({result.other.label}): {note}")


def _describe(difference: Difference, reference: str, label: str) -> str:
    if difference.note or difference.values is None:
        return difference.note
    ours, theirs = difference.values
    place = f" at {list(difference.index)}" if difference.index else ""
    ratio = "" if difference.ratio is None else f"; all of it is {difference.ratio:.4g} times the reference's"
    return (
        f"{reference} {ours:.8g}, {label} {theirs:.8g}{place}; greatest difference {difference.absolute:.3g} "
        f"(relative {difference.relative:.3g}), allowed {difference.bound:.3g}{ratio if difference.name else ''}"
    )


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:.1e}" if value else "0"
