"""Helpers for the main process, which is detected from the launcher's variables without a Trainer."""

from __future__ import annotations

import functools
import logging
import warnings
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from trainwright.core.process import detect

P = ParamSpec("P")
T = TypeVar("T")
D = TypeVar("D")

_LOG = logging.getLogger("trainwright")


class RankZeroOnly:
    """The decorator `rank_zero_only`: only the main process runs the decorated function."""

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return detect().rank

    def __call__(self, fn: Callable[P, T], default: D | None = None) -> Callable[P, T | D | None]:
        """Decorate a function.

        Args:
            fn: the function or method.
            default: the result on other processes. Default: None.
        """

        @functools.wraps(fn)
        def on_rank_zero(*args: P.args, **kwargs: P.kwargs) -> T | D | None:
            return fn(*args, **kwargs) if self.rank == 0 else default

        return on_rank_zero


rank_zero_only = RankZeroOnly()
"""Decorate a function so that only the main process runs it. `rank_zero_only.rank` is the rank of this process."""


def rank_prefixed_message(message: str, rank: int | None) -> str:
    """Return a message with the rank of a process in front of it. None returns the message unchanged."""
    return message if rank is None else f"[rank: {rank}] {message}"


def rank_zero_info(message: str, *args: object, **options: Any) -> None:
    """Log a message at level INFO to the logger `trainwright`, on the main process only."""
    if detect().rank == 0:
        _LOG.info(message, *args, stacklevel=2, **options)


def rank_zero_warn(
    message: str | Warning, stacklevel: int = 2, category: type[Warning] = UserWarning, **options: object
) -> None:
    """Issue a warning on the main process only.

    Args:
        message: text of the warning.
        stacklevel: as in `warnings.warn`, where 2 means the line that calls `rank_zero_warn`. Default: 2.
        category: class of the warning. Default: UserWarning.
        options: further arguments of `warnings.warn`.
    """
    if detect().rank == 0:
        warnings.warn(message, category, stacklevel=stacklevel, **options)


def rank_zero_deprecation(message: str | Warning, stacklevel: int = 2, **options: object) -> None:
    """Issue a DeprecationWarning on the main process only. See `rank_zero_warn` for the arguments."""
    rank_zero_warn(message, stacklevel + 1, DeprecationWarning, **options)  # + 1 for this function's own frame
