"""Logging and progress bars of several processes, under the names of Hugging Face Accelerate."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, MutableMapping
from typing import Any, ParamSpec, TypeVar

from trainwright.core.names.kwargs_handler import as_flag, read_variable
from trainwright.core.names.packages import is_rich_available
from trainwright.core.process import detect, variable
from trainwright.processes.partial_state import PartialState

P = ParamSpec("P")
T = TypeVar("T")

_LEVEL = "ACCELERATE_LOG_LEVEL"
_RICH = "ACCELERATE_ENABLE_RICH"


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """Logger whose calls write on the main process only, unless `main_process_only=False` is passed.

    Each call (`debug`, `info`, …) takes three more arguments:

    - `main_process_only`: True by default; False: every process writes.
    - `stacklevel`: number of the frame that the record names, as in Accelerate. Default: 2, the caller of the method.
    - `in_order`: with `main_process_only=False`, the processes write one after the other. Collective. Default: False.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write a record; see the class."""
        main_only = kwargs.pop("main_process_only", True)
        in_order = kwargs.pop("in_order", False)
        kwargs.setdefault("stacklevel", 2)  # as in Accelerate, the caller of the logger's method is 2
        # With `in_order`, processes with different levels must still wait for each other.
        if not self.isEnabledFor(level) and not in_order:
            return
        if main_only:
            if detect().rank == 0:
                super().log(level, msg, *args, **kwargs)
            return
        if not in_order:
            super().log(level, msg, *args, **kwargs)
            return
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index:
                super().log(level, msg, *args, **kwargs)
            state.wait_for_everyone()

    def process(self, msg: object, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message and the arguments as they are."""
        return msg, kwargs

    def warning_once(self, msg: object, *args: object, **kwargs: bool) -> None:
        """Write a warning. Repeated calls with the same arguments have no effect. `kwargs` are those of `log`."""
        if _is_new(self.name, repr((msg, args))):
            self.log(logging.WARNING, msg, *args, stacklevel=3, **kwargs)  # 3: the caller of `warning_once`


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that writes on the main process; see `MultiProcessAdapter`.

    Args:
        name: Usually `__name__`.
        log_level: `"DEBUG"`, `"INFO"`, `"WARNING"`, …, which is also set for the root logger. Default: the variable
            `ACCELERATE_LOG_LEVEL`, or else the configuration of Python's logging.
    """
    logger = logging.getLogger(name)
    level = log_level or variable(_LEVEL)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def install_rich_tracebacks() -> None:
    """Show uncaught errors with rich if the variable `ACCELERATE_ENABLE_RICH` is set and rich is installed."""
    if read_variable(_RICH, as_flag) and is_rich_available():
        from rich import traceback

        traceback.install(show_locals=False)


def on_main_process(function: Callable[P, T]) -> Callable[P, T | None]:
    """Return a method that runs on the main process only, if its object has `main_process_only = True`."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T | None:
        owner = args[0] if args else None
        main_process_only = getattr(owner, "main_process_only", False)
        if main_process_only and not PartialState().is_main_process:
            return None
        return function(*args, **kwargs)

    return call


def tqdm(*args: object, main_process_only: bool = True, **kwargs: object) -> Any:
    """Return tqdm's progress bar over an iterable, on the first process of each node only.

    Args:
        args, kwargs: Arguments of `tqdm.auto.tqdm`.
        main_process_only: False: every process shows a bar. Default: True.
    """
    from tqdm import auto

    if main_process_only and detect().local_rank != 0:
        kwargs["disable"] = True
    bar: Any = auto.tqdm
    return bar(*args, **kwargs)


# Name of a logger and text of a warning, for each call of `warning_once` in this process.
_seen: set[tuple[str, str]] = set()


def _is_new(name: str, text: str) -> bool:
    """Return whether a logger has not written this text with `warning_once`, and record the text."""
    is_new = (name, text) not in _seen
    _seen.add((name, text))
    return is_new
