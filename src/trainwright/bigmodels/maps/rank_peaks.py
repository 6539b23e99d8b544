"""Peak device memory of a rank that trains a model in float32 with Adam, for each strategy.

The peak is in the backward, usually at its start, or in the optimizer's step. For DeepSpeed and `offload`, the backward
is simulated. The formulas are those of the memory table in docs/meshes.md, with temporary tensors in addition.

Names that end with `_bytes`, and results of functions whose name ends with `_peak`, are bytes. Other sizes are numbers
of elements.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trainwright.bigmodels.maps.sizes import NUMBERED_BLOCK
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.fsdp.layers.known_models import PlannedMesh, ready_plan
from trainwright.strategies.fsdp.layers.plan import SplitLayers
from trainwright.strategies.megatron.stages import find_stages

_ENDS = ("embedding", "colwise_gathered")  # styles of layers whose input or output is a full tensor
_BYTES = 4  # of a weight or gradient in float32
_STATE_BYTES = 8  # of Adam's two averages of an element, both float32
_TEMPORARIES = 2  # temporary tensors of a parameter's size in Adam's update of one parameter after the other
_ALIGNMENT = 2  # stages 1 and 2 of ZeRO pad each rank's shard to a multiple of this number of elements


@dataclass(frozen=True, slots=True)
class ZeroBuckets:
    """Sizes of DeepSpeed's buffers, in elements. The defaults are those of `DeepSpeedStrategy`.

    Attributes:
        reduce: `reduce_bucket_size`: gradients per reduction.
        overlap: `overlap_comm`: stages 1 and 2 fill a second bucket while the first one is reduced.
        persistent: `stage3_param_persistence_threshold`: parameters up to this size stay gathered.
        prefetch: `stage3_prefetch_bucket_size`: parameters per prefetch.
        max_reuse_distance: `stage3_max_reuse_distance`: a parameter that is used again within this distance stays
            gathered.
        max_live: `stage3_max_live_parameters`: prefetching stops at this number of gathered elements.
    """

    reduce: int = 200_000_000
    overlap: bool = True
    persistent: int = 100_000
    prefetch: int = 50_000_000
    max_reuse_distance: int = 1_000_000_000
    max_live: int = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """Numbers of elements in a model, or in the part of a model that a rank has.

    Attributes:
        sizes: Elements of each parameter, in the model's order. Shared parameters count once.
        largest_block: Elements of the largest numbered block (such as `layers.0`). Strategies gather or move a block at
            a time.
        outside_blocks: Elements outside the blocks: embeddings, heads and norms.
        num_uses: Number of modules that share the largest parameter, such as 2 for tied embeddings. Each has a
            gradient. These gradients are in memory at the same time.
        joint_blocks: Elements of all blocks that use the same input tensor, such as a decoder's blocks that use the
            encoder's output. The backward finishes all of them at the same time.
    """

    sizes: tuple[int, ...]
    largest_block: int
    outside_blocks: int
    num_uses: int = 1
    joint_blocks: int = 0

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return sum(self.sizes)

    @property
    def largest_parameter(self) -> int:
        """Elements of the largest parameter."""
        return max(self.sizes, default=0)


def training_shape(model: nn.Module) -> TrainingShape:
    """Return the `TrainingShape` of a model on any device, the meta device included."""
    names: dict[nn.Parameter, list[str]] = {}  # a tied parameter has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    sizes = {names_of_one[0]: parameter.numel() for parameter, names_of_one in names.items()}
    shape = shape_of(sizes)
    num_uses = 1
    for parameter, names_of_one in names.items():
        if parameter.numel() == shape.largest_parameter:
            num_uses = max(num_uses, len(names_of_one))
    joint_blocks = 0
    # An attribute of transformers models, whose decoder's blocks are called `decoder.block.0` or similar.
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        for name, size in sizes.items():
            if NUMBERED_BLOCK.match(name) and "decoder" in name.split("."):
                joint_blocks += size
    return replace(shape, num_uses=num_uses, joint_blocks=joint_blocks)


def shape_of(sizes: Mapping[str, int]) -> TrainingShape:
    """Return the `TrainingShape` of a model from its parameters' names and numbers of elements.

    Shared parameters and an encoder's output are unknown here: `num_uses` and `joint_blocks` have their defaults.
    """
    blocks: Counter[str] = Counter()
    for name, elements in sizes.items():
        block = NUMBERED_BLOCK.match(name)
        if block is not None:
            blocks[block[0]] += elements
    return TrainingShape(
        sizes=tuple(sizes.values()),
        largest_block=max(blocks.values(), default=0),
        outside_blocks=sum(sizes.values()) - blocks.total(),
    )


def rank_peaks(
    shape: TrainingShape,
    *,
    world_size: int,
    activation_bytes: int,
    buckets: ZeroBuckets | None = None,
    foreach: bool = False,
) -> dict[str, int]:
    """Return the peak bytes on one rank's device in a step, by strategy. All ranks have the same activations.

    Args:
        shape: The model's numbers of elements.
        world_size: Number of ranks over which strategies shard. The strategies `single` and `offload` use one device.
        activation_bytes: Bytes that autograd saves in one rank's forward, from `count_stage_bytes`.
        buckets: DeepSpeed's buffers. Default: the defaults of `ZeroBuckets`.
        foreach: Adam updates all parameters at once, torch's default on a GPU. No effect on DeepSpeed and
            `offload`. Default: False.

    Returns:
        Strategy → bytes, with a separate entry for each ZeRO stage: `single`, `ddp`, `fsdp`, `offload`, and
        `deepspeed_stage_1` to `deepspeed_stage_3`.
    """
    buckets = buckets or ZeroBuckets()
    weight_bytes = _BYTES * shape.elements
    gradient_bytes = _BYTES * shape.elements
    state_bytes = _STATE_BYTES * shape.elements
    outside_bytes = _BYTES * shape.outside_blocks
    temporary_bytes = _temporary_bytes(shape, foreach)
    step_bytes = gradient_bytes + temporary_bytes
    # At the start of the backward, the first gradient is usually the largest one, as that of the output layer.
    backward_bytes = activation_bytes + _BYTES * shape.largest_parameter
    peaks = {
        "single": weight_bytes + state_bytes + max(step_bytes, backward_bytes),
        # Gradients are views of buckets that DDP never frees.
        "ddp": weight_bytes + state_bytes + gradient_bytes + max(temporary_bytes, backward_bytes),
        "fsdp": (weight_bytes + state_bytes) // world_size
        + max(step_bytes // world_size, _fsdp_backward_peak(shape, world_size, activation_bytes)),
        "offload": outside_bytes + max(backward_bytes, _offload_backward_peak(shape, activation_bytes)),
    }
    for stage in (1, 2):
        peaks[f"deepspeed_stage_{stage}"] = _flat_peak(shape, stage, world_size, activation_bytes, buckets)
    peaks["deepspeed_stage_3"] = _sharded_peak(shape, world_size, activation_bytes, buckets)
    return {name: math.ceil(peak) for name, peak in peaks.items()}


def _fsdp_backward_peak(shape: TrainingShape, world_size: int, activation_bytes: int) -> int:
    """Return the peak bytes of activations, gathered parameters and gradients in the backward of FSDP.

    The shards of parameters and optimizer states are not included.
    """
    shard_bytes = _BYTES * shape.elements // world_size
    # Gradient shards replace activations, which the backward frees.
    peak_bytes = max(activation_bytes, shard_bytes)
    # Parameters outside the blocks stay gathered for the whole step. They also have full gradients, and a copy of these
    # for the reduce-scatter.
    peak_bytes += 3 * _BYTES * shape.outside_blocks
    peak_bytes += shape.num_uses * _BYTES * shape.largest_parameter
    # Five blocks: the current one and the next one are gathered. The current one has full gradients, and a copy of
    # these for the reduce-scatter, while the gradients of the previous one are reduced.
    peak_bytes += 5 * _BYTES * shape.largest_block
    return peak_bytes


def _temporary_bytes(shape: TrainingShape, foreach: bool) -> int:
    """Return the bytes of temporary tensors in Adam's update."""
    if foreach:
        return _BYTES * shape.elements
    return _BYTES * _TEMPORARIES * shape.largest_parameter


def _flat_peak(shape: TrainingShape, stage: int, world_size: int, activation_bytes: int, buckets: ZeroBuckets) -> int:
    """Return the peak bytes on one rank's device in a step at ZeRO stage 1 or 2.

    Simulates a step of DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py). The backward computes gradients
    from the last parameter to the first and frees activations. Gradients are collected in buckets, copied into a buffer
    and reduced, and each rank keeps its shard. The optimizer then updates the shard as one tensor.
    """
    multiple = _ALIGNMENT * world_size
    elements = multiple * math.ceil(shape.elements / multiple)
    shard = elements // world_size
    # All parameters. Of the shard: the updated copy, and two averages.
    held_bytes = _BYTES * (elements + 3 * shard)
    num_buckets = 2 if buckets.overlap else 1
    bucket_bytes = _BYTES * buckets.reduce * num_buckets
    peak_bytes = _BYTES * shard * (1 + _TEMPORARIES)  # in the update: the shard's gradients, and temporary tensors
    for rank in (0, world_size - 1):  # the position of a rank's shard decides when the rank stores its gradients
        owned = _owned(shape.sizes, rank * shard, (rank + 1) * shard)
        backward_bytes = bucket_bytes + _zero_backward_peak(shape, owned, stage, activation_bytes, buckets)
        # The gradients of the shard's parameters are copied into one tensor.
        flattening_bytes = _BYTES * (sum(itertools.compress(shape.sizes, owned)) + shard)
        peak_bytes = max(peak_bytes, backward_bytes, flattening_bytes)
    return held_bytes + peak_bytes


def _sharded_peak(shape: TrainingShape, world_size: int, activation_bytes: int, buckets: ZeroBuckets) -> int:
    """Return the peak bytes on one rank's device in a step at ZeRO stage 3.

    Each parameter is sharded over all ranks. Their reduced gradients are among the held bytes.
    """
    shard = sum(math.ceil(size / world_size) for size in shape.sizes)
    # Of each shard: parameters, the updated copy, two averages, and gradients. Further a bucket for the reduction.
    held_bytes = _BYTES * (5 * shard + buckets.reduce)
    gathered_bytes = _BYTES * _gathered_elements(shape.sizes, buckets)
    not_owned = [False] * len(shape.sizes)
    backward_bytes = gathered_bytes + _zero_backward_peak(shape, not_owned, 3, activation_bytes, buckets)
    update_bytes = _BYTES * shard * (1 + _TEMPORARIES)
    return held_bytes + max(backward_bytes, update_bytes)


def _owned(sizes: Sequence[int], begin: int, end: int) -> list[bool]:
    """Return for each parameter whether it overlaps the shard from `begin` to `end` of the flat parameters."""
    owned = []
    offset = 0
    for size in sizes:
        owned.append(offset < end and offset + size > begin)
        offset += size
    return owned


def _zero_backward_peak(
    shape: TrainingShape, owned: Sequence[bool], stage: int, activation_bytes: int, buckets: ZeroBuckets
) -> int:
    """Return the peak bytes of activations and gradients in the backward, without the buckets.

    `owned` is the result of `_owned`: True for parameters of which this rank keeps gradients.
    """
    total = shape.elements
    shard_bytes = _BYTES * sum(itertools.compress(shape.sizes, owned))
    peak_bytes = 0
    done = 0  # elements whose gradients are computed
    kept_bytes = 0  # the shard's gradients, allocated together with the first one
    # Gradients that are not in a bucket. The first gradient of a shared parameter is kept until the other one is
    # computed.
    unbucketed_bytes = _BYTES * shape.largest_parameter if shape.num_uses > 1 else 0
    filled = 0  # elements in the bucket
    freed_next_bytes = 0  # gradients that are reduced outside the bucket
    has_owned = False  # one of these gradients belongs to this rank
    backward_order = list(reversed(list(zip(shape.sizes, owned, strict=True))))
    for size, is_owned in [*backward_order, (0, False)]:  # the last entry reduces the last bucket
        unbucketed_bytes += _BYTES * size
        remaining_activation_bytes = activation_bytes * (total - done) // total
        peak_bytes = max(peak_bytes, remaining_activation_bytes + kept_bytes + unbucketed_bytes)
        if filled and (filled + size > buckets.reduce or done == total):
            if has_owned:
                kept_bytes = shard_bytes
            # The reduction may still hold the send buffer when the rank copies its shard from it.
            peak_bytes = max(peak_bytes, remaining_activation_bytes + kept_bytes + unbucketed_bytes + _BYTES * filled)
            unbucketed_bytes -= freed_next_bytes
            filled = 0
            freed_next_bytes = 0
            has_owned = False
        if size <= buckets.reduce:
            unbucketed_bytes -= _BYTES * size
        elif stage > 1 or is_owned:  # stage 1 does not free the gradients of other ranks' shards
            freed_next_bytes += _BYTES * size
        filled += size
        done += size
        has_owned = has_owned or is_owned
    return peak_bytes


def _gathered_elements(sizes: Sequence[int], buckets: ZeroBuckets) -> int:
    """Return the largest number of gathered elements at ZeRO stage 3, reached between forward and backward."""
    sharded = [size for size in sizes if size > buckets.persistent]
    # A parameter n elements before the end of the forward is used again 2 n elements later, in the backward. Therefore
    # the last `max_reuse_distance / 2` elements stay gathered.
    ahead = buckets.max_reuse_distance // 2 + min(buckets.prefetch, buckets.max_live) + max(sharded, default=0)
    return sum(sizes) - sum(sharded) + min(sum(sharded), ahead)


def split_peak(share: TrainingShape, *, world_size: int, activation_bytes: int, logits_bytes: int) -> int:
    """Return the peak bytes of one rank with tensor parallelism. `share` is the shape of the rank's shards.

    The loss's backward makes two gradients of the size of the full logits. At that time, the rank's logits and the
    gathered logits may also be in memory.
    """
    alone_bytes = rank_peaks(share, world_size=1, activation_bytes=activation_bytes)["single"]  # Adam without foreach
    held_bytes = (_BYTES + _STATE_BYTES) * share.elements
    # Two gradients and the gathered logits are full. The rank's own logits are 1 / world_size of them.
    loss_bytes = activation_bytes + 3 * logits_bytes + logits_bytes // world_size
    return max(alone_bytes, held_bytes + loss_bytes)


def pipeline_peak(
    stages: Sequence[TrainingShape],
    *,
    num_micro_batches: int,
    activation_bytes: Sequence[int],
    sent_bytes: Sequence[int],
    foreach: bool = False,
) -> int:
    """Return the peak bytes of the rank with the highest peak, in a step of a pipeline with schedule `1f1b`.

    `activation_bytes` and `sent_bytes` are the result of `count_stage_bytes` for one micro-batch. torch receives the
    activations and gradients of each micro-batch in a separate buffer, and keeps all buffers.
    """
    peaks = []
    for i, (shape, saved_bytes) in enumerate(zip(stages, activation_bytes, strict=True)):
        # With 1f1b, a stage has run one forward more than the next stage when its first backward begins.
        in_flight = min(num_micro_batches, len(stages) - i)
        held_bytes = (_BYTES + _STATE_BYTES) * shape.elements
        gradient_bytes = _BYTES * shape.elements
        largest_bytes = _BYTES * shape.largest_parameter
        # Stage i receives what stage i - 1 sends, and receives gradients of what it sends itself.
        buffer_bytes = num_micro_batches * sum(sent_bytes[max(i - 1, 0) : i + 1])
        accumulated_bytes = 0  # gradients of finished micro-batches
        if num_micro_batches > in_flight:
            accumulated_bytes = gradient_bytes
        update_bytes = gradient_bytes + _temporary_bytes(shape, foreach)
        backward_bytes = in_flight * saved_bytes + largest_bytes + accumulated_bytes
        peak_bytes = max(update_bytes, backward_bytes)
        if num_micro_batches > 1:  # the backward of the last micro-batch, with all gradients
            peak_bytes = max(peak_bytes, saved_bytes + largest_bytes + gradient_bytes)
        peaks.append(held_bytes + buffer_bytes + peak_bytes)
    return max(peaks)


def stage_shapes(model: nn.Module, pp: int) -> list[TrainingShape] | None:
    """Return the shape of each stage of a pipeline, or None if the model cannot be split into `pp` stages.

    A weight that several stages use counts in each of them.
    """
    try:
        stages = find_stages(model, pp, None)
    except ConfigurationError:
        return None
    return [training_shape(nn.ModuleList(stage)) for stage in stages]


def _offload_backward_peak(shape: TrainingShape, activation_bytes: int) -> int:
    """Return the peak bytes of the blocks on the device, gradients and activations with strategy `offload`.

    The peak of the backward is between two blocks. The previous block is still on the device without its activations,
    and the next block is prefetched.
    """
    in_blocks = shape.elements - shape.outside_blocks
    largest_bytes = _BYTES * shape.largest_parameter
    if shape.joint_blocks:
        with_activations = in_blocks - shape.joint_blocks
        on_device = shape.joint_blocks + shape.largest_block
        tied_gradient_bytes = 3 * largest_bytes  # two gradients, and their sum
    else:
        with_activations = in_blocks - shape.largest_block
        on_device = min(3 * shape.largest_block, in_blocks)  # the previous, the current and the next block
        tied_gradient_bytes = largest_bytes if shape.num_uses > 1 else 0
    remaining_activation_bytes = activation_bytes * with_activations // max(in_blocks, 1)
    return _BYTES * on_device + tied_gradient_bytes + remaining_activation_bytes


def ranks_that_fit(shape: TrainingShape, device_bytes: int, **load: Any) -> dict[str, int | None]:
    """Return the smallest number of devices with which each strategy can train a model.

    Only powers of 2 up to 4,096 are tried, and only 1 for `single`, `ddp` and `offload`. None means that the model fits
    on none of these numbers of devices. `load`: `activation_bytes`, `buckets` and `foreach` of `rank_peaks`.
    """
    all_counts = [2**power for power in range(13)]
    peaks = {ranks: rank_peaks(shape, world_size=ranks, **load) for ranks in all_counts}
    found: dict[str, int | None] = {}
    for name in peaks[1]:
        # More ranks do not lower the peak of strategies that do not shard.
        counts = [1] if name in ("single", "ddp", "offload") else all_counts
        found[name] = next((ranks for ranks in counts if peaks[ranks][name] <= device_bytes), None)
    return found


def model_of_one_rank(model: nn.Module, tp: int, *, ends: bool = True) -> nn.Module | None:
    """Return a copy of a meta model with the shapes of one rank's shards under its built-in tensor-parallel plan.

    Return None without such a plan, or if the plan cannot split the model over `tp` ranks. Only the copy's shapes
    are meaningful. Without `ends`, the embedding and the output layer are not split: the copy can be called, and
    autograd saves the same bytes as on one rank.
    """
    share = copy.deepcopy(model)
    task: Any = share  # SplitLayers reads only the module names of a task
    mesh: Any = PlannedMesh({"tp": tp})
    try:
        plan = ready_plan(share, tp)
        used = {name: style for name, style in plan.items() if ends or style not in _ENDS}
        layers = SplitLayers(task, used, mesh)
    except ConfigurationError:
        return None
    layers.narrow()
    return share
