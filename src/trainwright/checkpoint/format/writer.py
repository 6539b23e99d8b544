"""Writing of a checkpoint folder, in two steps.

`plan_checkpoint` (one process) or `plan_share` (each rank of a sharded checkpoint) encodes a snapshot into `Contents`.
A `Draft` then writes the files into a hidden folder and publishes the folder in this order, so that no crash leaves an
incomplete checkpoint under the final name:

1. Write and sync the files of all parts.
2. Sync the folders that contain the files.
3. Write and sync the manifest. A folder without a manifest is not a checkpoint.
4. Rename the hidden folder to the final name.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.metadata
import itertools
import os
import platform
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.disk.durable import (
    FileEntry,
    hidden,
    make_folder,
    rename,
    sync_folder,
    sync_new_folders,
    write_file,
)
from trainwright.checkpoint.disk.low_priority_thread import LowPriorityThread
from trainwright.checkpoint.disk.planned_file import PlannedFile, write_files
from trainwright.checkpoint.format.codec import plan_tree
from trainwright.checkpoint.format.layout import (
    MANIFEST,
    MODEL_FOLDER,
    MODEL_STEM,
    OPTIMIZER_FOLDER,
    PARTS,
    PLAIN_VERSION,
    PROGRESS,
    RNG_FOLDER,
    SHARDED_VERSION,
    TRAINER_STEM,
    Kind,
    Manifest,
    Part,
    Snapshot,
    next_moment,
)
from trainwright.checkpoint.format.model import MAX_SHARD_BYTES, plain_names, plan_model
from trainwright.checkpoint.format.regions import TensorShards
from trainwright.checkpoint.format.shard_files import plan_shards
from trainwright.checkpoint.format.staging import remove_folder
from trainwright.core.errors import CheckpointError
from trainwright.core.host.folders import mark_in_use

# The files of the part "trainer" are directly in the checkpoint folder.
_FOLDER_OF_PART = {"rng": RNG_FOLDER, "optimizer": OPTIMIZER_FOLDER, "model": MODEL_FOLDER}


@dataclass(slots=True)
class Contents:
    """A snapshot encoded into files, ready to be written.

    Attributes:
        parts: files of each part, with paths relative to the checkpoint folder. After `plan_share`, these are the files
            of one rank.
        step, epoch, kind, world_size, metrics, format_version: values for the manifest; see `Manifest`.
        extra: see `Snapshot`.
    """

    parts: dict[str, list[PlannedFile]]
    step: int
    epoch: int
    kind: Kind
    world_size: int
    metrics: dict[str, float]
    format_version: int = PLAIN_VERSION
    extra: Path | None = None

    @property
    def files(self) -> list[PlannedFile]:
        """The files of all parts, in the order in which they are written."""
        return list(itertools.chain.from_iterable(self.parts.values()))


def plan_checkpoint(snapshot: Snapshot, *, max_shard_bytes: int = MAX_SHARD_BYTES) -> Contents:
    """Plan the files of a snapshot, and encode all values except tensors. Copies and writes nothing.

    Raises:
        CheckpointError: a value cannot be saved (the message has its path), or a full snapshot lacks RNG states.
    """
    _check_snapshot(snapshot)
    # The small parts come first, so that a full or read-only disk fails before gigabytes are written.
    parts = _plan_small(snapshot)
    if snapshot.kind == "full":
        parts["optimizer"] = _plan_trees(OPTIMIZER_FOLDER, "optimizer", snapshot.optimizers)
    if snapshot.model is not None:
        parts["model"] = plan_model(snapshot.model, max_shard_bytes=max_shard_bytes)
        # Exports write the files of `plan_model` into other folders, so that its paths have no folder.
        for file in parts["model"]:
            file.path = f"{MODEL_FOLDER}/{file.path}"
    return _contents(snapshot, parts)


def plan_share(snapshot: Snapshot, rank: int) -> Contents:
    """Plan one rank's files of a sharded checkpoint. The files of rank 0 also contain all values that are not sharded.

    Call this function on every rank with the rank's snapshot. Not collective. Raises as `plan_checkpoint`.
    """
    _check_snapshot(snapshot)
    parts: dict[str, list[PlannedFile]] = {}
    if rank == 0:
        parts = _plan_small(snapshot)
    # Every rank encodes the trees, which adds the rank's shards to the dicts below. The tree files are the same on all
    # ranks, so that only rank 0 writes them.
    if snapshot.kind == "full":
        optimizer_shards: dict[str, TensorShards] = {}
        tree_files = _plan_trees(OPTIMIZER_FOLDER, "optimizer", snapshot.optimizers, optimizer_shards)
        parts["optimizer"] = plan_shards(OPTIMIZER_FOLDER, rank, optimizer_shards)
        if rank == 0:
            parts["optimizer"] = tree_files + parts["optimizer"]
    if snapshot.model is not None:
        model_shards: dict[str, TensorShards] = {}
        try:
            tree_files = plan_tree(MODEL_STEM, plain_names(snapshot.model), shards=model_shards)
        except CheckpointError as error:
            raise CheckpointError(f"model.{error}") from error
        parts["model"] = plan_shards(MODEL_FOLDER, rank, model_shards)
        if rank == 0:
            parts["model"] = tree_files + parts["model"]
    contents = _contents(snapshot, parts)
    contents.format_version = SHARDED_VERSION
    return contents


def _plan_small(snapshot: Snapshot) -> dict[str, list[PlannedFile]]:
    parts = {"trainer": plan_tree(TRAINER_STEM, {PROGRESS: snapshot.state, **snapshot.trainer})}
    if snapshot.kind == "full":
        parts["rng"] = _plan_trees(RNG_FOLDER, "rank", snapshot.rng)
    return parts


def _plan_trees(
    folder: str, stem: str, trees: list[Any], shards: dict[str, TensorShards] | None = None
) -> list[PlannedFile]:
    """Plan the files of numbered trees, such as `optimizer/optimizer-00000.json`. Add sharded tensors to `shards`."""
    files: list[PlannedFile] = []
    for number, tree in enumerate(trees):
        name = f"{stem}-{number:05d}"
        # A rank writes the shards of all trees of a part into one file, so their names need a prefix.
        root = "" if shards is None else name
        try:
            files += plan_tree(f"{folder}/{name}", tree, root=root, shards=shards)
        except CheckpointError as error:
            raise CheckpointError(f"{folder}[{number}].{error}") from error
    return files


def _contents(snapshot: Snapshot, parts: dict[str, list[PlannedFile]]) -> Contents:
    # `AsyncWriter` may copy the tensors of these files later; see `Snapshot.state_rests`.
    for file in parts.get("optimizer", ()):
        file.state_rests = snapshot.state_rests
    return Contents(
        parts=parts,
        step=int(snapshot.state.get("step", 0)),
        epoch=int(snapshot.state.get("epoch", 0)),
        kind=snapshot.kind,
        world_size=snapshot.world_size,
        metrics=plain_metrics(snapshot.metrics),
        extra=snapshot.extra,
    )


def plain_metrics(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as Python floats. Waits for the devices of metrics that are tensors."""
    return {name: float(value) for name, value in metrics.items()}


def write_checkpoint(
    path: Path | str, snapshot: Snapshot, *, max_shard_bytes: int = MAX_SHARD_BYTES, must_be_new: bool = False
) -> Path:
    """Write `snapshot` as the checkpoint folder `path`. Blocks until it is on the disk.

    After a kill or a power failure, `path` holds either the previous checkpoint or the complete new one. After an
    error, no temporary folder remains. Call this function on one process only. Not collective. Waits for the devices.
    The snapshot's tensors must not change until this function returns.

    Args:
        path: the folder to create, with missing parents. An existing checkpoint is replaced.
        snapshot: the content.
        max_shard_bytes: see `plan_model`.
        must_be_new: see `Draft`.

    Returns:
        `path`.

    Raises:
        CheckpointError: see `plan_checkpoint` and `Draft`.
        OSError: the disk is full or not writable, or another system error.
    """
    check_target(Path(path))
    return write_contents(path, plan_checkpoint(snapshot, max_shard_bytes=max_shard_bytes), must_be_new=must_be_new)


def write_contents(
    path: Path | str, contents: Contents, *, quiet: LowPriorityThread | None = None, must_be_new: bool = False
) -> Path:
    """Write the result of `plan_checkpoint`; see `write_checkpoint`, and `write_files` for `quiet`."""
    with Draft(path, must_be_new=must_be_new) as draft:
        entries = draft.write(contents, quiet=quiet)
        draft.publish(contents, entries)
    return draft.path


class Draft:
    """A checkpoint that is being written into a hidden folder beside the final path.

    This process locks the hidden folder, so that `clean_stale` of other processes does not delete it. At the end of the
    `with` block, the folder is deleted unless `publish` has renamed it.

    Args:
        path: the final folder. A CheckpointError is raised if it exists, is not empty and is not a checkpoint, or if
            its name is not valid.
        must_be_new: `publish` raises if `path` has a checkpoint. Default: False, which replaces this checkpoint.

    Attributes:
        folder: the hidden folder. Other ranks of a sharded checkpoint write their files into it, too.
    """

    def __init__(self, path: Path | str, *, must_be_new: bool = False) -> None:
        self.path = Path(path)
        self.must_be_new = must_be_new
        check_target(self.path)
        make_folder(self.path.parent, sync=False)
        self.folder = hidden(self.path, "tmp")
        self._lock = contextlib.ExitStack()  # holds the context of `mark_in_use` until `close`
        self._published = False  # True: the folder has its final name, and `close` must not delete anything
        try:
            make_folder(self.folder, sync=False)
            self._lock.enter_context(mark_in_use(self.folder))
        except BaseException:
            self.close()  # __exit__ is not called for errors of __init__
            raise

    def __enter__(self) -> Draft:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unlock the folder, and delete it unless it was published."""
        if not self._published:
            with contextlib.suppress(OSError):
                remove_folder(self.folder)
        self._lock.close()

    def make_folders(self, contents: Contents) -> None:
        """Create the folders for the files of `contents`."""
        for folder in self._part_folders(contents):
            make_folder(folder, sync=False)

    def write(self, contents: Contents, *, quiet: LowPriorityThread | None = None) -> dict[str, FileEntry]:
        """Write this process's files, and return their sizes and hashes by path. Blocks until the files are synced.

        `make_folders` is called first. See `write_files` for `quiet`.
        """
        self.make_folders(contents)
        return write_files(self.folder, contents.files, quiet=quiet)

    def publish(self, contents: Contents, entries: Mapping[str, FileEntry]) -> None:
        """Write the manifest and rename the folder to `path`.

        Args:
            contents: the files that this process has written, and the values for the manifest.
            entries: size and hash of every file in the folder, including files of other processes, by path.

        Raises:
            CheckpointError: `must_be_new` is True and `path` has a checkpoint, another run has written `path` since
                this process began to publish, or `contents.extra` has a file with the name of a checkpoint's file.
        """
        folders = self._part_folders(contents)
        if contents.extra is not None:
            folders += self._move_extra(contents.extra)
        # The files are synced already. Syncing a folder puts the names in it on the disk.
        sync_new_folders()
        for folder in folders:
            sync_folder(folder)
        manifest = Manifest(
            step=contents.step,
            epoch=contents.epoch,
            created=next_moment(),
            kind=contents.kind,
            parts=_listed_parts(contents, entries),
            topology={"world_size": contents.world_size},
            versions=_versions(),
            metrics=contents.metrics,
            format_version=contents.format_version,
        )
        # Everything that the manifest lists must be on the disk before the manifest, and the manifest before the final
        # name. After a power failure, a file system may otherwise have the later one only.
        sync_folder(self.folder)
        write_file(self.folder / MANIFEST, manifest.to_bytes())
        sync_folder(self.folder)
        _publish(self.folder, self.path, must_be_new=self.must_be_new)
        self._published = True

    def _move_extra(self, extra: Path) -> list[Path]:
        """Move the files and folders in `extra` into the draft. Return the draft's folders that contain them."""
        folders = []
        for source_folder, _, names in os.walk(extra):
            folders.append(self.folder / Path(source_folder).relative_to(extra))
            for name in names:
                # A save hook has written these files, and does not sync them.
                with (Path(source_folder) / name).open("rb") as file:
                    os.fsync(file.fileno())
        for entry in list(extra.iterdir()):
            target = self.folder / entry.name
            if entry.name == MANIFEST or target.exists():
                raise CheckpointError(
                    f"a save hook wrote {entry.name!r}, which is a name of the checkpoint itself. Choose another name."
                )
            os.replace(entry, target)
        extra.rmdir()
        return folders

    def _part_folders(self, contents: Contents) -> list[Path]:
        """Return the folders in the draft that contain the files of `contents`, except the draft's folder itself."""
        return [self.folder / _FOLDER_OF_PART[name] for name in contents.parts if name in _FOLDER_OF_PART]


def _listed_parts(contents: Contents, entries: Mapping[str, FileEntry]) -> dict[str, Part]:
    """Return the parts of the manifest.

    A part has the files that rank 0 (this process) planned for it, followed by the files of other ranks in its folder,
    such as `model/rank-00001.json`. Only rank 0 writes files of the part "trainer".
    """
    paths_of_rank_0 = {file.path for file in contents.files}
    parts = {}
    for name, files in contents.parts.items():
        paths = [file.path for file in files]
        if name in _FOLDER_OF_PART:
            prefix = f"{_FOLDER_OF_PART[name]}/"
            paths += [path for path in entries if path.startswith(prefix) and path not in paths_of_rank_0]
        parts[name] = Part({path: entries[path] for path in paths})
    return parts


def check_target(path: Path) -> None:
    """Raise a `CheckpointError` if the name of `path` is empty or hidden, or if `path` exists, is not an empty folder
    and is not a checkpoint.
    """
    if not path.name or path.name.startswith("."):
        raise CheckpointError(f"{str(path)!r} is not a valid checkpoint name: it must not be empty or begin with '.'.")
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise CheckpointError(f"{path} exists and is not a folder; it is not replaced. Choose another name.")
    if _has_entries(path) and not (path / MANIFEST).is_file():
        raise CheckpointError(
            f"{path} exists and is not a checkpoint (it has no {MANIFEST}); it is not replaced. Choose another name."
        )


def _has_entries(path: Path) -> bool:
    """Return whether a path is a folder that is not empty."""
    return path.is_dir() and any(path.iterdir())


def _check_snapshot(snapshot: Snapshot) -> None:
    if snapshot.kind not in PARTS:
        raise CheckpointError(f"kind={snapshot.kind!r}, expected one of {', '.join(PARTS)}.")
    if PROGRESS in snapshot.trainer:
        raise CheckpointError(f"trainer[{PROGRESS!r}]: this name is reserved. Choose another name.")
    if snapshot.kind == "full" and len(snapshot.rng) != snapshot.world_size:
        raise CheckpointError(
            f"a full checkpoint of world_size={snapshot.world_size} got {len(snapshot.rng)} RNG states, expected one "
            "from each rank. Gather the states of all ranks, or write kind='weights'."
        )


def _versions() -> dict[str, str]:
    try:
        version = importlib.metadata.version("trainwright")
    except importlib.metadata.PackageNotFoundError:
        version = "not installed"  # run from a checkout
    return {"trainwright": version, "torch": str(torch.__version__), "python": platform.python_version()}


def _publish(temporary: Path, path: Path, *, must_be_new: bool) -> None:
    """Rename the complete checkpoint `temporary` to `path`. Replace a checkpoint at `path` unless `must_be_new`."""
    if must_be_new or not _has_entries(path):
        _publish_new(temporary, path)
        return
    # A folder with entries cannot be replaced by one rename. Between the two renames below, readers use `aside`; see
    # `staging`.
    aside = hidden(path, "old")
    # The lock belongs to the open folder, not to its name: it protects `aside` from `clean_stale` of other processes.
    with mark_in_use(path):
        try:
            rename(path, aside)
            rename(temporary, path)
        except BaseException:
            # Not `rename`: renaming the old checkpoint back is urgent, syncing it is not.
            if aside.exists() and not path.exists():
                os.replace(aside, path)
            raise
        finally:
            # An error may also occur after the second rename, such as Ctrl-C. If `path` does not exist, `aside` is the
            # only complete checkpoint.
            if aside.exists() and path.exists():
                _discard(aside, path)


def _publish_new(temporary: Path, path: Path) -> None:
    """Rename `temporary` to `path`, which must not exist or be an empty folder."""
    try:
        rename(temporary, path)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        raise CheckpointError(
            f"another run has written {path} since this run chose the name; it is not replaced. Give each run its "
            "own folder (default_root_dir, or ModelCheckpoint's dirpath or filename)."
        ) from error


def _discard(aside: Path, path: Path) -> None:
    """Delete the replaced checkpoint `aside` of `path`."""
    # If `path` is deleted later, readers would use an `old` folder whose deletion was interrupted. They ignore folders
    # with the role `del`.
    doomed = hidden(path, "del")
    try:
        rename(aside, doomed)
        remove_folder(doomed)
    except BaseException:
        shutil.rmtree(doomed, ignore_errors=True)
        raise
