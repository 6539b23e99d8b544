"""Background writing of checkpoints. Training waits for a copy to host memory only. A thread writes this copy.

The threads of a save, besides the caller of `AsyncWriter`:

- the writing thread (`AsyncWriter._run`) runs the jobs in order: it writes, syncs and publishes checkpoints;
- the low-priority thread (`LowPriorityThread`) hashes and writes the data of large files for the writing thread;
- the exit thread (`_hold_exit`) delays the exit of the interpreter until the writing thread ends.

They start with the first job and end when no job is left. A `Preparation` thread maps memory before the first save.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from torch.optim import Optimizer

from trainwright.checkpoint.disk.host_buffers import HostBuffers
from trainwright.checkpoint.disk.host_copies import LaterCopy
from trainwright.checkpoint.disk.low_priority_thread import LowPriorityThread, Preparation
from trainwright.checkpoint.disk.planned_file import LOW_PRIORITY_FROM_BYTES
from trainwright.checkpoint.format.layout import Snapshot
from trainwright.checkpoint.format.model import MAX_SHARD_BYTES
from trainwright.checkpoint.format.writer import Contents, check_target, plain_metrics, plan_checkpoint, write_contents
from trainwright.core import unraised
from trainwright.core.errors import CheckpointError

_DEADLINE_CHECK_S = 0.5  # interval in which a waiting thread reads `deadline_s`, which may change

Then = Callable[[Path], None]


class Write(Protocol):
    """A function that writes a checkpoint from the staged copies."""

    def __call__(self, *, quiet: LowPriorityThread) -> Any:
        """Write the checkpoint. The thread `quiet` hashes and writes large files."""


@dataclass(frozen=True, slots=True)
class _Job:
    """One checkpoint to write; see `AsyncWriter.start` for the fields."""

    path: Path
    write: Write
    then: Then | None


class AsyncWriter:
    """Writer that copies checkpoints to host memory, and writes the copies in a thread while training continues.

    Call the writer from one thread. `submit` is for checkpoints that one process writes, and `stage` with `start` for
    checkpoints that several ranks write together. At most one snapshot is in memory: a save waits for the previous
    save, so that a slow disk slows the run down instead of filling the memory. Work that takes processor time, such as
    hashing, is done by a thread of the lowest priority, and by the writing thread while a caller waits for a save. An
    exiting interpreter waits for unfinished saves until the deadline, prints the error of a failed save that no call
    has raised, and exits with code 1. Saving runs no collectives and draws no random numbers.

    Args:
        max_shard_bytes: see `plan_model`.

    Attributes:
        buffers: host memory for the copies, reused between saves.
        optimizers: the optimizers whose state is saved. Set it before the first save: the first copy that continues
            during training registers a hook with each of them, which remains until `close`.
        may_copy_later: copy optimizer states that allow it (see `Snapshot.state_rests`) while training continues. This
            is faster only if training leaves a core idle. Default: True.
        deadline_s: function that returns the value of `time.monotonic()` at which unpublished checkpoints are
            discarded. By default it returns None: checkpoints are never discarded.
    """

    def __init__(self, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
        self.buffers = HostBuffers()
        self._max_shard_bytes = max_shard_bytes
        self.optimizers: Sequence[Optimizer] = ()
        self.may_copy_later = True
        self.deadline_s: Callable[[], float | None] = lambda: None
        unraised.report_at_exit()
        # The snapshot in memory. Only the caller's thread sets these attributes.
        self._contents: Contents | None = None  # the files in the buffers; None before the first save, or if it failed
        self._later: LaterCopy | None = None  # remaining copies into the buffers; None if all were made at once
        self._guards: list[Any] = []  # handles of the step hooks that finish `_later`; see `_Guard`
        self._preparation: Preparation | None = None  # maps the buffers' pages between `prepare` and the first save
        # The save that is being written. The lock protects the four attributes after it.
        self._lock = threading.Lock()
        self._jobs: deque[_Job] = deque()  # submitted jobs, without the job that is being written
        self._thread: threading.Thread | None = None  # the writing thread, which sets None when no job is left
        self._quiet = LowPriorityThread()  # hashes and writes for `_thread`; a new object for each writing thread
        self._error: CheckpointError | None = None  # of the last failed job, until a call raises it
        self._dropped = threading.Event()  # set by `_drop`: the exit thread ends before `_thread`. New with `_thread`

    @property
    def is_writing(self) -> bool:
        """True while a checkpoint that was passed to `submit`, `submit_again` or `start` is being written."""
        with self._lock:
            return self._thread is not None

    @property
    def has_dropped(self) -> bool:
        """True if a write has exceeded the deadline `deadline_s` and has not ended."""
        with self._lock:
            return self._thread is not None and self._dropped.is_set()

    def prepare(self, num_bytes: int) -> None:
        """Allocate about `num_bytes` of host memory for the first save. A thread maps the pages. Does not block.

        Does nothing for less than `LOW_PRIORITY_FROM_BYTES`, or if the buffers have a snapshot.
        """
        if self._contents is not None or num_bytes < LOW_PRIORITY_FROM_BYTES:
            return
        self._end_preparation()
        self.buffers.reserve(num_bytes)
        self._preparation = Preparation(self.buffers.fillings())

    def submit(
        self, path: Path | str, snapshot: Snapshot, *, then: Then | None = None, must_be_new: bool = False
    ) -> Path:
        """Copy `snapshot`, and write the copy as the checkpoint `path` in the background; see `write_checkpoint`.

        Blocks until the previous checkpoint is published and the tensors are copied. Afterwards the tensors may change.
        If `snapshot.state_rests` is True, optimizer states are copied in the background, and each `step` of
        `optimizers` first waits for this copy. The save fails if other code changes the optimizer states during this
        copy.

        Args:
            path: the checkpoint's folder. A checkpoint in this folder remains until the new checkpoint is complete.
            snapshot: the state to save.
            then: called with `path` in the writing thread once the checkpoint is published. If it raises, the save
                fails with that error.
            must_be_new: see `Draft`.

        Raises:
            CheckpointError: the snapshot cannot be saved as `path`, or the previous checkpoint could not be written. In
                both cases the new save is not started.
        """
        self.wait()
        path = Path(path)
        check_target(path)
        contents = plan_checkpoint(snapshot, max_shard_bytes=self._max_shard_bytes)
        self._stage(contents)
        self._write(path, contents, then, must_be_new)
        return path

    def stage(self, contents: Contents) -> None:
        """Replace the tensors in `contents` by copies in host memory, for a save by several ranks.

        Blocks until earlier saves are done and the tensors are copied. Then call `start` to write the copies. Raises
        the errors of `wait`.
        """
        self.wait()
        self._stage(contents)

    def start(self, path: Path, write: Write, *, then: Then | None = None) -> None:
        """Call `write` in the writing thread, after earlier checkpoints. Does not block. Raises the errors of `wait`.

        Args:
            path: the checkpoint's folder, for error messages and `then`.
            write: function that writes this rank's files from the staged copies. Its argument `quiet` is for
                `write_files`.
            then: see `submit`.
        """
        self._start(_Job(path, write, then))

    def _stage(self, contents: Contents) -> None:
        """Copy the tensors of `contents` into the buffers. No job may be running, since jobs read the buffers."""
        self._end_preparation()
        # None until the copy has succeeded: after an error, the buffers contain a mixture of two snapshots.
        self._contents = None
        self._later = None
        self._later = self.buffers.stage(contents.files, may_copy_later=self.may_copy_later)
        self._contents = contents
        if self._later is not None and not self._guards:
            # On each optimizer, since different threads may step them.
            self._guards = [optimizer.register_step_pre_hook(_Guard(self)) for optimizer in self.optimizers]

    def _write(self, path: Path, contents: Contents, then: Then | None, must_be_new: bool) -> None:
        self._start(_Job(path, partial(write_contents, path, contents, must_be_new=must_be_new), then))

    def submit_again(
        self,
        path: Path | str,
        *,
        metrics: Mapping[str, Any] | None = None,
        then: Then | None = None,
        must_be_new: bool = False,
    ) -> Path:
        """Write the snapshot in memory as another checkpoint, after earlier checkpoints. Does not block.

        The snapshot is that of the last `submit`.

        Args:
            path, then, must_be_new: see `submit`.
            metrics: metrics for the manifest. Default: the metrics of the snapshot.

        Raises:
            CheckpointError: there is no snapshot, `path` exists and is not a checkpoint, or an earlier save has failed.
        """
        if self._contents is None:
            raise CheckpointError(f"there is no snapshot in memory to write as {path}: call submit first.")
        path = Path(path)
        check_target(path)
        contents = self._contents
        if metrics is not None:
            contents = replace(contents, metrics=plain_metrics(metrics))
        self._write(path, contents, then, must_be_new)
        return path

    def wait(self) -> None:
        """Block until all submitted checkpoints are published.

        Raises:
            CheckpointError: a checkpoint could not be written. Checkpoints submitted after it are discarded. The
                message names all of these. Each error is raised once.
        """
        self.join()
        with self._lock:
            self._raise_error()

    def finish_copy(self) -> None:
        """Block until the copy of the last snapshot is complete. Afterwards all tensors of the snapshot may change."""
        if self._later is not None:
            self._later.finish()

    def join(self) -> None:
        """Block until all writes have ended or the deadline has passed. Raises no error of a write; see `wait`."""
        # Read once per round: the writing thread sets the attribute to None when it ends.
        while (thread := self._thread) is not None:
            self._quiet.hurry()  # in each round, since `_thread` and `_quiet` may be new
            deadline_s = self.deadline_s()
            if deadline_s is None:
                thread.join(_DEADLINE_CHECK_S)
                continue
            seconds_left = max(0.0, deadline_s - time.monotonic())
            thread.join(min(seconds_left, _DEADLINE_CHECK_S))
            if time.monotonic() >= deadline_s and thread.is_alive():
                self._drop()
                return

    def _drop(self) -> None:
        """Allow the interpreter to exit while the writing thread waits for the disk. The buffers are not freed."""
        with self._lock:
            self._jobs.clear()
            # Not added to `unraised`, which is for errors that occur after the last call: `join` is being called.
            self._error = CheckpointError(
                "a checkpoint was not written before the deadline and is dropped. Earlier checkpoints are unchanged."
            )
            self._dropped.set()

    def close(self) -> None:
        """Call `wait`, then free the host memory, even if `wait` raises. The writer can be used again."""
        try:
            self.wait()
        finally:
            self._end_preparation()
            # The writing thread still reads the buffers if Ctrl-C has interrupted `wait`, or the deadline has passed.
            if not self.is_writing:
                self._contents = None
                self._later = None
                self.buffers.release()
                while self._guards:
                    self._guards.pop().remove()

    def _end_preparation(self) -> None:
        if self._preparation is not None:
            self._preparation.end()
            self._preparation = None

    def _start(self, job: _Job) -> None:
        with self._lock:
            self._raise_error()
            if self._thread is None:
                self._thread = self._start_thread()
            self._jobs.append(job)

    def _start_thread(self) -> threading.Thread:
        """Start the threads of a save, and return the writing thread. The caller holds the lock.

        The caller adds the first job before it releases the lock. The writing thread waits for the lock in `_next_job`,
        so that it does not find an empty queue and end.
        """
        # All are started here, since no thread can be started once the interpreter is exiting.
        self._quiet = LowPriorityThread()
        if self._contents is not None:
            num_bytes = sum(file.num_tensor_bytes for file in self._contents.files)
            if num_bytes >= LOW_PRIORITY_FROM_BYTES:
                self._quiet.start()
        self._dropped = threading.Event()
        name = "trainwright-checkpoint"
        thread = threading.Thread(target=self._run, args=(self._quiet,), name=name, daemon=True)
        thread.start()
        # The interpreter waits for this thread before it exits, since it is not a daemon. The writing thread is one, so
        # that a save that has exceeded the deadline does not delay the exit.
        guard = threading.Thread(target=_hold_exit, args=(thread, self._dropped), name=f"{name}-exit", daemon=False)
        guard.start()
        return thread

    def _raise_error(self) -> None:
        """Raise the error of the last failed job, once. The caller holds the lock."""
        error = self._error
        self._error = None
        if error is not None:
            unraised.discard(error)
            raise error

    def _run(self, quiet: LowPriorityThread) -> None:
        """Write jobs until none is left; the function of the writing thread."""
        try:
            while (job := self._next_job()) is not None:
                try:
                    self._check_copy(quiet)
                    job.write(quiet=quiet)
                    if job.then is not None:
                        job.then(job.path)
                except BaseException as error:  # noqa: BLE001  # raised by `wait`, in the caller's thread
                    self._fail(job, error)
        finally:
            quiet.end()

    def _check_copy(self, quiet: LowPriorityThread) -> None:
        """Finish the copy of the snapshot before it is written. Raise an error if its tensors changed meanwhile."""
        if self._later is None:
            return
        # The low-priority thread makes the copies, so that this thread does not compete with training for a core.
        quiet.put(self._later.finish)
        quiet.rest()
        # `rest` also ends if a caller waits for the save. This thread then makes the remaining copies.
        if not self._later.finish():
            raise CheckpointError(
                "an optimizer's state was changed between two of its steps, while it was being copied. Change the "
                "state in optimizer.step(), or pass Trainer(async_save=False)"
            )

    def _next_job(self) -> _Job | None:
        """Return the next job. Without one, mark the thread as ended and return None."""
        with self._lock:
            if self._jobs:
                return self._jobs.popleft()
            self._thread = None
            return None

    def _fail(self, job: _Job, error: BaseException) -> None:
        """Store the error of a job for the caller's thread, and discard the jobs after it."""
        with self._lock:
            message = (
                f"the checkpoint {job.path} could not be written in the background: {type(error).__name__}: {error}. "
                "Earlier checkpoints are unchanged."
            )
            if self._jobs:
                message += f" Also not written: {', '.join(str(unwritten.path) for unwritten in self._jobs)}."
                self._jobs.clear()
            self._error = CheckpointError(message)
            self._error.__cause__ = error
            unraised.add(self._error)


class _Guard:
    """Pre-hook of `Optimizer.step` that calls `finish_copy`. It has only a weak reference to the writer."""

    def __init__(self, writer: AsyncWriter) -> None:
        self._writer = weakref.ref(writer)

    def __call__(self, optimizer: Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        writer = self._writer()
        if writer is not None:
            writer.finish_copy()


def _hold_exit(thread: threading.Thread, dropped: threading.Event) -> None:
    """Block until the writing thread ends or its work is discarded, since an exiting interpreter would abort it."""
    while thread.is_alive() and not dropped.is_set():
        thread.join(_DEADLINE_CHECK_S)
