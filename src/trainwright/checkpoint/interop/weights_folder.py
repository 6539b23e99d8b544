"""Writing of a model's weights into a folder, as one file or as shards and an index, with crash-safe replacement.

Files have Hugging Face's names: `model.safetensors`, or `model-00001-of-00002.safetensors` etc. with
`model.safetensors.index.json`. In torch's format, names begin with `pytorch_model` and end in `.bin`. A folder holds
one model under these names. A new model replaces the previous model in the five steps below. After a crash, the folder
has the previous model, the new model or none, but never a mixture:

1. All new files are written under hidden names and synced.
2. Shards are renamed to their final names or, if a file has one of these names, all to longer temporary names, such as
   `model-0123456789abcdef-00001-of-00002.safetensors`.
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

# The final and temporary names of a model's files. Hexadecimal digits are in temporary names only.
_MODEL_FILE = re.compile(
    r"model(-[0-9a-f]{16})?-\d{5,}-of-\d{5,}\.safetensors|model\.safetensors(\.index\.json)?"
    r"|pytorch_model(-[0-9a-f]{16})?-\d{5,}-of-\d{5,}\.bin|pytorch_model\.bin(\.index\.json)?"
)
_SHARD = re.compile(r"-\d{5,}-of-(\d{5,})\.[a-z]+$")


@dataclass(slots=True)
class _Files:
    """The files of a model that `replace_weights` writes: their names and weights.

    Attributes:
        safe: True for safetensors, False for torch's format.
        shards: the weights of each file, by name.
        tied: see `replace_weights`. Empty for safetensors.
    """

    safe: bool
    shards: list[dict[str, Weight]]
    tied: Mapping[str, str]

    @property
    def is_single(self) -> bool:
        """True if the model has one file and no index."""
        return len(self.shards) == 1

    @property
    def entry(self) -> str:
        """The file whose rename publishes the model: the index, or the only file."""
        single = "model.safetensors" if self.safe else "pytorch_model.bin"
        return single if self.is_single else f"{single}.index.json"

    def names(self, infix: str = "") -> list[str]:
        """Return the names of the weight files: the final names or, with `infix`, temporary names that contain it.

        A single file has its final name with any `infix`, since its rename publishes the model.
        """
        if self.is_single:
            return [self.entry]
        stem, suffix = ("model", ".safetensors") if self.safe else ("pytorch_model", ".bin")
        return shard_names(len(self.shards), stem=stem, suffix=suffix, infix=infix)

    def index(self, names: list[str]) -> bytes:
        """Return the content of the index for shards with the given file names."""
        sizes: dict[str, int] = {}
        tensors_of: dict[str, list[str]] = {}
        for file, shard in zip(names, self.shards, strict=True):
            tensors_of[file] = list(shard)
            for name, weight in shard.items():
                sizes[name] = weight.like.nbytes
        index = shard_index(sizes, tensors_of, {})
        file_of = index["weight_map"]
        for name, first_name in self.tied.items():
            file_of[name] = file_of[first_name]
        index["weight_map"] = dict(sorted(file_of.items()))
        return dump_json(index, indent=2).encode() + b"\n"


def replace_weights(
    folder: Path,
    weights: Mapping[str, Weight],
    *,
    max_shard_bytes: int,
    safe: bool = True,
    tied: Mapping[str, str] | None = None,
) -> list[Path]:
    """Write a model's weights into a folder, and replace a previous model in the five steps of the module's docstring.

    Call this function on one process. Blocks on the disk. The extra memory is about that of `Weight.read`, or one shard
    in torch's format. The previous model remains until the new model is complete. On a file system without hard links,
    shards may keep their temporary names; the index refers to these names.

    Args:
        folder: the folder, which is created if needed. Files that are not of a model remain.
        weights: weights by name, in the order in which the shards are filled.
        max_shard_bytes: largest total size of the tensors in one file. A larger tensor gets its own file.
        safe: write safetensors. False writes the format of `torch.save`. Default: True.
        tied: further names of tensors, each with its name in `weights`. Only torch's format stores these further names.
            Default: None, no further names.

    Returns:
        The model's files. The index, if the model has one, is the last.

    Raises:
        CheckpointError: the disk is full, the folder cannot be written, or a tensor cannot be stored. The folder has
            the previous model, unless the message says that it has the new one.
    """
    folder = folder.absolute()
    sizes = {name: weight.like.nbytes for name, weight in weights.items()}
    shards = []
    for names in deal_out(sizes, max_shard_bytes):
        shards.append({name: weights[name] for name in names})
    files = _Files(safe, shards, {} if safe else dict(tied or {}))
    # The folders that do not exist yet, from `folder` upwards, so that `_undo` deletes inner folders first.
    new_folders = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    existing_folder = new_folders[-1].parent if new_folders else folder
    _check_room(folder, existing_folder, sum(sizes.values()))
    written: dict[str, Path] = {}  # final name → file with a hidden name
    try:
        make_folder(folder)
        for name, shard in zip(files.names(), files.shards, strict=True):
            written[name] = hidden(folder / name, "tmp")
            if safe:
                write_files(folder, [plan_streamed(written[name].name, shard)])
            else:
                _write_pickle(written[name], shard, files.tied)
        if not files.is_single:
            # `_put_in_place` writes the index, once the names of the shards are known.
            written[files.entry] = hidden(folder / files.entry, "tmp")
    except BaseException as error:
        _undo(list(written.values()), new_folders)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"the weights cannot be written to {folder}: {error.strerror or error}. The folder is unchanged."
            ) from error
        raise
    shard_files = _put_in_place(folder, files, written, new_folders)
    try:
        _remove_others(folder, {*shard_files, files.entry})
        shard_files = _rename_to_final(folder, files, shard_files)
    except OSError as error:
        raise CheckpointError(
            f"the new weights are in {folder} and complete, but cleaning up failed: {error}. Save again to retry."
        ) from error
    # A single file is its own entry, so `fromkeys` removes the second occurrence.
    return [folder / name for name in dict.fromkeys([*shard_files, files.entry])]


def _check_room(folder: Path, existing_folder: Path, needed: int) -> None:
    """Raise a `CheckpointError` if `existing_folder` is a file, or its disk has less than `needed` bytes free.

    `existing_folder` is `folder` or, if that does not exist, the closest parent that exists.
    """
    if not existing_folder.is_dir():
        raise CheckpointError(
            f"the weights cannot be written to {folder}: {existing_folder} is a file. Choose a folder."
        )
    free = shutil.disk_usage(existing_folder).free
    if needed > free:
        raise CheckpointError(
            f"the weights need {format_bytes(needed)} and the disk of {folder} has {format_bytes(free)} free (a "
            "previous model in the folder remains until the new one is complete). Free space, or choose another "
            "folder."
        )


def _write_pickle(path: Path, shard: Mapping[str, Weight], tied: Mapping[str, str]) -> None:
    """Write a new file in torch's format and wait until it is on the disk."""
    tensors = {name: _in_full(weight) for name, weight in shard.items()}
    for name, first_name in tied.items():
        # A tied tensor is in the shard of its first name. torch.save writes its storage once.
        if first_name in tensors:
            tensors[name] = tensors[first_name]
    with open(path, "xb") as file:
        fault_point("open", path)
        try:
            torch.save(tensors, file)
        except RuntimeError as error:
            # torch's writer replaces the OSError of a full disk by a RuntimeError.
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        fault_point("write", path)
        file.flush()
        os.fsync(file.fileno())
    fault_point("fsync", path)


def _in_full(weight: Weight) -> torch.Tensor:
    """Return a weight as a contiguous CPU tensor. Its storage has no other elements."""
    tensor = weight.in_memory
    if tensor is not None and tensor.device.type == "cpu":
        is_plain = tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()
        # torch.save writes the full storage, also that of a slice.
        if is_plain and tensor.untyped_storage().nbytes() == tensor.nbytes:
            return tensor
    full = torch.empty(weight.like.shape, dtype=weight.like.dtype, device="cpu")
    flat = full.view(-1)
    begin = 0
    for part in weight.read():
        flat[begin : begin + part.numel()].copy_(part)
        begin += part.numel()
    return full


def _put_in_place(folder: Path, files: _Files, written: Mapping[str, Path], new_folders: list[Path]) -> list[str]:
    """Publish the new weights as the folder's model (steps 2 and 3). Return the names of the weight files.

    The names are the final names, or temporary names, which `_rename_to_final` changes. `written` has the hidden path
    of each file by its final name. If publishing fails, the new files and `new_folders` are deleted.
    """
    final_names = files.names()
    names = final_names
    entry = files.entry
    if not files.is_single and any(os.path.lexists(folder / name) for name in final_names):
        # The previous model may have these shards, and its index must find them until the new index replaces it.
        names = files.names(secrets.token_hex(8))
    new_files = list(written.values())
    is_ready = False  # becomes True immediately before the rename of the entry
    try:
        if not files.is_single:
            write_file(written[entry], files.index(names))
            for final_name, name in zip(final_names, names, strict=True):
                os.replace(written[final_name], folder / name)
                new_files.append(folder / name)
                fault_point("rename", folder / name)
            # The shards must be on the disk before the index that names them.
            sync_folder(folder)
        is_ready = True
        rename(written[entry], folder / entry)
    except BaseException as error:
        # After the rename, the folder holds the new model, whose files must remain.
        if is_ready and not os.path.lexists(written[entry]):
            if isinstance(error, OSError):
                raise CheckpointError(
                    f"the new weights are in {folder}, but may be lost if the machine stops now: the disk reports "
                    f"{error.strerror or error}. Save again to retry."
                ) from error
            raise
        _undo(new_files, new_folders)
        if isinstance(error, OSError):
            raise CheckpointError(
                f"the weights cannot be put into {folder}: {error.strerror or error}. The folder is unchanged."
            ) from error
        raise
    return names


def _remove_others(folder: Path, new_names: set[str]) -> None:
    """Delete the files of previous models and of killed saves (step 4). Files with the new names remain."""
    indices = []
    single_files = []
    shards = []  # also hidden files of killed saves
    for name in sorted(os.listdir(folder)):
        if name in new_names or not _is_model_file(name):
            continue
        if name.startswith(".") or _SHARD.search(name):
            shards.append(name)
        elif name.endswith(".json"):
            indices.append(name)
        else:
            single_files.append(name)
    # Shards are deleted last. After a crash in between, shards without an index remain, which no reader takes for a
    # model. An index without its shards would be a damaged model.
    for names in ([*indices, *single_files], shards):
        for name in names:
            (folder / name).unlink(missing_ok=True)
            fault_point("delete", folder / name)
        if names:
            sync_folder(folder)


def _is_model_file(name: str) -> bool:
    """Return whether a file is of a model, also under a hidden name such as `.model.safetensors.tmp-…`."""
    hidden_parts = split_hidden(name)
    if hidden_parts is not None:
        name, _role = hidden_parts
    return _MODEL_FILE.fullmatch(name) is not None


def _rename_to_final(folder: Path, files: _Files, names: list[str]) -> list[str]:
    """Rename shards from temporary to final names (step 5). Return their names.

    Without hard links, nothing is changed and `names` are returned: a rename of one shard after the other would leave
    an index with missing shards in between.
    """
    final_names = files.names()
    if names == final_names:
        return names
    linked: list[Path] = []
    try:
        for name, final_name in zip(names, final_names, strict=True):
            os.link(folder / name, folder / final_name)
            linked.append(folder / final_name)
            fault_point("link", folder / final_name)
    except OSError:  # the file system has no hard links
        _undo(linked, [])
        return names
    # Both names exist until the new index is on the disk, so that each index finds its shards.
    sync_folder(folder)
    replace_file(folder / files.entry, files.index(final_names))
    for name in names:
        (folder / name).unlink()
        fault_point("delete", folder / name)
    sync_folder(folder)
    return final_names


def _undo(files: list[Path], folders: list[Path]) -> None:
    """Delete files, and then folders that are empty."""
    # Their own errors are suppressed: the error that led here is raised instead.
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()


def shards_of(path: Path) -> int:
    """Return the total number of shards according to a file's name: 2 for `…-00001-of-00002.safetensors`, else 1."""
    match = _SHARD.search(path.name)
    return int(match[1]) if match else 1
