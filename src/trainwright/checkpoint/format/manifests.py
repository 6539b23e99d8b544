"""Search for checkpoint folders, and comparison of their files with their manifests. Only manifests are parsed here."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import xxhash

from trainwright.checkpoint.disk.durable import CHUNK_BYTES, FileEntry
from trainwright.checkpoint.disk.untrusted import inside, read_bytes, reading, shortened
from trainwright.checkpoint.format.layout import MANIFEST, MAX_MANIFEST_BYTES, TRAINER_STEM, Manifest
from trainwright.checkpoint.format.staging import replaced_checkpoint
from trainwright.core.errors import CheckpointError, nearest
from trainwright.core.names.hidden_names import split_hidden

HashFiles = Callable[[Sequence[Path]], list[str]]
"""A function with the arguments and result of `hash_files`, which may divide the work among processes."""


def hash_file(path: Path) -> str:
    """Return the XXH3 128-bit hash of a file in hexadecimal. Reads the file in chunks."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the result of `hash_file` for each file, in order."""
    return [hash_file(path) for path in paths]


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint folder and its manifest. The other files in the folder have not been verified."""

    path: Path
    manifest: Manifest


OpenResult = tuple[Path, FoundCheckpoint | Exception]  # a folder, and the checkpoint in it or the error of opening it


def read_manifest(path: Path | str) -> Manifest:
    """Return the manifest of the checkpoint folder `path`. Reads nothing else.

    Raises:
        FileNotFoundError: `path` does not exist. The message lists the checkpoints in the parent folder of `path`.
        CheckpointError: `path` is a file, or the manifest is missing, damaged or of a newer format.
    """
    return open_checkpoint(path).manifest


def open_checkpoint(path: Path | str | FoundCheckpoint) -> FoundCheckpoint:
    """Read a checkpoint's manifest, and return it with the path. A `FoundCheckpoint` is returned unchanged.

    Raises the errors of `read_manifest`.
    """
    if isinstance(path, FoundCheckpoint):
        return path
    folder = _locate(Path(path))
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is not a checkpoint, or its save did not finish.")
    inside(folder, MANIFEST, str(folder))
    data = read_bytes(file, max_bytes=MAX_MANIFEST_BYTES)
    return FoundCheckpoint(folder, Manifest.from_bytes(data, str(file)))


def _locate(path: Path) -> Path:
    """Return the folder of the checkpoint `path`. After a crash, it is a hidden folder (see `replaced_checkpoint`).

    Raises the errors of `read_manifest` if the folder does not exist.
    """
    with reading(path):  # the name may be invalid
        if path.is_dir():
            return path
        if path.exists():
            raise CheckpointError(_not_a_folder(path))
        aside = replaced_checkpoint(path)
    if aside is not None:
        return aside
    names = [found.path.name for found in find_checkpoints(path.parent) if not problems_of(found, hash_files=None)]
    listed = f" Checkpoints in {path.parent}: {', '.join(names)}.{nearest(path.name, names)}" if names else ""
    raise FileNotFoundError(f"there is no checkpoint {str(path)!r}.{listed}")


def _not_a_folder(path: Path) -> str:
    if path.suffix == ".safetensors":
        return (
            f"{path} is a file of weights, and a checkpoint is a folder. Load it with "
            "safetensors.torch.load_file and task.load_state_dict."
        )
    return (
        f"{path} is a single file, and a checkpoint is a folder with a {MANIFEST}. Files such as .ckpt, .pt, .pth and "
        ".bin are pickles, which can run any code when they are loaded. Convert it with "
        f"`trainwright checkpoint convert {shlex.quote(str(path))} FOLDER`, which reads such files without running "
        "code from them."
    )


def verify(path: Path | str, *, hashes: bool = True, parts: Iterable[str] | None = None) -> list[str]:
    """Compare a checkpoint with its manifest. Return a list of error messages, which is empty for a valid checkpoint.

    Files that the manifest does not list are ignored.

    Args:
        path: the checkpoint folder.
        hashes: compare the hash of every file, too. False compares only names and sizes of files.
        parts: the parts to compare. Default: all.

    Raises:
        FileNotFoundError: `path` does not exist.
    """
    try:
        found = open_checkpoint(path)
    except CheckpointError as error:
        return [str(error)]
    return problems_of(found, hash_files=hash_files if hashes else None, parts=parts)


def problems_of(
    found: FoundCheckpoint, *, hash_files: HashFiles | None = hash_files, parts: Iterable[str] | None = None
) -> list[str]:
    """Return messages about files of `parts` that differ from the manifest.

    `hash_files=None` compares only names and sizes. `parts=None` compares all parts.
    """
    wanted = set(found.manifest.parts if parts is None else parts)
    files = []
    for name, part in found.manifest.parts.items():
        if name in wanted:
            for path, entry in part.files.items():
                files.append(_ListedFile(name, path, entry, _file_problem(found.path, path, entry)))
    if hash_files is not None:
        # Only files of the right size, in one call, which may divide the work among processes.
        to_hash = [file for file in files if file.problem is None]
        try:
            hashes = hash_files([inside(found.path, file.path, MANIFEST) for file in to_hash])
        except OSError as error:  # a read error of the disk
            return [f"its files cannot be read: {shortened(error)}"]
        for file, digest in zip(to_hash, hashes, strict=True):
            if digest != file.entry.xxh3_128:
                file.problem = f"{file.path} has changed: its hash is not the one in {MANIFEST}"
    return [f"{file.part}: {file.problem}" for file in files if file.problem is not None]


@dataclass(slots=True)
class _ListedFile:
    """A file that the manifest lists, with the name of its part."""

    part: str
    path: str  # relative to the checkpoint folder
    entry: FileEntry
    problem: str | None  # how the file differs from its entry, or None


def _file_problem(folder: Path, relative: str, entry: FileEntry) -> str | None:
    """Return how a file differs from its entry except for the hash, or None."""
    try:
        path = inside(folder, relative, MANIFEST)
        with reading(path):
            if not path.exists():
                return f"{relative} is missing"
            if not path.is_file():
                return f"{relative} is not a file"
            size = path.stat().st_size
    except CheckpointError as error:
        return str(error)
    if size != entry.size:
        return f"{relative} has {size} bytes, expected {entry.size}"
    return None


def find_checkpoints(folder: Path | str) -> list[FoundCheckpoint]:
    """Return the checkpoints directly in `folder`, by step and then by time of writing.

    Only manifests are read. Folders without a readable manifest are skipped. A checkpoint in a hidden folder is
    included if a crash interrupted its replacement. If `folder` does not exist, the list is empty.
    """
    found = [item for _, item in scan(Path(folder)) if isinstance(item, FoundCheckpoint)]
    return sorted(found, key=lambda item: (item.manifest.step, item.manifest.created, item.path.name))


def scan(folder: Path) -> Iterator[OpenResult]:
    """Yield each checkpoint folder in `folder` (with a manifest or `trainer.json`), and the checkpoint or its error."""
    if not folder.is_dir():
        return
    for entry in sorted(folder.iterdir()):
        if entry.name.startswith("."):
            # Hidden folders are unfinished, except for a checkpoint whose replacement crashed (see `staging`).
            split = split_hidden(entry.name)
            if split is None:  # another hidden folder
                continue
            name, _role = split
            if replaced_checkpoint(folder / name) != entry:
                continue
        # With `trainer.json` alone the manifest is lost, which is an error instead of no checkpoint. In a folder that
        # this user cannot read, such as lost+found, `os.path.exists` is False, and `Path.exists` raises an error.
        is_candidate = os.path.exists(entry / MANIFEST) or os.path.exists(entry / f"{TRAINER_STEM}.json")
        if entry.is_dir() and is_candidate:
            yield open_or_error(entry)


def open_or_error(path: Path) -> OpenResult:
    """Return `path` and the checkpoint in it, or the error of opening the checkpoint."""
    try:
        return path, open_checkpoint(path)
    except (CheckpointError, OSError) as error:
        return path, error
