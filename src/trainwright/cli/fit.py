"""`trainwright fit|validate|test|predict config.yaml`: run the task of a configuration file.

A configuration file holds `seed_everything`, `trainer:` (the arguments of `Trainer`), `task:` and `data:` (each a
`class_path` with `init_args`), `ckpt_path`, and for `fit` the arguments in `LOADING`. Any of it can be overridden:
`--trainer.max_epochs 3`, `task.lr=0.01`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from safetensors.torch import save_file

from trainwright.cli.configs.option_groups import group_trainer_options
from trainwright.cli.configs.overrides import CommandLine, read_command_line, read_configs
from trainwright.cli.configs.parsing import accept_strategies, build, parse
from trainwright.cli.configs.save_config_callback import resolved_yaml, save_config
from trainwright.cli.import_path import add_project_to_import_path
from trainwright.cli.main import INTERRUPTED
from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.host.folders import is_url
from trainwright.core.process import detect
from trainwright.core.tree import Batch

if TYPE_CHECKING:
    from jsonargparse import Namespace
    from jsonargparse._core import ArgumentGroup  # not exported

    from trainwright.core.run import Stage

PREDICTIONS_NAME = "predictions.safetensors"
_KEY = "predictions"  # name in the file for outputs that are tensors, not mappings
LOADING = ("on_damaged", "allow_missing", "strict", "load_weights_only")  # arguments of `Trainer.fit`


def run_stage(stage: Stage, argv: Sequence[str]) -> int:
    """Read the configuration, build the Trainer, the task and the data, and run.

    The stage `fit` first saves the resolved configuration.

    Class paths can name modules of the current folder. Call this function on every rank. Only the main process writes.

    Returns:
        The exit code: 0, or 130 if the run was ended by Ctrl-C.

    Raises:
        ConfigurationError: the command line or a configuration file is not valid.
        TaskError: `predict_step` returns outputs that cannot be written to a file.
    """
    parser, settings = read_settings(stage, read_command_line(argv))
    check_checkpoint(settings.ckpt_path)
    if settings.seed_everything is not None:
        from trainwright.core.rng import seed_everything

        seed_everything(settings.seed_everything)
    built = build(parser, settings)
    trainer = built.trainer
    # Not `trainer.is_global_zero`, which is True on every process before the run.
    if stage == "fit" and detect(settings.trainer.get("launcher") or "auto").rank == 0:
        # Before the run, so that a run that fails has its configuration, too.
        save_config(resolved_yaml(parser, settings), Path(trainer.default_root_dir))
    if stage == "predict":
        _predict(built, settings)
    else:
        loading: dict[str, Any] = {}
        if stage == "fit":
            loading = {name: settings[name] for name in LOADING}
        run = getattr(trainer, stage)
        run(built.task, datamodule=built.data, ckpt_path=settings.ckpt_path, **loading)
    return INTERRUPTED if trainer.interrupted else 0


fit = partial(run_stage, "fit")
validate = partial(run_stage, "validate")
predict = partial(run_stage, "predict")


def test(argv: Sequence[str]) -> int:
    """Run the test of a configuration file. A call in the form of `accelerate test` is an error that names `check`."""
    options = [word.partition("=")[0] for word in argv]
    if not argv or "--config_file" in options or "--config-file" in options:
        command = " ".join(["trainwright check", *argv])
        raise ConfigurationError(
            f"`trainwright test` runs the test of a task. Use `{command}` to check the processes of a launch, as "
            "`accelerate test` does, or name a task: task.class_path in --config, or --task=module.Class."
        )
    return run_stage("test", argv)


def read_settings(stage: Stage, line: CommandLine, *, defaults: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return the parser, and the settings of a command line and its files, which override `defaults`.

    The settings have class paths. `build` of `cli.configs.parsing` converts them to objects. Without data, `data` is
    None.

    Raises:
        ConfigurationError: a setting is not valid, or no task is configured.
    """
    add_project_to_import_path()
    config: dict[str, Any] = {}
    if defaults is not None:
        config |= defaults
    config |= read_configs(line.configs)
    if stage != "fit":  # the same file serves every stage
        for name in LOADING:
            config.pop(name, None)
    parser = build_parser(stage)
    known = ("seed_everything", "trainer", "task", "data", "ckpt_path", *LOADING)
    settings = parse(parser, config, line, known=known)
    for key in ("task", "data"):
        if key not in settings:
            settings[key] = None
    if settings.task is None:
        raise ConfigurationError("no task is configured. Name it: task.class_path in --config, or --task=module.Class.")
    return parser, settings


def _predict(built: Namespace, settings: Namespace) -> None:
    """Predict, and write the outputs on the main process. With `--output none`, nothing is written."""
    trainer = built.trainer
    keep = settings.output != "none"
    outputs = trainer.predict(built.task, datamodule=built.data, ckpt_path=settings.ckpt_path, return_predictions=keep)
    if keep and trainer.is_global_zero:
        path = Path(settings.output or Path(trainer.default_root_dir) / PREDICTIONS_NAME)
        shapes = write_predictions(outputs or [], path)
        text = ", ".join(f"{name} {tuple(shape)}" for name, shape in shapes.items())
        print(f"predictions: {path} ({text})")


def build_parser(stage: Stage) -> Any:
    """Return the jsonargparse parser of a command.

    Its keys are `config`, `trainer`, `task`, `data`, `seed_everything`, `ckpt_path`, for `fit` those in `LOADING`, and
    for `predict` `output`.
    """
    from jsonargparse import ArgumentParser

    from trainwright import DataModule, TaskModule, Trainer

    parser = ArgumentParser(
        prog=f"trainwright {stage}",
        usage=f"trainwright {stage} [--config FILE] [KEY=VALUE …]",
        description=f"{stage.capitalize()} the task of --config; override any setting with key=value.",
        exit_on_error=False,
        allow_abbrev=False,  # `--trainer.max_epoch` must be an error, not a guess
    )
    parser.add_argument("-c", "--config", action="config", help="YAML file; may be repeated, later ones win")
    parser.add_argument("--seed_everything", type=int | None, default=None, help="seed every generator before building")
    loading = parser.add_argument_group("Checkpoint", "The checkpoint that the stage starts from.")
    loading.add_argument(
        "--ckpt_path", type=str | None, default=None, help='checkpoint to start from: a folder, a URL, "best" or "last"'
    )
    if stage == "fit":
        _add_loading(loading)
    if stage == "predict":
        parser.add_argument(
            "--output",
            type=str | None,
            default=None,
            help=f"safetensors file to write (default: {PREDICTIONS_NAME} in trainer.default_root_dir); none: no file",
        )
    accept_strategies()
    parser.add_class_arguments(Trainer, "trainer")
    group_trainer_options(parser)
    parser.add_subclass_arguments(TaskModule, "task", required=False)
    parser.add_subclass_arguments(DataModule, "data", required=False)
    return parser


def _add_loading(group: ArgumentGroup) -> None:
    """Add the options of `Trainer.fit` for `ckpt_path`."""
    group.add_argument(
        "--on_damaged",
        type=Literal["error", "fall_back"] | None,
        default=None,
        help='a damaged checkpoint is an error, or is replaced by the newest valid one (default: only for "last")',
    )
    group.add_argument("--allow_missing", type=list[str], default=[], help="parts that may be missing: [optimizer]")
    group.add_argument("--strict", type=bool | None, default=None, help="whether all weights must fit by name")
    group.add_argument("--load_weights_only", type=bool, default=False, help="start at step 0 from the weights alone")


def check_checkpoint(ckpt_path: str | None) -> None:
    """Raise a ConfigurationError if the path of a checkpoint does not exist."""
    if ckpt_path is None or ckpt_path in ("best", "last") or is_url(ckpt_path):
        return
    if not Path(ckpt_path).exists():
        raise ConfigurationError(
            f'ckpt_path={ckpt_path!r} does not exist. Give a checkpoint\'s folder, "best" or "last".'
        )


def write_predictions(batches: Sequence[Any], path: Path) -> dict[str, torch.Size]:
    """Concatenate outputs of `predict_step` along the first dimension, write them to a file, and return their shapes.

    Args:
        batches: the output of `predict_step` for each batch, in order. An output is a tensor of shape (batch, …), which
            is saved as "predictions", or a mapping from names to such tensors.
        path: the safetensors file. A missing folder is created.

    Raises:
        TaskError: an output is something else, or batches have different names or shapes that cannot be concatenated.
    """
    named = [_named(batch) for batch in batches]
    names = list(named[0]) if named else []
    if any(batch.keys() != named[0].keys() for batch in named):
        raise TaskError(
            "predict_step returned different names for different batches. Return the same names for all batches, or "
            "write the outputs in a callback, with --output none."
        )
    joined: dict[str, torch.Tensor] = {}
    for name in names:
        try:
            whole = torch.cat([batch[name].cpu() for batch in named])
        except RuntimeError as error:
            raise TaskError(
                f"the outputs {name!r} of predict_step cannot be concatenated: {error} Return tensors that differ only "
                "in their first dimension, or write the outputs in a callback, with --output none."
            ) from error
        joined[name] = whole.contiguous()  # safetensors stores contiguous tensors only
    path.parent.mkdir(parents=True, exist_ok=True)
    # A reader never sees a file that is half written.
    staging = path.with_name(f".{path.name}.tmp")
    save_file(joined, staging)
    staging.replace(path)
    return {name: tensor.shape for name, tensor in joined.items()}


def _named(batch: Batch) -> dict[str, torch.Tensor]:
    """Return the tensors of an output by name. Raise TaskError for outputs that cannot be written."""
    tensors = dict(batch) if isinstance(batch, Mapping) else {_KEY: batch}
    for name, value in tensors.items():
        is_batch = isinstance(value, torch.Tensor) and value.dim() > 0
        if not isinstance(name, str) or not is_batch:
            raise TaskError(
                f"predict_step returned {type(value).__name__} ({name}), which `trainwright predict` cannot write. "
                "Return a tensor of shape (batch, ...) or a dict of them; or write in a callback, with --output none."
            )
    return tensors
