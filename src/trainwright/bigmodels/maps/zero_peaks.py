"""How much memory a rank's device needs at most under ZeRO in float32 with Adam: DeepSpeed's flat pieces and buckets.

A step is gone through as DeepSpeed 0.19.8 does it (runtime/zero/stage_1_and_2.py, stage3.py): gradients come from the
last parameter to the first while activations go, are collected in buckets, laid out once more to be sent, and their
pieces kept; then a whole piece is stepped as one tensor.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_BYTES = 4  # of an element in float32
_ALIGNMENT = 2  # elements to which stages 1 and 2 fill up the pieces of their flat parameters
_TEMPORARIES = 2  # tensors of a parameter's size that Adam computes its update with


@dataclass(frozen=True, slots=True)
class ZeroBuckets:
    """What DeepSpeed's configuration says of its buffers, in elements; unless given, what `DeepSpeedStrategy` says.

    Attributes:
        reduce: `reduce_bucket_size`: gradients that are sent at a time.
        overlap: `overlap_comm`: stages 1 and 2 fill a second bucket while the first one is sent.
        persistent: `stage3_param_persistence_threshold`: parameters up to this size stay whole between their uses.
        prefetch: `stage3_prefetch_bucket_size`: gathered ahead at a time.
        reuse: `stage3_max_reuse_distance`: what is used again within so many elements stays whole.
        live: `stage3_max_live_parameters`: nothing is gathered ahead once so many elements are whole.
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
    """Return the largest number of bytes that one rank's device holds in a step at stage 1 or 2.

    Args:
        sizes: elements of the parameters in the order of the model.
        stage: 1 or 2.
        world_size: ranks.
        activation_bytes: that autograd keeps of one rank's forward.
        uses: of the largest parameter: a gradient of each waits for the others.
        buckets: sizes of DeepSpeed's buffers.
    """
    elements = _ALIGNMENT * world_size * math.ceil(sum(sizes) / (_ALIGNMENT * world_size))
    piece = elements // world_size
    held = _BYTES * (elements + 3 * piece)  # parameters; the copy that is stepped, and two averages
    room = _BYTES * buckets.reduce * (2 if buckets.overlap else 1)
    peak = _BYTES * piece * (1 + _TEMPORARIES)
    for rank in (0, world_size - 1):  # what a rank owns says when it needs room for pieces
        owned = _owned(sizes, rank * piece, (rank + 1) * piece)
        sending = room + _sending(sizes, owned, stage, activation_bytes, uses, buckets)
        laid_out = _BYTES * (sum(size for size, mine in zip(sizes, owned, strict=True) if mine) + piece)
        peak = max(peak, sending, laid_out)
    return held + peak


def sharded_peak(
    sizes: Sequence[int], *, world_size: int, activation_bytes: int, uses: int, buckets: ZeroBuckets
) -> int:
    """Return the largest number of bytes that one rank's device holds in a step at stage 3.

    Args:
        sizes: elements of the parameters in the order of the model.
        world_size: ranks.
        activation_bytes: that autograd keeps of one rank's forward.
        uses: of the largest parameter: a gradient of each waits for the others.
        buckets: sizes of DeepSpeed's buffers.
    """
    piece = sum(math.ceil(size / world_size) for size in sizes)
    held = _BYTES * (5 * piece + buckets.reduce)  # parameters, the copy that is stepped, two averages, gradients
    gathered = _BYTES * _gathered(sizes, buckets)
    sending = _sending(sizes, [False] * len(sizes), 3, activation_bytes, uses, buckets)
    return held + max(gathered + sending, _BYTES * piece * (1 + _TEMPORARIES))


def _owned(sizes: Sequence[int], begin: int, end: int) -> list[bool]:
    """Say of each parameter whether a part of it lies in a piece of the flat parameters."""
    found, offset = [], 0
    for size in sizes:
        found.append(offset < end and offset + size > begin)
        offset += size
    return found


def _sending(
    sizes: Sequence[int], owned: Sequence[bool], stage: int, activation_bytes: int, uses: int, buckets: ZeroBuckets
) -> int:
    """Return the most that activations and gradients take while gradients come and are sent, buckets left out."""
    total, done, peak = sum(sizes), 0, 0
    pieces = _BYTES * sum(size for size, mine in zip(sizes, owned, strict=True) if mine)
    kept = 0  # pieces, for which there is room from this rank's first one on
    outside = _BYTES * max(sizes, default=0) if uses > 1 else 0  # gradients that lie in no bucket
    filled, leaving, has_own = 0, 0, False  # of the bucket; those sent from outside of it; whether one is this rank's
    for size, mine in [*zip(reversed(sizes), reversed(owned), strict=True), (0, False)]:
        outside += _BYTES * size
        peak = max(peak, activation_bytes * (total - done) // total + kept + outside)
        if filled and (filled + size > buckets.reduce or done == total):
            kept = pieces if has_own else kept
            # What was laid out to be sent may still be held by the communication when pieces are taken from it.
            peak = max(peak, activation_bytes * (total - done) // total + kept + outside + _BYTES * filled)
            outside -= leaving
            filled, leaving, has_own = 0, 0, False
        if size <= buckets.reduce:
            outside -= _BYTES * size
        elif stage > 1 or mine:  # stage 1 leaves gradients of others where they are
            leaving += _BYTES * size
        filled, has_own, done = filled + size, has_own or mine, done + size
    return peak


def _gathered(sizes: Sequence[int], buckets: ZeroBuckets) -> int:
    """Return how many elements are whole at most: around the turn from forward to backward, which uses them again."""
    others = [size for size in sizes if size > buckets.persistent]
    ahead = buckets.reuse // 2 + min(buckets.prefetch, buckets.live) + max(others, default=0)
    return sum(sizes) - sum(others) + min(sum(others), ahead)
