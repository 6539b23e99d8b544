"""Monitor of each rank of a distributed run, which detects failed ranks and reports a run that hangs.

A hanging collective does not report a reason. Each rank therefore has a daemon thread, with a separate connection to
the store of the process group. The thread runs no collectives, uses no device, and adds no work to a step. It only
reads the Trainer's counters. The threads communicate through these keys of the store:

    events              counter that grows with each `failure` and `stall/N`; each beat reads only it and `node/NODE`
    failure             the rank that failed first, with its traceback, as JSON of a `Failure`
    seen                number of ranks that have read `failure`
    ended               number of ranks that have ended themselves after the failure; the first one prints its traceback
    stall/N             the rank that requested hang report N
    at/N/RANK           the position of a rank in hang report N
    answers/N           number of ranks that have written their positions for report N
    printed/N           number of ranks that were about to print report N; only the first one does
    beat/RANK           number of the last beat of a rank, its position, and True if the rank is saving, as a JSON list
    node/NODE           lines with rank, process ID and start time of each process of a node; they monitor each other
    gone/RANK           the rank's process was killed or crashed
    left/RANK           the rank has left the run; other ranks do not wait for it

`loop_detector.py` has the monitor of user-written loops, which have no counters.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.core.errors import WorkerError
from trainwright.core.process import in_notebook
from trainwright.processes.hang_report import Failure, hang_report
from trainwright.processes.rank_position import (
    Position,
    ProcessMark,
    RankPosition,
    activity_of,
    collective_of,
    frames_of,
    position_of_rank,
)

_BEAT_S = 0.5
_RANKS_PER_BEAT_S = 256  # more ranks check less often, so that the store is not overloaded
_GRACE_S = 2.0  # for a surviving rank's own error, such as a broken connection, after the failed rank has left or ended
_PATIENCE_S = 15.0  # for a failed rank to end; longer only while it saves
_ANSWER_S = 4.0  # for ranks to report their positions
_ECHO_S = 2.5  # how long an error of a collective waits for the failure that caused it


class HangDetector:
    """Monitor thread of one rank during one stage.

    Args:
        store: separate connection to the store of the process group, with a prefix for this stage.
        rank: this rank.
        world_size: number of ranks.
        position: function that returns this rank's progress. Called in the monitor thread; must not change any state.
        hang_timeout_s: seconds without progress after which all ranks report their positions. None disables the report.
        timeout_s: seconds after which a collective fails, to be shown in the report.
        store_dies_with_rank_0: True if the process of rank 0 serves the store, False if torchrun's agent does.
        interrupt_only: after the failure of another rank, interrupt the main thread, as Ctrl-C does, instead of ending
            this process. `leave` then raises a WorkerError. A process that does not react is ended, except in a
            notebook.
    """

    # True: the other ranks print the failed rank's traceback, because its own output may be on another machine.
    _repeats_tracebacks = True

    def __init__(
        self,
        store: Store,
        *,
        rank: int,
        world_size: int,
        position: Callable[[], Position],
        hang_timeout_s: float | None,
        timeout_s: float,
        store_dies_with_rank_0: bool,
        interrupt_only: bool,
    ) -> None:
        self._store: Store | None = store
        self._rank = rank
        self._world_size = world_size
        self._position = position
        self._hang_timeout_s = hang_timeout_s
        self._timeout_s = timeout_s
        self._store_dies_with_rank_0 = store_dies_with_rank_0
        self._interrupt_only = interrupt_only
        self._beat_s = max(_BEAT_S, world_size / _RANKS_PER_BEAT_S)
        self._thread_id = threading.get_ident()  # the training thread, which creates this object
        self._thread = threading.Thread(target=self._run, name="trainwright-hang-detector", daemon=True)
        self._wake = threading.Event()  # ends the pause between two beats
        self._was_reported = threading.Event()  # this rank's error was written, or cannot be written
        self._stopping = False  # set by `close`
        self._error: BaseException | None = None  # the error with which this rank leaves the run
        self._mark = ProcessMark.mine()
        self._known_gone: set[int] = set()  # ranks whose processes have ended, as detected by this rank
        self._num_beats = 0
        self._num_events = 0  # the value of `events` at the last beat
        # Progress
        self._last_position = position()
        self._moved_at = time.monotonic()  # time of the last change of the position
        self._num_reports = 0  # hang reports for which this rank has written its position
        self._has_requested_report = False  # for the current position; its next change is then printed
        self._reported_position: Position | None = None  # of this rank in the last report, so that none repeats it
        self._report_due: tuple[int, float] | None = None  # number and time of the next report to print; else None
        # The first failure of a rank. A time of 0.0 means that the event has not happened.
        self._failure: Failure | None = None
        self._failure_seen_at = 0.0
        self._failed_rank_left_at = 0.0  # it has left the run, or its process has ended
        self._interrupted_at = 0.0  # `_end` has interrupted the training thread
        self._beat_of_failed = b""  # last content of `beat/RANK` of the failed rank
        self._beat_of_failed_at = 0.0  # time of its last change

    # Called by the training thread

    def start(self) -> None:
        """Start monitoring. Communicates with the store only, and does not wait for other ranks."""
        # A thread that uses the store during interpreter shutdown would abort the process.
        atexit.register(self.close)
        self._thread.start()

    def leave(self, error: BaseException) -> None:
        """Report the error that ends this rank's run. Waits at most some seconds for the store.

        If another rank has failed first, a note is added to the error.

        Raises:
            WorkerError: another rank has failed, and the error is only the interrupt of this rank.
        """
        self._error = error
        self._wake.set()
        self._was_reported.wait(2 * _ECHO_S)
        failure = self._failure
        if failure is None or failure.rank == self._rank:
            return
        if self._interrupted_at:
            raise WorkerError(f"another process of this run has failed:\n{failure.text}") from None
        if self._repeats_tracebacks or failure.gone:  # without a traceback, the text is one line that names the rank
            cause = failure.text
        else:
            cause = f"rank {failure.rank}: {failure.headline}"
        error.add_note(f"This followed the failure of another rank:\n{cause}")

    def close(self) -> None:
        """Stop monitoring. Waits at most some seconds for the store. A second call has no effect."""
        atexit.unregister(self.close)
        self._stopping = True
        self._wake.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(2 * _ECHO_S)

    # The thread

    def _run(self) -> None:
        try:
            self._write_process()
            while not self._stopping:
                self._beat(time.monotonic())
                self._wake.wait(self._beat_s)
                self._wake.clear()
            self._update_position(time.monotonic())
            if self._error is not None:
                self._finish_after_failure()
            else:
                self._finish()
        except dist.DistError:
            self._store = None
            self._run_without_store()
        finally:
            self._store = None
            self._was_reported.set()

    @property
    def _open_store(self) -> Any:
        assert self._store is not None  # it is released only when the thread ends or continues without it
        return self._store

    def _write_process(self) -> None:
        fields = json.dumps([self._rank, self._mark.pid, self._mark.started])
        self._open_store.append(f"node/{self._mark.node}", fields + "\n")

    def _beat(self, now: float) -> None:
        self._update_position(now)
        if self._error is not None and not self._was_reported.is_set():
            self._report_error()
        num_events = self._open_store.add("events", 0)  # adding 0 reads a counter
        if num_events != self._num_events:
            self._num_events = num_events
            self._read_events(now)
        self._check_neighbours()
        self._num_beats += 1
        # The activity of a rank besides training is checked only when others may have to wait for it.
        is_saving = self._failure is not None and activity_of(frames_of(self._thread_id)) == "saving"
        # Written at every beat. A count that no longer changes shows that the process has ended or is stopped.
        beat = [self._num_beats, str(self._last_position), is_saving]
        self._open_store.set(f"beat/{self._rank}", json.dumps(beat))
        if self._error is None:
            if self._failure is not None and self._is_time_to_end(now):
                self._end()
            elif self._hang_timeout_s is not None:
                self._request_report_of_stall(now)
                self._print_report_when_due(now)

    def _finish(self) -> None:
        """Record that this rank ends without an error. `LoopDetector` overrides this.

        Ranks end a stage together, so that there is nothing to record here.
        """

    def _update_position(self, now: float) -> None:
        position = self._position()
        if position == self._last_position or self._error is not None:
            return
        if self._has_requested_report:
            self._has_requested_report = False
            say(f"trainwright: rank {self._rank} has moved on after {now - self._moved_at:.0f} s: {position}")
        self._last_position = position
        self._moved_at = now

    def _read_events(self, now: float) -> None:
        """Read a failure, and answer requests for hang reports."""
        if self._failure is None and self._open_store.check(["failure"]):
            self._set_failure(Failure.from_json(self._open_store.get("failure")))
        while self._open_store.check([f"stall/{self._num_reports}"]):
            self._write_position(now)

    # A rank that fails

    def _report_error(self) -> None:
        """Write this rank's failure to the store, unless another rank has failed before."""
        error = self._error
        if isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._open_store.set(f"left/{self._rank}", f"{type(error).__name__}: {error}")
        elif error is not None:
            # An error of a collective follows from another rank's failure, which may not be in the store yet.
            deadline = time.monotonic() + (_ECHO_S if is_echo(error) else 0.0)
            while True:
                self._read_events(time.monotonic())
                self._check_neighbours()
                if self._failure is not None or time.monotonic() >= deadline:
                    break
                time.sleep(0.1)
            trace = error.__traceback__
            if trace is not None and trace.tb_next is not None:  # the first frame is the monitor's context manager
                trace = trace.tb_next
            text = "".join(traceback.format_exception(type(error), error, trace))
            self._post_failure(Failure(self._rank, f"rank {self._rank}:\n{text}"))
        self._was_reported.set()

    def _post_failure(self, failure: Failure) -> None:
        """Write a failure to the store, unless a rank has written one before. Then read the first failure."""
        if self._failure is None:
            first = self._open_store.compare_set("failure", "", failure.to_json())
            self._open_store.add("events", 1)
            self._set_failure(Failure.from_json(first))

    def _set_failure(self, failure: Failure) -> None:
        self._failure = failure
        self._failure_seen_at = time.monotonic()
        self._open_store.add("seen", 1)

    def _finish_after_failure(self) -> None:
        """Record that this failed rank leaves the run.

        If it serves the store, it waits until all ranks have read the failure, for at most 2.5 s.
        """
        if not self._was_reported.is_set():
            self._report_error()
        if isinstance(self._error, (SystemExit, KeyboardInterrupt)):  # `_report_error` has written the reason
            self._finish()
        else:
            self._open_store.set(f"left/{self._rank}", "failed")
        serves_store = self._rank == 0 and self._store_dies_with_rank_0
        if not serves_store or self._failure is None:
            return
        deadline = time.monotonic() + _ECHO_S
        while time.monotonic() < deadline:
            if self._open_store.add("seen", 0) + len(self._known_gone) >= self._world_size:
                return
            time.sleep(0.05)
            self._check_neighbours()

    def _check_neighbours(self) -> None:
        """Report the processes of this node that were killed or have crashed."""
        for line in self._open_store.get(f"node/{self._mark.node}").decode().splitlines():
            rank, pid, started = json.loads(line)
            if rank == self._rank or rank in self._known_gone:
                continue
            if not ProcessMark(self._mark.node, pid, started).is_gone():
                continue
            self._known_gone.add(rank)
            self._open_store.set(f"gone/{rank}", "")
            if not self._open_store.check([f"left/{rank}"]):
                host = self._mark.node.split()[0]
                text = f"rank {rank}: its process {pid} on {host} has ended without a traceback (killed, or crashed)."
                self._post_failure(Failure(rank, text, gone=True))

    # A surviving rank

    def _is_time_to_end(self, now: float) -> bool:
        """Return whether this process should end after the failure of another rank.

        Its main thread first gets time to detect the failure itself, and the failed rank gets time to finish. If a
        surviving rank exited first, the launcher would end the failed rank, which may still be saving.
        """
        failure = self._failure
        assert failure is not None  # checked before
        rank = failure.rank
        is_gone = failure.gone or self._open_store.check([f"gone/{rank}"])
        has_left = is_gone or self._open_store.check([f"left/{rank}"])
        if has_left and not self._failed_rank_left_at:
            self._failed_rank_left_at = now
        if self._failed_rank_left_at:
            return now - self._failed_rank_left_at >= self._grace_s(is_gone)
        # The failed rank has neither left nor ended. Wait longer than `_PATIENCE_S` only while its monitor reports that
        # it saves.
        beat = self._open_store.get(f"beat/{rank}") if self._open_store.check([f"beat/{rank}"]) else b""
        if beat != self._beat_of_failed:
            self._beat_of_failed = beat
            self._beat_of_failed_at = now
        is_alive = now - self._beat_of_failed_at < _PATIENCE_S
        if beat and is_alive:
            _, _, is_saving = json.loads(beat)
            if is_saving:
                return False
        return now - self._failure_seen_at >= _PATIENCE_S

    def _grace_s(self, is_gone: bool) -> float:
        """Return the seconds until this process ends, from when the failed rank left the run or its process ended.

        `LoopDetector` overrides this.
        """
        return _GRACE_S

    def _end(self) -> None:
        """End this process, whose main thread may be in a collective that will never complete."""
        failure = self._failure
        assert failure is not None  # checked before
        if self._interrupt_only:
            now = time.monotonic()
            if not self._interrupted_at:
                self._interrupted_at = now
                # Python raises KeyboardInterrupt in the main thread only. `leave` replaces it by a WorkerError.
                if self._thread_id == threading.main_thread().ident:
                    signal.pthread_kill(self._thread_id, signal.SIGINT)
            if in_notebook() or now - self._interrupted_at < 2 * _GRACE_S:
                return
        is_first = self._store is None or self._store.add("ended", 1) == 1
        text = f"\n{failure.text}" if is_first and self._repeats_tracebacks else f" {failure.headline}"
        say(f"trainwright: rank {self._rank} ends after the failure of rank {failure.rank}.{text}")
        sys.stdout.flush()
        os._exit(1)  # sys.exit would end this thread only

    def _run_without_store(self) -> None:
        """Monitor after the end of the process that served the store: rank 0, or torchrun's agent on its node."""
        if self._failure is None and self._store_dies_with_rank_0:
            self._failure = Failure(0, "rank 0: its process, which served the store, has ended.", gone=True)
        lost_at = time.monotonic()
        while not self._stopping and self._error is None:
            now = time.monotonic()
            self._update_position(now)
            if self._failure is not None and now - lost_at >= _GRACE_S:
                self._end()
            elif self._failure is None and self._waits_for_long(now, lost_at):
                self._failure = Failure(0, "the agent that started rank 0, and served the store, has ended.", gone=True)
            self._wake.wait(self._beat_s)
            self._wake.clear()

    def _waits_for_long(self, now: float, lost_at: float) -> bool:
        """Return whether the main thread is in a collective, and has made no progress for long since `lost_at`."""
        still_s = now - max(lost_at, self._moved_at)
        return still_s >= 5 * _GRACE_S and bool(collective_of(frames_of(self._thread_id)))

    # A rank that hangs

    def _request_report_of_stall(self, now: float) -> None:
        """Request a hang report if this rank makes no progress, once per position."""
        still_s = now - self._moved_at
        if self._hang_timeout_s is None or still_s < self._hang_timeout_s:
            return
        if self._reported_position == self._last_position:
            return
        # Another rank may have requested this report already. `compare_set` then returns that rank.
        first = self._open_store.compare_set(f"stall/{self._num_reports}", "", str(self._rank))
        if int(first) == self._rank:
            self._has_requested_report = True
        self._open_store.add("events", 1)
        self._read_events(now)

    def _write_position(self, now: float) -> None:
        """Write this rank's position for the next hang report."""
        number = self._num_reports
        self._num_reports += 1
        self._reported_position = self._last_position
        position = position_of_rank(self._rank, self._last_position, now - self._moved_at, self._thread_id)
        self._open_store.set(f"at/{number}/{self._rank}", json.dumps(asdict(position)))
        self._open_store.add(f"answers/{number}", 1)
        # Rank 0 prints after 4 s at the latest. If its monitor does not run, rank 1 prints after 8 s, rank 2 after
        # 12 s, and the others after 16 s.
        self._report_due = number, now + _ANSWER_S * (1 + min(self._rank, 3))

    def _print_report_when_due(self, now: float) -> None:
        """Print a report after all ranks have answered or the time limit for answers is over."""
        if self._report_due is None:
            return
        number, due = self._report_due
        is_due = now >= due
        if not is_due and self._rank == 0:
            is_due = self._open_store.add(f"answers/{number}", 0) == self._world_size
        if is_due:
            self._report_due = None
            if self._open_store.add(f"printed/{number}", 1) == 1:
                self._print_report(number)

    def _print_report(self, number: int) -> None:
        initiator = int(self._open_store.get(f"stall/{number}"))
        answers: dict[int, RankPosition] = {}
        silent: dict[int, str] = {}
        for rank in range(self._world_size):
            if self._open_store.check([f"at/{number}/{rank}"]):
                answers[rank] = RankPosition(**json.loads(self._open_store.get(f"at/{number}/{rank}")))
            else:
                silent[rank] = self._last_seen(rank)
        if initiator in answers:
            assert self._hang_timeout_s is not None  # reports are requested only then; all ranks have equal settings
            report = hang_report(
                initiator, answers, silent, hang_timeout_s=self._hang_timeout_s, timeout_s=self._timeout_s
            )
            say(report)

    def _last_seen(self, rank: int) -> str:
        """Return the last known state of a rank that has not written its position."""
        if self._open_store.check([f"gone/{rank}"]):
            state = "its process has ended"
        elif self._open_store.check([f"left/{rank}"]):
            state = f"it has left the run ({self._open_store.get(f'left/{rank}').decode()})"
        else:
            state = "its process has ended or is stopped, or a thread in it holds the GIL"
        if not self._open_store.check([f"beat/{rank}"]):
            return state
        _, position, _ = json.loads(self._open_store.get(f"beat/{rank}"))
        return f"{state}; last seen: {position}"


def is_echo(error: BaseException) -> bool:
    """Return whether an error looks like that of a collective with a broken connection to another rank."""
    signs = ("onnection", "pair.cc", "roken pipe")  # gloo writes both "Connection closed" and "connection reset"
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)


def say(text: str) -> None:
    """Print a message to the error output."""
    sys.stderr.write(f"{text}\n")
    sys.stderr.flush()
