"""Peak device memory of a rank under DeepSpeed ZeRO in float32 with Adam.

The functions simulate a step of DeepSpeed 0.19.8 (runtime/zero/stage_1_and_2.py, stage3.py). The backward computes
gradients from the last parameter to the first and frees activations. Gradients are collected in buckets, copied into a
buffer and reduced, and each rank keeps its shard. The optimizer then updates the shard as one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BYTES = 4  # of an element in float32
_ALIGNMENT = 2  # stages 1 and 2 pad each rank's shard to a multiple of this number of elements
_TEMPORARIES = 2  # temporary tensors of a parameter's size in Adam's update


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


def flat_peak(
    sizes: Sequence[int], *, stage: int, world_size: int, activation_bytes: int, uses: int, buckets: ZeroBuckets
) -> int:
    """Return the peak bytes on one rank's device in a step at stage 1 or 2.

    Args:
        sizes: Elements of each parameter, in the model's order.
        stage: 1 or 2.
        world_size: Number of ranks.
        activation_bytes: Bytes that autograd saves in one rank's forward.
        uses: Number of uses of the largest parameter. Each use makes a gradient, which is held until the last one.
        buckets: Sizes of DeepSpeed's buffers.
    """
    elements = _ALIGNMENT * world_size * math.ceil(sum(sizes) / (_ALIGNMENT * world_size))
    shard = elements // world_size
    held = _BYTES * (elements + 3 * shard)  # parameters; the updated copy of the shard, and two averages
    bucket_bytes = _BYTES * buckets.reduce * (2 if buckets.overlap else 1)
    peak = _BYTES * shard * (1 + _TEMPORARIES)
    for rank in (0, world_size - 1):  # the position of a rank's shard decides when the rank stores its gradients
        owned = _owned(sizes, rank * shard, (rank + 1) * shard)
        backward = bucket_bytes + _backward_peak(sizes, owned, stage, activation_bytes, uses, buckets)
        flattened = _BYTES * (sum(size for size, mine in zip(sizes, owned, strict=True) if mine) + shard)
        peak = max(peak, backward, flattened)
    return held + peak


def sharded_peak(
    sizes: Sequence[int], *, world_size: int, activation_bytes: int, uses: int, buckets: ZeroBuckets
) -> int:
    """Return the peak bytes on one rank's device in a step at stage 3.

    Args:
        sizes, world_size, activation_bytes, uses, buckets: See `flat_peak`.
    """
    shard = sum(math.ceil(size / world_size) for size in sizes)
    held = _BYTES * (5 * shard + buckets.reduce)  # parameters, the updated copy, two averages, gradients
    gathered = _BYTES * _gathered(sizes, buckets)
    backward = _backward_peak(sizes, [False] * len(sizes), 3, activation_bytes, uses, buckets)
    return held + max(gathered + backward, _BYTES * shard * (1 + _TEMPORARIES))


def _owned(sizes: Sequence[int], begin: int, end: int) -> list[bool]:
    """Return for each parameter whether it overlaps the shard from `begin` to `end` of the flat parameters."""
    found, offset = [], 0
    for size in sizes:
        found.append(offset < end and offset + size > begin)
        offset += size
    return found


def _backward_peak(
    sizes: Sequence[int], owned: Sequence[bool], stage: int, activation_bytes: int, uses: int, buckets: ZeroBuckets
) -> int:
    """Return the peak bytes of activations and gradients in the backward, without the buckets."""
    total, done, peak = sum(sizes), 0, 0
    shard_bytes = _BYTES * sum(size for size, mine in zip(sizes, owned, strict=True) if mine)
    kept = 0  # gradients of the shard, allocated together with the first one
    outside = _BYTES * max(sizes, default=0) if uses > 1 else 0  # gradients that are not in a bucket
    # Elements in the bucket, bytes of gradients that are reduced outside it, and whether one belongs to this rank.
    filled, freed_next, has_own = 0, 0, False
    for size, mine in [*zip(reversed(sizes), reversed(owned), strict=True), (0, False)]:
        outside += _BYTES * size
        peak = max(peak, activation_bytes * (total - done) // total + kept + outside)
        if filled and (filled + size > buckets.reduce or done == total):
            kept = shard_bytes if has_own else kept
            # The reduction may still hold the send buffer when the rank copies its shard from it.
            peak = max(peak, activation_bytes * (total - done) // total + kept + outside + _BYTES * filled)
            outside -= freed_next
            filled, freed_next, has_own = 0, 0, False
        if size <= buckets.reduce:
            outside -= _BYTES * size
        elif stage > 1 or mine:  # stage 1 does not free the gradients of other ranks' shards
            freed_next += _BYTES * size
        filled, has_own, done = filled + size, has_own or mine, done + size
    return peak


def _gathered(sizes: Sequence[int], buckets: ZeroBuckets) -> int:
    """Return the largest number of gathered elements, reached between the forward and the backward."""
    others = [size for size in sizes if size > buckets.persistent]
    ahead = buckets.reuse // 2 + min(buckets.prefetch, buckets.live) + max(others, default=0)
    return sum(sizes) - sum(others) + min(sum(others), ahead)
