"""Comparison of two checkpoints: their parts, tensors and other values. Each difference has a path."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import torch

from trainwright.checkpoint.disk.untrusted import reading
from trainwright.checkpoint.format.codec import read_tree
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
        num_tensors: number of compared tensors, without those in files with equal hashes.
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
        largest = None
        largest_size = -1.0
        for item in self.tensors:
            if item.max_abs is None:
                continue
            size = math.inf if math.isnan(item.max_abs) else item.max_abs
            if size > largest_size:
                largest = item
                largest_size = size
        return largest


# The value of an entry that one of two trees does not have. None is a value that trees may have.
_MISSING: Any = object()


def diff_checkpoints(left: Path | str, right: Path | str) -> CheckpointDifference:
    """Compare two checkpoints bit by bit. Call this function on one process. Blocks on the disk.

    Tensors are mapped and compared one pair at a time. Files with the same size and hash in both manifests are not
    read. Hashes of files are not verified.

    Raises:
        CheckpointError: a file is missing or has a wrong size.
    """
    left_side = _Side.of(Path(left))
    right_side = _Side.of(Path(right))
    left_parts = left_side.manifest.parts
    right_parts = right_side.manifest.parts
    difference = CheckpointDifference()
    _compare_trees(difference, "manifest", left_side.facts(), right_side.facts())
    for part in dict.fromkeys([*left_parts, *right_parts]):
        if part not in right_parts:
            difference.only_left.append(part)
        elif part not in left_parts:
            difference.only_right.append(part)
        elif left_parts[part].files != right_parts[part].files:  # sizes and hashes by name
            with reading(f"the part {part!r} of {left} or {right}"):
                _compare_part(difference, part, left_side, right_side)
    return difference


@dataclass(frozen=True, slots=True)
class _Side:
    """One of the two checkpoints. Its files are read on use, and tensors remain mapped to them."""

    folder: Path
    manifest: Manifest

    @classmethod
    def of(cls, folder: Path) -> _Side:
        side = cls(folder, read_manifest(folder))
        problems = verify(folder, hashes=False)
        if problems:
            raise CheckpointError(f"{folder} is damaged: {'; '.join(problems)}.")
        return side

    def facts(self) -> dict[str, Any]:
        """Return the values of the manifest that are compared: all except times and hashes."""
        return {
            "step": self.manifest.step,
            "epoch": self.manifest.epoch,
            "kind": self.manifest.kind,
            "topology": self.manifest.topology,
            "versions": self.manifest.versions,
            "metrics": self.manifest.metrics,
        }

    def trainer_tree(self) -> Any:
        return read_tree(self.folder, TRAINER_STEM, copy=False)

    def trees(self, part: str) -> list[Any]:
        """Return the state trees of the optimizers or of the ranks' generators."""
        if part == "rng":
            stems = numbered(self.manifest.parts[part].files, RNG_FOLDER, "rank")
            return [read_tree(self.folder, stem, copy=False) for stem in stems]
        stems = numbered(self.manifest.parts[part].files, OPTIMIZER_FOLDER, "optimizer")
        shards = find_shards(FoundCheckpoint(self.folder, self.manifest), part, copy=False)
        return [read_tree(self.folder, stem, copy=False, shards=shards) for stem in stems]


def _compare_part(difference: CheckpointDifference, part: str, left: _Side, right: _Side) -> None:
    if part == "model":
        _compare_models(difference, left.folder, right.folder)
    elif part == "trainer":
        _compare_trees(difference, part, left.trainer_tree(), right.trainer_tree())
    else:
        # A list, so that the paths are `optimizer[0]`, `rng[0]`, and so on.
        _compare_trees(difference, part, left.trees(part), right.trees(part))


def _compare_models(difference: CheckpointDifference, left: Path, right: Path) -> None:
    left_tensors = _tensors_by_name(left)
    right_tensors = _tensors_by_name(right)
    for name in dict.fromkeys([*left_tensors, *right_tensors]):
        path = f"model.{name}"
        if name not in right_tensors:
            difference.only_left.append(path)
        elif name not in left_tensors:
            difference.only_right.append(path)
        else:
            _compare_tensors(difference, path, left_tensors[name].read(), right_tensors[name].read())


def _tensors_by_name(folder: Path) -> dict[str, StoredTensor]:
    tensors, tied = stored_tensors(folder)
    by_name = {tensor.name: tensor for tensor in tensors}
    for name, first in tied.items():
        by_name[name] = by_name[first]
    return by_name


def _compare_trees(difference: CheckpointDifference, path: str, left: object, right: object) -> None:
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        _compare_tensors(difference, path, loaded(left), loaded(right))
        return
    if type(left) is type(right) and isinstance(left, (Mapping, list, tuple)):
        for key, left_value, right_value in _entries(left, right):
            entry_path = f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]"
            if left_value is _MISSING:
                difference.only_right.append(entry_path)
            elif right_value is _MISSING:
                difference.only_left.append(entry_path)
            else:
                _compare_trees(difference, entry_path, left_value, right_value)
        return
    if not _same_value(left, right):
        difference.values.append(ValueDifference(path, _text_of(left), _text_of(right)))


def _entries(left: Any, right: Any) -> Iterator[tuple[Any, Any, Any]]:
    """Yield the keys or indices of two mappings or sequences, with the value of each, which may be `_MISSING`."""
    if isinstance(left, Mapping):
        for key in dict.fromkeys([*left, *right]):
            yield key, left.get(key, _MISSING), right.get(key, _MISSING)
    else:
        for index, pair in enumerate(zip_longest(left, right, fillvalue=_MISSING)):
            yield index, *pair


def _same_value(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, (np.ndarray, np.generic)):
        if left.dtype != right.dtype or left.shape != right.shape:
            return False
        return bool(left.tobytes() == right.tobytes())
    if isinstance(left, float):
        return left == right or (math.isnan(left) and math.isnan(right))
    return bool(left == right)


def _compare_tensors(difference: CheckpointDifference, path: str, left: torch.Tensor, right: torch.Tensor) -> None:
    difference.num_tensors += 1
    if left.dtype != right.dtype or left.shape != right.shape:
        difference.tensors.append(TensorDifference(path, None, _described(left), _described(right)))
    elif not _same_bits(left, right):
        difference.tensors.append(TensorDifference(path, _max_abs(left, right), _described(left), _described(right)))


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are equal in all bits, so that 0.0 and -0.0 differ."""
    return torch.equal(_as_bytes(left), _as_bytes(right))


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Conjugated and negated views have the bits of their base.
    return tensor.resolve_conj().resolve_neg().contiguous().reshape(-1).view(torch.uint8)


def _max_abs(left: torch.Tensor, right: torch.Tensor) -> float:
    """Return the largest absolute difference. Two NaNs, and two equal infinities, count as equal."""
    wide = torch.complex128 if left.is_complex() else torch.float64
    wide_left = left.to(wide)
    wide_right = right.to(wide)
    # inf - inf is NaN, so equal elements are set to 0 after the subtraction.
    is_same = (wide_left == wide_right) | (wide_left.isnan() & wide_right.isnan())
    return float((wide_left - wide_right).abs().masked_fill_(is_same, 0.0).max())


def _described(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _text_of(value: object, limit: int = 120) -> str:
    if isinstance(value, torch.Tensor):
        return _described(value)
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
