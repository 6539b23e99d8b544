"""Sharded checkpoints of other programs, and merging of their weights."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.disk.planned_file import Weight
from trainwright.checkpoint.format.layout import MANIFEST
from trainwright.checkpoint.format.model import MAX_SHARD_BYTES
from trainwright.checkpoint.format.shard_files import SavedTensor
from trainwright.checkpoint.interop.dcp_folder import METADATA, Sharded, read_dcp
from trainwright.checkpoint.interop.deepspeed_folder import find_deepspeed, read_deepspeed
from trainwright.checkpoint.interop.export import stored_tensors
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.checkpoint.interop.weights_folder import replace_weights
from trainwright.core.errors import CheckpointError
from trainwright.core.names.hidden_names import plain_name

FSDP_MODEL = "pytorch_model_fsdp_"  # prefix of Accelerate's folder of a model, before its number
_FSDP_OPTIMIZER = "optimizer_"
_LIGHTNING_META = "meta.pt"
# Keys of the weights in a state dict. The first that exists is used.
_WEIGHTS = ("model", "state_dict", "model_state_dict", "app")
# Keys of an optimizer, such as `optimizer`, `optimizer_0` or `optim1`.
_OPTIMIZER = re.compile(r"(?:optimizer|optim)(?:_?(\d+))?")


def read_sharded(path: Path) -> Sharded | None:
    """Read a folder of torch.distributed.checkpoint or DeepSpeed, also as Accelerate or Lightning save it.

    Returns None for other folders. Raises a `CheckpointError` if files are missing or damaged, or if the folder has no
    weights.
    """
    # Files `*.distcp` without `.metadata` are an incomplete checkpoint, for which `read_dcp` raises.
    if (path / METADATA).is_file() or any(path.glob("*.distcp")):
        return _from_dcp(path, read_dcp(path))
    if (path / f"{FSDP_MODEL}0").is_dir():
        # Accelerate has one folder for the model and one for each optimizer, such as `optimizer_0`. The folder's name
        # is the key that `_from_dcp` expects.
        tree = read_dcp(path / f"{FSDP_MODEL}0")
        for entry in sorted(path.glob(f"{_FSDP_OPTIMIZER}*")):
            if entry.is_dir():
                tree[entry.name] = read_dcp(entry).get("optimizer")
        return _from_dcp(path, tree)
    folder = find_deepspeed(path)
    return None if folder is None else read_deepspeed(folder)


def _from_dcp(path: Path, tree: Mapping[str, Any]) -> Sharded:
    """Find weights and optimizers in a state dict of torch.distributed.checkpoint, which was read from `path`."""
    app = tree.get("app")
    if isinstance(app, Mapping):  # an object with state_dict(), as in torch's tutorial
        tree = {**tree, **app}
    weights = _find_weights(tree)
    if not weights:
        raise CheckpointError(
            f"{path} has no weights under {', '.join(_WEIGHTS)}: it has {', '.join(list(tree)[:10]) or 'nothing'}. "
            f"For Accelerate's save_state pass {FSDP_MODEL}0, or its parent folder, which also has the optimizer."
        )
    # The number in a key is the optimizer's position: `optimizer_10` comes after `optimizer_2`. A key without a number
    # is the first.
    numbered_optimizers: list[tuple[int, Any]] = []
    for key, state in tree.items():
        match = _OPTIMIZER.fullmatch(key)
        if match and isinstance(state, Mapping) and "param_groups" in state:
            numbered_optimizers.append((int(match[1] or 0), state))
    numbered_optimizers.sort(key=lambda item: item[0])
    # Lightning's file of the values that are not sharded.
    meta = path / _LIGHTNING_META
    progress = read_torch_file(meta)[0] if meta.is_file() else {}
    return Sharded(
        "torch.distributed",
        weights,
        [state for _, state in numbered_optimizers],
        progress=progress,
        schedulers=list(progress.get("lr_schedulers") or []),
    )


def _find_weights(tree: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the weights under one of the usual keys, or else the tensors at the top of the state dict."""
    for key in _WEIGHTS:
        nested = tree.get(key)
        if isinstance(nested, Mapping):
            return nested
    return {name: value for name, value in tree.items() if isinstance(value, torch.Tensor)}


def accelerate_rng(saved: Any) -> dict[str, Any]:
    """Return one rank's RNG states of Accelerate in the form of `core.rng.rng_state`.

    `saved` is the content of a file `random_states_N.pkl`. The result is empty if a state is missing. States of
    generators on devices are not converted.
    """
    try:
        # Accelerate saves the tuple of numpy's `get_state()`. The result has the dict of `get_state(legacy=False)`.
        name, key, position, has_gauss, gauss = saved["numpy_random_seed"]
        numpy = {
            "bit_generator": name,
            "state": {"key": key, "pos": position},
            "has_gauss": has_gauss,
            "gauss": gauss,
        }
        return {"python": saved["random_state"], "numpy": numpy, "torch": saved["torch_manual_seed"]}
    except (KeyError, TypeError, ValueError):
        return {}


def merge_weights(
    source: Path | str,
    target: Path | str,
    *,
    safe: bool = True,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    remove_source: bool = False,
) -> list[Path]:
    """Write the weights of a sharded checkpoint as a model in Hugging Face's layout.

    Call this function on one process. Blocks on the disk. The extra memory is one tensor or, with `safe=False`, one
    file.

    Args:
        source: a Trainwright checkpoint, or a folder of torch.distributed.checkpoint, of DeepSpeed, or of Accelerate's
            `save_state` with sharded weights.
        target: a folder, which is created if needed. A previous model in this folder is replaced. Other files remain.
        safe: write safetensors. False writes `pytorch_model.bin`. Default: True.
        max_shard_bytes: largest total size of the tensors in one file. A larger tensor gets its own file.
        remove_source: delete `source` once the weights are on the disk. Default: False.

    Returns:
        The written files. The index, if the model has one, is the last.

    Raises:
        FileNotFoundError: `source` is not a folder.
        CheckpointError: `source` is damaged or has no shards, `target` cannot be written, or `target` is within
            `source`, which `remove_source` would delete.
    """
    source = Path(source)
    target = Path(target)
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a folder.")
    if remove_source and target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{target} is within {source}, which would be removed. Choose another folder.")
    if (source / MANIFEST).is_file():
        tensors, tied = stored_tensors(source)
        weights = {}
        for tensor in tensors:
            weights[tensor.name] = Weight(tensor.like, partial(_in_one_part, tensor.read))
    else:
        weights, tied = _foreign_weights(source)
    files = replace_weights(target, weights, max_shard_bytes=max_shard_bytes, safe=safe, tied=tied)
    if remove_source:
        shutil.rmtree(source)
    return files


def _foreign_weights(source: Path) -> tuple[dict[str, Weight], dict[str, str]]:
    """Return the weights of another program's checkpoint by name, and tied name → first name.

    Entries of the state dict that are not tensors are skipped.
    """
    sharded = read_sharded(source)
    if sharded is None:
        raise CheckpointError(
            f"{source} has no shards: no {MANIFEST}, {METADATA}, {FSDP_MODEL}0 or files of DeepSpeed. Pass the folder "
            "that the ranks wrote."
        )
    weights: dict[str, Weight] = {}
    tied: dict[str, str] = {}
    # Tied names have one object. `sharded.weights` keeps the objects alive, so that ids are unique.
    first_names: dict[int, str] = {}
    for saved_name, value in sharded.weights.items():
        if not isinstance(value, torch.Tensor):
            continue
        name = plain_name(saved_name)
        first_name = first_names.setdefault(id(value), name)
        if first_name != name:
            tied[name] = first_name
        elif isinstance(value, SavedTensor):
            # The shards are joined when the tensor is written.
            like = torch.empty(value.shape, dtype=value.dtype, device="meta")
            weights[name] = Weight(like, partial(_in_one_part, value.load))
        else:
            weights[name] = Weight.of(value)
    return weights, tied


def _in_one_part(load: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield all elements of a tensor as one part. A function `Weight.read` may yield several parts."""
    yield load().reshape(-1)
