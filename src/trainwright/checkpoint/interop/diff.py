"""Comparison of two checkpoints: their parts, tensors and other values. Each difference has a path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.checkpoint.disk.untrusted import reading
from trainwright.checkpoint.format.codec import FindShards, read_tree
from trainwright.checkpoint.format.layout import OPTIMIZER_FOLDER, RNG_FOLDER, TRAINER_STEM, Manifest, numbered
from trainwright.checkpoint.format.manifests import FoundCheckpoint, read_manifest, verify
from trainwright.checkpoint.format.reader import find_shards
from trainwright.checkpoint.format.shard_files import loaded
from trainwright.checkpoint.interop.export import StoredTensor, stored_tensors
from trainwright.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor whose bits differ between two checkpoints.

    Attributes:
        path: `part.name`, as in `"model.net.weight"` or `"optimizer[0].state.net.weight.exp_avg"`.
        max_abs: the largest absolute difference of two elements. NaN if an element is NaN in one checkpoint only. None
            if shapes or dtypes differ.
        left, right: dtype and shape in each checkpoint, as text.
    """

    path: str
    max_abs: float | None
    left: str
    right: str


@dataclass(frozen=True, slots=True)
class ValueDifference:
    """One value that is not a tensor and differs. `left` and `right` are the `repr`s of the two values."""

    path: str
    left: str
    right: str


@dataclass
class CheckpointDifference:
    """The differences between two checkpoints.

    Attributes:
        only_left: paths of parts, tensors and other values that only the left checkpoint has.
        only_right: paths that only the right checkpoint has.
        tensors: tensors that differ, in the order of the left checkpoint.
        values: other values that differ, including values of the manifests except times of writing and hashes.
        num_tensors: number of compared tensors.
    """

    only_left: list[str] = field(default_factory=list)
    only_right: list[str] = field(default_factory=list)
    tensors: list[TensorDifference] = field(default_factory=list)
    values: list[ValueDifference] = field(default_factory=list)
    num_tensors: int = 0

    def __bool__(self) -> bool:
        """Return whether there is any difference."""
        return bool(self.only_left or self.only_right or self.tensors or self.values)

    def largest(self) -> TensorDifference | None:
        """Return the first tensor with the largest `max_abs`, or None. NaN counts as infinite."""
        compared = [item for item in self.tensors if item.max_abs is not None]
        return max(compared, key=lambda item: _size(item.max_abs), default=None)


def _size(difference: float | None) -> float:
    return math.inf if difference is None or math.isnan(difference) else difference


_MISSING: Any = object()


def diff_checkpoints(left: Path | str, right: Path | str) -> CheckpointDifference:
    """Compare two checkpoints bit by bit. Call this function on one process. Blocks on the disk.

    Tensors are mapped and compared one pair at a time. Files with the same size and hash in both manifests are not
    read. Hashes of files are not verified.

    Raises:
        CheckpointError: a file is missing or has a wrong size.
    """
    sides = Path(left), Path(right)
    manifests = read_manifest(sides[0]), read_manifest(sides[1])
    for path in sides:
        problems = verify(path, hashes=False)
        if problems:
            raise CheckpointError(f"{path} is damaged: {'; '.join(problems)}.")
    found = CheckpointDifference()
    _compare_trees(found, "manifest", *(_facts(manifest) for manifest in manifests))
    for part in dict.fromkeys([*manifests[0].parts, *manifests[1].parts]):
        has = [part in manifest.parts for manifest in manifests]
        if not all(has):
            (found.only_left if has[0] else found.only_right).append(part)
        elif manifests[0].parts[part].files != manifests[1].parts[part].files:
            with reading(f"the part {part!r} of {left} or {right}"):
                _compare_part(found, part, sides, manifests)
    return found


def _facts(manifest: Manifest) -> dict[str, Any]:
    return {
        "step": manifest.step,
        "epoch": manifest.epoch,
        "kind": manifest.kind,
        "topology": manifest.topology,
        "versions": manifest.versions,
        "metrics": manifest.metrics,
    }


def _compare_part(
    found: CheckpointDifference, part: str, sides: tuple[Path, Path], manifests: tuple[Manifest, Manifest]
) -> None:
    if part == "model":
        _compare_models(found, *sides)
        return
    if part == "trainer":
        _compare_trees(found, part, *(_mapped_tree(path, TRAINER_STEM) for path in sides))
        return
    folder, stem = {"optimizer": (OPTIMIZER_FOLDER, "optimizer"), "rng": (RNG_FOLDER, "rank")}[part]
    stems = [numbered(manifest.parts[part].files, folder, stem) for manifest in manifests]
    shards = [
        find_shards(FoundCheckpoint(side, manifest), part, copy=False) if part == "optimizer" else None
        for side, manifest in zip(sides, manifests, strict=True)
    ]
    for number in range(max(map(len, stems))):
        path = f"{part}[{number}]"
        if all(number < len(names) for names in stems):
            names = [item[number] for item in stems]
            _compare_trees(found, path, *map(_mapped_tree, sides, names, shards))
        else:
            (found.only_left if number < len(stems[0]) else found.only_right).append(path)


def _mapped_tree(folder: Path, stem: str, shards: FindShards | None = None) -> Any:
    """Read a state tree (see `codec`) whose tensors stay mapped to their files."""
    return read_tree(folder, stem, copy=False, shards=shards)


def _compare_models(found: CheckpointDifference, left: Path, right: Path) -> None:
    sides = [_by_name(stored_tensors(path)) for path in (left, right)]
    for name in dict.fromkeys([*sides[0], *sides[1]]):
        path = f"model.{name}"
        if name not in sides[0] or name not in sides[1]:
            (found.only_left if name in sides[0] else found.only_right).append(path)
        else:
            _compare_tensors(found, path, sides[0][name].read(), sides[1][name].read())


def _by_name(stored: tuple[list[StoredTensor], dict[str, str]]) -> dict[str, StoredTensor]:
    tensors, tied = stored
    by_name = {tensor.name: tensor for tensor in tensors}
    return by_name | {name: by_name[first] for name, first in tied.items()}


def _compare_trees(found: CheckpointDifference, path: str, left: object, right: object) -> None:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        _compare_tensors(found, path, loaded(left), loaded(right))
        return
    if type(left) is type(right) and isinstance(left, (Mapping, list, tuple)):
        for key, one, other in _pairs(left, right):
            here = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"
            if one is _MISSING or other is _MISSING:
                (found.only_right if one is _MISSING else found.only_left).append(here)
            else:
                _compare_trees(found, here, one, other)
        return
    if not _same_value(left, right):
        found.values.append(ValueDifference(path, _shown(left), _shown(right)))


def _pairs(left: Any, right: Any) -> Iterator[tuple[Any, Any, Any]]:
    if isinstance(left, Mapping):
        for key in dict.fromkeys([*left, *right]):
            yield key, left.get(key, _MISSING), right.get(key, _MISSING)
        return
    for number in range(max(len(left), len(right))):
        yield number, *(side[number] if number < len(side) else _MISSING for side in (left, right))


def _same_value(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        return bool(left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes())
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def _compare_tensors(found: CheckpointDifference, path: str, left: torch.Tensor, right: torch.Tensor) -> None:
    found.num_tensors += 1
    if left.dtype != right.dtype or left.shape != right.shape:
        found.tensors.append(TensorDifference(path, None, _described(left), _described(right)))
    elif not _same_bits(left, right):
        found.tensors.append(TensorDifference(path, _max_abs(left, right), _described(left), _described(right)))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    views = [tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8) for tensor in (left, right)]
    return torch.equal(*views)


def _max_abs(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest absolute difference. Two NaNs, and two equal infinities, count as equal."""
    wide = torch.complex128 if left.is_complex() else torch.float64
    one, other = left.to(wide), right.to(wide)
    same = (one == other) | (one.isnan() & other.isnan())
    return float((one - other).abs().masked_fill_(same, 0.0).max())


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _shown(value: object, limit: int = 120) -> str:
    if isinstance(value, torch.Tensor):
        return _described(value)
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
