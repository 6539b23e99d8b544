"""A state tree as a pair of files: `stem.json`, and `stem.safetensors` if it holds tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.checkpoint.codec import decode, encode
from trainwright.checkpoint.durable import write_file
from trainwright.checkpoint.layout import FileEntry, dump_json, inside, load_json
from trainwright.checkpoint.safetensors_io import read_safetensors, write_safetensors
from trainwright.core.errors import CheckpointError


def write_tree(folder: Path, stem: str, tree: Any) -> dict[str, FileEntry]:
    """Write `tree` (see `codec.encode`) as `folder/stem.json` and, if it holds tensors, `folder/stem.safetensors`.

    Blocks until both are synced; returns their sizes and hashes by path relative to `folder`.
    """
    value, tensors = encode(tree)
    files = {f"{stem}.json": write_file(folder / f"{stem}.json", dump_json(value).encode() + b"\n")}
    if tensors:
        files[f"{stem}.safetensors"] = write_safetensors(folder / f"{stem}.safetensors", tensors)
    return files


def read_tree(folder: Path, stem: str) -> Any:
    """Read what `write_tree` wrote; tensors are on the CPU and independent of the file.

    Raises:
        CheckpointError: a file is missing, damaged, or a link out of `folder`.
    """
    path = inside(folder, f"{stem}.json", str(folder))
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    tensor_path = inside(folder, f"{stem}.safetensors", str(folder))
    tensors = read_safetensors(tensor_path) if tensor_path.is_file() else {}
    try:
        return decode(load_json(path.read_bytes(), str(path)), tensors)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
