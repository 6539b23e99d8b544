"""Finding, verifying and reading checkpoints. Nothing here ever unpickles, and nothing partial passes for whole."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from trainwright.checkpoint.durable import CHUNK_BYTES
from trainwright.checkpoint.layout import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    PARTS,
    RNG_FOLDER,
    TRAINER_STEM,
    FileEntry,
    Kind,
    Manifest,
    inside,
    numbered,
)
from trainwright.checkpoint.model import read_model
from trainwright.checkpoint.staging import split_hidden, stepped_aside
from trainwright.checkpoint.trees import read_tree
from trainwright.checkpoint.writer import PROGRESS, Snapshot
from trainwright.core.errors import CheckpointError, TrainwrightWarning, nearest


@dataclass(frozen=True, slots=True)
class FoundCheckpoint:
    """A checkpoint folder and what its manifest says; its files have not been verified."""

    path: Path
    manifest: Manifest


def read_manifest(path: Path | str) -> Manifest:
    """Return the manifest of the checkpoint folder `path`; reads nothing else.

    Raises:
        FileNotFoundError: nothing is there; the message lists the checkpoints nearby.
        CheckpointError: a plain file is there, the manifest is missing (the checkpoint was never finished), damaged,
            of a newer format, or names files outside the folder.
    """
    return _manifest(_locate(Path(path)))


def _manifest(folder: Path) -> Manifest:
    file = folder / MANIFEST
    if not file.is_file():
        raise CheckpointError(f"{folder} has no {MANIFEST}: it is no checkpoint, or one that was never finished.")
    inside(folder, MANIFEST, str(folder))
    with open(file, "rb") as handle:
        data = handle.read(MAX_MANIFEST_BYTES + 1)
    if len(data) > MAX_MANIFEST_BYTES:
        raise CheckpointError(f"{file} is longer than {MAX_MANIFEST_BYTES} bytes; it is not ours.")
    return Manifest.from_bytes(data, str(file))


def _locate(path: Path) -> Path:
    """Return the folder to read for `path`, which a crash may have left under a hidden name."""
    if path.is_dir():
        return path
    if path.exists():
        raise CheckpointError(_about_plain_file(path))
    aside = stepped_aside(path)
    if aside is not None:
        return aside
    near = [found.path.name for found in find_checkpoints(path.parent) if not _problems(found, hashes=False)]
    listed = f" Checkpoints in {path.parent}: {', '.join(near)}.{nearest(path.name, near)}" if near else ""
    raise FileNotFoundError(f"there is no checkpoint {path}.{listed}")


def _about_plain_file(path: Path) -> str:
    if path.suffix == ".safetensors":
        return (
            f"{path} is a file of bare weights, and a checkpoint is a folder. Load it with "
            "safetensors.torch.load_file and task.load_state_dict."
        )
    return (
        f"{path} is a single file, and a checkpoint is a folder with a {MANIFEST}. Files such as .ckpt, .pt, .pth and "
        ".bin are pickles: opening one can run any code, so this never does. Take it over with "
        "`trainwright checkpoint convert`, which reads such files without running anything in them."
    )


def verify(path: Path | str, *, hashes: bool = True, parts: Iterable[str] | None = None) -> list[str]:
    """Compare a checkpoint with its manifest and return what is wrong with it, in words; empty when nothing is.

    Files that the manifest does not list are ignored.

    Args:
        path: the checkpoint folder.
        hashes: read every file and compare its hash; False only looks for missing files and wrong sizes.
        parts: only these parts.

    Raises:
        FileNotFoundError: nothing is at `path`.
    """
    try:
        folder = _locate(Path(path))
        manifest = _manifest(folder)
    except CheckpointError as error:
        return [str(error)]
    return _problems(FoundCheckpoint(folder, manifest), hashes=hashes, parts=parts)


def _problems(found: FoundCheckpoint, *, hashes: bool = True, parts: Iterable[str] | None = None) -> list[str]:
    wanted = set(found.manifest.parts if parts is None else parts)
    return [
        f"{name}: {problem}"
        for name, part in found.manifest.parts.items()
        if name in wanted
        for relative, entry in part.files.items()
        if (problem := _file_problem(found.path, relative, entry, hashes))
    ]


def _file_problem(folder: Path, relative: str, entry: FileEntry, hashes: bool) -> str | None:
    try:
        path = inside(folder, relative, MANIFEST)
    except CheckpointError as error:
        return str(error)
    if not path.exists():
        return f"{relative} is missing"
    if not path.is_file():
        return f"{relative} is not a file"
    size = path.stat().st_size
    if size != entry.size:
        return f"{relative} has {size} bytes, expected {entry.size}"
    if hashes and hash_file(path) != entry.xxh3_128:
        return f"{relative} has changed: its hash is not the one in {MANIFEST}"
    return None


def hash_file(path: Path) -> str:
    """Return the XXH3 128-bit hash of a file in hexadecimal, reading it in pieces."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def read_checkpoint(
    path: Path | str,
    *,
    verify: bool = True,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    device: torch.device | str = "cpu",
    copy_model: bool = True,
) -> Snapshot:
    """Read a checkpoint, whole or in part.

    Args:
        path: the checkpoint folder.
        verify: hash the files of the parts first. Sizes and presence are always checked.
        parts: which of `"trainer"`, `"model"`, `"optimizer"`, `"rng"`; by default all that its kind has. The others
            stay empty in the result, without error.
        allow_missing: parts without which the caller can do, besides those that the manifest says are not required;
            those that are absent are named in `Snapshot.missing` and in a warning. A part that is there but damaged,
            be it that one of its files is gone, is an error all the same.
        device: where the model's tensors go; all others are on the CPU.
        copy_model: see `read_model`; False leaves the model's and the optimizers' tensors mapped to the files, for a
            caller that copies them into a module and an optimizer and then drops them.

    Raises:
        FileNotFoundError: nothing is at `path`.
        CheckpointError: a plain file is at `path`; a part is missing or damaged (it is named); a name in `parts` or
            `allow_missing` is unknown.
    """
    folder = _locate(Path(path))
    manifest = _manifest(folder)
    wanted = tuple(PARTS[manifest.kind] if parts is None else parts)
    for name in (*wanted, *allow_missing):
        if name not in PARTS["full"]:
            raise CheckpointError(f"no checkpoint has a part {name!r}. Parts are: {', '.join(PARTS['full'])}.")
    missing = [name for name in wanted if _is_absent(folder, manifest, name)]
    lost = [name for name in missing if name not in allow_missing and _is_required(manifest, name)]
    if lost:
        raise CheckpointError(_about_lost(folder, manifest, lost))
    if missing:
        warnings.warn(
            f"{folder} has no {', '.join(missing)} part; going on without.",
            TrainwrightWarning,
            stacklevel=2,
        )
    present = [name for name in wanted if name not in missing]
    problems = _problems(FoundCheckpoint(folder, manifest), hashes=verify, parts=present)
    if problems:
        raise CheckpointError(
            f"{folder} is damaged: {'; '.join(problems)}. Use another checkpoint; newest_valid finds the "
            "latest whole one."
        )
    snapshot = Snapshot(
        metrics=dict(manifest.metrics),
        world_size=manifest.topology.get("world_size", 1),
        kind=manifest.kind,
        missing=tuple(missing),
    )
    _read_parts(folder, manifest, present, snapshot, copy=copy_model)
    if "model" in present:
        snapshot.model = read_model(folder / MODEL_FOLDER, device, copy=copy_model)
    return snapshot


def _is_absent(folder: Path, manifest: Manifest, name: str) -> bool:
    """Tell whether a part is not listed, or all of its files are gone; some files gone is damage, not absence."""
    part = manifest.parts.get(name)
    if part is None:
        return True
    return bool(part.files) and not any(os.path.lexists(folder / file) for file in part.files)


def _is_required(manifest: Manifest, name: str) -> bool:
    part = manifest.parts.get(name)
    return part is None or part.required


def _about_lost(folder: Path, manifest: Manifest, lost: list[str]) -> str:
    reasons = []
    for name in lost:
        part = manifest.parts.get(name)
        if part is None:
            reasons.append(f"the part {name!r} is not in it (its kind is {manifest.kind!r})")
        else:
            reasons.append(f"the part {name!r} is missing: {', '.join(part.files)}")
    return (
        f"{folder} is incomplete: {'; '.join(reasons)}. Use another checkpoint, or pass allow_missing={lost!r} to go "
        "on without, knowing that the run will differ."
    )


def _read_parts(folder: Path, manifest: Manifest, present: Sequence[str], snapshot: Snapshot, *, copy: bool) -> None:
    if "trainer" in present:
        tree = read_tree(folder, TRAINER_STEM)
        if not isinstance(tree, dict) or not isinstance(tree.get(PROGRESS), dict):
            raise CheckpointError(f"{folder / TRAINER_STEM}.json holds no {PROGRESS!r}; it is damaged or not ours.")
        snapshot.state = tree.pop(PROGRESS)
        snapshot.trainer = tree
    if "optimizer" in present:
        stems = numbered(manifest.parts["optimizer"].files, OPTIMIZER_FOLDER, "optimizer")
        snapshot.optimizers = _trees(folder, stems, copy=copy)
    if "rng" in present:
        snapshot.rng = _trees(folder, numbered(manifest.parts["rng"].files, RNG_FOLDER, "rank"))


def _trees(folder: Path, stems: list[str], *, copy: bool = True) -> list[Any]:
    return [read_tree(folder, stem, copy=copy) for stem in stems]


def find_checkpoints(folder: Path | str) -> list[FoundCheckpoint]:
    """Return the checkpoints in `folder` (not below it), by step and then by time of writing.

    Only manifests are read; a folder without a readable one is left out. A checkpoint that a crash left hidden while
    it was being replaced counts. A folder that does not exist has none.
    """
    found = [item for item in _scan(Path(folder)) if isinstance(item, FoundCheckpoint)]
    return sorted(found, key=lambda item: (item.manifest.step, item.manifest.created, item.path.name))


def _scan(folder: Path) -> Iterator[FoundCheckpoint | str]:
    """Yield each checkpoint in `folder`, or what is wrong with what looks like one."""
    if not folder.is_dir():
        return
    for entry in sorted(folder.iterdir()):
        split = split_hidden(entry.name)
        if entry.name.startswith(".") and (split is None or stepped_aside(folder / split[0]) != entry):
            continue
        if not entry.is_dir():
            continue
        looks_ours = (entry / MANIFEST).exists() or (entry / f"{TRAINER_STEM}.json").exists()
        if looks_ours:
            try:
                yield FoundCheckpoint(entry, _manifest(entry))
            except (CheckpointError, OSError) as error:
                yield str(error)


def newest_valid(folder: Path | str, *, kind: Kind | None = None) -> Path | None:
    """Return the checkpoint in `folder` that was written last among those whose files match their manifest, or None.

    It goes by the time of writing, not by the step: a run that was started anew in the folder of an older, longer one
    continues its own. Reads every file of the candidates, newest first, until one is whole;
    `read_checkpoint(..., verify=False)` need not read them again.

    Args:
        folder: where checkpoints lie; it need not exist.
        kind: `"full"` passes over checkpoints that cannot be resumed.

    Warns:
        TrainwrightWarning: a damaged checkpoint was passed over; says what is wrong with it.
    """
    found: list[FoundCheckpoint] = []
    for item in _scan(Path(folder)):
        if isinstance(item, str):
            warnings.warn(f"passing over a damaged checkpoint: {item}", TrainwrightWarning, stacklevel=2)
        else:
            found.append(item)
    order = sorted(found, key=lambda item: (item.manifest.created, item.manifest.step, item.path.name))
    for item in reversed(order):
        if kind is not None and item.manifest.kind != kind:
            continue
        problems = _problems(item)
        if not problems:
            return item.path
        warnings.warn(
            f"passing over the damaged checkpoint {item.path}: {'; '.join(problems)}", TrainwrightWarning, stacklevel=2
        )
    return None
