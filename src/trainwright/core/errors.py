"""The errors of Trainwright, and helpers for their messages. Every message contains the received value, the expected
value, the name of the argument, and what to do.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Iterable
from types import ModuleType
from typing import Any

PREEMPTED = 143  # exit code after a preemption: 128 + 15 (SIGTERM), also for other signals


class TrainwrightError(Exception):
    """Base class of the errors of Trainwright."""


class ConfigurationError(TrainwrightError, ValueError):
    """Invalid argument, task or loader. Raised before devices and processes are used."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """Unknown or missing argument, or a value of the wrong type. Python's own error for it is a TypeError."""


class TaskError(TrainwrightError, RuntimeError):
    """Invalid return value or call in a method of the user's task."""


class LoggedValueError(TaskError, ValueError):
    """Value passed to `log` that is not one number. Python's own error for it is a ValueError."""


class LogPlaceError(TaskError, ConfigurationError):
    """Call of `log` in a method where nothing can be logged."""


class CheckpointError(TrainwrightError, RuntimeError):
    """Checkpoint that is missing, damaged, incomplete or does not fit the run."""


class CheckpointNotFoundError(CheckpointError, FileNotFoundError):
    """No checkpoint where one was requested, such as `ckpt_path="last"` in a new folder."""


class DistributedOperationException(ConfigurationError):
    """Collective call that differs between processes in its kind, tensor shapes or dtypes. Accelerate has this name."""


class NonFiniteError(TrainwrightError, ArithmeticError):
    """Non-finite loss or gradient with `on_nonfinite="raise"`; the weights are unchanged.

    Attributes:
        step: optimizer steps that were completed before the failing step.
        epoch: 0-based index of the failing step's epoch.
        ranks: the ranks with a non-finite value.
        source: `"loss"`, or `"gradient"` if every loss is finite.
        parameters: names of the parameters whose gradients are not finite.
        sample_ids: data set indices of the failing step's samples, one list for each rank. None if an index is unknown.
    """

    step: int = 0
    epoch: int = 0
    ranks: tuple[int, ...] = ()
    source: str = "loss"
    parameters: tuple[str, ...] = ()
    sample_ids: list[list[int | str]] | None = None


class RollbackError(TrainwrightError, RuntimeError):
    """More rollbacks than `max_rollbacks` allows."""


class BatchSizeError(TrainwrightError, RuntimeError):
    """Out of memory even with the smallest batch size."""


class WorkerError(TrainwrightError, RuntimeError):
    """Failure of a process that the Trainer started. The message contains its traceback and rank."""


class Preempted(SystemExit):
    """Preemption by a signal (SIGTERM, SIGUSR1): every rank exits with code 143. `except Exception` does not catch it.
    `signal_name` is the name of the signal, such as `"SIGTERM"`.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(PREEMPTED)
        self.signal_name = signal_name


class MissingPackageError(TrainwrightError, ImportError):
    """Missing optional package. The message contains the `pip install` line."""


class TrainwrightWarning(UserWarning):
    """Base class of the warnings of Trainwright. Training continues."""


class CannotPadNestedTensorWarning(TrainwrightWarning):
    """`pad_across_processes` received a nested tensor, which it does not change."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest of `candidates`, or an empty string if none is close."""
    near_name = nearest_name(name, candidates)
    return "" if near_name is None else f" Did you mean {near_name!r}?"


def nearest_name(name: str, candidates: Iterable[str]) -> str | None:
    """Return the closest of `candidates`, or None if none is close."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return close[0] if close else None


def unknown(argument: str, value: object, known: Iterable[str], hint: str = "") -> ConfigurationError:
    """Return the error for an argument whose `value` is not in `known`. `hint` is appended to the message."""
    names = list(known)
    return ConfigurationError(
        f"{argument}={value!r} is unknown.{nearest(str(value), names)} Known: {', '.join(names)}.{hint}"
    )


def require_package(module: str, *, purpose: str, install: str | None = None) -> ModuleType:
    """Import an optional package on first use.

    Args:
        module: the module to import, for example `"wandb"` or `"torch.utils.tensorboard"`.
        purpose: the feature that needs the module. It is the subject of the error message: `"WandbLogger"` needs …
        install: the argument of `pip install`. Default: None, the name of the top-level package.

    Raises:
        MissingPackageError: the package is not installed, or the installed torchao does not fit the installed torch. An
            ImportError of any other installed package is raised unchanged.
    """
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        raise MissingPackageError(
            f"{purpose} needs the package {root!r}, which is not installed. Run: pip install {install or root}"
        )
    try:
        return importlib.import_module(module)
    except ImportError as error:
        if root != "torchao":
            raise
        version = importlib.metadata.version
        raise MissingPackageError(
            f"{purpose} needs a torchao for torch {version('torch')}; torchao {version('torchao')} cannot be imported "
            f"({error}). For torch 2.9, run: pip install torchao==0.17.0. For the newest torchao, upgrade torch."
        ) from error


def visible(text: str) -> str:
    """Return `text` with control characters escaped, so that a terminal does not execute them."""
    return "".join(char if char == "\n" or char.isprintable() else ascii(char)[1:-1] for char in text)


def load_torchao(purpose: str) -> Any:
    """Import torchao on first use; see `require_package`."""
    return require_package("torchao", purpose=purpose)
