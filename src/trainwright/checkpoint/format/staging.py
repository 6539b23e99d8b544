"""The hidden folders beside checkpoints, and how what a crash left of them is put right.

A hidden name is `.{name}.{role}-{16 hex digits}`: `tmp` is being written, `old` steps aside for a newer one of the
same name, `del` is being deleted. Only the instant between two renames leaves an `old` without its successor; readers
then take it, and `clean_stale` puts it back.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from trainwright.checkpoint.disk.durable import fault_point, hidden, rename
from trainwright.checkpoint.format.layout import MANIFEST, RUN_INDEX, TOP_LEVEL
from trainwright.core.host.folders import is_held
from trainwright.core.names.hidden_names import split_hidden


def remove_folder(folder: Path) -> None:
    """Delete a checkpoint folder so that no half of it is ever visible: it is hidden by a rename first."""
    doomed = hidden(folder, "del") if split_hidden(folder.name) is None else folder
    if doomed != folder:
        rename(folder, doomed)
    shutil.rmtree(doomed)
    fault_point("delete", doomed)


def stepped_aside(path: Path) -> Path | None:
    """Return the sealed checkpoint that a crash left hidden while it was being replaced; None if `path` exists."""
    if os.path.lexists(path) or not path.parent.is_dir():
        return None
    found = [
        entry
        for entry in path.parent.iterdir()
        if split_hidden(entry.name) == (path.name, "old") and (entry / MANIFEST).is_file()
    ]
    return max(found, key=lambda entry: entry.stat().st_mtime_ns, default=None)


def clean_stale(folder: Path | str) -> list[Path]:
    """Remove the hidden folders of crashed writers and deletions in `folder`.

    A checkpoint that was moved aside and never replaced gets its own name back. A hidden folder is deleted only if its
    name has our form, it holds nothing but parts of a checkpoint, no living process holds it, and it is not a link.
    Call it on one process, before writing. Returns the hidden paths that it removed.
    """
    folder = Path(folder)
    gone: list[Path] = []
    if not folder.is_dir():
        return gone
    for entry in sorted(folder.iterdir()):
        split = split_hidden(entry.name)
        if split is None or entry.is_symlink():
            continue
        name, role = split
        if entry.is_file() and name == RUN_INDEX:
            entry.unlink()
        elif entry.is_dir() and {child.name for child in entry.iterdir()} <= TOP_LEVEL and not is_held(entry):
            if role == "old" and stepped_aside(folder / name) == entry:
                rename(entry, folder / name)
            else:
                shutil.rmtree(entry)
        else:
            continue
        gone.append(entry)
    return gone
