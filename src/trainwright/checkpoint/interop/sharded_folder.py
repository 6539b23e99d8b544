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
_WEIGHTS = ("model", "state_dict", "model_state_dict", "app")  # keys of the weights in a state dict
_OPTIMIZER = re.compile(r"(?:optimizer|optim)(?:_?(\d+))?")


def read_sharded(path: Path) -> Sharded | None:
    """Read a folder of torch.distributed.checkpoint or DeepSpeed, also as Accelerate or Lightning save it.

    Returns None for other folders. A folder without weights raises a `CheckpointError`.
    """
    if (path / METADATA).is_file() or any(path.glob("*.distcp")):
        return _from_dcp(path, read_dcp(path))
    if (path / f"{FSDP_MODEL}0").is_dir():
        # Accelerate has one folder for the model and one for each optimizer, such as `optimizer_0`.
        tree = read_dcp(path / f"{FSDP_MODEL}0")
        for entry in sorted(path.glob(f"{_FSDP_OPTIMIZER}*")):
            if entry.is_dir():
                tree[entry.name] = read_dcp(entry).get("optimizer")
        return _from_dcp(path, tree)
    folder = find_deepspeed(path)
    return None if folder is None else read_deepspeed(folder)


def _from_dcp(path: Path, tree: Mapping[str, Any]) -> Sharded:
    app = tree.get("app")
    if isinstance(app, Mapping):  # an object with state_dict(), as in torch's tutorial
        tree = {**tree, **app}
    weights = _find_weights(tree)
    if not weights:
        raise CheckpointError(
            f"{path} has no weights under {', '.join(_WEIGHTS)}: it has {', '.join(list(tree)[:10]) or 'nothing'}. "
            f"For Accelerate's save_state pass {FSDP_MODEL}0, or its parent folder, which also has the optimizer."
        )
    # The number in a key is the optimizer's position: `optimizer_10` comes after `optimizer_2`.
    optimizers: list[tuple[int, Any]] = []
    for key, state in tree.items():
        match = _OPTIMIZER.fullmatch(key)
        if match and isinstance(state, Mapping) and "param_groups" in state:
            optimizers.append((int(match[1] or 0), state))
    optimizers.sort(key=lambda numbered: numbered[0])
    meta = path / _LIGHTNING_META
    progress = read_torch_file(meta)[0] if meta.is_file() else {}
    return Sharded(
        "torch.distributed",
        weights,
        [state for _, state in optimizers],
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
    """Return one rank's RNG states of Accelerate in the form of `core.rng.rng_state`. Empty if a state is missing."""
    try:
        # The tuple of `numpy.random.get_state()`, and the dict of `get_state(legacy=False)`.
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

    Call this function on one process. Blocks on the disk. The extra memory is one tensor. Returns the written files,
    with the index, if any, as the last. If `source` is not a folder, a FileNotFoundError is raised.

    Args:
        source: a Trainwright checkpoint, or a folder of torch.distributed.checkpoint, of DeepSpeed, or of Accelerate's
            `save_state` with sharded weights.
        target: a folder, which is created if needed. A previous model in this folder is replaced. Other files remain.
        safe: write safetensors. False writes `pytorch_model.bin`.
        max_shard_bytes: largest total size of the tensors in one file.
        remove_source: delete `source` once the weights are on the disk.
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
    """Return the weights, and tied name → first name."""
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
    """Yield the elements of a tensor as `Weight.read` does, which may yield several parts."""
    yield load().reshape(-1)
