"""Saves of the states of a Trainer or of a user-written loop, by the main rank or by all ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

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
        then: Called on the main rank with `path` after publication.
        must_be_new: See `SaveRequest`.
    """

    path: Path
    metrics: dict[str, float]
    then: Callable[[Path], None]
    must_be_new: bool = False


class StateWriter:
    """Writer of checkpoints, in the background if there is an asynchronous writer.

    The main rank writes a full checkpoint. Of a sharded checkpoint, each rank writes its shards, and the main rank also
    the unsharded values: first all ranks check that they can write. Then each rank writes on its own. The main rank
    waits until the others have reported their files, and publishes the checkpoint.

    Args:
        engine: The engine of the run.
        writer: This rank's asynchronous writer. None makes saves synchronous.
    """

    def __init__(self, engine: Engine, writer: AsyncWriter | None) -> None:
        self._engine = engine
        self._writer = writer
        self._group: SaveGroup | None = None
        self._processes: Any = None  # the processes of the group

    def save(
        self,
        snapshot: Snapshot,
        targets: list[SaveTarget],
        *,
        before: Callable[[], None],
        at_once: bool = False,
        alone: bool = False,
    ) -> None:
        """Write a snapshot to one or more checkpoints. Collective. After the return, the state may change.

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
        drafts: list[Draft] = []
        share: list[Contents] = []
        names = _names(targets)

        def begin() -> list[Path]:
            before()
            share.append(plan_share(snapshot, 0))
            for target in targets:
                drafts.append(Draft(target.path, must_be_new=target.must_be_new))
                drafts[-1].make_folders(share[0])
            return [draft.folder for draft in drafts]

        try:
            folders = self._engine.processes.on_main_rank(begin, f"write {names}")
            contents = self._agree(partial(self._prepare, snapshot, share, folders, writer), names)
            if not self._engine.is_main:
                for target, folder in zip(targets, folders, strict=True):
                    self._do(writer, target, partial(self._save_group().write_share, folder, contents))
            publish = partial(self._publish, contents, targets, drafts, writer)
            self._engine.processes.on_main_rank(publish, f"write {names}")
        finally:
            for draft in drafts:  # those that were not published
                draft.close()

    def hurry(self) -> None:
        """Make saves in progress wait at most 10 s for other ranks, which may have ended because the run failed."""
        if self._group is not None:
            self._group.hurry(_GRACE_S)

    def _save_group(self) -> SaveGroup:
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
        self, snapshot: Snapshot, share: list[Contents], folders: list[Path], writer: AsyncWriter | None
    ) -> Contents:
        """Plan the files of this rank's shards. Copy the shards if they are written asynchronously."""
        if self._writer is not None:
            self._writer.join()  # its thread uses the connection of the group
        contents = share[0] if share else plan_share(snapshot, self._engine.processes.rank)
        for folder in folders:
            if not folder.is_dir():
                raise CheckpointError(
                    f"{folder}, which rank 0 has created, does not exist here. Store checkpoints on a file system that "
                    "all nodes share, or let rank 0 write full checkpoints (state_dict_type='full')."
                )
        self._save_group()
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
            draft = drafts.pop(0)
            write = partial(
                self._save_group().write_and_publish, draft, replace(contents, metrics=plain_metrics(target.metrics))
            )
            try:
                self._do(writer, target, write)
            except BaseException:
                draft.close()
                raise

    def _do(self, writer: AsyncWriter | None, target: SaveTarget, write: Callable[..., None]) -> None:
        then = target.then if self._engine.is_main else None
        if writer is not None:
            writer.start(target.path, write, then=then)
            return
        write()
        if then is not None:
            then(target.path)


def _write_full(snapshot: Snapshot, targets: list[SaveTarget], writer: AsyncWriter | None) -> None:
    for number, target in enumerate(targets):
        own = replace(snapshot, metrics=target.metrics)
        if writer is None:
            target.then(write_checkpoint(target.path, own, must_be_new=target.must_be_new))
        elif number == 0:
            writer.submit(target.path, own, then=target.then, must_be_new=target.must_be_new)
        else:
            writer.submit_again(target.path, metrics=target.metrics, then=target.then, must_be_new=target.must_be_new)


def _names(targets: list[SaveTarget]) -> str:
    return ", ".join(str(target.path) for target in targets)
