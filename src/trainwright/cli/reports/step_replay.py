"""`trainwright replay CHECKPOINT --step N`: rerun a step on one device, and compare it with the logged values."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import sys
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.callbacks import Callback
from trainwright.checkpoint.format.manifests import find_checkpoints, open_checkpoint
from trainwright.cli.configs.overrides import CommandLine, read_command_line
from trainwright.cli.main import table_lines
from trainwright.cli.parity import STEP_ARGUMENTS
from trainwright.cli.reports.run_files import RunFileError, RunFiles, damage_named, read_run
from trainwright.core.errors import ConfigurationError, visible
from trainwright.core.hyperparameters import kept_and_left_out
from trainwright.core.run import Run
from trainwright.core.state import Group, SkippedData, StepResult
from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule
from trainwright.loggers.hyperparams import json_safe, plain
from trainwright.loggers.run_record import RECORD_FILE
from trainwright.trainer import Trainer

_SHOWN = 8  # parameters and samples
_DEPTHS = ("", "*/", "*/*/", "*/*/*/")  # of records below the folder that contains the checkpoints' folder
_CONFIGS = ("config.resolved.yaml", "config.yaml")


@dataclass(slots=True)
class Replay:
    """Results of replayed steps.

    Attributes:
        step: number of the last replayed step, from 1 on.
        losses: mean loss of each step over its data.
        grad_norms: gradient norm of each step before clipping.
        gradients: norm of each parameter's gradient in the last step, by name.
        samples: data set indices of the last step's samples; empty if unknown.
        skipped: data that `on_nonfinite` has skipped.
    """

    step: int
    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    samples: list[int | str] = field(default_factory=list)
    skipped: list[SkippedData] = field(default_factory=list)


class _Recorder(Callback):
    """Callback that records losses and gradients of steps."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def on_train_step_start(self, trainer: Any, task: TaskModule, group: Group) -> None:
        if trainer.state.step == self._replay.step - 1:
            loader = trainer.run.data.train().loader
            found = [loader.indices_in(group.first_idx + i) for i in range(len(group.batches))]
            self._replay.samples = [index for each in found if each is not None for index in each]

    def on_before_optimizer_step(self, trainer: Run, task: TaskModule, optimizer: Optimizer) -> None:
        step = trainer.state.step + 1
        norms = {
            name: float(torch.linalg.vector_norm(parameter.grad))
            for name, parameter in task.named_parameters()
            if parameter.grad is not None
        }
        self._replay.gradients = norms
        self._replay.grad_norms[step] = math.sqrt(sum(norm * norm for norm in norms.values()))

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if result.loss is not None:
            self._replay.losses[trainer.state.step] = float(result.loss)
        if result.grad_norm is not None:
            self._replay.grad_norms[trainer.state.step] = float(result.grad_norm)
        if trainer.state.step >= self._replay.step:
            trainer.request_stop("the step to replay is complete", closes_epoch=False)


def replay_step(
    task: TaskModule,
    checkpoint: str | Path,
    step: int,
    *,
    train_dataloaders: object = None,
    datamodule: DataModule | None = None,
    num_ranks: int | None = None,
    accumulate_grad_batches: int = 1,
    **arguments: Any,
) -> Replay:
    """Rerun the steps from a checkpoint up to `step` on one device, without logging and saving.

    Batches of several ranks become micro-batches of the step, so that the step has the same samples. Random numbers
    (dropout, augmentation) are equal only if the run had one process. The run's callbacks are not used.

    Args:
        task: the task of the run. The function changes its weights to those after `step`.
        checkpoint: folder of a checkpoint of an earlier step.
        step: number of the last step, from 1 on.
        train_dataloaders: training loaders of the run; see `Trainer.fit`.
        datamodule: data module of the run; see `Trainer.fit`.
        num_ranks: number of data-parallel ranks of the run. Default: None, the checkpoint's number of processes.
        accumulate_grad_batches: micro-batches of a step on one rank. Default: 1.
        arguments: further arguments of the `Trainer` of the run. Schedules may depend on `max_epochs` and `max_steps`.

    Raises:
        ConfigurationError: the checkpoint is not a full checkpoint of an earlier step, or the data ends before `step`.
    """
    manifest = open_checkpoint(Path(checkpoint)).manifest
    if manifest.kind != "full" or not manifest.step < step:
        what = f"a checkpoint of step {manifest.step}" if manifest.kind == "full" else "a checkpoint of weights only"
        raise ConfigurationError(
            f"step {step} cannot be reached from {checkpoint}, {what}. Use a full checkpoint of an earlier step."
        )
    found = Replay(step)
    ranks = num_ranks or manifest.topology.get("world_size", 1)
    settings = {
        **arguments,
        # A replay writes no checkpoints to which it could roll back.
        "on_nonfinite": "skip" if arguments.get("on_nonfinite") == "rollback" else arguments.get("on_nonfinite"),
        "devices": 1,
        "strategy": "single",
        "accumulate_grad_batches": accumulate_grad_batches * ranks,
        "limit_val_batches": 0,
        "num_sanity_val_steps": 0,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "preemption_grace": None,
        "callbacks": [*arguments.get("callbacks", ()), _Recorder(found)],
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".* holds the state of a callback")
        trainer = Trainer(**settings)
        trainer.fit(task, train_dataloaders, datamodule=datamodule, ckpt_path=checkpoint)
    found.skipped = trainer.skipped_batches
    if step not in found.losses and step not in found.grad_norms:
        raise ConfigurationError(
            f"step {step} was not reached: training ended after step {max(found.losses, default=manifest.step)}. "
            "Choose that step or an earlier one."
        )
    return found


def replay(argv: Sequence[str]) -> int:
    """Replay a step of a configuration; see `trainwright replay --help`.

    Returns:
        0 if all replayed values are within the tolerance of the logged values, else 1.
    """
    wanted, rest = _parser().parse_known_args(argv)
    checkpoint = Path(wanted.checkpoint)
    if not checkpoint.is_dir():
        raise ConfigurationError(f"{checkpoint} is not a folder. Pass the folder of a checkpoint.")
    if inside := find_checkpoints(checkpoint):
        names = ", ".join(each.path.name for each in inside)
        raise ConfigurationError(f"{checkpoint} contains checkpoints. Pass the folder of one of them: {names}.")
    line = read_command_line(rest)
    if wanted.config is not None:
        line.configs.insert(0, Path(wanted.config))
    if not line.configs:
        raise ConfigurationError(_needs_configuration(checkpoint))
    run = _run_of(checkpoint, wanted.run)
    found = _replay_configured(checkpoint, wanted.step, run, line)
    rows: list[list[Any]] = []
    if run is not None:
        with damage_named(run.record):
            rows = _compared(found, run)
    if wanted.json:
        facts = {"compared": rows, "gradients": found.gradients, "samples": found.samples}
        print(json.dumps(json_safe(plain({**facts, "skipped": found.skipped})), indent=2, allow_nan=False))
    else:
        print(visible(_text(found, rows, wanted.tolerance)))
    return int(any(not _is_close(logged, mine, wanted.tolerance) for *_, logged, mine in rows))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trainwright replay",
        usage="trainwright replay CHECKPOINT --step N --config FILE [--run FOLDER] [KEY=VALUE …]",
        description="Rerun a step of a run on one device, and compare loss and gradients with what was logged.",
        allow_abbrev=False,
    )
    parser.add_argument("checkpoint", help="folder of a checkpoint of an earlier step")
    parser.add_argument("--step", type=int, required=True, help="number of the step, from 1 on")
    parser.add_argument("--config", help="configuration of the run. Its classes are imported and constructed")
    parser.add_argument("--run", help="folder of the run's record. Default: the one that names the checkpoint's folder")
    parser.add_argument("--tolerance", type=float, default=1e-3, help="largest relative difference. Default: 0.001")
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _run_of(checkpoint: Path, named: str | None) -> RunFiles | None:
    """Return the run that wrote a checkpoint, or None if no record nearby names the checkpoint's folder."""
    if named is not None:
        return read_run(named)
    above = checkpoint.absolute().parent.parent
    records = [file for depth in _DEPTHS for file in above.glob(depth + RECORD_FILE)]
    for record in sorted(records, key=lambda file: -file.stat().st_mtime):
        with contextlib.suppress(RunFileError):  # of another run
            run = read_run(record.parent)
            with damage_named(record):
                folder = run.folder / run.start.get("folders", {}).get("checkpoints", "")
            if folder.resolve() == checkpoint.absolute().parent.resolve():
                return run
    return None


def _needs_configuration(checkpoint: Path) -> str:
    """Return the error for a missing `--config`, with the path of the file that the run has probably saved."""
    above = checkpoint.absolute().parent.parent
    found = next((above / name for name in _CONFIGS if (above / name).is_file()), None)
    if found is None:
        return (
            "replay needs the configuration of the run. Pass --config FILE, or call "
            "trainwright.cli.reports.step_replay.replay_step in a script."
        )
    # A checkpoint of someone else has the configuration of someone else, which is code.
    return f"replay runs the code that a configuration names. If you trust {found}, pass --config {found}."


def _replay_configured(checkpoint: Path, step: int, run: RunFiles | None, line: CommandLine) -> Replay:
    from trainwright.cli.configs.parsing import build
    from trainwright.cli.fit import read_settings
    from trainwright.core.rng import seed_everything

    parser, settings = read_settings("fit", line)
    given = settings.pop("trainer").as_dict()
    if settings.seed_everything is not None:
        seed_everything(settings.seed_everything)
    built = build(parser, settings)
    start: Mapping[str, Any] = {} if run is None else run.start
    with damage_named("" if run is None else run.record):
        recorded = dict(start.get("hyperparameters", {}))
        mesh = start.get("mesh", {})
        readers = int(mesh.get("dp_replicate", 1)) * int(mesh.get("dp_shard", 1))
    owners = [owner for owner in (built.data, built.task) if owner is not None]
    values = {k: v for owner in owners for k, v in kept_and_left_out(owner.hparams)[0].items()}  # as in the record
    own = json_safe(plain(values))
    for name in recorded.keys() & own.keys():
        if recorded[name] != own[name]:
            print(
                f"note: {name} is {own[name]} in the configuration, and was {recorded[name]} in the run. Pass the "
                "configuration of that run by --config, or override it.",
                file=sys.stderr,
            )
    return replay_step(
        built.task,
        checkpoint,
        step,
        datamodule=built.data,
        num_ranks=readers if start else None,
        accumulate_grad_batches=given["accumulate_grad_batches"] or 1,
        seed=given["seed"] if run is None else start.get("seed"),
        **{name: given[name] for name in (*STEP_ARGUMENTS, "max_epochs", "max_steps", "on_nonfinite", "max_skipped")},
    )


def _compared(found: Replay, run: RunFiles) -> list[list[Any]]:
    """Return a list [step, name, logged value, replayed value] for each logged value of the replayed steps."""
    rows: list[list[Any]] = []
    for line in run.progress:
        step = line["step"]
        for name, values in (("loss", found.losses), ("grad_norm", found.grad_norms)):
            if name in line and step in values:
                rows.append([step, name, float(line[name]), values[step]])
    return rows


def _is_close(logged: float, mine: float, tolerance: float) -> bool:
    if not (math.isfinite(logged) and math.isfinite(mine)):
        return math.isnan(logged) == math.isnan(mine)
    return abs(logged - mine) <= tolerance * max(abs(logged), abs(mine))


def _text(found: Replay, rows: list[list[Any]], tolerance: float) -> str:
    step = found.step
    loss = f", loss {found.losses[step]:.6g}" if step in found.losses else ""
    lines = [f"step {step}{loss}, gradient norm {found.grad_norms.get(step, math.nan):.6g}"]
    if rows:
        cells = [
            [str(s), name, f"{logged:.6g}", f"{mine:.6g}", "equal" if _is_close(logged, mine, tolerance) else "differs"]
            for s, name, logged, mine in rows
        ]
        lines += ["", *table_lines([["step", "", "logged", "replayed", ""], *cells])]
    if not any(row[0] == step for row in rows):
        lines.append(f"step {step} itself was not logged: only every log_every_n_steps-th step is.")
    bad = [name for name, norm in found.gradients.items() if not math.isfinite(norm)]
    if bad:
        lines += ["", f"gradients that are not finite: {', '.join(bad[:_SHOWN])}{' …' if len(bad) > _SHOWN else ''}"]
    for each in found.skipped:
        ids = [str(i) for of_rank in each.sample_ids or [] for i in of_rank]
        shown = f"; samples {', '.join(ids[:_SHOWN])}{' …' if len(ids) > _SHOWN else ''}" if ids else ""
        lines.append(f"skipped after step {each.step}: {each.reason}{shown}")
    largest = sorted(found.gradients.items(), key=lambda item: -item[1])[:_SHOWN]
    lines += ["", "largest gradients:", *(f"  {name}  {norm:.4g}" for name, norm in largest)]
    if found.samples:
        more = " …" if len(found.samples) > _SHOWN else ""
        lines.append(f"samples: {', '.join(map(str, found.samples[:_SHOWN]))}{more}")
    return "\n".join(lines)
