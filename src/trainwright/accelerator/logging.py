"""Logging and progress bars of several processes, under the names of Hugging Face Accelerate."""

from __future__ import annotations

import logging
from collections.abc import MutableMapping
from typing import Any

from trainwright.core.process import detect, variable
from trainwright.processes.partial_state import PartialState

_LEVEL = "ACCELERATE_LOG_LEVEL"


class MultiProcessAdapter(logging.LoggerAdapter[logging.Logger]):
    """A logger whose calls write on the main process, unless they say otherwise.

    Each call (`debug`, `info`, …) takes two more arguments:

    - `main_process_only`: True by default; False: every process writes.
    - `in_order`: with `main_process_only=False`, the processes write one after the other. Collective. Default: False.
    """

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """Write a record; see the class."""
        main_only, in_order = kwargs.pop("main_process_only", True), kwargs.pop("in_order", False)
        kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
        if not self.isEnabledFor(level) and not in_order:
            return
        if main_only or not in_order:
            if not main_only or detect().rank == 0:
                super().log(level, msg, *args, **kwargs)
            return
        state = PartialState()
        for rank in range(state.num_processes):
            if rank == state.process_index:
                super().log(level, msg, *args, **kwargs)
            state.wait_for_everyone()

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message and the arguments as they are."""
        return msg, kwargs

    def warning_once(self, msg: object, *args: object, **kwargs: bool) -> None:
        """Write a warning, but only the first time that it is called with these arguments."""
        if _is_new(self.name, repr((msg, args))):
            self.log(logging.WARNING, msg, *args, stacklevel=2, **kwargs)


def get_logger(name: str, log_level: str | None = None) -> MultiProcessAdapter:
    """Return a logger that writes on the main process; see `MultiProcessAdapter`.

    Args:
        name: Usually `__name__`.
        log_level: `"DEBUG"`, `"INFO"`, `"WARNING"`, … Default: the variable `ACCELERATE_LOG_LEVEL`, or else the
            configuration of Python's logging.
    """
    logger = logging.getLogger(name)
    level = log_level or variable(_LEVEL)
    if level is not None:
        logger.setLevel(level.upper())
        logger.root.setLevel(level.upper())
    return MultiProcessAdapter(logger, {})


def tqdm(*args: object, main_process_only: bool = True, **kwargs: object) -> Any:
    """Return tqdm's progress bar over an iterable, on the first process of each node only.

    Args:
        args, kwargs: Of `tqdm.auto.tqdm`.
        main_process_only: False: every process shows a bar. Default: True.
    """
    from tqdm import auto

    if main_process_only and detect().local_rank != 0:
        kwargs["disable"] = True
    bar: Any = auto.tqdm
    return bar(*args, **kwargs)


_seen: set[tuple[str, str]] = set()


def _is_new(name: str, text: str) -> bool:
    is_new = (name, text) not in _seen
    _seen.add((name, text))
    return is_new
