"""Checkpoints of DeepSpeed's `save_checkpoint`: full float32 weights and optimizer states from the partitions of ZeRO.

Stages 1 and 2 flatten each parameter group into one vector and split it into one partition per rank. Stage 3 splits
each parameter, and each rank stores its shards in flat vectors, one per sub-group of parameters. Files are parsed,
never executed (see `torch_file`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.disk.untrusted import inside, read_bytes, reading
from trainwright.checkpoint.format.regions import Span
from trainwright.checkpoint.interop.dcp_folder import ForeignShards, Sharded
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.core.errors import CheckpointError

LATEST = "latest"
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# DeepSpeed's objects that are not needed; they are skipped.
_SKIPPED = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
_WEIGHT = "fp32"


def find_deepspeed(folder: Path) -> Path | None:
    """Return the folder with the ranks' files: `folder`, or the folder that the file `latest` in it names, or None."""
    if any(_MODEL_FILE.fullmatch(path.name) or _OPTIMIZER_FILE.fullmatch(path.name) for path in folder.iterdir()):
        return folder
    latest = folder / LATEST
    if not latest.is_file():
        return None
    with reading(latest):
        tag = read_bytes(latest, max_bytes=1024).decode().strip()
    found = inside(folder, tag, str(latest))
    if not found.is_dir():
        raise CheckpointError(f"{latest} names the folder {tag!r}, which is missing. Copy it too.")
    return found


def read_deepspeed(folder: Path) -> Sharded:
    """Read the folder of one tag, such as `global_step100`. Refuses tensor, pipeline and expert parallelism."""
    models = _read_ranks(folder, _MODEL_FILE)
    if not models:
        raise CheckpointError(f"{folder} has no mp_rank_00_model_states.pt. Copy the files of every rank.")
    first = models[0]
    where = "tensor parallelism" if int(first.get("mp_world_size") or 1) > 1 else ""
    where = "pipeline parallelism" if any(folder.glob("layer_*-model_states.pt")) else where
    where = "experts" if any(folder.glob("layer_*_expert_*")) or any(folder.glob("expp_*")) else where
    if where:
        raise CheckpointError(
            f"{folder} was saved with {where}; only data parallelism is supported. Convert it with DeepSpeed first: "
            "python -m deepspeed.checkpoint.ds_to_universal."
        )
    shapes = first.get("param_shapes")
    partitions = [state["optimizer_state_dict"] for state in _read_ranks(folder, _OPTIMIZER_FILE)]
    with reading(folder, "is not a supported checkpoint of DeepSpeed"):
        schedulers = [scheduler] if (scheduler := first.get("lr_scheduler")) else []
        state = Sharded("deepspeed", {}, step=int(first["global_steps"]), schedulers=schedulers)
        if shapes is None:
            state.weights, saved = dict(first["module"]), first.get("optimizer")
            if isinstance(saved, Mapping) and "param_groups" in saved:
                state.optimizers = [dict(saved)]
            elif saved is not None:
                state.notes.append(
                    "The optimizer and its float32 weights are skipped: DeepSpeed's 16-bit optimizers are supported "
                    "with ZeRO only. Save with stage 1 to convert them."
                )
            return state
        ranks = int(first["dp_world_size"])
        if len(partitions) != ranks:
            raise CheckpointError(
                f"{folder} has {len(partitions)} files *_optim_states.pt, expected one from each of {ranks} ranks. "
                "Copy the files of every rank."
            )
        zero = _Zero(folder, [dict(group) for group in shapes], partitions)
        found = {kind: zero.tensors(flat) for kind, flat in zero.flat.items()}
        buffers = {name: first["module"][name] for name in first["buffer_names"]}
        frozen = zero.frozen([model.get("frozen_param_fragments") or {} for model in models], first)
        weights = {**found.pop(_WEIGHT), **buffers, **frozen}
        for other, name in dict(first.get("shared_params") or {}).items():
            weights[other] = weights[name]
        order = [name for name in first["module"] if name in weights]
        state.weights = {name: weights[name] for name in dict.fromkeys([*order, *weights])}
        state.optimizers = _torch_state(zero, found, first, state.notes)
    return state


def _read_ranks(folder: Path, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    """Read the files whose names match `pattern`, in the order of their ranks."""
    names = {path.name: pattern.fullmatch(path.name) for path in folder.iterdir()}
    ranks = sorted((int(found[1] or 0), name) for name, found in names.items() if found)
    missing = next((rank for rank, (own, _) in enumerate(ranks) if rank != own), None)
    if missing is not None:
        raise CheckpointError(
            f"{folder} has {ranks[-1][1]}, but no such file of rank {missing}. Copy the files of every rank. "
            "Checkpoints with tensor parallelism are not supported."
        )
    states = []
    for _, name in ranks:
        tree, unknown = read_torch_file(folder / name)
        strange = [one for one in unknown if one not in _SKIPPED]
        if strange or not isinstance(tree, dict):
            raise CheckpointError(
                f"{folder / name} names {', '.join(strange[:8]) or 'no dict'}, which is neither a tensor nor plain "
                "data. No code from the file was run. Save without client_state objects."
            )
        states.append(tree)
    return states


class _Zero:
    """The partitions of all ranks by kind: `"fp32"` (weights), or an optimizer state such as `"exp_avg"`."""

    def __init__(self, folder: Path, shapes: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> None:
        self.folder, self.shapes = folder, shapes
        self._is_stage_3 = "fp32_flat_groups" in ranks[0]
        saved = [rank["optimizer_state_dict" if self._is_stage_3 else "base_optimizer_state"] for rank in ranks]
        if not isinstance(saved[0], Mapping):
            raise CheckpointError(
                f"{folder} is an elastic checkpoint, which is not supported. Save it with "
                '{"zero_optimization": {"elastic_checkpoint": false}}.'
            )
        self.groups = [dict(group) for group in saved[0]["param_groups"]]
        key = "fp32_flat_groups" if self._is_stage_3 else "single_partition_of_fp32_groups"
        weights = [list(rank[key]) for rank in ranks]
        numbers = range(len(weights[0]))
        # kind → rank → group (stage 3: sub-group) → flat vector
        self.flat: dict[str, list[list[torch.Tensor]]] = {_WEIGHT: weights}
        # Values that are not partitioned, such as the step, by group.
        self.plain: list[dict[str, Any]] = [{} for _ in numbers]
        for kind in dict.fromkeys(kind for number in numbers for kind in saved[0]["state"].get(number, {})):
            values = [[rank["state"][number][kind] for number in numbers] for rank in saved]
            if all(
                isinstance(value, torch.Tensor) and value.shape == flat.shape and value.dim() == 1
                for value, flat in zip(values[0], weights[0], strict=True)
            ):
                self.flat[kind] = values
            else:
                for number in numbers:
                    self.plain[number][kind] = values[0][number]
        self._paddings = ranks[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]

    def tensors(self, flat: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the full tensors of one kind, by parameter."""
        shards = ForeignShards()
        found: dict[str, torch.Tensor] = {}
        begin = 0
        for number, group in enumerate(self.shapes):
            # The vectors that hold a parameter, one after the other: those of each rank, or those of all ranks.
            sources = flat if self._is_stage_3 else [[vectors[number] for vectors in flat]]
            begin = begin if self._is_stage_3 else 0
            for place, (name, size) in enumerate(group.items()):
                shape, count = tuple(size), math.prod(size)
                length = -(-count // len(sources))
                for rank, vectors in enumerate(sources):
                    first = rank * length
                    for region, values in _cut(vectors, begin, min(length, count - first), first):
                        shards.add(name, region, shape, values.dtype, values.detach)
                begin += length if self._is_stage_3 else count + int(self._paddings[number][place])
                found[name] = shards.full(name, shape, flat[0][0].dtype, self.folder)
        return found

    def frozen(self, fragments: list[Mapping[str, torch.Tensor]], first: Mapping[str, Any]) -> dict[str, torch.Tensor]:
        """Return the full frozen parameters. In stage 3, each rank has a shard of each frozen parameter."""
        found: dict[str, torch.Tensor] = {}
        for name, size in (first.get("frozen_param_shapes") or {}).items():
            parts = [ranks[name].view(-1) for ranks in fragments] if self._is_stage_3 else [fragments[0][name].view(-1)]
            found[name] = torch.cat(parts)[: math.prod(size)].view(tuple(size))
        return found


def _cut(vectors: Iterable[torch.Tensor], begin: int, count: int, first: int) -> Iterator[tuple[Span, torch.Tensor]]:
    """Yield elements `[begin, begin + count)` of concatenated vectors, with spans in a tensor that begin at `first`."""
    start, end = 0, begin + max(count, 0)
    for vector in vectors:
        low, high = max(begin, start), min(end, start + vector.numel())
        if low < high:
            yield Span(first + low - begin, first + high - begin), vector[low - start : high - start]
        start += vector.numel()


def _torch_state(
    zero: _Zero, kinds: Mapping[str, Mapping[str, torch.Tensor]], first: Mapping[str, Any], notes: list[str]
) -> list[Any]:
    """Return a list with the optimizer's torch state dict, by parameter name. Empty if its groups do not fit."""
    if len(zero.groups) != len(zero.shapes):
        notes.append(
            f"Weights only: the optimizer has {len(zero.groups)} groups, and the model's parameters have "
            f"{len(zero.shapes)}."
        )
        return []
    state: dict[str, dict[str, Any]] = {}
    for number, group in enumerate(zero.shapes):
        plain = dict(zero.plain[min(number, len(zero.plain) - 1)])
        step = plain.pop("step", zero.groups[number].pop("step", first["global_steps"]))
        plain["step"] = torch.as_tensor(step, dtype=torch.float32)
        for name in group:
            state[name] = {**plain, **{kind: values[name] for kind, values in kinds.items()}} if kinds else {}
    groups: Sequence[dict[str, Any]] = zero.groups
    if "bias_correction" in groups[0]:
        groups = [_as_adam(group, first.get("ds_config") or {}) for group in groups]
    named = [{**group, "params": list(names)} for group, names in zip(groups, zero.shapes, strict=True)]
    return [{"state": state, "param_groups": named}]


def _as_adam(group: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a parameter group of DeepSpeed's CPUAdam or FusedAdam to a group of torch's AdamW or Adam."""
    given = config.get("optimizer") or {}
    parameters = given.get("params") or {}
    is_decoupled = given.get("type", "AdamW").lower() == "adamw" or bool(parameters.get("adam_w_mode", True))
    kind = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    [own] = kind([torch.nn.Parameter(torch.zeros(1))]).state_dict()["param_groups"]
    return {key: tuple(group[key]) if key == "betas" else group.get(key, value) for key, value in own.items()}
