"""`trainwright parity`: train the same steps under several strategies, and report where they first differ. Every
strategy runs in separate processes, from one seed, on the same micro-batches in each step. The first one named is the
reference.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from trainwright.cli.configs.overrides import read_command_line
from trainwright.cli.main import table_lines
from trainwright.cli.parity.parity_run import STEP_ARGUMENTS, Plan
from trainwright.core.errors import ConfigurationError

if TYPE_CHECKING:
    from trainwright.cli.parity.parity_compare import Comparison
    from trainwright.cli.parity.parity_tape import Tape

_SHOWN = 8  # number of differing values that are printed
_SUFFIXES = (".yaml", ".yml")


def parity(argv: Sequence[str]) -> int:
    """Compare strategies; see `trainwright parity --help`.

    Returns:
        0 if all results are equal, 1 if one differs or could not train.
    """
    from trainwright.core.process import detect

    wanted, rest = _parser().parse_known_args(argv)
    topology = detect()
    if topology.launcher != "none":
        raise ConfigurationError(
            f"parity starts the processes of every strategy itself, but a launcher has started it ({topology}). Start "
            "it without a launcher, and set the number of processes with --devices."
        )
    line = read_command_line(rest)
    _check_assignments(line.assignments)
    configs = list(line.configs)
    defaults: dict[str, object] = {}
    if wanted.target.endswith(_SUFFIXES):
        configs.insert(0, Path(wanted.target))
    else:
        defaults["task"] = {"class_path": class_path(wanted.target)}
    if wanted.data is not None:
        defaults["data"] = {"class_path": class_path(wanted.data)}
    strategies = _read_strategies(wanted.strategies)
    with tempfile.TemporaryDirectory(prefix="trainwright-parity-") as folder:
        runs: list[Tape | str] = []
        for i, (label, strategy) in enumerate(strategies):
            shared = (wanted.devices, wanted.steps, wanted.seed, defaults, list(map(str, configs)), line.assignments)
            runs.append(_run(Plan(strategy, *shared), label, Path(folder, f"{i}")))
            if isinstance(runs[0], str):
                print(f"{label} could not train, so that there is no reference: {runs[0]}")
                return 1
        return _report(runs, [label for label, _ in strategies], wanted)


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
    parser.add_argument(
        "--strategies",
        default="single,ddp",
        help="names, with options as in megatron:pp=2:tp=2, or module:Class; the first is the reference",
    )
    parser.add_argument("--data", metavar="CLASS", help="data module, if the task has no data of its own")
    parser.add_argument("--steps", type=_count, default=5, help="optimizer steps (default: 5)")
    parser.add_argument("--devices", type=_count, default=2, help="processes of each strategy that can run several")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--atol", type=_bound, help="allowed: atol + rtol × largest element (default: by precision)")
    parser.add_argument("--rtol", type=_bound)
    return parser


def _count(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text} is not at least 1.")
    return int(text)


def _bound(text: str) -> float:
    if not 0 <= float(text) < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a valid bound. Write a number of at least 0.")
    return float(text)


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
        sys.path.insert(0, str(file.parent.resolve()))
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


def _read_strategies(text: str) -> list[tuple[str, str]]:
    """Return each strategy as it was written, and its import path or registry name."""
    from trainwright.strategies.registry import STRATEGIES, make_strategy

    strategies = []
    for label in filter(None, map(str.strip, text.split(","))):
        path = label
        if "=" in label:
            make_strategy(label)  # raises an error with the nearest option
        elif ":" in label:
            path = ":".join(class_path(label).rsplit(".", 1))
        elif label != "auto":
            STRATEGIES.get(label)  # raises an error with the nearest name
        strategies.append((label, path))
    if len(strategies) < 2:
        raise ConfigurationError("--strategies names fewer than two. Write, for example, --strategies single,ddp.")
    return strategies


def _run(plan: Plan, label: str, folder: Path) -> Tape | str:
    """Run one strategy; return its record, or the error."""
    from trainwright.cli.parity.parity_tape import Tape
    from trainwright.processes.launcher import run_module

    print(f"parity: {label} …", file=sys.stderr)
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    code = run_module("trainwright.cli.parity.parity_run", [str(folder)])
    error = folder / "error.txt"
    if error.exists():
        return error.read_text().strip()
    if code != 0 or not (folder / "facts.json").exists():
        return f"its process ended with exit code {code} before it had trained"
    return Tape.read(label, folder)


def _report(runs: Sequence[Tape | str], labels: Sequence[str], wanted: argparse.Namespace) -> int:
    from trainwright.cli.parity.parity_compare import Tolerance, compare

    reference = runs[0]
    assert not isinstance(reference, str)  # checked before
    tolerance = Tolerance.of(reference.precision, wanted.atol, wanted.rtol)
    num_steps = len(reference.steps) - 1
    micro_batches = len(reference.steps[1].data) if num_steps else 0
    print(
        f"{reference.task}: {num_steps} step(s) of {micro_batches} micro-batch(es), seed {wanted.seed}, precision "
        f"{reference.precision}; allowed: {tolerance.atol:g} + {tolerance.rtol:g} × largest element"
    )
    compared = [run if isinstance(run, str) else compare(reference, run, tolerance) for run in runs]
    _print_table(labels, compared)
    for label, result in zip(labels, compared, strict=True):
        if isinstance(result, str):
            print(f"\n{label} could not train: {result}")
            continue
        if not result.equal:
            print(f"\n{label} differs from {reference.label} first in step {result.step}:")
            print(*(f"  {difference.what}: {difference.text}" for difference in result.found[:_SHOWN]), sep="\n")
        if len(result.found) > _SHOWN:
            print(f"  and {len(result.found) - _SHOWN} more")
        for note in result.notes():
            print(f"  note ({label}): {note}")
    equal = all(not isinstance(result, str) and result.equal for result in compared)
    return 0 if equal and num_steps else 1


def _print_table(labels: Sequence[str], compared: Sequence[Comparison | str]) -> None:
    from trainwright.cli.parity.parity_compare import KINDS

    rows = [["strategy", "processes", "loss", *(f"{kind} ±" for kind in KINDS), ""]]
    for label, result in zip(labels, compared, strict=True):
        if isinstance(result, str):
            rows.append([label, *[""] * (2 + len(KINDS)), "failed"])
            continue
        run = result.other
        losses = [step.loss for step in run.steps[1:] if step.loss is not None]
        shown = f"{losses[0]:.6g} … {losses[-1]:.6g}" if losses else "–"
        if run is result.reference:
            cells, verdict = [""] * len(KINDS), "reference"
        else:
            cells = [f"{result.worst[kind]:.1e}" if kind in result.worst else "–" for kind in KINDS]
            verdict = "equal" if result.equal else f"differs in step {result.step}"
        rows.append([label, f"{run.processes}", shown, *cells, verdict])
    print(*table_lines(rows), sep="\n")
