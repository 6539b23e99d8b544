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
from typing import Any, NamedTuple

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

_MAX_SHOWN = 8  # parameters and samples
# Glob prefixes of the folders of records, relative to the parent of the checkpoints' folder: that folder itself, and up
# to three levels below it. For example, runs/net/checkpoints may belong to the record in runs/net/csv/version_0.
_RECORD_FOLDERS = ("", "*/", "*/*/", "*/*/*/")
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
        skipped: data that `on_nonfinite` has skipped so far, also before the checkpoint.

    A step without a loss (manual optimization) or without a step of the optimizer is missing in the dicts.
    """

    step: int
    losses: dict[int, float] = field(default_factory=dict)
    grad_norms: dict[int, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    samples: list[int | str] = field(default_factory=list)
    skipped: list[SkippedData] = field(default_factory=list)


class _Recorder(Callback):
    """Callback that records losses, gradients and samples into a `Replay`, and stops after its step."""

    def __init__(self, replay: Replay) -> None:
        self._replay = replay

    def on_train_step_start(self, trainer: Any, task: TaskModule, group: Group) -> None:
        if trainer.state.step != self._replay.step - 1:  # `state.step` counts completed steps
            return
        loader = trainer.run.data.train().loader
        self._replay.samples = []
        for i in range(len(group.batches)):
            indices = loader.indices_in(group.first_idx + i)
            if indices is not None:
                self._replay.samples += indices

    def on_before_optimizer_step(self, trainer: Run, task: TaskModule, optimizer: Optimizer) -> None:
        step = trainer.state.step + 1
        norms: dict[str, float] = {}
        for name, parameter in task.named_parameters():
            if parameter.grad is not None:
                norms[name] = float(torch.linalg.vector_norm(parameter.grad))
        self._replay.gradients = norms
        # The norm of the norms is the norm of all elements.
        self._replay.grad_norms[step] = math.sqrt(sum(norm * norm for norm in norms.values()))

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if result.loss is not None:
            self._replay.losses[trainer.state.step] = float(result.loss)
        if result.grad_norm is not None:  # the norm that the run logs, if it was computed
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
    (dropout, augmentation) are equal only if the run had one process. Callbacks are used only if they are passed as
    `callbacks`, in a list.

    Args:
        task: the task of the run. The function changes its weights to those after `step`.
        checkpoint: folder of a checkpoint of an earlier step.
        step: number of the last step, from 1 on.
        train_dataloaders: training loaders of the run; see `Trainer.fit`.
        datamodule: data module of the run; see `Trainer.fit`.
        num_ranks: number of data-parallel ranks of the run. Default: None, the checkpoint's number of processes.
        accumulate_grad_batches: micro-batches of a step on one rank. Default: 1.
        arguments: further arguments of the `Trainer` of the run. Schedules may depend on `max_epochs` and `max_steps`.

    Returns:
        The losses and gradients of the steps after the checkpoint up to `step`.

    Raises:
        CheckpointError: the checkpoint is missing or damaged.
        ConfigurationError: the checkpoint is not a full checkpoint of an earlier step, or the data ends before `step`.
    """
    manifest = open_checkpoint(Path(checkpoint)).manifest
    if manifest.kind != "full" or not manifest.step < step:
        what = "a checkpoint of weights only"
        if manifest.kind == "full":
            what = f"a checkpoint of step {manifest.step}"
        raise ConfigurationError(
            f"step {step} cannot be reached from {checkpoint}, {what}. Use a full checkpoint of an earlier step."
        )
    result = Replay(step)
    ranks = num_ranks or manifest.topology.get("world_size", 1)
    on_nonfinite = arguments.get("on_nonfinite")
    if on_nonfinite == "rollback":  # a replay writes no checkpoints to which it could roll back
        on_nonfinite = "skip"
    settings = {
        **arguments,
        "on_nonfinite": on_nonfinite,
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
        "callbacks": [*arguments.get("callbacks", ()), _Recorder(result)],
    }
    with warnings.catch_warnings():
        # The checkpoint has states of the run's callbacks, which the caller may not have passed.
        warnings.filterwarnings("ignore", ".* holds the state of a callback")
        trainer = Trainer(**settings)
        trainer.fit(task, train_dataloaders, datamodule=datamodule, ckpt_path=checkpoint)
    result.skipped = trainer.skipped_batches
    if step not in result.losses and step not in result.grad_norms:
        last = max(result.losses, default=manifest.step)
        raise ConfigurationError(
            f"step {step} was not reached: training ended after step {last}. Choose that step or an earlier one."
        )
    return result


def replay(argv: Sequence[str]) -> int:
    """Replay a step of a configuration; see `trainwright replay --help`.

    Returns:
        The exit code: 0 if all replayed values are within the tolerance of the logged values, or no values were
        logged, else 1.

    Raises:
        ConfigurationError: the folder is not one checkpoint, the configuration is missing or not valid, or the step
            cannot be reached.
        RunFileError: the record of `--run` is damaged.
    """
    wanted, rest = _parser().parse_known_args(argv)
    checkpoint = Path(wanted.checkpoint)
    if not checkpoint.is_dir():
        raise ConfigurationError(f"{checkpoint} is not a folder. Pass the folder of a checkpoint.")
    inside = find_checkpoints(checkpoint)
    if inside:
        names = ", ".join(each.path.name for each in inside)
        raise ConfigurationError(f"{checkpoint} contains checkpoints. Pass the folder of one of them: {names}.")
    line = read_command_line(rest)
    if wanted.config is not None:
        line.configs.insert(0, Path(wanted.config))
    if not line.configs:
        raise ConfigurationError(_needs_configuration(checkpoint))
    run = _run_of(checkpoint, wanted.run)
    result = _replay_configured(checkpoint, wanted.step, run, line)
    rows: list[_ComparedValue] = []
    if run is not None:
        with damage_named(run.named_in_errors):
            rows = _compared(result, run)
    if wanted.json:
        facts = {
            "compared": [list(row) for row in rows],
            "gradients": result.gradients,
            "samples": result.samples,
            "skipped": result.skipped,
        }
        print(json.dumps(json_safe(plain(facts)), indent=2, allow_nan=False))
    else:
        print(visible(_text(result, rows, wanted.tolerance, has_run=run is not None)))
    for row in rows:
        if not _is_close(row.logged, row.replayed, wanted.tolerance):
            return 1
    return 0


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
    """Return the run that wrote a checkpoint, or None if no record nearby names the checkpoint's folder.

    Args:
        checkpoint: folder of the checkpoint: `runs/net/checkpoints/step=20`.
        named: folder of the run, as the user names it. None searches from `runs/net` on.
    """
    if named is not None:
        return read_run(named)
    above = checkpoint.absolute().parent.parent
    records: list[Path] = []
    for folders in _RECORD_FOLDERS:
        records += above.glob(folders + RECORD_FILE)
    for record in sorted(records, key=lambda file: -file.stat().st_mtime):  # the newest first
        with contextlib.suppress(RunFileError):  # a damaged record of another run
            run = read_run(record.parent)
            with damage_named(record):
                folder = run.folder / run.start.get("folders", {}).get("checkpoints", "")
            if folder.resolve() == checkpoint.absolute().parent.resolve():
                return run
    return None


def _needs_configuration(checkpoint: Path) -> str:
    """Return the error for a missing `--config`, with the path of the file that the run has probably saved."""
    above = checkpoint.absolute().parent.parent
    for name in _CONFIGS:
        file = above / name
        if file.is_file():
            # It is not used by itself: a checkpoint of someone else has the configuration of someone else, which is
            # code.
            return f"replay runs the code that a configuration names. If you trust {file}, pass --config {file}."
    return (
        "replay needs the configuration of the run. Pass --config FILE, or call "
        "trainwright.cli.reports.step_replay.replay_step in a script."
    )


def _replay_configured(checkpoint: Path, step: int, run: RunFiles | None, line: CommandLine) -> Replay:
    from trainwright.cli.configs.parsing import build
    from trainwright.cli.fit import read_settings
    from trainwright.core.rng import seed_everything

    parser, settings = read_settings("fit", line)
    arguments = settings.pop("trainer").as_dict()
    if settings.seed_everything is not None:
        seed_everything(settings.seed_everything)
    built = build(parser, settings)
    # The record is more reliable than the configuration: overrides of the run's command line are not in a file.
    seed = arguments["seed"]
    num_ranks: int | None = None
    if run is not None:
        with damage_named(run.named_in_errors):
            recorded = dict(run.start.get("hyperparameters", {}))
            if run.start:
                seed = run.start.get("seed")
                # Ranks of one model-parallel group read the same data, so that only these two axes count.
                mesh = run.start.get("mesh", {})
                num_ranks = int(mesh.get("dp_replicate", 1)) * int(mesh.get("dp_shard", 1))
        _print_differences(recorded, built)
    names = (*STEP_ARGUMENTS, "max_epochs", "max_steps", "on_nonfinite", "max_skipped")
    return replay_step(
        built.task,
        checkpoint,
        step,
        datamodule=built.data,
        num_ranks=num_ranks,
        accumulate_grad_batches=arguments["accumulate_grad_batches"] or 1,
        seed=seed,
        **{name: arguments[name] for name in names},
    )


def _print_differences(recorded: Mapping[str, Any], built: Any) -> None:
    """Print a note for each hyper-parameter that the run had with another value."""
    values: dict[str, Any] = {}
    for owner in (built.data, built.task):  # the task wins, as in the record
        if owner is not None:
            values |= kept_and_left_out(owner.hparams)[0]
    configured = json_safe(plain(values))
    for name in recorded.keys() & configured.keys():
        if recorded[name] != configured[name]:
            print(
                f"note: {name} is {configured[name]} in the configuration, and was {recorded[name]} in the run. Pass "
                "the configuration of that run by --config, or override it.",
                file=sys.stderr,
            )


class _ComparedValue(NamedTuple):
    """A value that the run has logged, and its replayed value. `name` is `loss` or `grad_norm`."""

    step: int
    name: str
    logged: float
    replayed: float


def _compared(result: Replay, run: RunFiles) -> list[_ComparedValue]:
    """Return the logged values of the replayed steps, each with its replayed value."""
    rows: list[_ComparedValue] = []
    for line in run.progress:
        step = line["step"]
        for name, values in (("loss", result.losses), ("grad_norm", result.grad_norms)):
            if name in line and step in values:
                rows.append(_ComparedValue(step, name, float(line[name]), values[step]))
    return rows


def _is_close(logged: float, replayed: float, tolerance: float) -> bool:
    if not (math.isfinite(logged) and math.isfinite(replayed)):  # equal infinities, or two NaNs
        return logged == replayed or (math.isnan(logged) and math.isnan(replayed))
    return abs(logged - replayed) <= tolerance * max(abs(logged), abs(replayed))


def _text(result: Replay, rows: list[_ComparedValue], tolerance: float, *, has_run: bool) -> str:
    """Return the output of the command without `--json`."""
    step = result.step
    loss = f", loss {result.losses[step]:.6g}" if step in result.losses else ""
    lines = [f"step {step}{loss}, gradient norm {result.grad_norms.get(step, math.nan):.6g}"]
    if rows:
        table = [["step", "", "logged", "replayed", ""]]
        for row in rows:
            verdict = "equal" if _is_close(row.logged, row.replayed, tolerance) else "differs"
            table.append([str(row.step), row.name, f"{row.logged:.6g}", f"{row.replayed:.6g}", verdict])
        lines += ["", *table_lines(table)]
    if not has_run:
        lines.append("no record of the run was found, so nothing was compared.")
    elif not any(row.step == step for row in rows):
        lines.append(f"step {step} itself was not logged: only every log_every_n_steps-th step is.")
    not_finite = [name for name, norm in result.gradients.items() if not math.isfinite(norm)]
    if not_finite:
        lines += ["", f"gradients that are not finite: {_first_few(not_finite)}"]
    for skipped in result.skipped:
        ids: list[int | str] = []
        for ids_of_rank in skipped.sample_ids or []:
            ids += ids_of_rank
        samples = f"; samples {_first_few(ids)}" if ids else ""
        lines.append(f"skipped after step {skipped.step}: {skipped.reason}{samples}")
    lines += ["", "largest gradients:"]
    largest = sorted(result.gradients.items(), key=lambda item: -item[1])[:_MAX_SHOWN]
    lines += [f"  {name}  {norm:.4g}" for name, norm in largest]
    if result.samples:
        lines.append(f"samples: {_first_few(result.samples)}")
    return "\n".join(lines)


def _first_few(values: Sequence[int | str]) -> str:
    more = " …" if len(values) > _MAX_SHOWN else ""
    return ", ".join(map(str, values[:_MAX_SHOWN])) + more
