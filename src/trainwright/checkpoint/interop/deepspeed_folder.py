"""Checkpoints of DeepSpeed's `save_checkpoint`: full float32 weights and optimizer states from the partitions of ZeRO.

Stages 1 and 2 flatten each parameter group into one vector and split it into one partition per rank. Stage 3 splits
each parameter, and each rank stores its shards in flat vectors, one per sub-group of parameters. For parameters a (6
elements) and b (2 elements) of one group on 2 ranks:

    stages 1 and 2    rank 0: a0 a1 a2 a3    rank 1: a4 a5 b0 b1
    stage 3           rank 0: a0 a1 a2 b0    rank 1: a3 a4 a5 b1

Files are parsed, never executed (see `torch_file`).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.disk.untrusted import inside, read_bytes, reading
from trainwright.checkpoint.format.regions import Span
from trainwright.checkpoint.interop.dcp_folder import ForeignShards, Sharded
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.core.errors import CheckpointError

LATEST = "latest"
# In both names, group 1 is the data-parallel rank. `mp_rank` is the tensor-parallel rank.
_MODEL_FILE = re.compile(r"(?:zero_pp_rank_(\d+)_)?mp_rank_(\d+)_model_states\.pt")
_OPTIMIZER_FILE = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d+)_mp_rank_(\d+)_optim_states\.pt")
# Classes of DeepSpeed whose objects are in its files, and which the conversion does not need.
_SKIPPED = frozenset(
    {
        "deepspeed.runtime.fp16.loss_scaler.LossScaler",
        "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
        "deepspeed.runtime.zero.config.ZeroStageEnum",
        "deepspeed.utils.tensor_fragment.fragment_address",
    }
)
# The kind of the weights; see `_Zero`.
_WEIGHT = "fp32"


def find_deepspeed(folder: Path) -> Path | None:
    """Return the folder with the ranks' files: `folder`, or the folder that the file `latest` in it names.

    Returns None if `folder` has neither such files nor `latest`. Raises a `CheckpointError` if the folder that `latest`
    names is missing.
    """
    for path in folder.iterdir():
        if _MODEL_FILE.fullmatch(path.name) or _OPTIMIZER_FILE.fullmatch(path.name):
            return folder
    latest = folder / LATEST
    if not latest.is_file():
        return None
    with reading(latest):
        tag = read_bytes(latest, max_bytes=1024).decode().strip()
    tag_folder = inside(folder, tag, str(latest))
    if not tag_folder.is_dir():
        raise CheckpointError(f"{latest} names the folder {tag!r}, which is missing. Copy it too.")
    return tag_folder


def read_deepspeed(folder: Path) -> Sharded:
    """Read the folder of one tag, such as `global_step100`.

    Raises a `CheckpointError` if a file is missing or damaged, or if the checkpoint was saved with tensor, pipeline or
    expert parallelism.
    """
    models = _read_ranks(folder, _MODEL_FILE)
    if not models:
        raise CheckpointError(f"{folder} has no mp_rank_00_model_states.pt. Copy the files of every rank.")
    parallelism = _unsupported_parallelism(folder, models[0])
    if parallelism is not None:
        raise CheckpointError(
            f"{folder} was saved with {parallelism}; only data parallelism is supported. Convert it with DeepSpeed "
            "first: python -m deepspeed.checkpoint.ds_to_universal."
        )
    with reading(folder, "is not a supported checkpoint of DeepSpeed"):
        state = Sharded("deepspeed", {}, step=int(models[0]["global_steps"]))
        scheduler = models[0].get("lr_scheduler")
        if scheduler:
            state.schedulers.append(scheduler)
        # DeepSpeed saves the shapes of the parameters only with ZeRO.
        if models[0].get("param_shapes") is None:
            _add_without_zero(state, models[0])
        else:
            _add_zero(state, folder, models)
    return state


def _unsupported_parallelism(folder: Path, model: Mapping[str, Any]) -> str | None:
    """Return the kind of parallelism that cannot be converted, or None. `model` is the model file of rank 0."""
    if any(folder.glob("layer_*_expert_*")) or any(folder.glob("expp_*")):
        return "expert parallelism"
    if any(folder.glob("layer_*-model_states.pt")):
        return "pipeline parallelism"
    if int(model.get("mp_world_size") or 1) > 1:
        return "tensor parallelism"
    return None


def _add_without_zero(state: Sharded, model: Mapping[str, Any]) -> None:
    """Add the weights and, if it is one of torch's optimizers, the optimizer. `model` is the model file of rank 0."""
    state.weights = dict(model["module"])
    optimizer = model.get("optimizer")
    if isinstance(optimizer, Mapping) and "param_groups" in optimizer:
        state.optimizers = [dict(optimizer)]
    elif optimizer is not None:
        state.notes.append(
            "The optimizer and its float32 weights are skipped: DeepSpeed's 16-bit optimizers are supported "
            "with ZeRO only. Save with stage 1 to convert them."
        )


def _add_zero(state: Sharded, folder: Path, models: list[dict[str, Any]]) -> None:
    """Add the weights and the optimizer that are partitioned over the ranks.

    `models` are the model files by rank. Only stage 3 has one for each rank, other stages have one for all ranks.
    """
    first = models[0]
    partitions = [rank["optimizer_state_dict"] for rank in _read_ranks(folder, _OPTIMIZER_FILE)]
    num_ranks = int(first["dp_world_size"])
    if len(partitions) != num_ranks:
        raise CheckpointError(
            f"{folder} has {len(partitions)} files *_optim_states.pt, expected one from each of {num_ranks} ranks. "
            "Copy the files of every rank."
        )
    zero = _Zero(folder, [dict(group) for group in first["param_shapes"]], partitions)
    # Kind → parameter name → full tensor.
    tensors = {kind: zero.tensors(vectors) for kind, vectors in zero.vectors.items()}
    # The float32 weights of the optimizer are more precise than the 16-bit weights in `module`.
    weights = tensors.pop(_WEIGHT)
    for name in first["buffer_names"]:
        weights[name] = first["module"][name]
    shared_params = dict(first.get("shared_params") or {})  # name of a tied parameter → name of the stored one
    if zero.is_stage_3:
        weights |= zero.frozen(models)
    else:
        # Stages 1 and 2 do not partition frozen parameters, which are in `module` in full. `frozen_param_shapes` names
        # them for stage 2 only, so all other weights in `module` are taken as frozen.
        for name, value in first["module"].items():
            if name not in weights and name not in shared_params and isinstance(value, torch.Tensor):
                weights[name] = value
    for name, shared_with in shared_params.items():
        weights[name] = weights[shared_with]
    # `module` has the order of the model's modules, and the weights receive the same order. With stage 3, names of
    # partitioned parameters may be missing in `module`; they follow.
    in_module = [name for name in first["module"] if name in weights]
    ordered_names = dict.fromkeys([*in_module, *weights])  # a dict, because names occur twice
    state.weights = {name: weights[name] for name in ordered_names}
    if len(zero.groups) == len(zero.shapes):
        state.optimizers = [_torch_state(zero, tensors, first)]
    else:
        state.notes.append(
            f"Weights only: the optimizer has {len(zero.groups)} groups, and the model's parameters have "
            f"{len(zero.shapes)}."
        )


def _read_ranks(folder: Path, pattern: re.Pattern[str]) -> list[dict[str, Any]]:
    """Read the files whose names match `pattern`, in the order of their ranks. Returns [] if no name matches.

    Raises a `CheckpointError` if the file of a rank is missing, or a file contains unsupported objects.
    """
    files = []  # (rank, path)
    for path in folder.iterdir():
        match = pattern.fullmatch(path.name)
        if match:
            # `mp_rank_00_model_states.pt` has no data-parallel rank: one file for all ranks.
            files.append((int(match[1] or 0), path))
    files.sort()
    # With tensor parallelism, several files have the same data-parallel rank.
    for expected, (rank, _) in enumerate(files):
        if rank != expected:
            raise CheckpointError(
                f"{folder} has {files[-1][1].name}, but no such file of rank {expected}. Copy the files of every rank. "
                "Checkpoints with tensor parallelism are not supported."
            )
    states = []
    for _, path in files:
        tree, classes = read_torch_file(path)
        # Objects of the skipped classes remain placeholders in the tree, at keys that are not read.
        unknown = [name for name in classes if name not in _SKIPPED]
        if unknown or not isinstance(tree, dict):
            raise CheckpointError(
                f"{path} names {', '.join(unknown[:8]) or 'no dict'}, which is neither a tensor nor plain "
                "data. No code from the file was run. Save without client_state objects."
            )
        states.append(tree)
    return states


class _Zero:
    """The partitions of all ranks by kind: `"fp32"` (weights), or an optimizer state such as `"exp_avg"`.

    Attributes:
        is_stage_3: False for stages 1 and 2, whose files have the same format.
        shapes: for each parameter group, the shapes of its trainable parameters by name.
        groups: the parameter groups of the optimizer. Their `"params"` are not used.
        vectors: kind → rank → group (stage 3: sub-group) → flat vector. In nested containers, this is
            `{"fp32": [[vector of group 0, vector of group 1], [...]], "exp_avg": ...}`, with an inner list per rank.
        plain: for each group (stage 3: sub-group), the unpartitioned values: kind → value, as in `{"step": 10}`.
    """

    def __init__(self, folder: Path, shapes: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> None:
        self._folder = folder
        self.is_stage_3 = "fp32_flat_groups" in ranks[0]
        # Elements of padding after each parameter in the vector of its group. Older versions of DeepSpeed have none.
        self._paddings = ranks[0].get("param_alignment_paddings") or [[0] * len(group) for group in shapes]
        self.shapes = shapes
        if self.is_stage_3:
            weights_key = "fp32_flat_groups"
            state_key = "optimizer_state_dict"
        else:
            weights_key = "single_partition_of_fp32_groups"
            state_key = "base_optimizer_state"
        saved = [rank[state_key] for rank in ranks]
        # An elastic checkpoint has a list of states there, without the parameter groups.
        if not isinstance(saved[0], Mapping):
            raise CheckpointError(
                f"{folder} is an elastic checkpoint, which is not supported. Save it with "
                '{"zero_optimization": {"elastic_checkpoint": false}}.'
            )
        self.groups = [dict(group) for group in saved[0]["param_groups"]]
        weights = [list(rank[weights_key]) for rank in ranks]
        self.vectors: dict[str, list[list[torch.Tensor]]] = {_WEIGHT: weights}
        self.plain: list[dict[str, Any]] = [{} for _ in weights[0]]
        self._add_optimizer_states([rank["state"] for rank in saved])

    def _add_optimizer_states(self, states: list[Mapping[int, Mapping[str, Any]]]) -> None:
        """Add `states` (rank → group → kind → value) to `vectors` and `plain`.

        Values with the shape of the group's weights are partitioned, and other values are equal on all ranks.
        """
        numbers = range(len(self.plain))  # of the groups or sub-groups
        kinds: dict[str, None] = {}  # a dict without values, which is an ordered set
        for number in numbers:
            kinds |= dict.fromkeys(states[0].get(number, {}))
        weights_of_rank_0 = self.vectors[_WEIGHT][0]
        for kind in kinds:
            values = [[state[number][kind] for number in numbers] for state in states]  # rank → group → value
            if all(map(_is_vector_like, values[0], weights_of_rank_0)):
                self.vectors[kind] = values
            else:
                for number in numbers:
                    self.plain[number][kind] = values[0][number]

    def tensors(self, vectors: list[list[torch.Tensor]]) -> dict[str, torch.Tensor]:
        """Return the full tensors of one kind by parameter name. They are read on use.

        `vectors` are the flat vectors of the kind: rank → group (stage 3: sub-group) → vector.
        """
        shards = ForeignShards()
        if self.is_stage_3:
            self._add_stage_3(shards, vectors)
        else:
            self._add_stages_1_and_2(shards, vectors)
        dtype = vectors[0][0].dtype
        full: dict[str, torch.Tensor] = {}
        for group in self.shapes:
            for name, shape in group.items():
                full[name] = shards.full(name, tuple(shape), dtype, self._folder)
        return full

    def _add_stages_1_and_2(self, shards: ForeignShards, vectors: list[list[torch.Tensor]]) -> None:
        """Add the parameters of stages 1 and 2, which are consecutive in the joined partitions of their group."""
        for number, group in enumerate(self.shapes):
            partitions = [vectors_of_rank[number] for vectors_of_rank in vectors]
            begin = 0  # of the parameter in the joined partitions
            for (name, shape), padding in zip(group.items(), self._paddings[number], strict=True):
                count = math.prod(shape)
                for span, values in _cut(partitions, begin, count):
                    shards.add(name, span, tuple(shape), values.dtype, values.detach)
                begin += count + int(padding)

    def _add_stage_3(self, shards: ForeignShards, vectors: list[list[torch.Tensor]]) -> None:
        """Add the parameters of stage 3. A rank's shards of them are consecutive in its joined sub-groups."""
        begin = 0  # of the parameter's shard in the joined sub-groups, which is the same on all ranks
        for group in self.shapes:
            for name, shape in group.items():
                count = math.prod(shape)
                # 10 elements on 4 ranks: 3, 3, 3 and 1. The last rank has 2 elements of padding.
                length = math.ceil(count / len(vectors))
                for rank, sub_groups in enumerate(vectors):
                    # The first element of the rank's shard. With more ranks than elements, it may be after the end.
                    shard_begin = rank * length
                    num_elements = min(length, count - shard_begin)
                    for span, values in _cut(sub_groups, begin, num_elements, shard_begin):
                        shards.add(name, span, tuple(shape), values.dtype, values.detach)
                begin += length

    def frozen(self, models: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Return the full frozen parameters of stage 3, in which each rank's model file has a shard of each."""
        full: dict[str, torch.Tensor] = {}
        for name, shape in (models[0].get("frozen_param_shapes") or {}).items():
            parts = [model["frozen_param_fragments"][name].view(-1) for model in models]
            # The end of the last shard may be padding.
            full[name] = torch.cat(parts)[: math.prod(shape)].view(tuple(shape))
        return full


def _is_vector_like(value: object, vector: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == vector.shape and value.dim() == 1


def _cut(
    vectors: Iterable[torch.Tensor], begin: int, count: int, span_begin: int = 0
) -> Iterator[tuple[Span, torch.Tensor]]:
    """Yield the elements `[begin, begin + count)` of concatenated vectors, in one part for each vector.

    Each part has its span in the parameter, whose first span begins at `span_begin`. With vectors of 4 and 6 elements,
    begin=3 and count=3, this yields Span(0, 1) with `vectors[0][3:4]` and Span(1, 3) with `vectors[1][0:2]`. Nothing is
    yielded if `count` is not positive.
    """
    end = begin + count
    start = 0  # of the vector in the concatenation
    for vector in vectors:
        low = max(begin, start)
        high = min(end, start + vector.numel())
        if low < high:
            span = Span(span_begin + low - begin, span_begin + high - begin)
            yield span, vector[low - start : high - start]
        start += vector.numel()


def _torch_state(
    zero: _Zero, tensors: Mapping[str, Mapping[str, torch.Tensor]], model: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the optimizer's torch state dict with parameter names.

    `tensors` are the optimizer's states: kind → name → full tensor. `model` is the model file of rank 0.
    """
    state: dict[str, dict[str, Any]] = {}
    groups: list[dict[str, Any]] = []
    for number, shapes in enumerate(zero.shapes):
        group = dict(zero.groups[number])
        # Stage 3 has plain values by sub-group, of which there may be fewer or more than groups. The only plain value,
        # the step, is the same in all of them.
        plain = dict(zero.plain[min(number, len(zero.plain) - 1)])
        # Older versions of FusedAdam have the step in the group, all other optimizers in the state.
        group_step = group.pop("step", model["global_steps"])
        plain["step"] = torch.as_tensor(plain.get("step", group_step), dtype=torch.float32)
        for name in shapes:
            state[name] = {}
            # SGD without momentum has no states, and a state with the step only would not be one of torch's.
            if tensors:
                state[name] |= plain
                state[name] |= {kind: values[name] for kind, values in tensors.items()}
        # A key of DeepSpeed's own classes, of which ZeRO supports those of Adam.
        if "bias_correction" in zero.groups[0]:
            group = _as_adam(group, model.get("ds_config") or {})
        groups.append({**group, "params": list(shapes)})
    return {"state": state, "param_groups": groups}


def _as_adam(group: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a parameter group of DeepSpeed's CPUAdam or FusedAdam to a group of torch's AdamW or Adam.

    Keys that torch's group lacks, such as `bias_correction`, are dropped. Keys that DeepSpeed's group lacks, such as
    `foreach`, have torch's defaults. `config` is DeepSpeed's configuration, which determines the class.
    """
    optimizer = config.get("optimizer") or {}
    parameters = optimizer.get("params") or {}
    is_decoupled = optimizer.get("type", "AdamW").lower() == "adamw" or bool(parameters.get("adam_w_mode", True))
    cls = torch.optim.AdamW if is_decoupled else torch.optim.Adam
    converted = cls([torch.nn.Parameter(torch.zeros(1))]).state_dict()["param_groups"][0]
    for key in converted:
        if key in group:
            converted[key] = group[key]
    converted["betas"] = tuple(converted["betas"])
    return dict(converted)
