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
from trainwright.checkpoint.format.layout import (
    MODEL_FOLDER,
    MODEL_STEM,
    OPTIMIZER_FOLDER,
    RNG_FOLDER,
    TRAINER_STEM,
    Manifest,
    numbered,
)
from trainwright.checkpoint.format.manifests import FoundCheckpoint, read_manifest, verify
from trainwright.checkpoint.format.model import read_model
from trainwright.checkpoint.format.reader import find_shards
from trainwright.checkpoint.format.shard_files import loaded
from trainwright.checkpoint.interop.export import StoredTensor, stored_tensors
from trainwright.core.errors import CheckpointError


@dataclass(frozen=True, slots=True)
class TensorDifference:
    """One tensor whose bits differ between two checkpoints.

    Attributes:
        path: `part.name`, as in `"model.net.weight"` or `"optimizer[0].state.net.weight.exp_avg"`.
        max_abs: the largest absolute difference of two elements. It is 0 if only the signs of zeros or the bits of NaNs
            differ, NaN if an element is NaN in one checkpoint only, and None if shapes or dtypes differ.
        left, right: dtype and shape in each checkpoint, as text: `"float32[3, 2]"`. Weights of the model have the dtype
            in which they are stored: complex numbers are pairs of real numbers.
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
        num_tensors: number of compared tensors, including equal ones. Parts with equal hashes are not compared.
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


def diff_checkpoints(left: Path | str, right: Path | str) -> CheckpointDifference:
    """Compare two checkpoints bit by bit. Call this function on one process. Blocks on the disk.

    Tensors are mapped and compared one pair at a time. A part whose files all have the same sizes and hashes in both
    manifests is not read. Hashes of files are not verified.

    Raises:
        FileNotFoundError: `left` or `right` does not exist.
        CheckpointError: a manifest is damaged, or a file is missing, has a wrong size or cannot be read.
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
        elif left_parts[part].files != right_parts[part].files:  # sizes and hashes by path
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
        """Read the manifest, and check that all files exist and have the right sizes."""
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

    def rng_trees(self) -> list[Any]:
        """Return the RNG states of each rank."""
        stems = numbered(self.manifest.parts["rng"].files, RNG_FOLDER, "rank")
        return [read_tree(self.folder, stem, copy=False) for stem in stems]

    def optimizer_trees(self) -> list[Any]:
        """Return the state tree of each optimizer."""
        stems = numbered(self.manifest.parts["optimizer"].files, OPTIMIZER_FOLDER, "optimizer")
        shards = find_shards(FoundCheckpoint(self.folder, self.manifest), "optimizer", copy=False)
        return [read_tree(self.folder, stem, copy=False, shards=shards) for stem in stems]

    def weights(self) -> dict[str, StoredTensor]:
        """Return the model's tensors by name, also by the further names of tied tensors."""
        tensors, tied = stored_tensors(self.folder)
        by_name = {tensor.name: tensor for tensor in tensors}
        for name, first_name in tied.items():
            by_name[name] = by_name[first_name]
        return by_name

    def other_model_values(self) -> dict[str, Any]:
        """Return the entries of the model's state dict that are not tensors, such as results of `get_extra_state`."""
        if f"{MODEL_STEM}.json" in self.manifest.parts["model"].files:
            shards = find_shards(FoundCheckpoint(self.folder, self.manifest), "model", copy=False)
            state_dict = read_tree(self.folder, MODEL_STEM, copy=False, shards=shards)
        else:
            state_dict = read_model(self.folder / MODEL_FOLDER, copy=False)
        return {name: value for name, value in state_dict.items() if not isinstance(value, torch.Tensor)}


def _compare_part(difference: CheckpointDifference, part: str, left: _Side, right: _Side) -> None:
    if part == "model":
        _compare_models(difference, left, right)
    elif part == "trainer":
        _compare_trees(difference, part, left.trainer_tree(), right.trainer_tree())
    elif part == "rng":
        # Lists, so that the paths are `rng[0]`, `rng[1]`, and so on.
        _compare_trees(difference, part, left.rng_trees(), right.rng_trees())
    else:
        _compare_trees(difference, part, left.optimizer_trees(), right.optimizer_trees())


def _compare_models(difference: CheckpointDifference, left: _Side, right: _Side) -> None:
    left_tensors = left.weights()
    right_tensors = right.weights()
    for name in dict.fromkeys([*left_tensors, *right_tensors]):
        path = f"model.{name}"
        if name not in right_tensors:
            difference.only_left.append(path)
        elif name not in left_tensors:
            difference.only_right.append(path)
        else:
            _compare_tensors(difference, path, left_tensors[name].read(), right_tensors[name].read())
    _compare_trees(difference, "model", left.other_model_values(), right.other_model_values())


# Replaces the value of an entry that only one of two trees has. None may be a value of a tree.
_MISSING: Any = object()


def _compare_trees(difference: CheckpointDifference, path: str, left: object, right: object) -> None:
    """Add the differences between two values and, if both are dicts or sequences, between their entries.

    `path` is the path of the two values, such as "trainer.callbacks".
    """
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
    """Yield each key or index of two mappings or sequences with its left and right value.

    `_MISSING` replaces the value that one of the two does not have.
    """
    if isinstance(left, Mapping):
        for key in dict.fromkeys([*left, *right]):
            yield key, left.get(key, _MISSING), right.get(key, _MISSING)
    else:
        for index, (left_value, right_value) in enumerate(zip_longest(left, right, fillvalue=_MISSING)):
            yield index, left_value, right_value


def _same_value(left: Any, right: Any) -> bool:
    """Return whether two values that are not tensors, mappings or sequences are equal. NaN equals NaN."""
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
    """Return a tensor's dtype and shape, as in `float32[3, 2]`."""
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _text_of(value: object, limit: int = 120) -> str:
    if isinstance(value, torch.Tensor):
        return _described(value)
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
