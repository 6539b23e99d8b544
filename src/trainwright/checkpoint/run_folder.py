"""A run's checkpoint folder: its index, the names in it, and the newest valid checkpoint."""

from __future__ import annotations

import contextlib
import itertools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from trainwright.checkpoint.disk.durable import hidden, make_folder
from trainwright.checkpoint.format.layout import Kind, NewerFormatError, go_on_from
from trainwright.checkpoint.format.manifests import (
    FoundCheckpoint,
    HashFiles,
    LookedAt,
    find_checkpoints,
    hash_files,
    look_at,
    open_checkpoint,
    scan,
)
from trainwright.checkpoint.format.reader import check_checkpoint
from trainwright.checkpoint.format.staging import clean_stale
from trainwright.checkpoint.retention import IndexEntry, RunIndex
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.names.hidden_names import names_in

# What happens when the requested checkpoint is damaged: an error, or the newest valid one before it is used.
OnDamaged = Literal["error", "fall_back"]


class RunFolder:
    """The folder of a run's checkpoints; it need not exist. Made for each use: it stores nothing that another process
    may change on the disk.
    """

    def __init__(self, path: Path, *, run: str = "") -> None:
        self.path = path
        self._run = run

    @property
    def index(self) -> RunIndex:
        """The list of this run's checkpoints, as it is on the disk now."""
        return RunIndex(self.path, run=self._run)

    def prepare(self) -> None:
        """Delete what killed runs have left, and date later checkpoints of this process after all that are there."""
        clean_stale(self.path)
        for found in find_checkpoints(self.path):  # of a run whose clock may have been ahead
            go_on_from(found.manifest.created)

    def listed(self, wanted: Callable[[IndexEntry], bool]) -> list[LookedAt]:
        """Return those of this run's checkpoints that are wanted, opened, with their paths."""
        return [look_at(self.path / entry.name) for entry in self.index.entries() if wanted(entry)]

    def newest(
        self,
        candidates: Sequence[LookedAt] | None = None,
        *,
        accepts: Callable[[FoundCheckpoint], bool] = lambda found: True,
        parts: Sequence[str] | None = None,
        allow_missing: Sequence[str] = (),
        on_damaged: OnDamaged = "fall_back",
        hash_files: HashFiles = hash_files,
    ) -> FoundCheckpoint | None:
        """Return the valid checkpoint that was written last, or None.

        The time of writing decides, not the step: a run that was started from scratch in the folder of an older, longer
        one resumes its own. Reads every file of the candidates, newest first, until one is valid.

        Args:
            candidates: checkpoints, and errors of those that could not be opened. Default: all in the folder, of every
                run.
            accepts: called with each, newest first; one for which it raises a `CheckpointError` is damaged.
            parts, allow_missing, hash_files: see `check_checkpoint`.
            on_damaged: `"error"` raises for a damaged checkpoint. Default: `"fall_back"`, which skips it with a
                warning.

        Raises:
            NewerFormatError: a candidate is of a newer format, and may well be the newest.
        """
        opened: list[FoundCheckpoint] = []
        for path, item in scan(self.path) if candidates is None else candidates:
            if isinstance(item, NewerFormatError):
                raise item
            if isinstance(item, FoundCheckpoint):
                opened.append(item)
            else:
                _pass_over(path, item, on_damaged)
        opened.sort(key=lambda found: (found.manifest.created, found.manifest.step, found.path.name), reverse=True)
        for found in opened:
            try:
                if _is_listed_itself(found.path) or not accepts(found):
                    continue
                check_checkpoint(found, parts=parts, allow_missing=allow_missing, hash_files=hash_files)
                return found
            except CheckpointError as error:
                _pass_over(found.path, error, on_damaged)
        return None

    def newest_before(self, path: Path) -> tuple[list[LookedAt], Callable[[FoundCheckpoint], bool]]:
        """Return the folder's other checkpoints, and a function: whether one of them was written before that at `path`.

        All others count as earlier if the time of writing at `path` is unreadable.
        """
        true_path = os.path.realpath(path)
        looked_at = list(scan(self.path))
        own = [item for place, item in looked_at if os.path.realpath(place) == true_path]
        before = next((item.manifest.created for item in own if isinstance(item, FoundCheckpoint)), None)
        others = [(place, item) for place, item in looked_at if os.path.realpath(place) != true_path]
        return others, lambda found: before is None or found.manifest.created < before

    def find(self, step: int) -> Path | None:
        """Return the full checkpoint of `step` that this run has published in the folder, or None."""
        names = [entry.name for entry in self.index.entries() if entry.step == step and entry.kind == "full"]
        return self.path / names[-1] if names else None

    def enter(self, found: FoundCheckpoint) -> None:
        """Enter a checkpoint of this run that it was killed before it could enter."""
        index, entry = self.index, (found.path.name, found.manifest.created)
        if all((known.name, known.created) != entry for known in index.entries()):
            index.add(self.path / found.path.name)

    def written_after(self, path: Path) -> set[str]:
        """Return when those of this run's checkpoints were written that are younger than the one at `path`."""
        created = open_checkpoint(path).manifest.created
        return {entry.created for entry in self.index.entries() if entry.created > created}

    def free_name(self, name: str) -> str:
        """Return `name`, or with a version appended if another run's checkpoint has that name."""
        taken = names_in(self.path) - {entry.name for entry in self.index.entries()}
        versions = (f"{name}-v{number}" for number in itertools.count(1))
        return next(free for free in itertools.chain((name,), versions) if free not in taken)

    def reserve(self, name: str) -> Path | None:
        """Keep other runs that share the folder from using a name before its checkpoint is written. Returns a
        placeholder to remove later; None if it cannot be made.
        """
        placeholder = hidden(self.path / name, "tmp")
        with contextlib.suppress(OSError):  # the save itself will say what is wrong with the folder
            make_folder(self.path, sync=False)
            placeholder.mkdir()
            return placeholder
        return None

    def link(self, name: str, target: str) -> None:
        """Point the relative symbolic link `name` at a checkpoint beside it, in one step."""
        link = self.path / name
        if link.is_dir() and not link.is_symlink():
            raise CheckpointError(
                f"{link} is a checkpoint of its own, written when save_last was True. Move it away, or keep "
                "save_last=True."
            )
        partial = link.with_name(f".{name}.link")
        partial.unlink(missing_ok=True)
        os.symlink(target, partial, target_is_directory=True)
        os.replace(partial, link)


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

    `read_checkpoint(..., verify=False)` need not read its files again.

    Args:
        folder: of checkpoints; it need not exist.
        kind: `"full"` skips checkpoints that cannot be resumed.
        earlier_than: a checkpoint of the folder: only those that were written before it count.
        parts, allow_missing, on_damaged, hash_files: see `RunFolder.newest`, also for warnings and errors.
    """
    place = RunFolder(Path(folder))
    candidates, is_earlier = (None, None) if earlier_than is None else place.newest_before(earlier_than)
    found = place.newest(
        candidates,
        accepts=lambda found: kind in (None, found.manifest.kind) and (is_earlier is None or is_earlier(found)),
        parts=parts,
        allow_missing=allow_missing,
        on_damaged=on_damaged,
        hash_files=hash_files,
    )
    return None if found is None else found.path


def whole_checkpoint(
    path: Path | str,
    *,
    kind: Kind | None = None,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    on_damaged: OnDamaged = "error",
    hash_files: HashFiles = hash_files,
) -> Path:
    """Return `path` if its files match its manifest, or a replacement; see `open_valid`."""
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
    """Open a checkpoint and compare its files with its manifest.

    Args:
        path: the checkpoint folder, or a checkpoint that is open.
        kind: `"full"` skips replacements that cannot be resumed; the kind of `path` itself is not checked.
        parts, allow_missing, hash_files: see `check_checkpoint`.
        on_damaged: `"fall_back"` returns the newest valid checkpoint of the same folder that was written earlier, with
            a `TrainwrightWarning` that names both. If the time of writing of `path` is unreadable, any other counts.

    Raises:
        FileNotFoundError: nothing is at `path`.
        NewerFormatError: it is of a newer format, which is not damage.
        CheckpointError: it is damaged, and there is no replacement or none is requested.
    """
    try:
        found = open_checkpoint(path)
        check_checkpoint(found, parts=parts, allow_missing=allow_missing, hash_files=hash_files)
        return found
    except NewerFormatError:
        raise
    except CheckpointError as error:
        path = path.path if isinstance(path, FoundCheckpoint) else path
        if on_damaged == "error" or not path.is_dir():
            raise
        flaw = error
    true_path = Path(os.path.realpath(path))  # the neighbours of a link's target are the run's checkpoints
    folder = RunFolder(true_path.parent)
    candidates, is_earlier = folder.newest_before(true_path)
    instead = folder.newest(
        candidates,
        accepts=lambda found: kind in (None, found.manifest.kind) and is_earlier(found),
        parts=parts,
        allow_missing=allow_missing,
        hash_files=hash_files,
    )
    if instead is None:
        raise CheckpointError(f"{flaw} No earlier one in {true_path.parent} is whole.") from flaw
    warnings.warn(f"{flaw} Falling back to {instead.path}.", TrainwrightWarning, stacklevel=2)
    return instead


def _is_listed_itself(path: Path) -> bool:
    """Tell whether `path` is a link to its neighbour, such as `last`: that one is a candidate, and hashed once."""
    return path.is_symlink() and os.path.dirname(os.path.realpath(path)) == os.path.realpath(path.parent)


def _pass_over(path: Path, flaw: Exception, on_damaged: OnDamaged) -> None:
    what = f"the damaged checkpoint {path}: {flaw}"
    if on_damaged == "error":
        raise CheckpointError(f"{what} To have it passed over, ask for on_damaged='fall_back'.")
    warnings.warn(f"passing over {what}", TrainwrightWarning, stacklevel=3)
