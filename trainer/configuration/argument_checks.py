"""Checks of the values of a Trainer's arguments, and errors for unknown arguments. No device or file is used."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

from trainwright.core.errors import ArgumentTypeError, ConfigurationError, TrainwrightWarning, nearest
from trainwright.core.process import detect
from trainwright.trainer.configuration.arguments import TrainerArguments

# Arguments that are whole numbers: the name, the smallest value, and the meaning of a special value.
_WHOLE_NUMBERS = (
    ("accumulate_grad_batches", 1, ""),
    ("log_every_n_steps", 1, ""),
    ("num_nodes", 1, ""),
    ("reload_dataloaders_every_n_epochs", 0, ""),
    ("max_rollbacks", 0, ""),
    ("num_sanity_val_steps", -1, "-1 for all batches"),
    ("check_val_every_n_epoch", 1, "None to count batches over epochs"),
    ("seed", 0, "None for torch's initial seed"),
    ("max_skipped", 1, "None for no bound"),
)
_NUMBERS_OF_BATCHES = (
    "limit_train_batches",
    "limit_val_batches",
    "limit_test_batches",
    "limit_predict_batches",
    "overfit_batches",
)
# Argument → its values, and the end of the error for another value.
_CHOICES: dict[str, tuple[tuple[str | None, ...], str]] = {
    "on_save_error": (("raise", "warn"), "Write 'raise' or 'warn'."),
    "on_interrupt": ((None, "return", "raise"), "Write 'return' or 'raise', or None for the default."),
    "on_nonfinite": (
        (None, "raise", "skip", "rollback"),
        "Write 'raise', 'skip' or 'rollback', or None to disable the check.",
    ),
    "uneven_batches": (("pad", "stop", "error"), "Known: 'pad', 'stop', 'error'."),
}
# Arguments that may not have a true value with `barebones=True`.
_CONTRADICT_BAREBONES = (
    "enable_checkpointing",
    "logger",
    "enable_progress_bar",
    "enable_model_summary",
    "detect_anomaly",
    "profiler",
    "log_every_n_steps",
    "num_sanity_val_steps",
)
# Arguments of other trainers and their replacements.
_ELSEWHERE = {
    "gpus": "devices=…, accelerator='gpu'",
    "tpu_cores": "accelerator='tpu'",
    "num_processes": "devices=…, accelerator='cpu'",
    "distributed_backend": "strategy=…",
    "resume_from_checkpoint": "fit(ckpt_path=…)",
    "checkpoint_callback": "enable_checkpointing=… and callbacks=[ModelCheckpoint(…)]",
    "weights_summary": "enable_model_summary=… and callbacks=[ModelSummary(…)]",
    "progress_bar_refresh_rate": "callbacks=[TQDMProgressBar(refresh_rate=…)]",
    "track_grad_norm": "trainer.last_step.grad_norm",
    "auto_lr_find": "Tuner(trainer).lr_find(…), or callbacks=[LearningRateFinder()]",
    "auto_scale_batch_size": "Tuner(trainer).scale_batch_size(…), or callbacks=[BatchSizeFinder()]",
    "terminate_on_nan": "on_nonfinite='raise'",
}
# Arguments of Lightning for which only the default is accepted, with advice about other values.
_NOT_SERVED = {
    "plugins": "plugins are not supported. Remove the argument. Use precision= for number formats, arguments of the "
    "strategy for the engine, launcher= for the cluster, and sync_batchnorm=True for BatchNorm.",
    "model_registry": "a model registry is not supported. Remove the argument and upload checkpoints with "
    "ModelCheckpoint(dirpath='s3://…').",
}
# Former name of an argument of Lightning's `fit` and `test` → its name in current versions.
_OLD_NAMES = {
    "train_dataloader": "train_dataloaders",
    "train_loader": "train_dataloaders",
    "test_dataloaders": "dataloaders",
}


def check_plain_arguments(arguments: TrainerArguments) -> None:
    """Check the values of arguments, and pairs of arguments that contradict each other.

    Raises:
        ConfigurationError: an argument is invalid.
    """
    for name, lowest, otherwise in _WHOLE_NUMBERS:
        check_whole(name, getattr(arguments, name), lowest, otherwise)
    if not isinstance(arguments.fast_dev_run, bool):
        check_whole("fast_dev_run", arguments.fast_dev_run, 0)
    for name in _NUMBERS_OF_BATCHES:
        _check_number_of_batches(name, getattr(arguments, name))
    for name, (choices, advice) in _CHOICES.items():
        value = getattr(arguments, name)
        if value not in choices:
            near = nearest(str(value), [choice for choice in choices if choice is not None])
            raise ConfigurationError(f"{name}={value!r} is unknown.{near} {advice}")
    if arguments.check_val_every_n_epoch is None and isinstance(arguments.val_check_interval, float):
        raise ConfigurationError(
            "check_val_every_n_epoch=None counts batches over epochs, so "
            f"val_check_interval={arguments.val_check_interval!r} cannot be a fraction of an epoch. Use a whole "
            "number of batches."
        )
    for name, instead in _NOT_SERVED.items():
        value = getattr(arguments, name)
        if name == "plugins" and value:
            value = _effective_plugins(value)
        is_default = value is None or value == [] or value == ()
        if not is_default:
            raise ConfigurationError(f"{name}={value!r}: {instead}")
    if arguments.barebones:
        _check_barebones(arguments)


def check_whole(name: str, value: object, lowest: int, otherwise: str = "") -> None:
    """Check that an argument is None or a whole number. `otherwise` is the meaning of a special value.

    Raises:
        ConfigurationError: the value is another object, or less than `lowest`.
    """
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < lowest:
        hint = f" ({otherwise})" if otherwise else ""
        raise ConfigurationError(f"{name}={value!r}: write a whole number of at least {lowest}{hint}.")


def _check_number_of_batches(name: str, value: Any) -> None:
    if value is None:
        return
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not value >= 0:  # also NaN
        raise ConfigurationError(
            f"{name}={value!r}: write a whole number of batches, or a fraction between 0.0 and 1.0."
        )
    if 1.0 < value < float("inf") and value != int(value):
        raise ConfigurationError(
            f"{name}={value!r}: write a fraction of at most 1.0, or a whole number of batches such as {int(value)}."
        )


def _check_barebones(arguments: TrainerArguments) -> None:
    for name in _CONTRADICT_BAREBONES:
        value = getattr(arguments, name)
        if value:
            raise ConfigurationError(f"barebones=True contradicts {name}={value!r}. Remove one of them.")
    if arguments.fast_dev_run:
        raise ConfigurationError("barebones=True and fast_dev_run contradict each other. Remove one of them.")


def _effective_plugins(plugins: Any) -> Any:
    """Return the plugins without those of libraries that change nothing here.

    These are plugins that only load checkpoint files of Lightning, with a warning, and cluster environments that agree
    with the launcher's environment variables.

    Raises:
        ConfigurationError: a cluster environment has another world size or rank.
    """
    from trainwright.core.names.lightning_stand_in import is_cluster_environment, only_loads

    if not isinstance(plugins, (list, tuple)):
        plugins = [plugins]
    effective = []
    for plugin in plugins:
        if only_loads(plugin):
            warnings.warn(
                f"plugins: {type(plugin).__name__}.load_checkpoint is not called, because checkpoints are folders of "
                "safetensors and JSON, which are loaded without unpickling.",
                TrainwrightWarning,
                stacklevel=4,
            )
        elif is_cluster_environment(plugin):
            _check_environment(plugin)
        else:
            effective.append(plugin)
    return effective


def _check_environment(plugin: Any) -> None:
    """Check that a cluster environment of Lightning names the process that the environment variables name."""
    topology = detect()
    size = plugin.world_size()
    rank = plugin.global_rank()
    if (size, rank) != (topology.world_size, topology.rank):
        raise ConfigurationError(
            f"plugins: {type(plugin).__name__} is rank {rank} of {size}, and the environment variables of this process "
            f"are those of rank {topology.rank} of {topology.world_size}. The Trainer uses the variables. Set RANK and "
            "WORLD_SIZE to the same values before the Trainer is created."
        )


def refuse_unknown(name: str, _: object, known: Iterable[str]) -> None:
    """Raise an error for an unknown argument of the Trainer. The message names the most similar argument.

    The second argument, the value of the unknown one, is not used.

    Raises:
        ArgumentTypeError: always.
    """
    hint = f" Use {_ELSEWHERE[name]} instead." if name in _ELSEWHERE else nearest(name, known)
    raise ArgumentTypeError(f"Trainer has no argument {name!r}.{hint}")


def refuse_of_verb(verb: str, name: str, _: object, known: Iterable[str]) -> None:
    """Raise an error for an unknown argument of `fit`, `validate`, `test` or `predict`, with the most similar argument.

    Raises:
        ArgumentTypeError: always.
    """
    arguments = [argument for argument in known if argument != "self"]
    new_name = _OLD_NAMES.get(name)
    hint = f" Use {new_name} instead." if new_name in arguments else nearest(name, arguments)
    raise ArgumentTypeError(f"{verb}() has no argument {name!r}.{hint} It takes: {', '.join(arguments)}.")
