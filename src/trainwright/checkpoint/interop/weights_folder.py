"""Writing of a model's weights into a folder, as one file or as shards and an index, with crash-safe replacement.

Files have Hugging Face's names: `model.safetensors`, or `model-00001-of-00002.safetensors` etc. with
`model.safetensors.index.json`. In torch's format, names begin with `pytorch_model` and end in `.bin`. A folder holds
one model under these names. A new model replaces the previous model in the five steps below. After a crash, the folder
has the previous model, the new model or none, but never a mixture:

1. All new files are written under hidden names and synced.
2. Shards are renamed to their final names or, if a file has one of these names, all to longer temporary names.
3. One rename publishes the single file or the index. From here on the folder holds the new model.
4. Files of the previous model are deleted, its index first.
5. Shards with temporary names are linked to their final names, the index is replaced, and the temporary names are
   deleted.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from trainwright.checkpoint.disk.durable import (
    fault_point,
    hidden,
    make_folder,
    rename,
    replace_file,
    sync_folder,
    write_file,
)
from trainwright.checkpoint.disk.planned_file import Weight, write_files
from trainwright.checkpoint.disk.untrusted import dump_json
from trainwright.checkpoint.format.model import deal_out, shard_index, shard_names
from trainwright.checkpoint.format.safetensors_io import plan_streamed
from trainwright.core.errors import CheckpointError
from trainwright.core.host.byte_sizes import format_bytes
from trainwright.core.names.hidden_names import split_hidden

# The names of a model's files. The groups with hexadecimal digits are in temporary names only.
_MODEL_FILE = re.compile(
    r"model(-[0-9a-f]{16})?-\d{5,}-of-\d{5,}\.safetensors|model\.safetensors(\.index\.json)?"
    r"|pytorch_model(-[0-9a-f]{16})?-\d{5,}-of-\d{5,}\.bin|pytorch_model\.bin(\.index\.json)?"
)
_SHARD = re.compile(r"-\d{5,}-of-(\d{5,})\.[a-z]+$")


def _in_full(weight: Weight) -> torch.Tensor:
    """Return a weight as a contiguous CPU tensor. Its storage has no other elements."""
    here = weight.in_memory
    if here is not None and here.device.type == "cpu":
        is_plain = here.is_contiguous() and not here.is_conj() and not here.is_neg()
        if is_plain and here.untyped_storage().nbytes() == here.nbytes:
            return here
    made = torch.empty(weight.like.shape, dtype=weight.like.dtype, device="cpu")
    flat, begin = made.view(-1), 0
    for part in weight.read():
        flat[begin : begin + part.numel()].copy_(part)
        begin += part.numel()
    return made


@dataclass(slots=True)
class _Files:
    """The files of a model that `replace_weights` writes: their names and weights.

    Attributes:
        safe: True for safetensors, False for torch's format.
        shards: the weights of each file, by name.
        tied: see `replace_weights`.
    """

    safe: bool
    shards: list[dict[str, Weight]]
    tied: Mapping[str, str]

    @property
    def is_single(self) -> bool:
        return len(self.shards) == 1

    @property
    def entry(self) -> str:
        """The file whose rename publishes the model: the index, or the only file."""
        single = "model.safetensors" if self.safe else "pytorch_model.bin"
        return single if self.is_single else f"{single}.index.json"

    def names(self, infix: str = "") -> list[str]:
        """Return the names of the weight files: the final names or, with `infix`, temporary names that contain it."""
        if self.is_single:
            return [self.entry]
        stem, suffix = ("model", ".safetensors") if self.safe else ("pytorch_model", ".bin")
        return shard_names(len(self.shards), stem=stem, suffix=suffix, infix=infix)

    def index(self, names: list[str]) -> bytes:
        """Return the index for shards with the given file names."""
        sizes = {name: weight.like.nbytes for shard in self.shards for name, weight in shard.items()}
        index = shard_index(sizes, dict(zip(names, map(list, self.shards), strict=True)), {})
        files = index["weight_map"]
        index["weight_map"] = dict(sorted({**files, **{to: files[of] for to, of in self.tied.items()}}.items()))
        return dump_json(index, indent=2).encode() + b"\n"


def replace_weights(
    folder: Path,
    weights: Mapping[str, Weight],
    *,
    max_shard_bytes: int,
    safe: bool = True,
    tied: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a model's weights into a folder, and replace a previous model there as the module describes.

    Call this function on one process. Blocks on the disk. The extra memory is about that of `Weight.read`, or one shard
    in torch's format. The previous model remains until the new model is complete. On a file system without hard links,
    shards may keep their temporary names.

    Args:
        folder: the folder, which is created if needed. Files that are not of a model remain.
        weights: weights by name, in the order in which the shards are filled.
        max_shard_bytes: largest total size of the tensors in one file. A larger tensor gets its own file.
        safe: write safetensors. False writes the format of `torch.save`.
        tied: further names of tensors, each with its name in `weights`. Only torch's format stores these further names.

    Returns:
        The model's files, the index last if there is one.
    """
    folder = folder.absolute()
    dealt = deal_out({name: weight.like.nbytes for name, weight in weights.items()}, max_shard_bytes)
    shards = [{name: weights[name] for name in names} for names in dealt]
    files = _Files(safe, shards, {} if safe else dict(tied or {}))
    new_folders = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    _check_room(folder, new_folders[-1].parent if new_folders else folder, weights)
    written: dict[str, Path] = {}
    try:
        make_folder(folder)
        for name, shard in zip(files.names(), files.shards, strict=True):
            written[name] = hidden(folder / name, "tmp")
            if safe:
                write_files(folder, [plan_streamed(written[name].name, shard)])
            else:
                _write_pickle(written[name], shard, files.tied)
        written.setdefault(files.entry, hidden(folder / files.entry, "tmp"))
    except BaseException as error:
        _undo([*written.values()], new_folders)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"the weights cannot be written to {folder}: {error.strerror or error}. The folder is unchanged."
            ) from error
        raise
    names = _put_in_place(folder, files, written, new_folders)
    try:
        _remove_others(folder, {*names, files.entry})
        names = _take_own_names(folder, files, names)
    except OSError as error:
        raise CheckpointError(
            f"the new weights are in {folder}, but old files could not be deleted: {error}. Save again to retry."
        ) from error
    return [folder / name for name in dict.fromkeys([*names, files.entry])]


def _check_room(folder: Path, there: Path, weights: Mapping[str, Weight]) -> None:
    if not there.is_dir():
        raise CheckpointError(f"the weights cannot be written to {folder}: {there} is a file. Choose a folder.")
    need, free = sum(weight.like.nbytes for weight in weights.values()), shutil.disk_usage(there).free
    if need > free:
        raise CheckpointError(
            f"the weights need {format_bytes(need)} and the disk of {folder} has {format_bytes(free)} free (a previous "
            "model in the folder remains until the new one is complete). Free space, or choose another folder."
        )


def _write_pickle(path: Path, shard: Mapping[str, Weight], tied: Mapping[str, str]) -> None:
    """Write a new file in torch's format and wait until it is on the disk."""
    tensors = {name: _in_full(weight) for name, weight in shard.items()}
    tensors |= {other: tensors[first] for other, first in tied.items() if first in tensors}
    with open(path, "xb") as file:
        fault_point("open", path)
        try:
            torch.save(tensors, file)
        except RuntimeError as error:
            if isinstance(error.__context__, OSError):  # the cause of torch's error
                raise error.__context__ from None
            raise
        fault_point("write", path)
        file.flush()
        os.fsync(file.fileno())
    fault_point("fsync", path)


def _put_in_place(folder: Path, files: _Files, written: Mapping[str, Path], new_folders: list[Path]) -> list[str]:
    """Publish the new weights as the folder's model (steps 2 and 3). Return the names of the weight files."""
    own = names = files.names()
    entry = files.entry
    if not files.is_single and any(os.path.lexists(folder / name) for name in own):
        names = files.names(secrets.token_hex(8))
    new = list(written.values())
    ready = False
    try:
        if not files.is_single:
            write_file(written[entry], files.index(names))
            for name, target in zip(own, names, strict=True):
                os.replace(written[name], folder / target)
                new.append(folder / target)
                fault_point("rename", folder / target)
            sync_folder(folder)
        ready = True
        rename(written[entry], folder / entry)
    except BaseException as error:
        if ready and not os.path.lexists(written[entry]):
            raise  # the new model has been published
        _undo(new, new_folders)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"the weights cannot be put into {folder}: {error.strerror or error}. The folder is unchanged."
            ) from error
        raise
    return names


def _remove_others(folder: Path, kept: set[str]) -> None:
    """Delete the files of previous models and killed saves, indices first. Files with the names `kept` remain."""
    left = [name for name in os.listdir(folder) if name not in kept and _is_model_file(name)]
    entries = [name for name in left if _SHARD.search(name) is None and not name.startswith(".")]
    for names in (sorted(entries, key=lambda name: not name.endswith(".json")), sorted(set(left) - set(entries))):
        for name in names:
            (folder / name).unlink(missing_ok=True)
            fault_point("delete", folder / name)
        if names:
            sync_folder(folder)


def _is_model_file(name: str) -> bool:
    visible, _ = split_hidden(name) or (name, "")
    return _MODEL_FILE.fullmatch(visible) is not None


def _take_own_names(folder: Path, files: _Files, names: list[str]) -> list[str]:
    """Rename shards from temporary to final names, if the file system has hard links. Return the current names."""
    own = files.names()
    if names == own:
        return names
    linked: list[Path] = []
    try:
        for name, target in zip(names, own, strict=True):
            os.link(folder / name, folder / target)
            linked.append(folder / target)
            fault_point("link", folder / target)
    except OSError:  # without hard links: the index has the temporary names, which readers use
        _undo(linked, [])
        return names
    sync_folder(folder)
    replace_file(folder / files.entry, files.index(own))
    for name in names:
        (folder / name).unlink()
        fault_point("delete", folder / name)
    sync_folder(folder)
    return own


def _undo(files: list[Path], folders: list[Path]) -> None:
    with contextlib.suppress(OSError):  # the first error is raised instead
        for file in files:
            file.unlink(missing_ok=True)
        for folder in folders:
            folder.rmdir()


def shards_of(path: Path) -> int:
    """Return the number of shards that a file's name contains: 2 for `…-of-00002.safetensors`, else 1."""
    found = _SHARD.search(path.name)
    return int(found[1]) if found else 1
