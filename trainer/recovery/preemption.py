"""Preemption: the machine says that this process is about to be ended, and a checkpoint is the answer.

A signal handler only notes the signal. Ranks agree on it between two steps (or two batches of a validation, which is
then broken off), write a checkpoint if there is time, and leave together with exit code 143.
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
from typing import Any, Protocol

from trainwright.core.errors import Preempted
from trainwright.core.process import slurm_job
from trainwright.processes.agreement import Agreement
from trainwright.processes.process_group import Processes
from trainwright.processes.signals import SIGNALS, ReceivedSignal, SignalHandler, is_users
from trainwright.trainer.data import EvaluationData
from trainwright.trainer.loop_state import LoopState

MARGIN_S = 1.0  # kept free for leaving, besides what a checkpoint takes
_ROUNDS = 1000  # of an evaluation, between two exchanges at most


class _Requeue(SignalHandler):
    """Act on SIGUSR1, Slurm's warning, outside of a fit: nothing has to be saved, so that the process ends at once."""

    def __init__(self, is_main: bool, requeue: bool) -> None:
        super().__init__()
        self._requeues = is_main and requeue

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Have Slurm run the job again, and raise `Preempted` wherever the process is."""
        if _Leaving.begun:
            return
        name = signal.Signals(number).name
        done = requeue_job() if self._requeues else ""
        os.write(2, f"trainwright: {name} came outside of training; the process ends.{done}\n".encode())
        raise Preempted(name)


class _Leaving(SignalHandler):
    """Keep further signals from ending a process that leaves already: its exit code is 143.

    Args:
        deadline: until when; a process that has gone on instead is ended as before.
        before: the handlers that were set before the fit.
    """

    begun = False

    def __init__(self, deadline: float, before: Mapping[int, Any]) -> None:
        super().__init__()
        self._deadline, self._before = deadline, before

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Ignore it, or pass it on to the handler of before."""
        if time.monotonic() >= self._deadline:
            _Leaving.begun = False
            signal.signal(number, self._before[number] or signal.SIG_DFL)
            signal.raise_signal(number)


@atexit.register
def _leave_quietly() -> None:
    """Keep the code of a process that leaves until its end: Python puts the system's handlers back before that."""
    if _Leaving.begun:
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def listen(*, is_main: bool, requeue: bool) -> None:
    """Act on SIGUSR1 from now on, also before a fit and after it, unless a handler of the user's own is set.

    Args:
        is_main: this is the process of rank 0.
        requeue: it has Slurm run the job again.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGUSR1"):
        return
    before = signal.getsignal(signal.SIGUSR1)
    if before is signal.SIG_DFL or isinstance(before, _Requeue):
        signal.signal(signal.SIGUSR1, _Requeue(is_main, requeue))


class _Note(SignalHandler):
    """Note a signal during a fit, for the loop to act on; a handler that the user has set runs as well.

    While the fit is set up nothing has to be saved: `Preempted` is raised at once.
    """

    def __init__(self, preemption: Preemption, run: Fit, before: Mapping[int, Any]) -> None:
        super().__init__()
        self._preemption, self._run, self._before = preemption, run, before

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Note it."""
        before, leaves = self._before[number], self._preemption.agreed
        self._preemption.take(number)
        self._run.loop.look()
        if is_users(before):
            before(number, frame)
        elif not self._run.trains and not leaves:
            self._preemption.agreed = True
            (before if isinstance(before, _Requeue) else _Requeue(False, False)).handle(number, frame)


class Fit(Protocol):
    """The run that signals are watched for.

    Attributes:
        loop: where its loop stands.
        trains: it is set up.
    """

    loop: LoopState
    trains: bool


class Preemption(ReceivedSignal):
    """The signals of a fit; see `ReceivedSignal`."""

    @contextlib.contextmanager
    def watching(self, run: Fit) -> Iterator[None]:
        """Note SIGTERM and SIGUSR1 meanwhile, instead of dying of them; handlers that the user has set run as well.

        Only in the main thread, where Python allows handlers, and which `run` runs in.

        Raises:
            Preempted: a signal came while the fit ended, by itself or with an error, which is printed.
        """
        if self.grace_s is None or threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {}
        note = _Note(self, run, before)
        _Leaving.begun = False
        for number in SIGNALS:
            before[number] = signal.getsignal(number)
            signal.signal(number, note)
        failure: BaseException | None = None
        try:
            yield
        except BaseException as error:
            failure = error
            raise
        finally:
            late = self.signal and not self.agreed and not is_users(before[self.signal])
            _Leaving.begun = self.agreed = self.agreed or bool(late)
            leaving = _Leaving(self._deadline, before)
            for number, handler in before.items():
                if self.agreed and not is_users(handler):
                    signal.signal(number, leaving)
                else:
                    signal.signal(number, handler if handler is not None else signal.SIG_DFL)
            if late:
                name = signal.Signals(self.signal).name
                if isinstance(failure, Exception):
                    traceback.print_exception(failure)
                os.write(2, f"trainwright: {name} came while the fit ended; the process ends.\n".encode())
                raise Preempted(name) from failure

    def write_deadline_s(self) -> float | None:
        """Return when `time.monotonic()` leaves no more time for checkpoints; None without a signal."""
        return self._deadline - MARGIN_S if self.signal else None


class EvaluationWatch:
    """Tells before each batch of an evaluation whether to break it off, because all ranks know of a signal.

    With several processes they speak at rounds that each of them has a batch for, so that what the task itself
    exchanges in its step stays in order. Loaders whose lengths are unknown are not broken off.

    Args:
        preemption: of the run.
        processes: this rank among the others.
        data: what is evaluated.
    """

    def __init__(self, preemption: Preemption, processes: Processes, data: EvaluationData) -> None:
        self._preemption = preemption
        self._loaders = data.loaders
        self._agreement = Agreement(processes, _ROUNDS) if processes.world_size > 1 else None
        self._rounds = 0

    def __call__(self, index: int, idx: int) -> bool:
        """Tell it before batch `idx` of loader `index`. Collective at rounds that all ranks know beforehand."""
        told = self._preemption
        if self._agreement is None:
            if told.signal:
                told.hear([told.note()])
            return told.agreed
        if told.grace_s is None or idx >= self._loaders[index].num_full_rounds:
            return False
        self._rounds += 1
        if self._agreement.due(self._rounds):
            told.hear(self._agreement.hold(self._rounds, told.note()))
        return told.agreed


def requeue_job() -> str:
    """Have Slurm run this job again, if it is one; returns what came of it, for the user."""
    job = slurm_job()
    if job is None:
        return ""
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f" Job {job} was not requeued: {error}."
    if done.returncode:
        return f" Job {job} was not requeued: scontrol said {done.stderr.strip() or done.returncode}."
    return f" Job {job} is requeued."
