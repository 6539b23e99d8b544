"""Handling of preemption signals: write a checkpoint and end the process.

Which handler is set depends on the phase of the process:

- Outside fits: `_RequeueHandler`, for SIGUSR1 only. It ends the process.
- In a fit: `_StoringHandler`, which only stores the signal. Ranks exchange signals between two steps or two validation
  batches, stop, write a checkpoint if there is time, and end together with exit code 143.
- From the end of a fit that a signal has stopped until the end of the process: `_ExitHandler`, which ignores signals.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import subprocess
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from types import FrameType
from typing import Any

from trainwright.core.errors import Preempted
from trainwright.core.process import slurm_job
from trainwright.processes.agreement import Agreement
from trainwright.processes.process_group import Processes
from trainwright.processes.signals import SIGNALS, ReceivedSignal, SignalHandler, ending_hung_process, is_users
from trainwright.trainer.data import EvaluationData
from trainwright.trainer.loop_state import LoopState

MARGIN_S = 1.0  # reserved for ending the process, in addition to the time of a save
_MAX_BATCHES_BETWEEN_EXCHANGES = 1000  # of an evaluation
_HUNG_S = 10.0  # after the grace, until a process that hangs is ended


class _RequeueHandler(SignalHandler):
    """Handler of SIGUSR1, Slurm's warning, outside of a fit. It ends the process, because no state has to be saved.

    Args:
        is_main: this is the process of rank 0.
        requeue: rank 0 requeues the Slurm job.
    """

    def __init__(self, is_main: bool, requeue: bool) -> None:
        super().__init__()
        self._requeues = is_main and requeue

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Requeue the Slurm job, if requested, and raise `Preempted`. Does nothing if the process is ending already."""
        if _ExitHandler.begun:
            return
        name = signal.Signals(number).name
        message = requeue_job() if self._requeues else ""
        # Not by `print`: a handler may interrupt a write to the same stream.
        os.write(2, f"trainwright: received {name} outside of training; the process ends.{message}\n".encode())
        raise Preempted(name)


class _ExitHandler(SignalHandler):
    """Handler that ignores further signals while the process ends, so that its exit code is 143.

    Args:
        deadline: `time.monotonic()` value after which signals are handled as before the fit.
        previous: the handlers that were set before the fit, by signal; None if C code has set one.

    Attributes:
        begun: this process is ending because of a signal. Set on the class, because a process has one such state.
    """

    begun = False

    def __init__(self, deadline: float, previous: Mapping[int, Any]) -> None:
        super().__init__()
        self._deadline = deadline
        self._previous = previous

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Ignore the signal, or after the deadline pass it to the previous handler."""
        if time.monotonic() >= self._deadline:
            _ExitHandler.begun = False
            # None is a handler in C, which Python cannot restore.
            signal.signal(number, self._previous[number] or signal.SIG_DFL)
            signal.raise_signal(number)


@atexit.register
def _keep_exit_code() -> None:
    """Ignore signals at interpreter exit, where Python restores the system's handlers, to keep the exit code."""
    if _ExitHandler.begun:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def listen(*, is_main: bool, requeue: bool) -> None:
    """Handle SIGUSR1 outside fits from now on, unless the user has set a handler.

    Args:
        is_main: this is the process of rank 0.
        requeue: rank 0 requeues the Slurm job.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        return
    previous = signal.getsignal(signal.SIGUSR1)
    if previous is signal.SIG_DFL or isinstance(previous, _RequeueHandler):
        signal.signal(signal.SIGUSR1, _RequeueHandler(is_main, requeue))


class _StoringHandler(SignalHandler):
    """Handler that stores a signal during a fit for the training loop. It also calls a handler set by the user.

    During the setup of a fit nothing has to be saved, so `Preempted` is raised at once, unless the user has set a
    handler.

    Args:
        preemption: stores the signal.
        loop: the state of the training loop.
        previous: the handlers that were set before the fit, by signal; None if C code has set one.
    """

    def __init__(self, preemption: Preemption, loop: LoopState, previous: Mapping[int, Any]) -> None:
        super().__init__()
        self._preemption = preemption
        self._loop = loop
        self._previous = previous

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Store the signal, and make the loop check for it after the current step."""
        previous = self._previous[number]
        was_agreed = self._preemption.agreed
        self._preemption.take(number)
        self._loop.check_next_step()
        if is_users(previous):
            previous(number, frame)
            return
        is_setup = not self._loop.trains and not was_agreed
        if is_setup:
            self._preemption.agreed = True  # so that `watching` does not raise `Preempted` a second time
            handler = previous
            if not isinstance(handler, _RequeueHandler):
                handler = _RequeueHandler(is_main=False, requeue=False)
            handler.handle(number, frame)


class Preemption(ReceivedSignal):
    """The signals of a fit; see `ReceivedSignal`."""

    @contextlib.contextmanager
    def watching(self, loop: LoopState) -> Iterator[None]:
        """Store SIGTERM and SIGUSR1 within the context. Handlers that the user has set are called too.

        Has no effect with `grace_s=None`, and outside the main thread, because Python allows signal handlers only
        there.

        Raises:
            Preempted: a signal arrived while the fit ended. If the fit ended with an error, the error is printed.
        """
        if self.grace_s is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {int(number): signal.getsignal(number) for number in SIGNALS}
        storing = _StoringHandler(self, loop, previous)
        _ExitHandler.begun = False
        for number in previous:
            signal.signal(number, storing)
        failure: BaseException | None = None
        try:
            with self._ending_hung_fit(previous):
                yield
        except BaseException as error:
            failure = error
            raise
        finally:
            # A signal after the last exchange of the loop: no later exchange can agree on it.
            is_late = bool(self.signal) and not self.agreed and not is_users(previous[self.signal])
            if is_late:
                self.agreed = True
            self._replace_handlers(previous)
            if is_late:
                name = signal.Signals(self.signal).name
                if isinstance(failure, Exception):
                    traceback.print_exception(failure)  # `Preempted` replaces it
                os.write(2, f"trainwright: received {name} while the fit ended; the process ends.\n".encode())
                raise Preempted(name) from failure

    def _ending_hung_fit(self, previous: Mapping[int, Any]) -> contextlib.AbstractContextManager[None]:
        """Return a context that ends this process if it does not end in time after SIGTERM."""
        if is_users(previous[signal.SIGTERM]):  # the user's handler may decide that the process does not end
            return contextlib.nullcontext()
        reason = f"no step ended within preemption_grace={self.grace_s:g} s"
        return ending_hung_process((self.grace_s or 0.0) + _HUNG_S, lambda: reason)

    def _replace_handlers(self, previous: Mapping[int, Any]) -> None:
        """At the end of a fit, restore the earlier handlers, or ignore signals if the process ends now."""
        _ExitHandler.begun = self.agreed
        exiting = _ExitHandler(self._deadline, previous)
        for number, handler in previous.items():
            if self.agreed and not is_users(handler):
                signal.signal(number, exiting)
            elif handler is None:  # a handler in C, which Python cannot restore
                signal.signal(number, signal.SIG_DFL)
            else:
                signal.signal(number, handler)

    def write_deadline_s(self) -> float | None:
        """Return the `time.monotonic()` value by which checkpoints must be written; None without a signal."""
        return self._deadline - MARGIN_S if self.signal else None


class EvaluationWatch:
    """Check before each batch of an evaluation whether the ranks have agreed on a signal, so that the evaluation stops.

    It is the `abandon` argument of `evaluate`. Several processes exchange signals only before batches that every rank
    has, so that the order of collectives in the task's step is the same on all ranks. They do not stop evaluations with
    loaders of unknown length.

    Args:
        preemption: signals of the run.
        processes: the processes of the run.
        data: the evaluation data.
    """

    def __init__(self, preemption: Preemption, processes: Processes, data: EvaluationData) -> None:
        self._preemption = preemption
        self._loaders = data.loaders
        self._agreement = Agreement(processes, _MAX_BATCHES_BETWEEN_EXCHANGES) if processes.world_size > 1 else None
        self._rounds = 0  # calls before batches that every rank has, over all loaders

    def __call__(self, dataloader_idx: int, batch_idx: int) -> bool:
        """Return whether to stop before a batch of a loader. Some calls are collective."""
        preemption = self._preemption
        if self._agreement is None:  # one process agrees with itself
            if preemption.signal:
                preemption.set_agreed([preemption.signal_and_remaining_ms()])
            return preemption.agreed
        if preemption.grace_s is None or batch_idx >= self._loaders[dataloader_idx].num_full_rounds:
            return False
        self._rounds += 1
        if self._agreement.due(self._rounds):
            signals = self._agreement.exchange(self._rounds, preemption.signal_and_remaining_ms())
            preemption.set_agreed(signals)
        return preemption.agreed


def requeue_job() -> str:
    """Requeue this process's Slurm job, if any. Return a message for the user; empty without a job."""
    job = slurm_job()
    if job is None:
        return ""
    try:
        result = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f" Job {job} was not requeued: {error}."
    if result.returncode:
        return f" Job {job} was not requeued: scontrol failed: {result.stderr.strip() or result.returncode}."
    return f" Job {job} is requeued."
