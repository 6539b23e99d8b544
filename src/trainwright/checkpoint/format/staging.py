"""The hidden folders beside checkpoints, and their cleanup after a crash.

A hidden name is `.{name}.{role}-{16 hex digits}`. A folder with the role `tmp` is being written, one with `old` is
being replaced by a newer checkpoint of the same name, and one with `del` is being deleted. A crash between the two
renames of a replacement leaves an `old` folder without the newer checkpoint. Readers then use the `old` folder, and
`clean_stale` restores its name.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainwright.checkpoint.disk.durable import fault_point, hidden, rename
from trainwright.checkpoint.format.layout import EARLIER_RUN_INDEX, MANIFEST, RUN_INDEX, TOP_LEVEL
from trainwright.core.host.folders import is_in_use, lock_folder
from trainwright.core.names.hidden_names import split_hidden


def remove_folder(folder: Path) -> None:
    """Rename a checkpoint folder to a hidden name, then delete it. Readers thus never find an incomplete checkpoint.

    A folder that has a hidden name is deleted without a rename.
    """
    doomed = folder
    if split_hidden(folder.name) is None:
        doomed = hidden(folder, "del")
        rename(folder, doomed)
    shutil.rmtree(doomed)
    fault_point("delete", doomed)


def replaced_checkpoint(path: Path) -> Path | None:
    """Return the folder of the checkpoint that was `path` before its replacement crashed.

    Returns None if `path` exists, or no folder with the role `old` is complete.
    """
    if os.path.lexists(path) or not path.parent.is_dir():
        return None
    replaced = []
    for entry in path.parent.iterdir():
        if split_hidden(entry.name) == (path.name, "old") and (entry / MANIFEST).is_file():
            replaced.append(entry)
    # Several crashes may have left several. The newest one is used.
    return max(replaced, key=lambda entry: entry.stat().st_mtime_ns, default=None)


def clean_stale(folder: Path | str) -> list[Path]:
    """Remove the hidden folders that crashed writes and deletions of checkpoints left in `folder`.

    A checkpoint whose replacement crashed gets its name back. A hidden folder is deleted only if its name is
    `.{name}.{role}-{16 hex digits}`, it contains only entries of a checkpoint, no running process has locked it, and it
    is not a link.

    Call this function on one process, before writing. Returns the hidden paths that were deleted or renamed.
    """
    folder = Path(folder)
    cleaned: list[Path] = []
    if not folder.is_dir():
        return cleaned
    for entry in sorted(folder.iterdir()):
        split = split_hidden(entry.name)
        if split is None or entry.is_symlink():
            continue
        name, role = split
        if entry.is_file() and name in (RUN_INDEX, EARLIER_RUN_INDEX):
            # `RunIndex` writes a new index into a hidden file. Without the lock, it may be one that another run is
            # writing now.
            with lock_folder(folder):
                entry.unlink(missing_ok=True)
        elif not _is_abandoned(entry):
            continue
        elif role == "old" and replaced_checkpoint(folder / name) == entry:
            rename(entry, folder / name)
        else:
            shutil.rmtree(entry)
        cleaned.append(entry)
    return cleaned


def _is_abandoned(path: Path) -> bool:
    """Return whether a path is a folder that no process has locked, and contains only entries of a checkpoint."""
    if not path.is_dir():
        return False
    return {child.name for child in path.iterdir()} <= TOP_LEVEL and not is_in_use(path)
