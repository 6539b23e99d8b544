"""Peak device memory of a rank that trains a model in float32 with Adam, for each strategy.

The peak is at one of two moments of a step: at the start of the backward, with all activations and the last layer's
gradient, or in the optimizer's step, with all gradients and temporary tensors. The formulas follow the memory tables
in docs/strategies.md, which tests compare with measured bytes.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from trainwright.bigmodels.maps.sizes import NUMBERED_BLOCK
from trainwright.bigmodels.maps.zero_peaks import ZeroBuckets, flat_peak, sharded_peak
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.fsdp.layers.plan import SplitLayers
from trainwright.strategies.fsdp.layers.ready import PlannedMesh, ready_plan
from trainwright.strategies.megatron.stages import find_stages

_BYTES, _STATES = 4, 8  # of a weight or gradient in float32, and of Adam's two averages
_TEMPORARIES = 2  # tensors of a parameter's size that Adam computes its update with


@dataclass(frozen=True, slots=True)
class TrainingShape:
    """A model as strategies see it, in elements.

    Attributes:
        sizes: of the parameters in the order of the model, a shared one once.
        unit: of the largest numbered block, which strategies gather or move by itself.
        outside: in no block: embeddings, heads, norms between.
        uses: names that the largest tensor has: each use makes a gradient, which waits for the others.
        together: of all blocks that take one tensor, as a decoder's do of its encoder: none of them is done in the
            backward before all are.
    """

    sizes: tuple[int, ...]
    unit: int
    outside: int
    uses: int = 1
    together: int = 0

    @property
    def elements(self) -> int:
        """Of all parameters."""
        return sum(self.sizes)

    @property
    def tensor(self) -> int:
        """Of the largest parameter."""
        return max(self.sizes, default=0)


def training_shape(model: nn.Module) -> TrainingShape:
    """Return the shape of a model on any device, the meta device included."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    sizes = {own[0]: parameter.numel() for parameter, own in names.items()}
    shape = shape_of(sizes)
    uses = max((len(own) for parameter, own in names.items() if parameter.numel() == shape.tensor), default=1)
    together = 0
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        blocks = (name for name in sizes if NUMBERED_BLOCK.match(name))
        together = sum(sizes[name] for name in blocks if "decoder" in name.split("."))
    return replace(shape, uses=uses, together=together)


def shape_of(sizes: Mapping[str, int]) -> TrainingShape:
    """Return the shape of a model from its parameters' names and numbers of elements."""
    blocks: Counter[str] = Counter()
    for name, elements in sizes.items():
        if block := NUMBERED_BLOCK.match(name):
            blocks[block[0]] += elements
    outside = sum(sizes.values()) - blocks.total()
    return TrainingShape(tuple(sizes.values()), max(blocks.values(), default=0), outside)


def rank_peaks(
    shape: TrainingShape, *, world_size: int, activation_bytes: int, buckets: ZeroBuckets | None = None
) -> dict[str, int]:
    """Return the largest number of bytes that one rank's device holds in a step, by strategy.

    Args:
        shape: of the model.
        world_size: ranks; each has the same activations.
        activation_bytes: that autograd keeps of one rank's forward, see `count_activation_bytes`.
        buckets: sizes of DeepSpeed's buffers; those of `DeepSpeedStrategy` unless given.
    """
    ranks, kept = world_size, activation_bytes
    weights = gradients = _BYTES * shape.elements
    states, largest = _STATES * shape.elements, _BYTES * shape.tensor
    unit, outside = _BYTES * shape.unit, _BYTES * shape.outside
    stepping = gradients + _TEMPORARIES * largest
    peaks = {
        "single": weights + states + max(stepping, kept + largest),
        # Gradients live in buckets that are there all the time.
        "ddp": weights + states + gradients + max(_TEMPORARIES * largest, kept + largest),
        # A unit and the next one are gathered; its gradients are whole and laid out once more to be sent in pieces,
        # while those of the one before are sent. What is in no unit is whole for all of the step. Pieces of gradients
        # come as activations go.
        "fsdp": (weights + states) // ranks
        + max(stepping // ranks, max(kept, gradients // ranks) + 3 * outside + shape.uses * largest + 5 * unit),
        "offload": outside + max(kept + largest, _streaming(shape, kept)),
    }
    zero: dict[str, Any] = {
        "world_size": ranks, "activation_bytes": kept, "uses": shape.uses, "buckets": buckets or ZeroBuckets()
    }  # fmt: skip
    for stage in (1, 2):
        peaks[f"deepspeed_stage_{stage}"] = flat_peak(shape.sizes, stage=stage, **zero)
    peaks["deepspeed_stage_3"] = sharded_peak(shape.sizes, **zero)
    return {name: math.ceil(peak) for name, peak in peaks.items()}


def split_peak(share: TrainingShape, *, world_size: int, activation_bytes: int, logits_bytes: int) -> int:
    """Return the largest number of bytes that one rank's device holds in a step under `tp`.

    Args:
        share: of the layers as they are on one rank, see `one_ranks_share`.
        world_size: ranks over which layers are split.
        activation_bytes: that autograd keeps of one rank's forward.
        logits_bytes: of the whole logits. The loss' backward makes two gradients of their size, when the rank's own
            part and what was gathered of all may still be held by the communication.
    """
    alone = rank_peaks(share, world_size=1, activation_bytes=activation_bytes)["single"]
    loss = activation_bytes + 3 * logits_bytes + logits_bytes // world_size
    return max(alone, (_BYTES + _STATES) * share.elements + loss)


def pipeline_peak(
    stages: Sequence[TrainingShape],
    *,
    num_micro_batches: int,
    activation_bytes: Sequence[int],
    sent_bytes: Sequence[int],
) -> int:
    """Return the largest number of bytes that one rank's device holds in a step of a pipeline with schedule `1f1b`.

    Args:
        stages: of the model, one on each rank, see `stage_shapes`.
        num_micro_batches: in a step.
        activation_bytes: that autograd keeps in each stage of one micro-batch, see `count_stage_bytes`.
        sent_bytes: that each stage but the last one sends to the next for one micro-batch. Torch receives each
            micro-batch's activations and gradients in a buffer of its own, and keeps all buffers.
    """
    found = []
    for i, (shape, kept) in enumerate(zip(stages, activation_bytes, strict=True)):
        in_flight = min(num_micro_batches, len(stages) - i)
        weights = gradients = _BYTES * shape.elements
        largest = _BYTES * shape.tensor
        buffers = num_micro_batches * sum(sent_bytes[max(i - 1, 0) : i + 1])
        earlier = gradients if num_micro_batches > in_flight else 0  # of micro-batches that are done
        moments = (
            gradients + _TEMPORARIES * largest,
            in_flight * kept + largest + earlier,
            (kept + largest + gradients) * (num_micro_batches > 1),
        )
        found.append(weights + _STATES * shape.elements + buffers + max(moments))
    return max(found)


def stage_shapes(model: nn.Module, pp: int) -> list[TrainingShape] | None:
    """Return the shape of each stage of a pipeline; None if the model cannot be divided into so many.

    A weight that several stages use is in each of them.
    """
    try:
        stages = find_stages(model, pp, None)
    except ConfigurationError:
        return None
    return [training_shape(nn.ModuleList(stage)) for stage in stages]


def _streaming(shape: TrainingShape, activation_bytes: int) -> int:
    """Return the most that visits the device under `offload` while the backward goes from one unit to the next.

    Then the one before is still there, and the next one is copied ahead. Its activations are gone.
    """
    inside = shape.elements - shape.outside
    largest = _BYTES * shape.tensor
    if shape.together:
        left, waiting = inside - shape.together, 3 * largest  # two gradients of a tied weight, and their sum
    else:
        left, waiting = inside - shape.unit, largest * (shape.uses > 1)
    visiting = _BYTES * (shape.together + shape.unit if shape.together else min(3 * shape.unit, inside))
    return visiting + waiting + activation_bytes * left // max(inside, 1)


def ranks_that_fit(
    shape: TrainingShape, device_bytes: int, *, activation_bytes: int, buckets: ZeroBuckets | None = None
) -> dict[str, int | None]:
    """Return on how many devices of a size each strategy can train a model, the fewest up to 4,096; None: on none."""
    by_count = {
        ranks: rank_peaks(shape, world_size=ranks, activation_bytes=activation_bytes, buckets=buckets)
        for ranks in (2**power for power in range(13))
    }
    found: dict[str, int | None] = {}
    for name in by_count[1]:
        counts = [1] if name in ("single", "ddp", "offload") else list(by_count)
        found[name] = next((ranks for ranks in counts if by_count[ranks][name] <= device_bytes), None)
    return found


_ENDS = ("embedding", "colwise_gathered")  # styles of layers that are called with whole tensors, or make such


def one_ranks_share(model: nn.Module, tp: int, *, ends: bool = True) -> nn.Module | None:
    """Return a copy of a model whose layers are as narrow as on one rank, by the model's ready plan.

    Args:
        model: on the meta device; of the copy only shapes are right.
        tp: ranks over which layers are split.
        ends: False leaves the embedding and the layer that makes logits whole: then the copy can be called, and
            autograd keeps of it what it keeps on a rank.

    Returns:
        None if there is no known plan, or if it cannot split the model over this number of ranks.
    """
    share = copy.deepcopy(model)
    task: Any = share  # of a task, names of modules are all that is asked
    mesh: Any = PlannedMesh({"tp": tp})
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a vocabulary that stays whole: then it does in the copy too
            plan = ready_plan(share, tp)
        layers = SplitLayers(task, {name: style for name, style in plan.items() if ends or style not in _ENDS}, mesh)
    except ConfigurationError:
        return None
    layers.narrow()
    return share
