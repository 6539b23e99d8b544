"""Finding, verifying and reading checkpoints. Nothing here ever unpickles, and nothing partial passes for whole."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from trainwright.checkpoint.codec import FindPieces
from trainwright.checkpoint.hashing import HashFiles, hash_files
from trainwright.checkpoint.layout import (
    MANIFEST,
    MAX_MANIFEST_BYTES,
    MODEL_FOLDER,
    MODEL_STEM,
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
from trainwright.checkpoint.piece_files import RANK_STEM, PieceFiles
from trainwright.checkpoint.staging import stepped_aside
from trainwright.checkpoint.trees import read_tree
from trainwright.checkpoint.upgrade import NewerFormatError, upgraded
from trainwright.checkpoint.writer import PROGRESS, Snapshot
from trainwright.core.errors import CheckpointError, TrainwrightWarning, nearest
from trainwright.core.hidden_names import split_hidden
from trainwright.core.tree import map_tensors

# What becomes of the wish for a checkpoint that turns out to be damaged: an error, or the newest one that is whole.
OnDamaged = Literal["error", "fall_back"]


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
    near = [found.path.name for found in find_checkpoints(path.parent) if not _problems(found, hash_files=None)]
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
    return _problems(FoundCheckpoint(folder, manifest), hash_files=hash_files if hashes else None, parts=parts)


def _problems(
    found: FoundCheckpoint, *, hash_files: HashFiles | None = hash_files, parts: Iterable[str] | None = None
) -> list[str]:
    wanted = set(found.manifest.parts if parts is None else parts)
    listed = [
        (name, relative, entry)
        for name, part in found.manifest.parts.items()
        if name in wanted
        for relative, entry in part.files.items()
    ]
    flaws = [_file_problem(found.path, relative, entry) for _, relative, entry in listed]
    if hash_files is not None:
        sound = [i for i, flaw in enumerate(flaws) if flaw is None]
        hashes = hash_files([inside(found.path, listed[i][1], MANIFEST) for i in sound])
        for i, found_hash in zip(sound, hashes, strict=True):
            _, relative, entry = listed[i]
            if found_hash != entry.xxh3_128:
                flaws[i] = f"{relative} has changed: its hash is not the one in {MANIFEST}"
    return [f"{name}: {flaw}" for (name, _, _), flaw in zip(listed, flaws, strict=True) if flaw is not None]


def _file_problem(folder: Path, relative: str, entry: FileEntry) -> str | None:
    try:
        path = inside(folder, relative, MANIFEST)
    except CheckpointError as error:
        return str(error)
    if not path.exists():
        return f"{relative} is missing"
    if not path.is_file():
        return f"{relative} is not a file"
    size = path.stat().st_size
    return None if size == entry.size else f"{relative} has {size} bytes, expected {entry.size}"


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
        copy_model: see `read_model`; False leaves the model's and the optimizers' tensors mapped to the files, or to
            be read when they are used where they lie in pieces (`SavedTensor`), for a caller that copies them into a
            module and an optimizer and then drops them.

    Raises:
        FileNotFoundError: nothing is at `path`.
        CheckpointError: a plain file is at `path`; a part is missing or damaged (it is named); a name in `parts` or
            `allow_missing` is unknown.
    """
    folder = _locate(Path(path))
    manifest = _manifest(folder)
    found = FoundCheckpoint(folder, manifest)
    wanted = _wanted(found, parts, allow_missing)
    missing, flaw = _examine(found, wanted, allow_missing, hash_files if verify else None)
    if flaw is not None:
        raise CheckpointError(flaw)
    if missing:
        warnings.warn(
            f"{folder} has no {', '.join(missing)} part; going on without.",
            TrainwrightWarning,
            stacklevel=2,
        )
    snapshot = Snapshot(
        metrics=dict(manifest.metrics),
        world_size=manifest.topology.get("world_size", 1),
        kind=manifest.kind,
        missing=tuple(missing),
    )
    trees = _read_parts(found, [name for name in wanted if name not in missing], device, copy_model)
    _fill(snapshot, upgraded(trees, manifest.format_version), folder)
    return snapshot


def check_checkpoint(
    path: Path | str,
    *,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    hash_files: HashFiles = hash_files,
) -> Manifest:
    """Hash the files of a checkpoint's parts, as `read_checkpoint` does before it reads them, and read no part.

    Takes the same arguments and raises the same errors as `read_checkpoint`, which may read what passed with
    `verify=False`. One process does this for all: it reads every byte of the parts, or has `hash_files` do it.

    Returns:
        The manifest.
    """
    folder = _locate(Path(path))
    found = FoundCheckpoint(folder, _manifest(folder))
    _, flaw = _examine(found, _wanted(found, parts, allow_missing), allow_missing, hash_files)
    if flaw is not None:
        raise CheckpointError(flaw)
    return found.manifest


def _wanted(found: FoundCheckpoint, parts: Sequence[str] | None, allow_missing: Sequence[str]) -> tuple[str, ...]:
    """Return the parts to read: `parts`, or all that the checkpoint's kind has."""
    wanted = tuple(PARTS[found.manifest.kind] if parts is None else parts)
    for name in (*wanted, *allow_missing):
        if name not in PARTS["full"]:
            raise CheckpointError(f"no checkpoint has a part {name!r}. Parts are: {', '.join(PARTS['full'])}.")
    return wanted


def _examine(
    found: FoundCheckpoint, wanted: Sequence[str], allow_missing: Sequence[str], hash_files: HashFiles | None
) -> tuple[list[str], str | None]:
    """Return which wanted parts are absent and may be, and what makes the checkpoint unusable; None: nothing does."""
    folder, manifest = found.path, found.manifest
    missing = [name for name in wanted if _is_absent(folder, manifest, name)]
    lost = [name for name in missing if name not in allow_missing and _is_required(manifest, name)]
    if lost:
        return missing, _about_lost(folder, manifest, lost)
    problems = _problems(found, hash_files=hash_files, parts=[name for name in wanted if name not in missing])
    if problems:
        return missing, (
            f"{folder} is damaged: {'; '.join(problems)}. Use another checkpoint; newest_valid finds the "
            "latest whole one."
        )
    return missing, None


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


def _read_parts(
    found: FoundCheckpoint, present: Sequence[str], device: torch.device | str, copy: bool
) -> dict[str, Any]:
    """Return part → tree, as the format of the checkpoint has it."""
    folder, parts = found.path, found.manifest.parts
    trees: dict[str, Any] = {}
    pieces = {name: find_pieces(found, name, copy=copy) for name in ("optimizer", "model") if name in present}
    if "trainer" in present:
        trees["trainer"] = read_tree(folder, TRAINER_STEM)
    if "optimizer" in present:
        stems = numbered(parts["optimizer"].files, OPTIMIZER_FOLDER, "optimizer")
        trees["optimizer"] = [read_tree(folder, stem, copy=copy, pieces=pieces["optimizer"]) for stem in stems]
    if "rng" in present:
        trees["rng"] = [read_tree(folder, stem) for stem in numbered(parts["rng"].files, RNG_FOLDER, "rank")]
    if "model" in present and f"{MODEL_STEM}.json" in parts["model"].files:
        trees["model"] = _read_model_in_pieces(folder, pieces["model"], device, copy)
    elif "model" in present:
        sealed = {relative.removeprefix(f"{MODEL_FOLDER}/") for relative in parts["model"].files}
        trees["model"] = read_model(folder / MODEL_FOLDER, device, copy=copy, files=sealed)
    return trees


def _read_model_in_pieces(folder: Path, pieces: FindPieces | None, device: torch.device | str, copy: bool) -> Any:
    weights = read_tree(folder, MODEL_STEM, copy=copy, pieces=pieces)
    if not isinstance(weights, dict):
        raise CheckpointError(f"{folder / MODEL_STEM}.json holds a {type(weights).__name__}, expected a dictionary.")
    if torch.device(device).type == "cpu":
        return weights
    return map_tensors(functools.cache(lambda tensor: tensor.to(device)), weights)  # tied ones stay one


def find_pieces(found: FoundCheckpoint, part: str, *, copy: bool) -> FindPieces | None:
    """Return how the tensors of a part that lie in pieces are found by name; None if it has none.

    Args:
        found: the checkpoint.
        part: `"model"` or `"optimizer"`.
        copy: put tensors together in memory; False: they are read when they are used (see `SavedTensor`).

    Raises:
        CheckpointError: an index of pieces is damaged.
    """
    files, folder = found.manifest.parts[part].files, {"model": MODEL_FOLDER, "optimizer": OPTIMIZER_FOLDER}[part]
    if f"{folder}/{RANK_STEM}-00000.json" not in files:
        return None
    pieces = PieceFiles(found.path, folder, files)

    @functools.cache  # weights that are tied stay one tensor
    def find(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        tensor = pieces.find(name, shape, dtype)
        return tensor.load() if copy else tensor

    return find


def _fill(snapshot: Snapshot, trees: dict[str, Any], folder: Path) -> None:
    if "trainer" in trees:
        tree = trees["trainer"]
        if not isinstance(tree, dict) or not isinstance(tree.get(PROGRESS), dict):
            raise CheckpointError(f"{folder / TRAINER_STEM}.json holds no {PROGRESS!r}; it is damaged or not ours.")
        snapshot.state = tree.pop(PROGRESS)
        snapshot.trainer = tree
    snapshot.optimizers = trees.get("optimizer", [])
    snapshot.rng = trees.get("rng", [])
    snapshot.model = trees.get("model")


def find_checkpoints(folder: Path | str) -> list[FoundCheckpoint]:
    """Return the checkpoints in `folder` (not below it), by step and then by time of writing.

    Only manifests are read; a folder without a readable one is left out. A checkpoint that a crash left hidden while
    it was being replaced counts. A folder that does not exist has none.
    """
    found = [item for _, item in _scan(Path(folder)) if isinstance(item, FoundCheckpoint)]
    return sorted(found, key=lambda item: (item.manifest.step, item.manifest.created, item.path.name))


def _scan(folder: Path) -> Iterator[tuple[Path, FoundCheckpoint | Exception]]:
    """Yield each checkpoint in `folder`, or what is wrong with what looks like one, with its path."""
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
                yield entry, FoundCheckpoint(entry, _manifest(entry))
            except (CheckpointError, OSError) as error:
                yield entry, error


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
    """Return the checkpoint in `folder` that was written last among those whose files match their manifest, or None.

    It goes by the time of writing, not by the step: a run that was started anew in the folder of an older, longer one
    continues its own. Reads every file of the candidates, newest first, until one is whole;
    `read_checkpoint(..., verify=False)` need not read them again.

    Args:
        folder: where checkpoints lie; it need not exist.
        kind: `"full"` passes over checkpoints that cannot be resumed.
        parts, allow_missing: as in `read_checkpoint`: what must be whole.
        earlier_than: only those that were written before this checkpoint of the folder, which is not among them; all
            others if its manifest cannot be read and does not tell its time.
        on_damaged: `"error"` raises instead of passing over a damaged checkpoint.
        hash_files: reads the files, all sound ones of a candidate at once.

    Warns:
        TrainwrightWarning: a damaged checkpoint was passed over; says what is wrong with it.

    Raises:
        NewerFormatError: a checkpoint of a newer format lies there, which may well be the newest.
        CheckpointError: a damaged one was met and `on_damaged="error"`.
    """
    found: list[FoundCheckpoint] = []
    before: str | None = None
    for path, item in _scan(Path(folder)):
        if isinstance(item, NewerFormatError):
            raise item
        if earlier_than is not None and path.resolve() == earlier_than.resolve():
            before = item.manifest.created if isinstance(item, FoundCheckpoint) else None
        elif isinstance(item, Exception):
            _pass_over(f"a damaged checkpoint: {item}", on_damaged)
        else:
            found.append(item)
    if before is not None:
        found = [item for item in found if item.manifest.created < before]
    order = sorted(found, key=lambda item: (item.manifest.created, item.manifest.step, item.path.name))
    for item in reversed(order):
        if (kind is not None and item.manifest.kind != kind) or _is_listed_itself(item.path):
            continue
        _, flaw = _examine(item, _wanted(item, parts, allow_missing), allow_missing, hash_files)
        if flaw is None:
            return item.path
        _pass_over(f"the damaged checkpoint {item.path}: {flaw}", on_damaged)
    return None


def _is_listed_itself(path: Path) -> bool:
    """Tell whether `path` is a link to its neighbour, such as `last`: that one is a candidate, and hashed once."""
    return path.is_symlink() and path.resolve().parent == path.parent.resolve()


def _pass_over(what: str, on_damaged: OnDamaged) -> None:
    if on_damaged == "error":
        raise CheckpointError(f"{what} To have it passed over, ask for on_damaged='fall_back'.")
    warnings.warn(f"passing over {what}", TrainwrightWarning, stacklevel=3)


def whole_checkpoint(
    path: Path | str,
    *,
    kind: Kind | None = None,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    on_damaged: OnDamaged = "error",
    hash_files: HashFiles = hash_files,
) -> Path:
    """Return `path` once its files have been compared with its manifest, or what may be used in its place.

    Args:
        path: the checkpoint folder.
        kind: `"full"` passes over replacements that cannot be resumed; `path` itself is not asked for its kind.
        parts, allow_missing: as in `read_checkpoint`.
        hash_files: as in `newest_valid`.
        on_damaged: `"fall_back"`: if it is damaged, return the newest valid one of the same folder that was written
            earlier; one whose manifest does not even tell its time gives way to the newest of all.

    Warns:
        TrainwrightWarning: another one than `path` is returned; names both and says what is wrong.

    Raises:
        FileNotFoundError: nothing is at `path`.
        NewerFormatError: it is of a newer format, which is no damage.
        CheckpointError: it is damaged, and there is nothing to fall back to or no wish to.
    """
    path = Path(path)
    try:
        check_checkpoint(path, parts=parts, allow_missing=allow_missing, hash_files=hash_files)
        return path
    except NewerFormatError:
        raise
    except CheckpointError as error:
        if on_damaged == "error" or not path.is_dir():
            raise
        flaw = error
    true_path = path.resolve()  # the neighbours of a link's target are the run's checkpoints
    found = newest_valid(
        true_path.parent,
        kind=kind,
        parts=parts,
        allow_missing=allow_missing,
        earlier_than=true_path,
        hash_files=hash_files,
    )
    if found is None:
        raise CheckpointError(f"{flaw} No earlier one in {true_path.parent} is whole.") from flaw
    warnings.warn(f"{flaw} Falling back to {found}.", TrainwrightWarning, stacklevel=2)
    return found
