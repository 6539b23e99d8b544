"""A state tree as a pair of files: `stem.json`, and `stem.safetensors` if it holds tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from trainwright.checkpoint.disk.damage import reading
from trainwright.checkpoint.disk.planned_file import PlannedFile
from trainwright.checkpoint.disk.untrusted import check_json_size, dump_json, inside, read_json
from trainwright.checkpoint.format.codec import FindPieces, decode, encode
from trainwright.checkpoint.format.pieces import Pieces
from trainwright.checkpoint.format.safetensors_io import plan_safetensors, read_safetensors
from trainwright.core.errors import CheckpointError


def plan_tree(stem: str, tree: Any, *, root: str = "", pieces: dict[str, Pieces] | None = None) -> list[PlannedFile]:
    """Encode `tree` (see `codec.encode`) as `stem.json` and, if it holds tensors, `stem.safetensors`.

    Everything but the tensors is encoded when this returns; tensors are the tree's own memory.

    Args:
        stem: of the files.
        tree: see `codec.encode`.
        root, pieces: likewise; the values of pieces lie in files of their own.

    Raises:
        CheckpointError: see `codec.encode`; or the JSON would be longer than readers accept.
    """
    value, tensors = encode(tree, root, pieces=pieces)
    text = check_json_size(dump_json(value).encode() + b"\n", f"{stem}.json")
    files = [PlannedFile(f"{stem}.json", text)]
    if tensors:
        files.append(plan_safetensors(f"{stem}.safetensors", tensors))
    return files


def read_tree(folder: Path, stem: str, *, copy: bool = True, pieces: FindPieces | None = None) -> Any:
    """Read what `plan_tree` planned; tensors are on the CPU and, unless `copy` is False, independent of the file.

    Raises:
        CheckpointError: a file is missing, damaged, or a link out of `folder`.
    """
    path = inside(folder, f"{stem}.json", str(folder))
    if not path.is_file():
        raise CheckpointError(f"{path} is missing.")
    tensor_path = inside(folder, f"{stem}.safetensors", str(folder))
    tensors = read_safetensors(tensor_path, copy=copy) if tensor_path.is_file() else {}
    try:
        with reading(path):
            return decode(read_json(path), tensors, pieces)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
