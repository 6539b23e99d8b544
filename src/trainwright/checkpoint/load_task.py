"""Construction of a task or data module from a checkpoint, with its hyper-parameters and its state."""

from __future__ import annotations

import inspect
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch

from trainwright.checkpoint.format.model import load_plain_state
from trainwright.checkpoint.format.reader import read_checkpoint
from trainwright.checkpoint.remote import download_checkpoint
from trainwright.checkpoint.task_objects import TASK_OBJECTS, equal_objects, objects_named_in_errors
from trainwright.core.errors import CheckpointError
from trainwright.core.host.folders import is_url
from trainwright.core.hyperparameters import (
    DATAMODULE_HYPER_PARAMETERS,
    HYPER_PARAMETERS,
    HYPER_PARAMETERS_ENUMS,
    HYPER_PARAMETERS_LEFT_OUT,
    HYPER_PARAMETERS_NAME,
    Hyperparameters,
    from_plain_data,
    read_hyperparameters,
)
from trainwright.core.names.constants import LIGHTNING_VERSION
from trainwright.core.yaml_text import parse_yaml

TaskT = TypeVar("TaskT", bound=torch.nn.Module)
DataT = TypeVar("DataT")
T = TypeVar("T")


def load_task_from_checkpoint(
    cls: type[TaskT],
    path: Path | str,
    *,
    map_location: torch.device | str | None = None,
    strict: bool | None = True,
    hparams_file: Path | str | None = None,
    hparams_overrides: Mapping[str, Any] | None = None,
) -> TaskT:
    """Construct a task with the hyper-parameters of a checkpoint, and load the checkpoint's weights into the task.

    Args:
        cls: the task's class. Saved hyper-parameters that its constructor does not accept are skipped. A constructor
            with `**kwargs` accepts all. Hyper-parameters saved from one argument are passed as this argument.
            `configure_model` and then `on_load_checkpoint` are called before weights are loaded.
        path: a checkpoint folder or its URL, which is downloaded into a temporary folder. Full checkpoints and
            checkpoints with weights only can be loaded.
        map_location: the device for the task. Default: None, the device on which the constructor creates the weights.
        strict: raise an error if weights are missing or unexpected. Default: True. None uses the task's
            `strict_loading`.
        hparams_file: a YAML or JSON file of hyper-parameters that are used instead of the saved ones.
        hparams_overrides: values that replace saved hyper-parameters or add to them.

    Raises:
        FileNotFoundError: `path` does not exist.
        CheckpointError: the checkpoint is damaged, the constructor's arguments are incomplete or unknown, or the
            weights do not fit.
    """
    if is_url(path):
        with tempfile.TemporaryDirectory(prefix="trainwright-") as folder:
            local = download_checkpoint(path, folder)
            return load_task_from_checkpoint(
                cls,
                local,
                map_location=map_location,
                strict=strict,
                hparams_file=hparams_file,
                hparams_overrides=hparams_overrides,
            )
    path = Path(path).expanduser()
    snapshot = read_checkpoint(path, parts=("trainer", "model"), copy_model=False)
    task = _construct(cls, snapshot.trainer, path, hparams_file, hparams_overrides or {})
    configure_model = getattr(task, "configure_model", None)
    if callable(configure_model):
        configure_model()
    if map_location is not None:
        task.to(map_location)
    on_load_checkpoint = getattr(task, "on_load_checkpoint", None)
    object_descriptions = snapshot.trainer.get(TASK_OBJECTS, {})
    # The dict that `on_load_checkpoint` receives, as in Lightning. The hook may change or replace "state_dict".
    checkpoint = {
        **snapshot.trainer.get("task", {}),
        **equal_objects(task, object_descriptions),
        "epoch": snapshot.state.get("epoch", 0),
        "global_step": snapshot.state.get("step", 0),
        "state_dict": snapshot.model or {},
    }
    if callable(on_load_checkpoint):
        with objects_named_in_errors(task, object_descriptions):
            on_load_checkpoint(checkpoint)
    if strict is None:
        strict = getattr(task, "strict_loading", True)
    load_plain_state(task, checkpoint["state_dict"], strict=strict)
    return task


def load_as_lightning(path: Path | str, map_location: Any = None) -> dict[str, Any]:
    """Return the weights, hyper-parameters and entries of `on_save_checkpoint` as in a checkpoint file of Lightning.

    Optimizers, schedules and the state of callbacks are not included, because their formats differ.

    Args:
        path: a checkpoint folder.
        map_location: the device of the weights. Default: None, the CPU, as with a dict or a function.
    """
    snapshot = read_checkpoint(Path(path), parts=("trainer", "model"))
    weights = snapshot.model or {}
    if isinstance(map_location, (str, torch.device)):
        weights = {name: tensor.to(map_location) for name, tensor in weights.items()}
    hyperparameters, _ = read_hyperparameters(snapshot.trainer)
    data_hyperparameters, _ = read_hyperparameters(snapshot.trainer.get(DATAMODULE_HYPER_PARAMETERS) or {})
    return {
        **snapshot.trainer.get("task", {}),
        "epoch": snapshot.state.get("epoch", 0),
        "global_step": snapshot.state.get("step", 0),
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "state_dict": weights,
        HYPER_PARAMETERS: hyperparameters,
        DATAMODULE_HYPER_PARAMETERS: data_hyperparameters,
    }


def load_data_from_checkpoint(
    cls: type[DataT],
    path: Path | str,
    *,
    hparams_file: Path | str | None = None,
    hparams_overrides: Mapping[str, Any] | None = None,
) -> DataT:
    """Construct a data module with the hyper-parameters of a checkpoint, and load the data module's saved state.

    Args:
        cls: the data module's class.
        path: a checkpoint folder of a fit with a data module, or its URL.
        hparams_file: see `load_task_from_checkpoint`, which raises the same errors.
        hparams_overrides: see `load_task_from_checkpoint`.
    """
    with tempfile.TemporaryDirectory(prefix="trainwright-") as folder:
        local = download_checkpoint(path, folder) if is_url(path) else Path(path).expanduser()
        trainer = read_checkpoint(local, parts=("trainer",)).trainer
    entries = trainer.get(DATAMODULE_HYPER_PARAMETERS) or {}  # None if the fit had no data module
    data = _construct(cls, entries, Path(str(path)), hparams_file, hparams_overrides or {})
    state = trainer.get("datamodule")
    if state:
        data.load_state_dict(state)  # type: ignore[attr-defined]  # the data layer is not imported here
    return data


def _construct(
    cls: type[T], entries: Mapping[str, Any], path: Path, hparams_file: Path | str | None, overrides: Mapping[str, Any]
) -> T:
    """Construct an object of `cls` with hyper-parameters.

    Args:
        cls: the class of a task or data module.
        entries: the entries `HYPER_PARAMETERS`, `HYPER_PARAMETERS_NAME` and so on of the checkpoint `path`.
        path: the checkpoint, for error messages.
        hparams_file: see `load_task_from_checkpoint`.
        overrides: hyper-parameters that replace saved ones or add to them.
    """
    left_out: dict[str, str] = dict(entries.get(HYPER_PARAMETERS_LEFT_OUT) or {})  # name → why it was not saved
    saved: Any = entries.get(HYPER_PARAMETERS) if hparams_file is None else _read_file(Path(hparams_file))
    if saved is None:
        saved = {}
    if not isinstance(saved, Mapping):
        origin = path if hparams_file is None else hparams_file
        raise CheckpointError(f"{origin}: {HYPER_PARAMETERS} is a {type(saved).__name__}, expected a dict.")
    if hparams_file is None:
        saved, not_restored = from_plain_data(dict(saved), entries.get(HYPER_PARAMETERS_ENUMS) or ())
        left_out |= not_restored
    arguments = dict(overrides)
    # `save_hyperparameters(config)` saves the entries of the argument `config` and its name. Without such a call, each
    # hyper-parameter is an argument.
    name = entries.get(HYPER_PARAMETERS_NAME)
    is_one_argument = isinstance(name, str) and name in inspect.signature(cls).parameters
    if is_one_argument and name in overrides:
        left_out = {}  # the argument that replaces the saved one contains them
    _check_complete(cls, {**saved, **overrides}, path, left_out, uses_all=is_one_argument)
    if is_one_argument and name not in overrides:
        # The saved hyper-parameters and the overrides that are not arguments become this one argument.
        parameters = inspect.signature(cls).parameters
        new_entries = {key: value for key, value in overrides.items() if key not in parameters}
        arguments = {key: value for key, value in overrides.items() if key in parameters}
        saved = {str(name): Hyperparameters({**saved, **new_entries})}
    return cls(**_accepted_arguments(cls, saved, arguments, path))


def _read_file(path: Path) -> Any:
    return parse_yaml(path.read_text(), str(path))  # JSON is a subset of YAML


def _check_complete(
    cls: type, hyperparameters: Mapping[str, Any], path: Path, left_out: Mapping[str, str], *, uses_all: bool
) -> None:
    """Check that `hyperparameters` has the ones that the checkpoint lacks. Their defaults would make another object.

    `left_out` has these by name, with the reason. Unless `uses_all`, those that `cls` does not accept may be missing.
    """
    signature = inspect.signature(cls)
    uses_all = uses_all or _accepts_any(signature)
    missing = {}
    for key, reason in left_out.items():
        is_used = uses_all or key in signature.parameters
        if is_used and key not in hyperparameters:
            missing[key] = reason
    if missing:
        raise CheckpointError(
            f"{cls.__qualname__}{signature}: {path} lacks {', '.join(missing)}. save_hyperparameters could not save: "
            f"{'; '.join(missing.values())}. Pass it to load_from_checkpoint: "
            f"{', '.join(f'{key}=…' for key in missing)}."
        )


def _accepts_any(signature: inspect.Signature) -> bool:
    """Return whether a signature has `**kwargs`."""
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _accepted_arguments(
    cls: type, saved: Mapping[str, Any], arguments: Mapping[str, Any], path: Path | str
) -> dict[str, Any]:
    """Return `arguments` and the saved hyper-parameters that `cls` accepts. Raise an error if a call would fail."""
    signature = inspect.signature(cls)
    accepts_any = _accepts_any(signature)
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    if owner.__module__.startswith("trainwright."):
        accepts_any = False  # the class has no constructor of its own, and torch's accepts no arguments
    named_kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    accepted = {name for name, parameter in signature.parameters.items() if parameter.kind in named_kinds}
    all_arguments = {name: value for name, value in saved.items() if accepts_any or name in accepted}
    all_arguments |= arguments
    try:
        signature.bind(**all_arguments)
    except TypeError as error:
        raise CheckpointError(
            f"{cls.__qualname__}{signature} cannot be called with {', '.join(all_arguments) or 'nothing'}: {error}. "
            f"{path} holds the hyper-parameters {', '.join(saved) or '(none)'}. Pass the rest as keyword arguments, "
            f"or call save_hyperparameters() in the constructor and save again."
        ) from error
    return all_arguments
