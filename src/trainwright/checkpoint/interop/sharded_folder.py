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
        tree = read_dcp(path / f"{FSDP_MODEL}0")
        folders = sorted(entry for entry in path.glob(f"{_FSDP_OPTIMIZER}*") if entry.is_dir())
        return _from_dcp(path, tree | {folder.name: read_dcp(folder).get("optimizer") for folder in folders})
    folder = find_deepspeed(path)
    return None if folder is None else read_deepspeed(folder)


def _from_dcp(path: Path, tree: Mapping[str, Any]) -> Sharded:
    inner = tree.get("app")
    if isinstance(inner, Mapping):  # an object with state_dict(), as in torch's tutorial
        tree = {**tree, **inner}
    found = {key: match for key in tree if (match := _OPTIMIZER.fullmatch(key))}
    optimizers = [tree[key] for key in sorted(found, key=lambda key: int(found[key][1] or 0))]
    weights = next((tree[key] for key in _WEIGHTS if isinstance(tree.get(key), Mapping)), None)
    if weights is None:
        weights = {name: value for name, value in tree.items() if isinstance(value, torch.Tensor)}
    if not weights:
        raise CheckpointError(
            f"{path} has no weights under {', '.join(_WEIGHTS)}: it has {', '.join(list(tree)[:10]) or 'nothing'}. "
            f"For Accelerate's save_state pass {FSDP_MODEL}0, or its parent folder, which also has the optimizer."
        )
    meta = path / _LIGHTNING_META
    progress = read_torch_file(meta)[0] if meta.is_file() else {}
    return Sharded(
        "torch.distributed",
        weights,
        [state for state in optimizers if isinstance(state, Mapping) and "param_groups" in state],
        progress=progress,
        schedulers=list(progress.get("lr_schedulers") or []),
    )


def accelerate_rng(saved: Any) -> dict[str, Any]:
    """Return one rank's RNG states of Accelerate in the form of `core.rng.rng_state`. Empty if a state is missing."""
    try:
        name, key, position, has_gauss, gauss = saved["numpy_random_seed"]
        state = {"key": key, "pos": position}
        numpy = {"bit_generator": name, "state": state, "has_gauss": has_gauss, "gauss": gauss}
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
    source, target = Path(source), Path(target)
    if not source.is_dir():
        raise FileNotFoundError(f"{source} is not a folder.")
    if remove_source and target.resolve().is_relative_to(source.resolve()):
        raise CheckpointError(f"{target} is within {source}, which would be removed. Choose another folder.")
    if (source / MANIFEST).is_file():
        tensors, tied = stored_tensors(source)
        weights = {tensor.name: Weight(tensor.like, partial(_read, tensor.read)) for tensor in tensors}
    else:
        weights, tied = _foreign_weights(source)
    files = replace_weights(target, weights, max_shard_bytes=max_shard_bytes, safe=safe, tied=tied)
    if remove_source:
        shutil.rmtree(source)
    return files


def _foreign_weights(source: Path) -> tuple[dict[str, Weight], dict[str, str]]:
    sharded = read_sharded(source)
    if sharded is None:
        raise CheckpointError(
            f"{source} has no shards: no {MANIFEST}, {METADATA}, {FSDP_MODEL}0 or files of DeepSpeed. Pass the folder "
            "that the ranks wrote."
        )
    weights: dict[str, Weight] = {}
    tied: dict[str, str] = {}
    first: dict[int, str] = {}
    for raw, value in sharded.weights.items():
        name = plain_name(raw)
        if not isinstance(value, torch.Tensor):
            continue
        if first.setdefault(id(value), name) != name:
            tied[name] = first[id(value)]
        elif isinstance(value, SavedTensor):
            like = torch.empty(value.shape, dtype=value.dtype, device="meta")
            weights[name] = Weight(like, partial(_read, value.load))
        else:
            weights[name] = Weight.of(value)
    return weights, tied


def _read(load: Callable[[], torch.Tensor]) -> Iterator[torch.Tensor]:
    yield load().reshape(-1)
