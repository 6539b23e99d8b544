"""The errors that Trainwright raises, and the words they are made of.

Every message says what was got, what was expected and what to do, with the values and the names of the arguments.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
from collections.abc import Iterable
from types import ModuleType

PREEMPTED = 143  # exit code: 128 + SIGTERM, whatever the signal


class TrainwrightError(Exception):
    """Base of every error that Trainwright raises on purpose."""


class ConfigurationError(TrainwrightError, ValueError):
    """An argument, a task or a loader cannot mean what was asked; raised before a device or process is touched."""


class TaskError(TrainwrightError, RuntimeError):
    """A method of the user's task returned or called something that the loop cannot use."""


class CheckpointError(TrainwrightError, RuntimeError):
    """A checkpoint is missing, damaged, incomplete or does not fit the run that asked for it."""


class NonFiniteError(TrainwrightError, ArithmeticError):
    """A loss or a gradient is NaN or infinite, and the run was told to end then; no weight has been changed by it.

    Attributes:
        step: completed optimizer steps; the present one is not among them.
        epoch: 0-based.
        ranks: those on which it was found.
        source: `"loss"`, or `"gradient"` where every loss is finite.
        parameters: names of the parameters whose gradients are not finite.
        sample_ids: for each rank the indices in the data set of what it consumed; None where the data has none.
    """

    step: int = 0
    epoch: int = 0
    ranks: tuple[int, ...] = ()
    source: str = "loss"
    parameters: tuple[str, ...] = ()
    sample_ids: list[list[int | str]] | None = None


class RollbackError(TrainwrightError, RuntimeError):
    """A run was to go back to a checkpoint once more than `max_rollbacks` allows."""


class BatchSizeError(TrainwrightError, RuntimeError):
    """Memory runs out even with the smallest batch size."""


class WorkerError(TrainwrightError, RuntimeError):
    """A process that the Trainer started has failed; the message holds that process's own traceback and rank."""


class Preempted(SystemExit):
    """The machine has asked this process to end (SIGTERM, SIGUSR1) and every rank leaves, with exit code 143.

    It is no `Exception`, so that it passes through `except Exception`. The argument is the signal's name.
    """

    def __init__(self, signal_name: str) -> None:
        super().__init__(PREEMPTED)
        self.signal_name = signal_name


class MissingPackageError(TrainwrightError, ImportError):
    """An optional package is needed and not installed; the message holds the exact `pip install` line."""


class TrainwrightWarning(UserWarning):
    """Base of the warnings that Trainwright issues: training goes on, but the reader should look."""


def nearest(name: str, candidates: Iterable[str]) -> str:
    """Return `" Did you mean 'x'?"` for the closest of `candidates`, or an empty string when none is close."""
    close = difflib.get_close_matches(name, list(candidates), n=1, cutoff=0.6)
    return f" Did you mean {close[0]!r}?" if close else ""


def unknown(argument: str, value: object, known: Iterable[str], hint: str = "") -> ConfigurationError:
    """Return the error for an argument's value that is none of the names that are known."""
    names = list(known)
    return ConfigurationError(
        f"{argument}={value!r} is unknown.{nearest(str(value), names)} Known: {', '.join(names)}.{hint}"
    )


def require_package(module: str, *, purpose: str, install: str | None = None) -> ModuleType:
    """Import an optional package when it is first used.

    Args:
        module: the module to import, for example `"wandb"` or `"torch.utils.tensorboard"`.
        purpose: what needs it, as the subject of a sentence, for example `"WandbLogger"`.
        install: what to hand to `pip install`; the top-level package's name unless told.

    Raises:
        MissingPackageError: the package is not installed. An error inside an installed package passes through.
    """
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        raise MissingPackageError(
            f"{purpose} needs the package {root!r}, which is not installed. Run: pip install {install or root}"
        )
    return importlib.import_module(module)
