"""Preemption signals: handlers that only record signals, and the exchange of signals between ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from types import FrameType
from typing import Any

from trainwright.core.errors import TrainwrightWarning
from trainwright.processes.agreement import Agreement
from trainwright.processes.process_group import Processes

SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGUSR1") if hasattr(signal, name))
_EXCHANGE_EVERY_N_STEPS = 10  # at least


class SignalHandler:
    """Signal handler of Trainwright. In a forked process, the handler runs the system's default action.

    For example, multiprocessing ends a forked process by SIGTERM and waits until the process has ended.
    """

    def __init__(self) -> None:
        self._process = os.getpid()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.handle(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Act on a signal in the process that has set this handler."""


def is_users(handler: object) -> bool:
    """Return whether a signal handler was set by the user."""
    return callable(handler) and not isinstance(handler, SignalHandler)


class ReceivedSignal:
    """A signal that this process has received, or that all ranks know.

    Args:
        grace_s: Seconds from the signal until the system ends the process. None if signals are not handled.

    Attributes:
        signal: Number of the signal that this process, or in an exchange another rank, has received. 0 without a
            signal.
        agreed: True if all ranks know `signal` from an exchange.
        receiver: The first rank that received it.
    """

    def __init__(self, grace_s: float | None) -> None:
        self.grace_s = grace_s
        self.signal = 0
        self.agreed = False
        self.receiver = 0
        self._deadline = 0.0

    def take(self, number: int) -> None:
        """Record a signal to this process. Only the first signal is recorded."""
        if not self.signal:
            self.signal, self._deadline = number, time.monotonic() + (self.grace_s or 0.0)

    def remaining_s(self) -> float:
        """Return the seconds until the system ends the process."""
        return self._deadline - time.monotonic()

    def note(self) -> list[int]:
        """Return the values of this rank for an exchange: the signal, and the milliseconds that remain."""
        return [self.signal, int(self.remaining_s() * 1000) if self.signal else 0]

    def hear(self, everyone: list[list[int]]) -> None:
        """Receive the values of all ranks (see `note`)."""
        told = [(rank, number, left_ms) for rank, (number, left_ms) in enumerate(everyone) if number]
        if told:
            self.agreed = True
            self.receiver, self.signal, _ = told[0]
            self._deadline = time.monotonic() + min(left_ms for _, _, left_ms in told) / 1000


class LoopSignal(ReceivedSignal):
    """Handler of SIGTERM and SIGUSR1 in a user-written loop, until `close`. It also calls the user's own handlers.

    Outside of the main thread, where Python allows no handlers, only the signals of other ranks are received.

    Args:
        processes: the processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        super().__init__(grace_s=0.0)
        self._processes = processes
        self._agreement = Agreement(processes, _EXCHANGE_EVERY_N_STEPS)
        self._num_steps = 0
        self._handlers: list[_LoopHandler] = []
        if threading.current_thread() is threading.main_thread():
            self._handlers = [_LoopHandler(self, number) for number in SIGNALS]
        else:
            warnings.warn(
                "accelerator.should_stop was read outside of the main thread: signals to this process are not handled, "
                "only those that other ranks receive. Read it once in the main thread first.",
                TrainwrightWarning,
                stacklevel=3,
            )

    def end_step(self) -> None:
        """Count an optimizer step, and exchange signals between ranks about once per second. Collective, on the host.

        The first call waits for every rank, and reports the ranks that are missing.
        """
        if self.agreed:
            return
        self._num_steps += 1
        if self._processes.world_size == 1:
            self.hear([self.note()])
            return
        if self._num_steps == 1:
            self._processes.meet("accelerator.should_stop")
        if self._agreement.due(self._num_steps):
            self.hear(self._agreement.hold(self._num_steps, self.note()))

    def close(self) -> None:
        """Restore the earlier handlers."""
        for handler in self._handlers:
            handler.close()


class _LoopHandler(SignalHandler):
    """Handler that records a signal. After `close` it calls the earlier handler."""

    def __init__(self, received: LoopSignal, number: int) -> None:
        super().__init__()
        self._received, self._number, self._closed = received, number, False
        self._before: Any = signal.getsignal(number)
        signal.signal(number, self)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self._closed:
            self._received.take(number)
        before = self._earlier()
        if is_users(before) or isinstance(before, _LoopHandler):
            before(number, frame)
        elif self._closed:
            self._restore()
            signal.raise_signal(number)

    def close(self) -> None:
        """Stop recording, and restore the earlier handler unless another one has been set since."""
        self._closed = True
        current: Any = signal.getsignal(self._number)
        if current is self and threading.current_thread() is threading.main_thread():
            self._restore()

    def _earlier(self) -> Any:
        """Return the latest earlier handler that is not closed."""
        before = self._before
        while isinstance(before, _LoopHandler) and before._closed:
            before = before._before
        return signal.SIG_DFL if before is None else before

    def _restore(self) -> None:
        signal.signal(self._number, self._earlier())
