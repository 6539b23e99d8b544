"""Saves of the states of a Trainer or of a user-written loop, by the main rank or by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from trainwright.checkpoint import AsyncWriter, Contents, Draft, SaveGroup, Snapshot, plan_share, write_checkpoint
from trainwright.checkpoint.format.writer import plain_metrics
from trainwright.core.errors import CheckpointError
from trainwright.processes.process_group import Processes
from trainwright.strategies.engine import Engine

_GRACE_S = 10.0  # time for the other ranks to report after the run has failed


@dataclass(frozen=True, slots=True)
class SaveTarget:
    """One checkpoint to write.

    Attributes:
        path: Folder of the checkpoint.
        metrics: Metrics for the checkpoint's manifest.
        then: Called on the main rank with `path` after publication, in the writer's thread if the save is asynchronous.
        must_be_new: See `SaveRequest`. Default: False.
    """

    path: Path
    metrics: dict[str, float]
    then: Callable[[Path], None]
    must_be_new: bool = False


class StateWriter:
    """Writer of checkpoints, in the background if there is an asynchronous writer.

    The main rank writes a full checkpoint. Of a sharded checkpoint, each rank writes its shards, and the main rank also
    the unsharded values, in this order:

    1. The main rank creates the folders.
    2. All ranks plan and check their files. If one rank cannot write, all ranks raise.
    3. Each rank writes on its own, and reports its files in the group's store.
    4. The main rank waits until the others have reported their files, and publishes the checkpoint.

    Args:
        engine: The engine of the run.
        writer: This rank's asynchronous writer. None makes saves synchronous.
    """

    def __init__(self, engine: Engine, writer: AsyncWriter | None) -> None:
        self._engine = engine
        self._writer = writer
        # The ranks' communication about sharded saves, and the processes that it uses. None before the first one.
        # Created again if the engine has other processes, such as in `Engine.reunited`.
        self._group: SaveGroup | None = None
        self._processes: Processes | None = None

    def save(
        self,
        snapshot: Snapshot,
        targets: list[SaveTarget],
        *,
        before: Callable[[], None],
        at_once: bool = False,
        alone: bool = False,
    ) -> None:
        """Write a snapshot to one or more checkpoints. Collective, except with `alone`.

        After the return, the state may change: an asynchronous writer has copied it.

        Args:
            snapshot: This rank's snapshot.
            targets: The checkpoints, the same on every rank.
            before: Function that is called first, on rank 0.
            at_once: Return only after publication, even with a writer. Default: False.
            alone: Only this rank calls the method, for a full checkpoint. Default: False.

        Raises:
            CheckpointError, OSError: A rank cannot write. Every rank raises, and nothing is published.
        """
        writer = None if at_once else self._writer
        if snapshot.in_shards:
            self._write_shards(snapshot, targets, before, writer)
            return

        def write() -> None:
            before()
            if self._engine.is_main:  # False on rank 0 of another replica of TorchFTStrategy, which writes nothing
                _write_full(snapshot, targets, writer)

        processes = Processes() if alone else self._engine.processes
        processes.on_main_rank(write, f"write {_names(targets)}")

    def _write_shards(
        self,
        snapshot: Snapshot,
        targets: list[SaveTarget],
        before: Callable[[], None],
        writer: AsyncWriter | None,
    ) -> None:
        """Write a sharded checkpoint in the four steps that are described above. Collective."""
        # Both are filled by `begin`, and so only on the main rank. They are lists of this method and not results of
        # `begin`, whose result is sent to all ranks, and so that `finally` closes drafts also if `begin` fails.
        drafts: list[Draft] = []
        main_contents: list[Contents] = []
        names = _names(targets)

        def begin() -> list[Path]:
            before()
            contents = plan_share(snapshot, 0)
            main_contents.append(contents)
            for target in targets:
                draft = Draft(target.path, must_be_new=target.must_be_new)
                drafts.append(draft)
                draft.make_folders(contents)
            return [draft.folder for draft in drafts]

        try:
            folders = self._engine.processes.on_main_rank(begin, f"write {names}")
            contents = self._agree(partial(self._prepare, snapshot, main_contents, folders, writer), names)
            if not self._engine.is_main:
                for target, folder in zip(targets, folders, strict=True):
                    self._run(writer, target, partial(self._save_group().write_share, folder, contents))
            publish = partial(self._publish, contents, targets, drafts, writer)
            self._engine.processes.on_main_rank(publish, f"write {names}")
        finally:
            for draft in drafts:  # `_publish` has removed the others
                draft.close()

    def hurry(self) -> None:
        """Make saves in progress wait at most 10 s for other ranks, which may have ended because the run failed."""
        if self._group is not None:
            self._group.hurry(_GRACE_S)

    def _save_group(self) -> SaveGroup:
        """Return the group of the engine's current processes. The first call on each rank connects to the store."""
        processes = self._engine.processes
        if self._group is None or self._processes is not processes:
            self._processes = processes
            self._group = SaveGroup(
                processes.own_store("save"),
                rank=processes.rank,
                world_size=processes.world_size,
                timeout_s=processes.timeout.total_seconds(),
            )
        return self._group

    def _prepare(
        self, snapshot: Snapshot, main_contents: list[Contents], folders: list[Path], writer: AsyncWriter | None
    ) -> Contents:
        """Plan the files of this rank's shards. Copy the shards if they are written asynchronously."""
        if self._writer is not None:
            self._writer.join()  # its thread uses the connection of the group
        if main_contents:  # on the main rank, `begin` has planned them
            contents = main_contents[0]
        else:
            contents = plan_share(snapshot, self._engine.processes.rank)
        for folder in folders:
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder}, which rank 0 has created, does not exist here. Store checkpoints on a file system that "
                    "all nodes share, or let rank 0 write full checkpoints (state_dict_type='full')."
                )
        self._save_group()  # connect now, so that an error is raised on every rank
        if writer is not None:
            writer.stage(contents)
        return contents

    def _agree(self, prepare: Callable[[], Contents], names: str) -> Contents:
        """Return the result of `prepare`. If `prepare` fails on any rank, raise an error on every rank."""
        problem: Exception | None = None
        contents: Contents | None = None
        try:
            contents = prepare()
        except Exception as error:  # noqa: BLE001  # the other ranks wait for this one
            problem = error
        reports = self._engine.processes.gather_object(
            None if problem is None else f"{type(problem).__name__}: {problem}"
        )
        if problem is not None:
            raise problem
        for rank, text in enumerate(reports):
            if text is not None:
                raise CheckpointError(f"rank {rank} could not write {names}: {text}")
        assert contents is not None  # otherwise there was a problem
        return contents

    def _publish(
        self, contents: Contents, targets: list[SaveTarget], drafts: list[Draft], writer: AsyncWriter | None
    ) -> None:
        """Write the main rank's shards and publish the checkpoints, immediately or with the asynchronous writer."""
        for target in targets:
            # From now on, `write` closes the draft, in another thread with an asynchronous writer.
            draft = drafts.pop(0)
            contents_of_target = replace(contents, metrics=plain_metrics(target.metrics))
            write = partial(self._save_group().write_and_publish, draft, contents_of_target)
            try:
                self._run(writer, target, write)
            except BaseException:
                draft.close()
                raise

    def _run(self, writer: AsyncWriter | None, target: SaveTarget, write: Callable[..., None]) -> None:
        """Call `write` and then `target.then`, immediately or in the asynchronous writer's thread."""
        then = target.then if self._engine.is_main else None
        if writer is not None:
            writer.start(target.path, write, then=then)
            return
        write()
        if then is not None:
            then(target.path)


def _write_full(snapshot: Snapshot, targets: list[SaveTarget], writer: AsyncWriter | None) -> None:
    """Write a full checkpoint to each target. The writer copies the state once, and writes the copy several times."""
    for number, target in enumerate(targets):
        snapshot_of_target = replace(snapshot, metrics=target.metrics)
        if writer is None:
            target.then(write_checkpoint(target.path, snapshot_of_target, must_be_new=target.must_be_new))
        elif number == 0:
            writer.submit(target.path, snapshot_of_target, then=target.then, must_be_new=target.must_be_new)
        else:
            writer.submit_again(target.path, metrics=target.metrics, then=target.then, must_be_new=target.must_be_new)


def _names(targets: list[SaveTarget]) -> str:
    return ", ".join(str(target.path) for target in targets)
