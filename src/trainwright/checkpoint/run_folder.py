"""A run's checkpoint folder: index, names of checkpoints, and the newest valid checkpoint.

Several runs may share a folder. Methods that name "this run" use its index (`RunIndex`); all other methods use every
checkpoint in the folder. "Newest" is always by the time of writing, not by the step.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from trainwright.checkpoint.disk.durable import hidden, make_folder
from trainwright.checkpoint.format.layout import Kind, NewerFormatError, order_after
from trainwright.checkpoint.format.manifests import (
    FoundCheckpoint,
    HashFiles,
    OpenResult,
    find_checkpoints,
    hash_files,
    open_checkpoint,
    open_or_error,
    scan,
)
from trainwright.checkpoint.format.reader import check_checkpoint
from trainwright.checkpoint.format.staging import clean_stale
from trainwright.checkpoint.retention import IndexEntry, RunIndex
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.names.hidden_names import names_in

# The behavior for a damaged checkpoint: raise an error, or use the newest valid one before it.
OnDamaged = Literal["error", "fall_back"]


class RunFolder:
    """The folder of a run's checkpoints, which need not exist. Nothing that is read from the disk is cached.

    Args:
        path: the folder.
        run: the run's id; see `RunIndex`.
    """

    def __init__(self, path: Path, *, run: str = "") -> None:
        self.path = path
        self._run = run

    @property
    def index(self) -> RunIndex:
        """The index of this run's checkpoints, read from the disk."""
        return RunIndex(self.path, run=self._run)

    def prepare(self) -> None:
        """Call `clean_stale`. Give new checkpoints of this process later times than all checkpoints in the folder."""
        clean_stale(self.path)
        # Their clock may have been ahead. Without a later time, a new checkpoint would not be the newest.
        for found in find_checkpoints(self.path):
            order_after(found.manifest.created)

    def listed(self, wanted: Callable[[IndexEntry], bool]) -> list[OpenResult]:
        """Open the checkpoints of this run for whose index entries `wanted` returns True."""
        return [open_or_error(self.path / entry.name) for entry in self.index.entries() if wanted(entry)]

    def newest(
        self,
        candidates: Sequence[OpenResult] | None = None,
        *,
        accepts: Callable[[FoundCheckpoint], bool] = lambda found: True,
        parts: Sequence[str] | None = None,
        allow_missing: Sequence[str] = (),
        on_damaged: OnDamaged = "fall_back",
        hash_files: HashFiles = hash_files,
    ) -> FoundCheckpoint | None:
        """Return the valid checkpoint that was written last, or None.

        The time of writing decides, not the step, so that a new run in the folder of an older, longer run resumes from
        its own checkpoints. Reads all files of the candidates, newest first, until a candidate is valid.

        Args:
            candidates: checkpoints, and errors of checkpoints that could not be opened. Default: all checkpoints in the
                folder, of every run.
            accepts: function that returns whether a candidate may be used, called for the newest candidate first. If it
                raises a `CheckpointError`, the candidate counts as damaged.
            parts, allow_missing, hash_files: see `check_checkpoint`.
            on_damaged: `"error"` raises for a damaged candidate. Default: `"fall_back"`, which skips it with a warning.

        Raises:
            CheckpointError: a candidate is damaged, and `on_damaged` is `"error"`.
            NewerFormatError: a candidate has a newer format. It may be the newest checkpoint.
        """
        opened: list[FoundCheckpoint] = []
        # Damaged manifests are reported first: their times of writing are unknown.
        for path, item in scan(self.path) if candidates is None else candidates:
            if isinstance(item, NewerFormatError):
                raise item
            if isinstance(item, FoundCheckpoint):
                opened.append(item)
            else:
                _skip_damaged(path, item, on_damaged)
        opened.sort(key=lambda found: (found.manifest.created, found.manifest.step, found.path.name), reverse=True)
        for found in opened:
            try:
                # The target of such a link is a candidate itself.
                if _is_link_within_folder(found.path) or not accepts(found):
                    continue
                check_checkpoint(found, parts=parts, allow_missing=allow_missing, hash_files=hash_files)
                return found
            except CheckpointError as error:
                _skip_damaged(found.path, error, on_damaged)
        return None

    def older_than(self, path: Path) -> list[OpenResult]:
        """Return the folder's checkpoints, and errors of opening others, that may be older than the checkpoint `path`.

        If the time of writing of `path` is unreadable, these are all except `path` itself. Checkpoints that cannot be
        opened are included, because their times of writing are unknown.
        """
        true_path = os.path.realpath(path)
        others: list[OpenResult] = []
        created = None  # time of writing of `path`
        for other, item in scan(self.path):
            if os.path.realpath(other) != true_path:
                others.append((other, item))
            elif isinstance(item, FoundCheckpoint):
                created = item.manifest.created
        if created is None:
            return others
        older = []
        for other, item in others:
            may_be_older = not isinstance(item, FoundCheckpoint) or item.manifest.created < created
            if may_be_older:
                older.append((other, item))
        return older

    def find(self, step: int) -> Path | None:
        """Return the path of this run's newest full checkpoint of `step`, or None."""
        names = [entry.name for entry in self.index.entries() if entry.step == step and entry.kind == "full"]
        return self.path / names[-1] if names else None  # entries of one step are sorted by time of writing

    def enter(self, found: FoundCheckpoint) -> None:
        """Add a checkpoint of this run to the index if it is missing, because the run was killed before adding it."""
        index = self.index
        listed = {(entry.name, entry.created) for entry in index.entries()}
        if (found.path.name, found.manifest.created) not in listed:
            index.add(self.path / found.path.name)

    def written_after(self, path: Path) -> set[str]:
        """Return the time of writing of each of this run's checkpoints that is newer than the checkpoint `path`."""
        created = open_checkpoint(path).manifest.created
        return {entry.created for entry in self.index.entries() if entry.created > created}

    def free_name(self, name: str) -> str:
        """Return `name` or, if another run has a checkpoint of this name, the first free of `name-v1`, `name-v2`, …

        A checkpoint in this run's index does not take its name, so that the next save of this name replaces it. Names
        that other runs have reserved or are writing are taken.
        """
        taken = names_in(self.path) - {entry.name for entry in self.index.entries()}
        free_name = name
        version = 0
        while free_name in taken:
            version += 1
            free_name = f"{name}-v{version}"
        return free_name

    def reserve(self, name: str) -> Path | None:
        """Reserve a checkpoint's name until the checkpoint is written, because several runs may share the folder.

        Returns a placeholder folder to remove later, or None if it cannot be created. `free_name` of other runs then
        does not return the name.
        """
        placeholder = hidden(self.path / name, "tmp")
        try:
            make_folder(self.path, sync=False)
            placeholder.mkdir()
        except OSError:
            return None  # the save will report the problem
        return placeholder

    def link(self, name: str, target: str) -> None:
        """Atomically create or replace the relative symbolic link `name` to the checkpoint `target` beside it.

        Raises a CheckpointError if `name` is a checkpoint instead of a link.
        """
        link = self.path / name
        if link.is_dir() and not link.is_symlink():
            raise CheckpointError(
                f"{link} is a checkpoint, written with save_last=True, and is not replaced by a link. Move it away, or "
                "set save_last=True."
            )
        # `os.symlink` cannot replace a link, so that a new link is renamed.
        new_link = link.with_name(f".{name}.link")
        new_link.unlink(missing_ok=True)  # of a process that was killed here
        os.symlink(target, new_link, target_is_directory=True)
        os.replace(new_link, link)


def newest_valid(
    folder: Path | str,
    *,
    kind: Kind | None = None,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    earlier_than: Path | None = None,
    on_damaged: OnDamaged = "fall_back",
    hash_files: HashFiles = hash_files,
) -> Path | None:
    """Return the valid checkpoint in `folder` that was written last, or None.

    The files of the result have been verified, so that `read_checkpoint` may be called with `verify=False`.

    Args:
        folder: folder of the checkpoints. It need not exist.
        kind: `"full"` skips checkpoints that cannot be resumed. Default: None, which accepts any kind.
        earlier_than: a checkpoint in the folder. Only checkpoints that are older are accepted. Default: None.
        parts, allow_missing, on_damaged, hash_files: see `RunFolder.newest`, also for warnings and errors.
    """
    run_folder = RunFolder(Path(folder))
    newest = run_folder.newest(
        None if earlier_than is None else run_folder.older_than(earlier_than),
        accepts=lambda found: kind in (None, found.manifest.kind),
        parts=parts,
        allow_missing=allow_missing,
        on_damaged=on_damaged,
        hash_files=hash_files,
    )
    return None if newest is None else newest.path


def whole_checkpoint(
    path: Path | str,
    *,
    kind: Kind | None = None,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    on_damaged: OnDamaged = "error",
    hash_files: HashFiles = hash_files,
) -> Path:
    """Return the path of the result of `open_valid`, which has the same arguments and errors."""
    return open_valid(
        Path(path), kind=kind, parts=parts, allow_missing=allow_missing, on_damaged=on_damaged, hash_files=hash_files
    ).path


def open_valid(
    path: Path | FoundCheckpoint,
    *,
    kind: Kind | None = None,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    on_damaged: OnDamaged = "error",
    hash_files: HashFiles = hash_files,
) -> FoundCheckpoint:
    """Open a checkpoint, compare its files with its manifest and parse them.

    Args:
        path: the checkpoint folder, or an open checkpoint.
        kind: `"full"` excludes replacements that cannot be resumed. The kind of `path` itself is not checked.
        parts, allow_missing, hash_files: see `check_checkpoint`.
        on_damaged: `"fall_back"` replaces a damaged checkpoint by the newest valid older one in its folder, with a
            `TrainwrightWarning`. Default: `"error"`. If the time of writing of `path` is unreadable, all count as
            older.

    Raises:
        FileNotFoundError: `path` does not exist.
        NewerFormatError: the checkpoint has a newer format, which is not damage.
        CheckpointError: the checkpoint is damaged, and no replacement exists or is requested.
    """
    try:
        found = open_checkpoint(path)
        check_checkpoint(found, parts=parts, allow_missing=allow_missing, hash_files=hash_files)
        return found
    except NewerFormatError:
        raise
    except CheckpointError as error:
        damaged_folder = path.path if isinstance(path, FoundCheckpoint) else path
        if on_damaged == "error" or not damaged_folder.is_dir():
            raise
        damage = error
    true_path = Path(os.path.realpath(damaged_folder))  # the run's checkpoints are beside a link's target
    folder = RunFolder(true_path.parent)
    replacement = folder.newest(
        folder.older_than(true_path),
        accepts=lambda found: kind in (None, found.manifest.kind),
        parts=parts,
        allow_missing=allow_missing,
        hash_files=hash_files,
    )
    if replacement is None:
        raise CheckpointError(f"{damage} No older checkpoint in {true_path.parent} is valid.") from damage
    warnings.warn(f"{damage} Falling back to {replacement.path}.", TrainwrightWarning, stacklevel=2)
    return replacement


def _is_link_within_folder(path: Path) -> bool:
    """Return whether `path` is a link to a checkpoint in the same folder, such as `last`."""
    return path.is_symlink() and os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def _skip_damaged(path: Path, damage: Exception, on_damaged: OnDamaged) -> None:
    """Warn of a damaged checkpoint that is skipped, or with `on_damaged="error"` raise a CheckpointError."""
    what = f"the damaged checkpoint {path}: {damage}"
    if on_damaged == "error":
        raise CheckpointError(f"{what} To skip it, set on_damaged='fall_back'.")
    warnings.warn(f"skipping {what}", TrainwrightWarning, stacklevel=3)
