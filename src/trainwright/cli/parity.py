"""`trainwright parity`: train the same steps with several strategies, and report the first difference.

Each strategy runs in separate processes, with the same seed and the same micro-batches in each step. The first strategy
is the reference.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainwright.cli.configs.overrides import SUFFIXES, CommandLine, read_command_line
from trainwright.cli.main import table_lines
from trainwright.core.errors import ConfigurationError, TrainwrightError
from trainwright.core.registry import import_object

if TYPE_CHECKING:
    from trainwright.cli.parity_tape import Comparison, Tape

_MAX_LINES = 8  # differing values that are printed for each strategy
# Arguments of the Trainer that are read from the configuration, because they affect a step.
STEP_ARGUMENTS = (
    *("accelerator", "precision", "gradient_clip_val", "gradient_clip_algorithm", "deterministic", "benchmark"),
    *("compile", "use_distributed_sampler", "per_sample_rng", "uneven_batches"),
    *("limit_train_batches", "overfit_batches", "reload_dataloaders_every_n_epochs"),
)


@dataclass(frozen=True)
class ParityPlan:
    """Plan of one run, stored as `plan.json` in a folder. The run writes its steps or its error into this folder."""

    strategy: str  # a name, or "module:name" of a strategy, a class or a function that makes one
    devices: int  # processes, if the strategy can run several
    steps: int
    seed: int
    defaults: dict[str, Any]  # configuration that the files override
    configs: list[str]
    assignments: list[tuple[str, str]]  # key and text of each override on the command line


def parity(argv: Sequence[str]) -> int:
    """Compare strategies; see `trainwright parity --help`.

    Returns:
        The exit code: 0 if all results are equal, 1 if a strategy has other results or could not train.

    Raises:
        ConfigurationError: an option or an override is not valid, or a launcher has started several processes.
    """
    from trainwright.core.process import detect

    wanted, rest = _parser().parse_known_args(argv)
    topology = detect()
    if topology.launcher != "none":
        raise ConfigurationError(
            f"parity starts the processes of every strategy itself, but a launcher has started parity ({topology}). "
            "Start parity without a launcher, and set the number of processes with --devices."
        )
    line = read_command_line(rest)
    _check_assignments(line.assignments)
    configs = list(line.configs)
    defaults: dict[str, object] = {}
    if wanted.target.endswith(SUFFIXES):
        configs.insert(0, Path(wanted.target))
    else:
        defaults["task"] = {"class_path": class_path(wanted.target)}
    if wanted.data is not None:
        defaults["data"] = {"class_path": class_path(wanted.data)}
    strategies = _read_strategies(wanted.strategies)
    with tempfile.TemporaryDirectory(prefix="trainwright-parity-") as folder:
        runs: list[Tape | str] = []  # a text is the error of a strategy that could not train
        for i, (label, strategy) in enumerate(strategies):
            plan = ParityPlan(
                strategy=strategy,
                devices=wanted.devices,
                steps=wanted.steps,
                seed=wanted.seed,
                defaults=defaults,
                configs=[str(config) for config in configs],
                assignments=line.assignments,
            )
            run = _run(plan, label, Path(folder, f"{i}"))
            if i == 0 and isinstance(run, str):  # the reference
                print(f"{label} could not train, and is the reference of the others: {run}")
                return 1
            runs.append(run)
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
    parser.add_argument(
        "--devices", type=_count, default=2, help="processes of each strategy that can run several (default: 2)"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of weights and data (default: 0)")
    parser.add_argument("--atol", type=_bound, help="allowed: atol + rtol × largest element (default: by precision)")
    parser.add_argument("--rtol", type=_bound, help="relative part of the bound; see --atol (default: by precision)")
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
    """Return the dotted path of `file.py:Class` or `package.module:Class`. Add the file's folder to `sys.path`.

    Raises:
        ConfigurationError: `text` has another form, or the file does not exist. The class is not imported.
    """
    module, _, name = text.rpartition(":")
    if not module or not name:
        raise ConfigurationError(
            f"{text!r} names no class and no configuration file. Write file.py:Class, package.module:Class or a path "
            f"that ends in {' or '.join(SUFFIXES)}."
        )
    if module.endswith(".py"):
        file = Path(module)
        if not file.is_file():
            raise ConfigurationError(f"{text!r}: there is no file {module}. Check the path.")
        sys.path.insert(0, str(file.parent.resolve()))
        module = file.stem
    return f"{module}.{name}"


def _check_assignments(assignments: Sequence[tuple[str, str]]) -> None:
    known = {f"trainer.{name}" for name in (*STEP_ARGUMENTS, "accumulate_grad_batches")}
    for key, _ in assignments:
        if key.startswith("trainer.") and key not in known:
            raise ConfigurationError(
                f"{key} cannot be set here: use --steps, --strategies and --devices. Loggers, callbacks and validation "
                f"are not used. Arguments that can be set: {', '.join(sorted(known))}."
            )


def _read_strategies(text: str) -> list[tuple[str, str]]:
    """Return the text of each strategy in the option, with the strategy's import path or registry name.

    For example, `"ddp,my.py:Mine,megatron:tp=2"` returns
    `[("ddp", "ddp"), ("my.py:Mine", "my:Mine"), ("megatron:tp=2", "megatron:tp=2")]`.

    Raises:
        ConfigurationError: a name or an option is unknown, or there are fewer than two strategies.
    """
    from trainwright.strategies.registry import STRATEGIES, make_strategy

    strategies = []
    for label in filter(None, map(str.strip, text.split(","))):
        path = label
        if "=" in label:
            make_strategy(label)  # raises an error with the nearest option
        elif ":" in label:
            module, _, name = class_path(label).rpartition(".")
            path = f"{module}:{name}"
        elif label != "auto":
            STRATEGIES.get(label)  # raises an error with the nearest name
        strategies.append((label, path))
    if len(strategies) < 2:
        raise ConfigurationError(
            f"--strategies={text!r} names fewer than two strategies. Write, for example, --strategies single,ddp."
        )
    return strategies


def _run(plan: ParityPlan, label: str, folder: Path) -> Tape | str:
    """Run one strategy in new processes. Return its `Tape`, or the error as text."""
    from trainwright.cli.parity_tape import Tape
    from trainwright.processes.launcher import run_module

    print(f"parity: {label} …", file=sys.stderr)
    folder.mkdir()
    (folder / "plan.json").write_text(json.dumps(asdict(plan)))
    code = run_module("trainwright.cli.parity", [str(folder)])
    error = folder / "error.txt"
    if error.exists():
        return error.read_text().strip()
    if code != 0 or not (folder / "facts.json").exists():
        return f"its process ended with exit code {code} before it had trained"
    return Tape.read(label, folder)


def _report(runs: Sequence[Tape | str], labels: Sequence[str], wanted: argparse.Namespace) -> int:
    """Compare the runs to the first one, print the results, and return the exit code. A text is a run's error."""
    from trainwright.cli.parity_tape import Tolerance, compare

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
            for difference in result.found[:_MAX_LINES]:
                print(f"  {difference.what}: {difference.text}")
        if len(result.found) > _MAX_LINES:
            print(f"  and {len(result.found) - _MAX_LINES} more")
        for note in result.notes():
            print(f"  note ({label}): {note}")
    equal = all(not isinstance(result, str) and result.equal for result in compared)
    return 0 if equal and num_steps else 1  # runs without a step show nothing


def _print_table(labels: Sequence[str], compared: Sequence[Comparison | str]) -> None:
    from trainwright.cli.parity_tape import KINDS

    rows = [["strategy", "processes", "loss", *(f"{kind} ±" for kind in KINDS), ""]]
    for label, result in zip(labels, compared, strict=True):
        if isinstance(result, str):
            rows.append([label, *[""] * (2 + len(KINDS)), "failed"])
            continue
        run = result.other
        losses = [step.loss for step in run.steps[1:] if step.loss is not None]  # the first entry is the initial state
        first_and_last = f"{losses[0]:.6g} … {losses[-1]:.6g}" if losses else "–"
        if run is result.reference:
            cells = [""] * len(KINDS)
            verdict = "reference"
        else:
            cells = [f"{result.worst[kind]:.1e}" if kind in result.worst else "–" for kind in KINDS]
            verdict = "equal" if result.equal else f"differs in step {result.step}"
        rows.append([label, f"{run.processes}", first_and_last, *cells, verdict])
    print(*table_lines(rows), sep="\n")


# A strategy's run, in its own process: `python -m trainwright.cli.parity FOLDER`


def run_plan(folder: Path) -> int:
    """Run the `ParityPlan` in a folder. Return 0. After an error, write `error.txt` into the folder and return 1.

    A strategy with several processes runs this function in each of them.
    """
    plan = ParityPlan(**json.loads((folder / "plan.json").read_text()))
    try:
        _record(plan, folder)
    except Exception as error:  # noqa: BLE001  # any error of the task is shown with the other strategies' results
        text = str(error) if isinstance(error, TrainwrightError) else traceback.format_exc()
        (folder / "error.txt").write_text(text)
        return 1
    return 0


def _record(plan: ParityPlan, folder: Path) -> None:
    from trainwright import Trainer
    from trainwright.cli.configs.parsing import build
    from trainwright.cli.fit import read_settings
    from trainwright.cli.parity_tape import StepTape
    from trainwright.core.rng import seed_everything

    line = CommandLine(list(map(Path, plan.configs)), plan.assignments)
    parser, settings = read_settings("fit", line, defaults=plan.defaults)
    configured = settings.pop("trainer").as_dict()
    if configured.get("callbacks"):
        print("trainwright: note: the configuration's callbacks are not used in the comparison.", file=sys.stderr)
    seed_everything(plan.seed)  # before the task is built, because it draws its initial weights
    built = build(parser, settings)
    strategy, devices = load_strategy(plan)
    # A strategy with one process takes as many micro-batches for a step as `plan.devices` processes together.
    micro_batches = (configured["accumulate_grad_batches"] or 1) * plan.devices
    tape = StepTape(folder, micro_batches, plan.seed)
    trainer = Trainer(
        **{name: configured[name] for name in STEP_ARGUMENTS},
        strategy=strategy,
        devices=devices,
        max_steps=plan.steps,
        max_epochs=-1,
        limit_val_batches=0,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        preemption_grace=None,
        default_root_dir=folder / "files",
        seed=plan.seed,
        callbacks=[tape],
    )
    trainer.fit(built.task, datamodule=built.data)


def load_strategy(plan: ParityPlan) -> tuple[Any, int]:
    """Return the plan's strategy for the Trainer, and the number of processes: 1 if it is not distributed.

    Raises:
        ConfigurationError: the plan names an object that is not a strategy and does not create one.
    """
    from trainwright.strategies.registry import STRATEGIES, make_strategy
    from trainwright.strategies.strategy import Strategy

    name = plan.strategy
    if name == "auto":
        return name, plan.devices
    strategy: Any
    if ":" in name and "=" in name:  # a name with options
        strategy = make_strategy(name)
    else:
        strategy = import_object(name) if ":" in name else STRATEGIES.get(name)
        if callable(strategy):  # a class, or a function that makes a strategy
            strategy = strategy()
    if not isinstance(strategy, Strategy):
        raise ConfigurationError(
            f"--strategies {name}: a {type(strategy).__name__} is not a Strategy. Name a strategy, or its class."
        )
    num_processes = plan.devices if strategy.is_distributed else 1
    return strategy, num_processes


if __name__ == "__main__":
    sys.exit(run_plan(Path(sys.argv[1])))
