"""Writing a checkpoint: beside its place, synced, sealed, published by one rename."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.durable import held, hidden, make_folder, rename, sync_folder, write_file
from trainwright.checkpoint.layout import (
    MANIFEST,
    MODEL_FOLDER,
    OPTIMIZER_FOLDER,
    PARTS,
    RNG_FOLDER,
    TRAINER_STEM,
    Kind,
    Manifest,
    Part,
)
from trainwright.checkpoint.model import MAX_SHARD_BYTES, plan_model
from trainwright.checkpoint.planned_file import PlannedFile, write_files
from trainwright.checkpoint.staging import remove_folder
from trainwright.checkpoint.trees import plan_tree
from trainwright.core.errors import CheckpointError

_FOLDERS = {"rng": RNG_FOLDER, "optimizer": OPTIMIZER_FOLDER, "model": MODEL_FOLDER}
PROGRESS = "progress"  # the key of trainer.json under which `Snapshot.state` is stored


@dataclass
class Snapshot:
    """What a checkpoint holds, in memory.

    Attributes:
        state: `TrainState.to_dict()`.
        model: the task's state dict by plain names; None: this checkpoint has no model part.
        optimizers: one tree of `named_optimizer_state` each.
        trainer: anything that `codec.encode` takes, by name: schedulers, scaler, data, callbacks, loggers,
            `hyper_parameters`, ... The name `"progress"` is taken.
        rng: one tree per rank; a full checkpoint needs `world_size` of them.
        metrics: the latest values, also in the manifest.
        world_size: processes of the run.
        kind: `"weights"` leaves optimizers and RNG out.
        missing: after reading: the parts that were asked for, absent, and allowed to be.
    """

    state: dict[str, Any] = field(default_factory=dict)
    model: Mapping[str, Any] | None = None
    optimizers: list[Any] = field(default_factory=list)
    trainer: dict[str, Any] = field(default_factory=dict)
    rng: list[Any] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    world_size: int = 1
    kind: Kind = "full"
    missing: tuple[str, ...] = ()


@dataclass(slots=True)
class Contents:
    """A snapshot encoded into files: what is left to do is to write bytes.

    Attributes:
        parts: part → its files by paths relative to the checkpoint folder.
        step, epoch, kind, world_size, metrics: for the manifest.
    """

    parts: dict[str, list[PlannedFile]]
    step: int
    epoch: int
    kind: Kind
    world_size: int
    metrics: dict[str, float]

    @property
    def files(self) -> list[PlannedFile]:
        """All files, in the order in which they are written."""
        return [file for files in self.parts.values() for file in files]


def plan_checkpoint(snapshot: Snapshot, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Contents:
    """Encode everything of a snapshot that is no tensor, and lay out its files. Nothing is copied or written.

    The tensors in the result are the snapshot's own.

    Raises:
        CheckpointError: something in the snapshot cannot be saved (its place is named), or a full snapshot lacks RNG
            states.
    """
    _check_snapshot(snapshot)
    # The small parts come first: a disk that is full or read-only shows before gigabytes are written.
    parts = {"trainer": plan_tree(TRAINER_STEM, {PROGRESS: snapshot.state, **snapshot.trainer})}
    if snapshot.kind == "full":
        parts["rng"] = _plan_trees(RNG_FOLDER, "rank", snapshot.rng)
        parts["optimizer"] = _plan_trees(OPTIMIZER_FOLDER, "optimizer", snapshot.optimizers)
    if snapshot.model is not None:
        parts["model"] = plan_model(snapshot.model, max_shard_bytes=max_shard_bytes)
        for file in parts["model"]:
            file.path = f"{MODEL_FOLDER}/{file.path}"
    return Contents(
        parts=parts,
        step=int(snapshot.state.get("step", 0)),
        epoch=int(snapshot.state.get("epoch", 0)),
        kind=snapshot.kind,
        world_size=snapshot.world_size,
        metrics=plain_metrics(snapshot.metrics),
    )


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as Python floats, those that are tensors too (which waits for their device)."""
    return {name: float(value) for name, value in metrics.items()}


def write_checkpoint(path: Path | str, snapshot: Snapshot, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Path:
    """Write `snapshot` as the checkpoint folder `path`; when this returns it is on the disk.

    Whatever happens on the way, even a kill or a power failure, `path` holds what it held before or all of the new
    checkpoint. An error leaves no temporary folder. Call it on one process only; it blocks on the disk and, for
    device tensors, on the device, and takes no part in any collective. The snapshot's tensors must not change
    meanwhile (`AsyncWriter` copies them first).

    Args:
        path: the folder to make; missing parents are made too. A checkpoint there is replaced.
        snapshot: what to write.
        max_shard_bytes: see `plan_model`.

    Returns:
        `path`.

    Raises:
        CheckpointError: something in the snapshot cannot be saved (its place is named), a full snapshot lacks RNG
            states, or `path` holds something that is no checkpoint.
        OSError: the disk is full, not writable, ...
    """
    check_target(Path(path))
    return write_contents(path, plan_checkpoint(snapshot, max_shard_bytes=max_shard_bytes))


def write_contents(path: Path | str, contents: Contents, *, threads: bool = True) -> Path:
    """Write what `plan_checkpoint` returned; the rest is as in `write_checkpoint`.

    Args:
        path: the folder to make.
        contents: its files.
        threads: hash in a second thread; False where no thread may be started any more, and where nobody waits.
    """
    path = Path(path)
    check_target(path)
    make_folder(path.parent)
    temporary = hidden(path, "tmp")
    try:
        make_folder(temporary)
        with held(temporary):
            _write_parts(temporary, contents, threads)
            _publish(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            remove_folder(temporary)
        raise
    return path


def check_target(path: Path) -> None:
    """Check that a checkpoint may be written as `path`.

    Raises:
        CheckpointError: it has no name or a hidden one, or something that is no checkpoint is there.
    """
    if not path.name or path.name.startswith("."):
        raise CheckpointError(f"{str(path)!r} is no name for a checkpoint: names must not be empty or hidden.")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path} exists and is no folder; it is not replaced. Choose another name.")
    if path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} exists and is no checkpoint (it has no {MANIFEST}); it is not replaced. Choose another name."
        )


def _check_snapshot(snapshot: Snapshot) -> None:
    if snapshot.kind not in PARTS:
        raise CheckpointError(f"kind={snapshot.kind!r}, expected one of {', '.join(PARTS)}.")
    if PROGRESS in snapshot.trainer:
        raise CheckpointError(f"trainer[{PROGRESS!r}]: this name is taken by the progress itself. Choose another.")
    if snapshot.kind == "full" and len(snapshot.rng) != snapshot.world_size:
        raise CheckpointError(
            f"a full checkpoint of world_size={snapshot.world_size} got {len(snapshot.rng)} RNG states; it needs one "
            "from each rank, or a resumed run would differ. Gather them, or write kind='weights'."
        )


def _plan_trees(folder: str, stem: str, trees: list[Any]) -> list[PlannedFile]:
    files: list[PlannedFile] = []
    for number, tree in enumerate(trees):
        try:
            files += plan_tree(f"{folder}/{stem}-{number:05d}", tree)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}[{number}].{error}") from error
    return files


def _write_parts(folder: Path, contents: Contents, threads: bool) -> None:
    folders = [folder / _FOLDERS[name] for name in contents.parts if name in _FOLDERS]
    for sub in folders:
        make_folder(sub)
    entries = write_files(folder, contents.files, threads=threads)
    for sub in folders:
        sync_folder(sub)
    parts = {name: Part({file.path: entries[file.path] for file in files}) for name, files in contents.parts.items()}
    manifest = Manifest(
        step=contents.step,
        epoch=contents.epoch,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="microseconds"),
        kind=contents.kind,
        parts=parts,
        topology={"world_size": contents.world_size},
        versions=_versions(),
        metrics=contents.metrics,
    )
    # Everything that the manifest vouches for is on the disk before the manifest is.
    sync_folder(folder)
    write_file(folder / MANIFEST, manifest.to_bytes())
    sync_folder(folder)


def _versions() -> dict[str, str]:
    try:
        own = importlib.metadata.version("trainwright")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"  # run from a checkout
    return {"trainwright": own, "torch": str(torch.__version__), "python": platform.python_version()}


def _publish(temporary: Path, path: Path) -> None:
    if not (path.is_dir() and any(path.iterdir())):
        rename(temporary, path)
        return
    aside = hidden(path, "old")
    with held(path):
        try:
            rename(path, aside)
            rename(temporary, path)
        except BaseException:
            # Not `rename`: what must not be lost is put back first, and whether it is synced matters less.
            if aside.exists() and not path.exists():
                os.replace(aside, path)
            raise
        finally:
            # Only when the new one has taken its place.
            if aside.exists() and path.exists():
                _discard(aside, path)


def _discard(aside: Path, path: Path) -> None:
    # Under the role `del` no reader ever takes it for a checkpoint again.
    doomed = hidden(path, "del")
    try:
        rename(aside, doomed)
        remove_folder(doomed)
    except BaseException:
        shutil.rmtree(doomed, ignore_errors=True)
        raise
