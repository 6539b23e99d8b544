"""Have every error of a reader be a `CheckpointError`, whatever a damaged or forged file made Python or torch raise."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

import torch

from trainwright.core.errors import CheckpointError

_SHOWN = 300  # characters of another error's text: it may quote a file


@contextlib.contextmanager
def reading(what: object, problem: str = "cannot be read") -> Iterator[None]:
    """Turn whatever is raised while a file is read and interpreted into a `CheckpointError` that names it.

    The values in a file decide what goes wrong with it (a size that overflows, a name that no file can have, a link to
    itself), so that no list of exceptions is complete. Errors of a device pass through: they say nothing of the file.

    Args:
        what: the file or folder, for the message.
        problem: what the message says of it. Default: `"cannot be read"`.

    Raises:
        CheckpointError: something was raised; a `CheckpointError` passes through as it is.
    """
    try:
        yield
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{what} {problem}: {shortened(error)}. It is damaged or not ours.") from error


def check_regular(path: os.PathLike[str] | str) -> None:
    """Refuse what is there and is no file of bytes: opening a pipe would wait for its other end, for ever.

    Raises:
        CheckpointError: it is a pipe, a device, a socket or a folder. What is not there passes: opening it says so.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} is no regular file. It is damaged or not ours.")


def shortened(error: BaseException) -> str:
    """Return an error's type and text, cut to a length that a message can hold."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
