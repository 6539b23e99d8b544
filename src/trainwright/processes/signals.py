"""Preemption signals: handlers that only record signals, and the exchange of signals between ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from trainwright.core.errors import TrainwrightWarning
from trainwright.processes.agreement import Agreement
from trainwright.processes.process_group import Processes

SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM,)
if hasattr(signal, "SIGUSR1"):  # not on Windows
    SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
_EXCHANGE_EVERY_N_STEPS = 10  # the maximum number of steps between two exchanges
_HUNG_S = 30.0  # until a user-written loop that has not handled SIGTERM is ended: Kubernetes' and Slurm's default

_open_sockets: list[socket.socket] = []  # to which Python writes the numbers of signals


def _stop_writing_signals() -> None:
    """Stop writing signals to the sockets in a forked process, such as a loader worker, which shares them."""
    if _open_sockets:
        signal.set_wakeup_fd(-1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_stop_writing_signals)


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


@contextlib.contextmanager
def ending_hung_process(seconds: float, reason: Callable[[], str]) -> Iterator[None]:
    """Context manager that ends the process some time after SIGTERM, with exit code 143.

    The main thread may wait in a collective that another rank does not call. Python then runs no signal handler.

    Args:
        seconds: Time from the first SIGTERM until the end of the process. Leaving the context prevents the end.
        reason: Function that returns the message at that time. An empty message means that the process does not hang.
    """

    def end_late() -> None:
        deadline: float | None = None  # None before SIGTERM, and after a deadline at which the process did not hang
        while True:
            timeout_s = None if deadline is None else deadline - time.monotonic()
            if timeout_s is not None:
                timeout_s = max(timeout_s, 1e-3)  # 0 would make the socket non-blocking
            receiver.settimeout(timeout_s)
            try:
                number = receiver.recv(1)[0]
            except TimeoutError:
                text = reason()
                if text:
                    os.write(2, f"trainwright: received SIGTERM, and {text}; the process ends.\n".encode())
                    os._exit(128 + signal.SIGTERM)
                deadline = None
                continue
            if number == 0:  # the context ends
                return
            if previous_fd != -1:  # of an event loop, for example that of a notebook
                with contextlib.suppress(OSError):
                    os.write(previous_fd, bytes([number]))
            if number == signal.SIGTERM and deadline is None:
                deadline = time.monotonic() + seconds

    # Python's C signal handler writes the number of each signal to this socket, even while the main thread is in a call
    # that does not return to Python.
    receiver, sender = socket.socketpair()
    sender.setblocking(False)
    previous_fd = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
    _open_sockets.append(sender)
    thread = threading.Thread(target=end_late, name="preemption", daemon=True)
    thread.start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(previous_fd)
        _open_sockets.remove(sender)
        sender.send(b"\0")
        thread.join()
        receiver.close()
        sender.close()


class ReceivedSignal:
    """The first preemption signal to this process, or after an exchange the signal that ranks agreed on.

    Args:
        grace_s: Seconds from the signal until the system ends the process. None if signals are not handled.

    Attributes:
        signal: Number of the signal. 0 without a signal.
        agreed: True if an exchange has set `signal` to the same value on every rank.
        receiver: The lowest rank that had received a signal before the exchange. 0 before an exchange.
    """

    def __init__(self, grace_s: float | None) -> None:
        self.grace_s = grace_s
        self.signal = 0
        self.agreed = False
        self.receiver = 0
        self._deadline = 0.0  # when the system ends the process; valid with a signal

    def take(self, number: int) -> None:
        """Record a signal to this process. Only the first signal is recorded."""
        if not self.signal:
            self.signal = number
            self._deadline = time.monotonic() + (self.grace_s or 0.0)

    def remaining_s(self) -> float:
        """Return the seconds until the system ends the process."""
        return self._deadline - time.monotonic()

    def signal_and_remaining_ms(self) -> list[int]:
        """Return the values of this rank for an exchange: the signal, and the milliseconds that remain."""
        if not self.signal:
            return [0, 0]
        return [self.signal, int(self.remaining_s() * 1000)]

    def set_agreed(self, by_rank: list[list[int]]) -> None:
        """Set the signal of the lowest rank that has received one, and the shortest remaining time of all such ranks.

        Args:
            by_rank: `signal_and_remaining_ms` of each rank.
        """
        remaining_ms: list[int] = []
        for rank, (number, remaining_ms_of_rank) in enumerate(by_rank):
            if not number:
                continue
            if not remaining_ms:
                self.signal = number
                self.receiver = rank
            remaining_ms.append(remaining_ms_of_rank)
        if remaining_ms:
            self.agreed = True
            self._deadline = time.monotonic() + min(remaining_ms) / 1000


class LoopSignal(ReceivedSignal):
    """Handler of SIGTERM and SIGUSR1 in a user-written loop, until `close`. It also calls the user's own handlers.

    Outside of the main thread, where Python allows no handlers, only the signals of other ranks are received. If the
    main thread does not return to Python within 30 seconds after SIGTERM, the process ends with exit code 143.

    Args:
        processes: the processes of the run.
    """

    def __init__(self, processes: Processes) -> None:
        super().__init__(grace_s=0.0)  # a user-written loop stops at `should_stop`, whatever time remains
        self._processes = processes
        self._agreement = Agreement(processes, _EXCHANGE_EVERY_N_STEPS)
        self._num_steps = 0
        self._handlers: list[_LoopHandler] = []
        self._watch = contextlib.ExitStack()
        if threading.current_thread() is threading.main_thread():
            self._handlers = [_LoopHandler(self, number) for number in SIGNALS]
            if not _open_sockets:  # otherwise a fit, or another loop, already ends this process
                self._watch.enter_context(ending_hung_process(_HUNG_S, self._reason_of_hang))
        else:
            warnings.warn(
                "accelerator.should_stop was read outside of the main thread: signals to this process are not handled, "
                "only those that other ranks receive. Read it once in the main thread first.",
                TrainwrightWarning,
                stacklevel=3,
            )

    def _reason_of_hang(self) -> str:
        # The handler of the main thread has recorded the signal if that thread has returned to Python.
        return "" if self.signal else f"the main thread has not returned to Python for {_HUNG_S:g} s"

    def end_step(self) -> None:
        """Count an optimizer step, and exchange signals between ranks about once per second. Collective, on the host.

        The first call waits for every rank, and reports the ranks that are missing.
        """
        if self.agreed:
            return
        self._num_steps += 1
        if self._processes.world_size == 1:
            self.set_agreed([self.signal_and_remaining_ms()])
            return
        if self._num_steps == 1:
            self._processes.meet("accelerator.should_stop")
        if self._agreement.due(self._num_steps):
            self.set_agreed(self._agreement.exchange(self._num_steps, self.signal_and_remaining_ms()))

    def close(self) -> None:
        """Restore the earlier handlers. Outside of the main thread, the handlers stay and only stop recording."""
        for handler in self._handlers:
            handler.close()
        if threading.current_thread() is threading.main_thread():
            self._watch.close()


class _LoopHandler(SignalHandler):
    """Handler that records a signal until `close`, and calls the user's earlier handler.

    Without such a handler, a signal after `close` has its earlier effect.
    """

    def __init__(self, received: LoopSignal, number: int) -> None:
        super().__init__()
        self._received = received
        self._number = number
        self._is_closed = False
        self._previous: Any = signal.getsignal(number)
        signal.signal(number, self)

    def handle(self, number: int, frame: FrameType | None) -> None:
        if not self._is_closed:
            self._received.take(number)
        previous = self._previous_open()
        if is_users(previous) or isinstance(previous, _LoopHandler):
            previous(number, frame)
        elif self._is_closed:  # a later handler calls this one, or `close` ran in another thread
            self._restore()
            signal.raise_signal(number)

    def close(self) -> None:
        """Stop recording, and restore the earlier handler unless another one has been set since."""
        self._is_closed = True
        current: Any = signal.getsignal(self._number)
        if current is self and threading.current_thread() is threading.main_thread():
            self._restore()

    def _previous_open(self) -> Any:
        """Return the latest earlier handler that is not closed."""
        previous = self._previous
        while isinstance(previous, _LoopHandler) and previous._is_closed:
            previous = previous._previous
        return signal.SIG_DFL if previous is None else previous  # None: set by a library in C, not by Python

    def _restore(self) -> None:
        signal.signal(self._number, self._previous_open())
