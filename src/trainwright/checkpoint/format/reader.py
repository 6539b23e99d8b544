"""Reading of checkpoints, without pickle. An incomplete or damaged checkpoint is an error.

The steps of `read_checkpoint`: open the manifest, choose the parts (`_wanted`), find absent and damaged parts
(`_check_parts`), parse the files of each part (`_read_parts`), convert the results to the newest format (`upgraded`),
and check the types of the entries that a resume reads (`_fill`). `check_checkpoint` does the same with mapped tensors,
whose values are not read.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.disk.untrusted import reading
from trainwright.checkpoint.format.codec import FindShards, read_tree
from trainwright.checkpoint.format.layout import (
    MODEL_FOLDER,
    MODEL_STEM,
    OPTIMIZER_FOLDER,
    PARTS,
    PROGRESS,
    RNG_FOLDER,
    TRAINER_STEM,
    Manifest,
    Snapshot,
    numbered,
    upgraded,
)
from trainwright.checkpoint.format.manifests import FoundCheckpoint, HashFiles, hash_files, open_checkpoint, problems_of
from trainwright.checkpoint.format.model import read_model
from trainwright.checkpoint.format.shard_files import RANK_STEM, ShardFiles
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.state import TrainState
from trainwright.core.tree import map_tensors

_ADVICE = (
    "Use another checkpoint: the Trainer's on_damaged='fall_back' uses the newest valid one before it, and "
    "trainwright.checkpoint.newest_valid(folder) returns the newest valid one."
)


def read_checkpoint(
    path: Path | str | FoundCheckpoint,
    *,
    verify: bool = True,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    device: torch.device | str = "cpu",
    copy_model: bool = True,
) -> Snapshot:
    """Read a checkpoint, or some of its parts.

    Args:
        path: the checkpoint folder, or the result of `open_checkpoint`.
        verify: first compare the hashes of the parts' files. Missing files and wrong sizes are always detected.
        parts: any of `"trainer"`, `"model"`, `"optimizer"`, `"rng"`. Default: all parts of the checkpoint's kind.
        allow_missing: parts that may be absent, like parts that the manifest marks as not required. A warning and
            `Snapshot.missing` name the absent parts. Damaged parts always raise an error.
        device: device of the model's tensors. All other tensors are on the CPU.
        copy_model: False returns tensors of the model and the optimizers that are mapped from the files (see
            `read_safetensors`), and sharded tensors as `SavedTensor`. The caller must copy these tensors. Default:
            True.

    Raises:
        FileNotFoundError: `path` does not exist.
        CheckpointError: `path` is a file, or a part is missing, damaged or unknown (the message names it).
        NewerFormatError: the checkpoint has a newer format.
    """
    found = open_checkpoint(path)
    wanted = _wanted(found, parts, allow_missing)
    missing = _check_parts(found, wanted, allow_missing, hash_files if verify else None)
    if missing:
        warnings.warn(
            f"{found.path} has no {', '.join(missing)} part; continuing without it.", TrainwrightWarning, stacklevel=3
        )
    return _snapshot(found, wanted, missing, device=device, copy=True, copy_model=copy_model)


def _snapshot(
    found: FoundCheckpoint,
    wanted: Sequence[str],
    missing: Sequence[str],
    *,
    device: torch.device | str = "cpu",
    copy: bool,
    copy_model: bool,
) -> Snapshot:
    """Parse the parts `wanted` except `missing`.

    `copy_model=False` maps the tensors of the model and the optimizers from the files, and `copy=False` those of the
    trainer and RNG parts.
    """
    manifest = found.manifest
    snapshot = Snapshot(
        metrics=dict(manifest.metrics),
        world_size=manifest.topology.get("world_size", 1),
        kind=manifest.kind,
        missing=tuple(missing),
    )
    present = [name for name in wanted if name not in missing]
    with reading(found.path):
        trees = _read_parts(found, present, device, copy=copy, copy_model=copy_model)
        _fill(snapshot, upgraded(trees, manifest.format_version), found.path)
    return snapshot


def check_checkpoint(
    path: Path | str | FoundCheckpoint,
    *,
    parts: Sequence[str] | None = None,
    allow_missing: Sequence[str] = (),
    hash_files: HashFiles = hash_files,
) -> Manifest:
    """Compare the hashes of a checkpoint's parts with its manifest, parse the parts, and return the manifest.

    Call this function on one process. Other processes may then call `read_checkpoint` with `verify=False`. `hash_files`
    computes the hashes. See `read_checkpoint` for the other arguments and the errors.
    """
    found = open_checkpoint(path)
    wanted = _wanted(found, parts, allow_missing)
    missing = _check_parts(found, wanted, allow_missing, hash_files)
    try:
        _snapshot(found, wanted, missing, copy=False, copy_model=False)
    except CheckpointError as error:
        raise CheckpointError(f"{error} {_ADVICE}") from error
    return found.manifest


def _wanted(found: FoundCheckpoint, parts: Sequence[str] | None, allow_missing: Sequence[str]) -> tuple[str, ...]:
    """Return the parts to read: `parts` or, if None, all parts of the checkpoint's kind. Check the names of parts."""
    wanted = tuple(PARTS[found.manifest.kind] if parts is None else parts)
    for name in (*wanted, *allow_missing):
        if name not in PARTS["full"]:
            raise CheckpointError(
                f"parts or allow_missing contains {name!r}, expected some of {', '.join(PARTS['full'])}."
            )
    return wanted


def _check_parts(
    found: FoundCheckpoint, wanted: Sequence[str], allow_missing: Sequence[str], hash_files: HashFiles | None
) -> list[str]:
    """Return the wanted parts that are absent. Raise an error if one may not be absent, or a part is damaged.

    `hash_files=None` compares only names and sizes of files.
    """
    folder = found.path
    manifest = found.manifest
    missing = [name for name in wanted if _is_absent(folder, manifest, name)]
    not_allowed = []
    for name in missing:
        is_required = name not in manifest.parts or manifest.parts[name].required
        if is_required and name not in allow_missing:
            not_allowed.append(name)
    if not_allowed:
        raise CheckpointError(_missing_message(folder, manifest, not_allowed))
    present = [name for name in wanted if name not in missing]
    problems = problems_of(found, hash_files=hash_files, parts=present)
    if problems:
        raise CheckpointError(f"{folder} is damaged: {'; '.join(problems).removesuffix('.')}. {_ADVICE}")
    return missing


def _is_absent(folder: Path, manifest: Manifest, name: str) -> bool:
    """Return whether the manifest lacks a part, or all files of the part are missing.

    If only some files are missing, the part is present and damaged. A part without files, such as the optimizers of a
    task that has none, is present.
    """
    part = manifest.parts.get(name)
    if part is None:
        return True
    return bool(part.files) and not any(os.path.lexists(folder / file) for file in part.files)


def _missing_message(folder: Path, manifest: Manifest, missing: list[str]) -> str:
    reasons = []
    for name in missing:
        part = manifest.parts.get(name)
        if part is None:
            reasons.append(f"the part {name!r} is not in it (its kind is {manifest.kind!r})")
        else:
            reasons.append(f"the part {name!r} is missing: {', '.join(part.files)}")
    return (
        f"{folder} is incomplete: {'; '.join(reasons)}. Use another checkpoint, or pass allow_missing={missing!r} to "
        "continue without it; the run will then differ."
    )


def _read_parts(
    found: FoundCheckpoint, present: Sequence[str], device: torch.device | str, *, copy: bool, copy_model: bool
) -> dict[str, Any]:
    """Return the trees of the parts `present` by part, in the form that `upgraded` expects."""
    folder = found.path
    parts = found.manifest.parts
    trees: dict[str, Any] = {}
    if "trainer" in present:
        trees["trainer"] = read_tree(folder, TRAINER_STEM, copy=copy)
    if "optimizer" in present:
        stems = numbered(parts["optimizer"].files, OPTIMIZER_FOLDER, "optimizer")
        shards = find_shards(found, "optimizer", copy=copy_model)
        trees["optimizer"] = [read_tree(folder, stem, copy=copy_model, shards=shards) for stem in stems]
    if "rng" in present:
        stems = numbered(parts["rng"].files, RNG_FOLDER, "rank")
        trees["rng"] = [read_tree(folder, stem, copy=copy) for stem in stems]
    if "model" in present:
        trees["model"] = _read_model_part(found, device, copy=copy_model)
    return trees


def _read_model_part(found: FoundCheckpoint, device: torch.device | str, *, copy: bool) -> dict[str, Any]:
    folder = found.path
    files = found.manifest.parts["model"].files
    is_sharded = f"{MODEL_STEM}.json" in files
    if not is_sharded:
        names = {path.removeprefix(f"{MODEL_FOLDER}/") for path in files}
        return read_model(folder / MODEL_FOLDER, device, copy=copy, files=names)
    shards = find_shards(found, "model", copy=copy)
    weights = read_tree(folder, MODEL_STEM, copy=copy, shards=shards)
    if not isinstance(weights, dict):
        raise CheckpointError(f"{folder / MODEL_STEM}.json holds a {type(weights).__name__}, expected a dictionary.")
    if torch.device(device).type == "cpu":
        return weights
    # Tied weights are one tensor of the tree. The cache returns one tensor on the device for all of them.
    on_device: dict[str, Any] = map_tensors(functools.cache(lambda tensor: tensor.to(device)), weights)
    return on_device


def find_shards(found: FoundCheckpoint, part: str, *, copy: bool) -> FindShards | None:
    """Return a function that returns a sharded tensor of `part` (`"model"`, `"optimizer"`) for name, shape and dtype.

    Returns None if the part has no shards. With `copy=True`, the function reads the tensor into memory. Otherwise, it
    returns a `SavedTensor`.
    """
    files = found.manifest.parts[part].files
    folder = {"model": MODEL_FOLDER, "optimizer": OPTIMIZER_FOLDER}[part]
    if f"{folder}/{RANK_STEM}-00000.json" not in files:
        return None
    shards = ShardFiles(found.path, folder, files)

    # The tree names a tied tensor several times. The cache returns the same object each time.
    @functools.cache
    def find(name: str, shape: tuple[int, ...], dtype: str) -> torch.Tensor:
        saved_tensor = shards.find(name, shape, dtype)
        return saved_tensor.load() if copy else saved_tensor

    return find


def _fill(snapshot: Snapshot, trees: dict[str, Any], folder: Path) -> None:
    """Set the snapshot's attributes from trees in the newest format. Parts that were not read keep their defaults."""
    if "trainer" in trees:
        origin = f"{folder / TRAINER_STEM}.json"
        tree = trees["trainer"]
        if not isinstance(tree, dict) or not isinstance(tree.get(PROGRESS), dict):
            raise CheckpointError(f"{origin} holds no {PROGRESS!r}; it is damaged or has another format.")
        # The writer stores `state` among the entries of `trainer`.
        snapshot.state = tree.pop(PROGRESS)
        snapshot.trainer = tree
        _check_progress(snapshot.state, origin)
        _check_entries(snapshot.trainer, origin)
    snapshot.optimizers = trees.get("optimizer", [])
    _check_optimizers(snapshot.optimizers, str(folder / OPTIMIZER_FOLDER))
    snapshot.rng = trees.get("rng", [])
    snapshot.model = trees.get("model")


# Checks of values from files. The seal of the manifest detects damage, not forgery, so that an entry may have any type.
# A check returns whether a value has the expected form. The functions `_is`, `_list_of` and `_dict_with` make checks.
Check = Callable[[Any], bool]

_COUNT_LIMIT = 2**63  # all counts fit into int64


def _is(kind: type) -> Check:
    return lambda value: isinstance(value, kind)


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _COUNT_LIMIT  # `type`, since a bool is an instance of int


def _list_of(check: Check) -> Check:
    return lambda value: isinstance(value, list) and all(map(check, value))


def _dict_with(**checks: Check) -> Check:
    """Return a check for a dict. If the dict has an entry with the name of a check, this check must accept the entry.

    `_dict_with(epoch=_is_count)` accepts `{}`, `{"epoch": 3}` and `{"other": "x"}`, but not `{"epoch": -1}`.
    """

    def check(value: Any) -> bool:
        if not isinstance(value, dict):
            return False
        return all(accepts(value[name]) for name, accepts in checks.items() if name in value)

    return check


def _is_position(value: object) -> bool:
    """Accept a position in the data, such as `{"batch": 7, "world": 4}`. None is the start of an epoch."""
    if value is None:
        return True
    return isinstance(value, dict) and "batch" in value and all(map(_is_count, value.values()))


def _is_data(value: object) -> bool:
    if not isinstance(value, dict):
        return False
    # An empty dict is the start of the data.
    if value and not {"position", "epoch"} <= value.keys():
        return False
    return _dict_with(position=_is_position, epoch=_is_count, order=_is(dict))(value)


# The entries of the trainer part that a resume reads, with their types (see docs/checkpoint-format.md).
_ENTRIES: dict[str, tuple[str, Check]] = {
    "task": ("a dict", _is(dict)),
    "task_objects": ("a dict", _is(dict)),
    "callbacks": ("a dict", _is(dict)),
    "schedulers": ("a list of dicts", _list_of(_is(dict))),
    "strategy": ("a dict", _is(dict)),
    "data": ("a dict with a position of counts and an epoch", _is_data),
    "data_ranks": ("a list of ranks", _list_of(_is_count)),
    "loggers": ("a list of dicts", _list_of(_is(dict))),
    "datamodule": ("a dict", _is(dict)),
    "left_out": (
        "a dict of lists and a count",
        _dict_with(skipped=_list_of(_is(dict)), num_rollbacks=_is_count, abandoned=_is(list)),
    ),
    "metrics": ("a list of dicts", _list_of(_dict_with(logged=_is(dict), objects=_is(dict)))),
    "frozen": ("a list of names", _list_of(_is(str))),
    "seed": ("a whole number", lambda value: type(value) is int),
    "run_id": ("a text", _is(str)),
}
_is_group = _dict_with(params=_list_of(_is(str)))


def _check_progress(state: Mapping[str, Any], origin: str) -> None:
    """Check that each saved counter has the type of its default in `TrainState`, and is not negative."""
    for field in dataclasses.fields(TrainState):
        value = state.get(field.name, field.default)
        kind = type(field.default)
        has_type = type(value) is kind or (kind is float and type(value) is int)
        if not has_type or not 0 <= value < _COUNT_LIMIT:
            raise CheckpointError(f"{origin}: progress.{field.name} is {value!r}; it is damaged or has another format.")


def _check_entries(trainer: Mapping[str, Any], origin: str) -> None:
    for name, (expected, check) in _ENTRIES.items():
        if name in trainer and not check(trainer[name]):
            raise CheckpointError(f"{origin}: {name!r} is not {expected}; it is damaged or has another format.")


def _check_optimizers(trees: Sequence[Any], origin: str) -> None:
    for number, tree in enumerate(trees):
        if not _is_optimizer(tree):
            raise CheckpointError(
                f"{origin}: optimizer {number} has no groups and states; it is damaged or has another format."
            )


def _is_optimizer(tree: Any) -> bool:
    if not isinstance(tree, dict):
        return False
    # "groups" is the key of `named_optimizer_state`, and "param_groups" that of torch's own state dicts.
    groups = tree.get("groups", tree.get("param_groups", []))
    has_dicts = isinstance(tree.get("state", {}), dict) and isinstance(tree.get("dtypes", {}), dict)
    return has_dicts and _list_of(_is_group)(groups)
