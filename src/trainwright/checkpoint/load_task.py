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
            `configure_model` is called before weights are loaded.
        path: a checkpoint folder or its URL. Full checkpoints and checkpoints with weights only can be loaded.
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
    on_load = getattr(task, "on_load_checkpoint", None)
    objects = snapshot.trainer.get(TASK_OBJECTS, {})
    shown = {
        **snapshot.trainer.get("task", {}),
        **equal_objects(task, objects),
        "epoch": snapshot.state.get("epoch", 0),
        "global_step": snapshot.state.get("step", 0),
        "state_dict": snapshot.model or {},
    }
    if callable(on_load):
        with objects_named_in_errors(task, objects):
            on_load(shown)
    strict = getattr(task, "strict_loading", True) if strict is None else strict
    load_plain_state(task, shown["state_dict"], strict=strict)
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
    of_data, _ = read_hyperparameters(snapshot.trainer.get(DATAMODULE_HYPER_PARAMETERS) or {})
    return {
        **snapshot.trainer.get("task", {}),
        "epoch": snapshot.state.get("epoch", 0),
        "global_step": snapshot.state.get("step", 0),
        "pytorch-lightning_version": LIGHTNING_VERSION,
        "state_dict": weights,
        HYPER_PARAMETERS: hyperparameters,
        DATAMODULE_HYPER_PARAMETERS: of_data,
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
    found = trainer.get(DATAMODULE_HYPER_PARAMETERS) or {}
    data = _construct(cls, found, Path(str(path)), hparams_file, hparams_overrides or {})
    state = trainer.get("datamodule")
    if state:
        data.load_state_dict(state)  # type: ignore[attr-defined]  # the data layer is not imported here
    return data


def _construct(
    cls: type[T], found: Mapping[str, Any], path: Path, hparams_file: Path | str | None, overrides: Mapping[str, Any]
) -> T:
    """Construct an object with hyper-parameters from a checkpoint's entries `found` or, if passed, from a file."""
    from_checkpoint = hparams_file is None
    saved: Any = found.get(HYPER_PARAMETERS) if hparams_file is None else _read_file(Path(hparams_file))
    saved = {} if saved is None else saved
    if not isinstance(saved, Mapping):
        origin = path if hparams_file is None else hparams_file
        raise CheckpointError(f"{origin}: {HYPER_PARAMETERS} is a {type(saved).__name__}, expected a dict.")
    left_out: Mapping[str, str] = found.get(HYPER_PARAMETERS_LEFT_OUT) or {}
    if from_checkpoint:
        saved, lost = from_plain_data(dict(saved), found.get(HYPER_PARAMETERS_ENUMS) or ())
        left_out = {**left_out, **lost}
    name = found.get(HYPER_PARAMETERS_NAME)
    overrides = dict(overrides)
    in_one = isinstance(name, str) and name in inspect.signature(cls).parameters
    if in_one and name in overrides:
        left_out = {}  # entries of the argument that is passed
    _check_complete(cls, {**saved, **overrides}, path, left_out, all_used=in_one)
    if in_one and name not in overrides:
        saved, overrides = _in_one(cls, str(name), saved, overrides)
    return cls(**_arguments(cls, saved, overrides, path))


def _check_complete(
    cls: type, given: Mapping[str, Any], path: Path, left_out: Mapping[str, str], *, all_used: bool
) -> None:
    """Check that hyper-parameters that the checkpoint lacks are given. Their defaults would make another object."""
    signature = inspect.signature(cls)
    all_used = all_used or _takes_any(signature)
    lost = {key: why for key, why in left_out.items() if key not in given and (all_used or key in signature.parameters)}
    if lost:
        raise CheckpointError(
            f"{cls.__qualname__}{signature}: {path} lacks {', '.join(lost)}. save_hyperparameters could not save: "
            f"{'; '.join(lost.values())}. Pass it to load_from_checkpoint: {', '.join(f'{key}=…' for key in lost)}."
        )


def _takes_any(signature: inspect.Signature) -> bool:
    return any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in signature.parameters.values())


def _in_one(
    cls: type, name: str, saved: Mapping[str, Any], overrides: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return saved and overriding hyper-parameters as one argument `name`, and the overrides of other arguments."""
    known = inspect.signature(cls).parameters
    inside = {key: value for key, value in overrides.items() if key not in known}
    return {name: Hyperparameters({**saved, **inside})}, {key: overrides[key] for key in overrides if key in known}


def _read_file(path: Path) -> Any:
    return parse_yaml(path.read_text(), str(path))  # JSON is a subset of YAML


def _arguments(cls: type, saved: Mapping[str, Any], overrides: Mapping[str, Any], path: Path | str) -> dict[str, Any]:
    signature = inspect.signature(cls)
    takes_any = _takes_any(signature)
    owner = next(base for base in cls.__mro__ if "__init__" in vars(base))
    if owner.__module__.startswith("trainwright."):
        takes_any = False  # the class has no constructor of its own, and torch's accepts no arguments
    known = {
        name
        for name, parameter in signature.parameters.items()
        if parameter.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    kept = {name: value for name, value in saved.items() if takes_any or name in known}
    arguments = {**kept, **overrides}
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise CheckpointError(
            f"{cls.__qualname__}{signature} cannot be called with {', '.join(arguments) or 'nothing'}: {error}. "
            f"{path} holds the hyper-parameters {', '.join(saved) or '(none)'}. Pass the rest as keyword arguments, "
            f"or call save_hyperparameters() in the constructor and save again."
        ) from error
    return arguments
