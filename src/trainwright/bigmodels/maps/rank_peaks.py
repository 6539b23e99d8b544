"""Peak device memory of a rank that trains a model in float32 with Adam, for each strategy.

The peak is at one of two moments of a step: at the start of the backward, with all activations and the last layer's
gradient, or in the optimizer's step, with all gradients and temporary tensors. The formulas follow the memory tables
in docs/meshes.md, which tests compare with measured bytes.

Names that end with `_bytes` and the variables in `rank_peaks` are bytes. Sizes in `TrainingShape` and `ZeroBuckets` are
numbers of elements.
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

_BYTES = 4  # of a weight or gradient in float32
_STATES = 8  # bytes of Adam's two averages of an element, both float32
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
        reuse: `stage3_max_reuse_distance`: a parameter that is used again within this distance stays gathered.
        live: `stage3_max_live_parameters`: prefetching stops at this number of gathered elements.
    """

    reduce: int = 200_000_000
    overlap: bool = True
    persistent: int = 100_000
    prefetch: int = 50_000_000
    reuse: int = 1_000_000_000
    live: int = 1_000_000_000


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """Numbers of elements in a model, or in the part of a model that a rank has.

    Attributes:
        sizes: Elements of each parameter, in the model's order. Shared parameters count once.
        unit: Elements of the largest numbered block (such as `layers.0`). Strategies gather or move a block at a time.
        outside: Elements outside the blocks: embeddings, heads and norms.
        uses: Number of modules that share the largest parameter, such as 2 for tied embeddings. Each has a gradient.
            These gradients are in memory at the same time.
        together: Elements of all blocks that use the same input tensor, such as a decoder's blocks that use the
            encoder's output. The backward finishes all of them at the same time.
    """

    sizes: tuple[int, ...]
    unit: int
    outside: int
    uses: int = 1
    together: int = 0

    @property
    def elements(self) -> int:
        """Elements of all parameters."""
        return sum(self.sizes)

    @property
    def tensor(self) -> int:
        """Elements of the largest parameter."""
        return max(self.sizes, default=0)


def training_shape(model: nn.Module) -> TrainingShape:
    """Return the `TrainingShape` of a model on any device, the meta device included."""
    names: dict[nn.Parameter, list[str]] = {}  # a tied parameter has several
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    sizes = {names_of_one[0]: parameter.numel() for parameter, names_of_one in names.items()}
    shape = shape_of(sizes)
    uses = 1
    for parameter, names_of_one in names.items():
        if parameter.numel() == shape.tensor:
            uses = max(uses, len(names_of_one))
    together = 0
    # An attribute of transformers models, whose decoder's blocks are called `decoder.block.0` or similar.
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        for name, size in sizes.items():
            if NUMBERED_BLOCK.match(name) and "decoder" in name.split("."):
                together += size
    return replace(shape, uses=uses, together=together)


def shape_of(sizes: Mapping[str, int]) -> TrainingShape:
    """Return the `TrainingShape` of a model from its parameters' names and numbers of elements.

    Shared parameters and an encoder's output are unknown here: `uses` and `together` have their defaults.
    """
    blocks: Counter[str] = Counter()
    for name, elements in sizes.items():
        block = NUMBERED_BLOCK.match(name)
        if block is not None:
            blocks[block[0]] += elements
    outside = sum(sizes.values()) - blocks.total()
    return TrainingShape(tuple(sizes.values()), max(blocks.values(), default=0), outside)


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
    ranks = world_size
    kept = activation_bytes
    buckets = buckets or ZeroBuckets()
    weights = _BYTES * shape.elements
    gradients = _BYTES * shape.elements
    states = _STATES * shape.elements
    largest = _BYTES * shape.tensor  # its gradient is usually the first one, as that of the output layer
    unit = _BYTES * shape.unit
    outside = _BYTES * shape.outside
    temporary = _temporary_bytes(shape, foreach)
    stepping = gradients + temporary
    # Five units: the current and the next one are gathered; the current one has full gradients and a copy of them for
    # the reduce-scatter, while the previous unit's are reduced. Parameters outside the units stay gathered for the
    # step. Gradient shards replace activations.
    sharded_backward = max(kept, gradients // ranks) + 3 * outside + shape.uses * largest + 5 * unit
    peaks = {
        "single": weights + states + max(stepping, kept + largest),
        # Gradients are views of buckets that DDP never frees.
        "ddp": weights + states + gradients + max(temporary, kept + largest),
        "fsdp": (weights + states) // ranks + max(stepping // ranks, sharded_backward),
        "offload": outside + max(kept + largest, _streaming(shape, kept)),
    }
    for stage in (1, 2):
        peaks[f"deepspeed_stage_{stage}"] = _flat_peak(shape, stage, ranks, kept, buckets)
    peaks["deepspeed_stage_3"] = _sharded_peak(shape, ranks, kept, buckets)
    return {name: math.ceil(peak) for name, peak in peaks.items()}


def _temporary_bytes(shape: TrainingShape, foreach: bool) -> int:
    """Return the bytes of temporary tensors in Adam's update."""
    if foreach:
        return _BYTES * shape.elements
    return _BYTES * _TEMPORARIES * shape.tensor


def _flat_peak(shape: TrainingShape, stage: int, world_size: int, activation_bytes: int, buckets: ZeroBuckets) -> int:
    """Return the peak bytes on one rank's device in a step at ZeRO stage 1 or 2.

    Simulates a step of DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py). The backward computes gradients
    from the last parameter to the first and frees activations. Gradients are collected in buckets, copied into a buffer
    and reduced, and each rank keeps its shard. The optimizer then updates the shard as one tensor.
    """
    multiple = _ALIGNMENT * world_size
    elements = multiple * math.ceil(shape.elements / multiple)
    shard = elements // world_size
    held = _BYTES * (elements + 3 * shard)  # parameters; the updated copy of the shard, and two averages
    num_buckets = 2 if buckets.overlap else 1
    bucket_bytes = _BYTES * buckets.reduce * num_buckets
    peak = _BYTES * shard * (1 + _TEMPORARIES)
    for rank in (0, world_size - 1):  # the position of a rank's shard decides when the rank stores its gradients
        owned = _owned(shape.sizes, rank * shard, (rank + 1) * shard)
        backward = bucket_bytes + _backward_peak(shape, owned, stage, activation_bytes, buckets)
        # The gradients of the shard's parameters are copied into one tensor.
        flattened = _BYTES * (sum(itertools.compress(shape.sizes, owned)) + shard)
        peak = max(peak, backward, flattened)
    return held + peak


def _sharded_peak(shape: TrainingShape, world_size: int, activation_bytes: int, buckets: ZeroBuckets) -> int:
    """Return the peak bytes on one rank's device in a step at ZeRO stage 3.

    Each parameter is sharded over all ranks. Their reduced gradients are among the held bytes.
    """
    shard = sum(math.ceil(size / world_size) for size in shape.sizes)
    held = _BYTES * (5 * shard + buckets.reduce)  # parameters, the updated copy, two averages, gradients
    gathered = _BYTES * _gathered(shape.sizes, buckets)
    backward = _backward_peak(shape, [False] * len(shape.sizes), 3, activation_bytes, buckets)
    return held + max(gathered + backward, _BYTES * shard * (1 + _TEMPORARIES))


def _owned(sizes: Sequence[int], begin: int, end: int) -> list[bool]:
    """Return for each parameter whether it overlaps the shard from `begin` to `end` of the flat parameters."""
    owned = []
    offset = 0
    for size in sizes:
        owned.append(offset < end and offset + size > begin)
        offset += size
    return owned


def _backward_peak(
    shape: TrainingShape, owned: Sequence[bool], stage: int, activation_bytes: int, buckets: ZeroBuckets
) -> int:
    """Return the peak bytes of activations and gradients in the backward, without the buckets.

    `owned` is the result of `_owned`: True for parameters of which this rank keeps gradients.
    """
    total = shape.elements
    shard_bytes = _BYTES * sum(itertools.compress(shape.sizes, owned))
    peak = 0
    done = 0  # elements whose gradients are computed
    kept = 0  # bytes of the shard's gradients, allocated together with the first one
    # Bytes of gradients that are not in a bucket. The first gradient of a shared parameter is kept until the other one
    # is computed.
    outside = _BYTES * shape.tensor if shape.uses > 1 else 0
    filled = 0  # elements in the bucket
    freed_next = 0  # bytes of gradients that are reduced outside the bucket
    has_owned = False  # one of these gradients belongs to this rank
    backward_order = list(reversed(list(zip(shape.sizes, owned, strict=True))))
    for size, is_owned in [*backward_order, (0, False)]:  # the last entry reduces the last bucket
        outside += _BYTES * size
        activations = activation_bytes * (total - done) // total
        peak = max(peak, activations + kept + outside)
        if filled and (filled + size > buckets.reduce or done == total):
            if has_owned:
                kept = shard_bytes
            # The reduction may still hold the send buffer when the rank copies its shard from it.
            peak = max(peak, activations + kept + outside + _BYTES * filled)
            outside -= freed_next
            filled = 0
            freed_next = 0
            has_owned = False
        if size <= buckets.reduce:
            outside -= _BYTES * size
        elif stage > 1 or is_owned:  # stage 1 does not free the gradients of other ranks' shards
            freed_next += _BYTES * size
        filled += size
        done += size
        has_owned = has_owned or is_owned
    return peak


def _gathered(sizes: Sequence[int], buckets: ZeroBuckets) -> int:
    """Return the largest number of gathered elements at ZeRO stage 3, reached between forward and backward."""
    sharded = [size for size in sizes if size > buckets.persistent]
    # A parameter n elements before the end of the forward is used again 2 n elements later, in the backward. Therefore
    # the last `reuse / 2` elements stay gathered.
    ahead = buckets.reuse // 2 + min(buckets.prefetch, buckets.live) + max(sharded, default=0)
    return sum(sizes) - sum(sharded) + min(sum(sharded), ahead)


def split_peak(share: TrainingShape, *, world_size: int, activation_bytes: int, logits_bytes: int) -> int:
    """Return the peak bytes of one rank with tensor parallelism. `share` is the shape of the rank's shards.

    The loss's backward makes two gradients of the size of the full logits. At that time, the rank's logits and the
    gathered logits may also be in memory.
    """
    alone = rank_peaks(share, world_size=1, activation_bytes=activation_bytes)["single"]  # Adam without foreach
    loss = activation_bytes + 3 * logits_bytes + logits_bytes // world_size
    return max(alone, (_BYTES + _STATES) * share.elements + loss)


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
    for i, (shape, kept) in enumerate(zip(stages, activation_bytes, strict=True)):
        # With 1f1b, a stage has run one forward more than the next stage when its first backward begins.
        in_flight = min(num_micro_batches, len(stages) - i)
        weights = _BYTES * shape.elements
        gradients = _BYTES * shape.elements
        largest = _BYTES * shape.tensor
        # Stage i receives what stage i - 1 sends, and receives gradients of what it sends itself.
        buffers = num_micro_batches * sum(sent_bytes[max(i - 1, 0) : i + 1])
        earlier = gradients if num_micro_batches > in_flight else 0  # accumulated in finished micro-batches
        peak = max(gradients + _temporary_bytes(shape, foreach), in_flight * kept + largest + earlier)
        if num_micro_batches > 1:  # the backward of the last micro-batch, with all gradients
            peak = max(peak, kept + largest + gradients)
        peaks.append(weights + _STATES * shape.elements + buffers + peak)
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


def _streaming(shape: TrainingShape, activation_bytes: int) -> int:
    """Return the peak bytes of the blocks on the device, gradients and activations with strategy `offload`.

    The peak of the backward is between two blocks. The previous block is still on the device without its activations,
    and the next block is prefetched.
    """
    inside = shape.elements - shape.outside
    largest = _BYTES * shape.tensor
    if shape.together:
        remaining = inside - shape.together
        streamed = shape.together + shape.unit
        tied_gradients = 3 * largest  # two gradients, and their sum
    else:
        remaining = inside - shape.unit
        streamed = min(3 * shape.unit, inside)
        tied_gradients = largest if shape.uses > 1 else 0
    return _BYTES * streamed + tied_gradients + activation_bytes * remaining // max(inside, 1)


def ranks_that_fit(shape: TrainingShape, device_bytes: int, **load: Any) -> dict[str, int | None]:
    """Return the smallest number of devices with which each strategy can train a model. None means more than 4,096.

    Only powers of 2 are tried. `load`: `activation_bytes`, `buckets` and `foreach` of `rank_peaks`.
    """
    all_counts = [2**power for power in range(13)]
    peaks = {ranks: rank_peaks(shape, world_size=ranks, **load) for ranks in all_counts}
    found: dict[str, int | None] = {}
    for name in peaks[1]:
        # More ranks do not lower the peak of strategies that do not shard.
        counts = [1] if name in ("single", "ddp", "offload") else all_counts
        found[name] = next((ranks for ranks in counts if peaks[ranks][name] <= device_bytes), None)
    return found


_ENDS = ("embedding", "colwise_gathered")  # styles of layers whose input or output is a full tensor


def model_of_one_rank(model: nn.Module, tp: int, *, ends: bool = True) -> nn.Module | None:
    """Return a copy of a meta model with the shapes of one rank's shards under its built-in tensor-parallel plan.

    Return None if there is no such plan, or the plan cannot split the model over `tp` ranks. Only the copy's shapes
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
