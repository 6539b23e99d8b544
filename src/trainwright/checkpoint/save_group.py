"""Checkpoints that several ranks write together. Each rank writes its files, and rank 0 publishes the checkpoint.

1. Rank 0 creates a `Draft` and its folders. Its caller sends the folder's path to the other ranks.
2. Each rank writes its files into the folder. Each rank except 0 then stores a report under the key
   `{16 hex digits of the folder's name}/{rank}`: sizes and hashes of its files, or its error.
3. Rank 0 reads the reports, and deletes each one that it accepts. Then it writes the manifest and renames the folder.

The ranks exchange reports through the run's `torch.distributed.Store`, from any thread and without collectives.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from trainwright.checkpoint.disk.durable import FileEntry
from trainwright.checkpoint.disk.low_priority_thread import LowPriorityThread
from trainwright.checkpoint.disk.planned_file import write_files
from trainwright.checkpoint.disk.untrusted import check_relative
from trainwright.checkpoint.format.writer import Contents, Draft
from trainwright.core.errors import CheckpointError
from trainwright.core.names.hidden_names import split_hidden

# Pauses between two checks of the store: short at first, for ranks that report in milliseconds, then doubled.
_FIRST_PAUSE_S = 0.002
_LONGEST_PAUSE_S = 0.1


class Store(Protocol):
    """The methods of `torch.distributed.Store` that are used here. Only one thread at a time may use an object."""

    def set(self, key: str, value: str, /) -> Any:
        """Set a key."""

    def get(self, key: str, /) -> bytes:
        """Return the value of an existing key."""

    def check(self, keys: list[str], /) -> bool:
        """Return whether all keys exist."""

    def delete_key(self, key: str, /) -> bool:
        """Delete a key."""


class SaveGroup:
    """The ranks that write one checkpoint together.

    Args:
        store: the key-value store of the run.
        rank: rank of this process.
        world_size: number of ranks.
        timeout_s: seconds that rank 0 waits for other ranks after it has written its own files.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int, timeout_s: float) -> None:
        self._store = store
        self.rank = rank
        self.world_size = world_size
        self._timeout_s = timeout_s
        self._hurry_until_s: float | None = None  # value of `time.monotonic()`; None until `hurry` is called

    def hurry(self, seconds: float) -> None:
        """Limit rank 0's wait for other ranks to `seconds` from now, because ranks may have failed. Thread-safe."""
        self._hurry_until_s = time.monotonic() + seconds

    def write_share(self, folder: Path, contents: Contents, *, quiet: LowPriorityThread | None = None) -> None:
        """Write this rank's files into the draft's folder, which rank 0 created, and report them or an error to rank 0.

        Blocks until the files are synced. Call it on every rank except 0. Not collective. An error of writing is not
        raised here, but on rank 0. Raises a CheckpointError if the report cannot be sent. See `write_files` for
        `quiet`.
        """
        try:
            report: dict[str, Any] = {"files": _to_json(write_files(folder, contents.files, quiet=quiet))}
        except Exception as error:  # noqa: BLE001  # reported, so that rank 0 raises it and does not wait
            report = {"error": f"{type(error).__name__}: {error}"}
        try:
            self._store.set(_key(folder, self.rank), json.dumps(report))
        except Exception as error:
            raise CheckpointError(f"rank {self.rank} cannot report its files to rank 0: {error}") from error

    def write_and_publish(self, draft: Draft, contents: Contents, *, quiet: LowPriorityThread | None = None) -> None:
        """Write rank 0's files, wait for the reports of all other ranks, and publish the checkpoint. Not collective.

        The draft is closed, also after an error. See `write_files` for `quiet`.

        Raises:
            CheckpointError: another rank could not write, or did not report within the timeout (the message names the
                rank), or an error of `Draft.publish`.
            OSError: rank 0 could not write.
        """
        with draft:
            entries = draft.write(contents, quiet=quiet)
            entries |= self._collect(draft.folder)
            draft.publish(contents, entries)

    def _collect(self, folder: Path) -> dict[str, FileEntry]:
        """Wait for the reports of all other ranks. Return size and hash of these ranks' files by path."""
        entries: dict[str, FileEntry] = {}
        waiting = set(range(1, self.world_size))
        begun_s = time.monotonic()
        pause_s = _FIRST_PAUSE_S
        while waiting:
            for rank in sorted(waiting):
                key = _key(folder, rank)
                if self._store.check([key]):
                    entries |= _read_report(rank, self._store.get(key), folder)
                    self._store.delete_key(key)
                    waiting.discard(rank)
            if waiting:
                self._check_timeout(waiting, begun_s)
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return entries

    def _check_timeout(self, waiting: set[int], begun_s: float) -> None:
        """Raise an error if the ranks `waiting` have not reported in time. `begun_s` is when the wait began."""
        now_s = time.monotonic()
        if now_s > begun_s + self._timeout_s:
            limit = f"within {self._timeout_s:g} s (the strategy's timeout)"
        elif self._hurry_until_s is not None and now_s > self._hurry_until_s:
            limit = "before the run failed"
        else:
            return
        names = ", ".join(str(rank) for rank in sorted(waiting))
        raise CheckpointError(
            f"rank {names} of {self.world_size} did not report its files {limit}. It failed, or its disk is slow."
        )


def _key(folder: Path, rank: int) -> str:
    """Return the key of a rank's report about the files in a draft's folder."""
    assert split_hidden(folder.name) is not None  # its random digits are unique to this save
    return f"{folder.name.rpartition('-')[2]}/{rank}"


def _to_json(entries: Mapping[str, FileEntry]) -> dict[str, Any]:
    return {path: [entry.size, entry.xxh3_128] for path, entry in entries.items()}


def _read_report(rank: int, data: bytes, folder: Path) -> dict[str, FileEntry]:
    """Return the entries in a rank's report, after a check of the files. Raise the error in the report, if any."""
    report = json.loads(data)
    if "error" in report:
        raise CheckpointError(f"rank {rank} could not write its files: {report['error']}")
    entries = {}
    for path, (num_bytes, digest) in report["files"].items():
        check_relative(path, f"rank {rank}")
        entry = FileEntry(num_bytes, digest)
        entries[path] = entry
        # Rank 0 must see the file, too: each node may have its own disk at this path.
        try:
            size = (folder / path).stat().st_size
        except OSError:
            size = -1
        if size != entry.size:
            raise CheckpointError(
                f"rank {rank} wrote {path} with {entry.size} bytes, but rank 0 cannot find it. Put checkpoints on a "
                "file system that all nodes share, or set state_dict_type='full', with which rank 0 writes all files."
            )
    return entries
