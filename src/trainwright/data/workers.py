"""What every loader worker does before the user's own `worker_init_fn`."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


class WorkerStart:
    """Lets a worker outlive the signals that announce the end of a run, which go to the whole group of processes.

    The process that trains wants to finish its step and to save; it ends its workers itself. Without it they end too.

    Args:
        then: the user's own function.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, worker_id: int) -> None:
        """Run in the worker."""
        signal.signal(signal.SIGTERM, _once)
        if hasattr(signal, "SIGUSR1"):
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        if self._then is not None:
            self._then(worker_id)


def _once(number: int, frame: FrameType | None) -> None:
    """Ignore the first one: a worker that does not end when it is told to is sent another."""
    signal.signal(number, signal.SIG_DFL)
