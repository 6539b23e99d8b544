"""Ring attention: ranks send keys and values around a ring, and each rank merges the results for its own queries.

Source: Liu et al., "Ring Attention with Blockwise Transformers for Near-Infinite Context" (2023). Besides its own part,
a rank holds at most two blocks of keys and values: the current block and the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.context.blocks import accumulator_dtype, backward_block, forward_block


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    *,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of this rank's queries over the keys and values of all ranks. The dtype is that of `q`.

    With `is_causal`, the sequence must be split in order `"zigzag"` (see `Order`).

    Forward sends keys and values around the group. Backward sends them again, together with their gradients. The next
    block is received while the current one is computed. Partial results are merged in float32, or in float64 for
    float64 inputs. Collective, in backward too: every rank passes tensors of the same shapes. Second derivatives are
    not supported.

    Args:
        q: (batch, heads, local length, head size).
        k: (batch, key heads, local length, head size).
        v: (batch, key heads, local length, value size).
        group: Process group that splits the sequence. None means all ranks.
        is_causal: A position sees only itself and earlier positions. Fully masked parts of the scores are not computed.
        scale: Factor of the scores. Default: 1 / √(head size).
        enable_gqa: Accept a number of heads of `q` that is a multiple of the number of heads of `k` and `v`.

    Raises:
        ConfigurationError: The shapes or dtypes are not compatible.
    """
    _check(q, k, v, is_causal, enable_gqa)
    arguments = (q, k, v, group, is_causal, scale)
    out: Tensor = _RingAttention.apply(*arguments)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, enable_gqa: bool) -> None:
    shapes = f"q, k and v have the shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigurationError(f"q, k and v have the dtypes {q.dtype}, {k.dtype} and {v.dtype}. Use the same dtype.")
    have_4_dims = q.dim() == k.dim() == v.dim() == 4
    if not have_4_dims or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise ConfigurationError(f"{shapes}; ring attention expects (batch, heads, local length, head size).")
    if q.shape[1] != k.shape[1] and (not enable_gqa or q.shape[1] % k.shape[1]):
        raise ConfigurationError(
            f"{shapes}: {q.shape[1]} heads of queries and {k.shape[1]} heads of keys must be equal. With "
            "enable_gqa=True, the number for queries may be a multiple of the number for keys."
        )
    if is_causal and q.shape[2] != k.shape[2]:
        raise ConfigurationError(f"{shapes}; causal attention over a split sequence needs as many queries as keys.")
    if is_causal and q.shape[2] % 2:
        raise ConfigurationError(f"{shapes}; order 'zigzag' needs an even local length. Use split_sequence().")


def _block(rank: int, source: int, length: int, is_causal: bool) -> tuple[slice, slice, bool]:
    """Return which of `rank`'s queries see which of `source`'s keys, and whether a causal mask applies to them."""
    everything = slice(None)
    first_chunk = slice(0, length // 2)
    second_chunk = slice(length // 2, None)
    if not is_causal or source == rank:  # a rank's own positions ascend
        return everything, everything, is_causal
    # Rank r of n holds chunks r and 2n-1-r. With 2 ranks: rank 0 holds chunks 0 and 3, rank 1 holds chunks 1 and 2.
    # The second chunk of an earlier rank comes after both chunks of this rank.
    if source < rank:
        return everything, first_chunk, False
    # The first chunk of this rank comes before both chunks of a later rank.
    return second_chunk, everything, False


class Ring:
    """Transfers to the next rank of a group, and from the previous rank.

    Args:
        group: Process group. None means all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        assert self.group is not None
        self._next = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        self._previous = dist.get_global_rank(self.group, (self.rank - 1) % self.size)

    def start(self, tensors: Sequence[Tensor], first_tag: int = 0) -> Callable[[], list[Tensor]]:
        """Start to send contiguous `tensors` to the next rank, and to receive such tensors from the previous rank.

        Returns:
            A function that waits for the transfer and returns the received tensors.
        """
        received = [torch.empty_like(tensor) for tensor in tensors]
        operations = []
        # Tags distinguish this transfer from another one that is in flight.
        for tag, (sent, target) in enumerate(zip(tensors, received, strict=True), first_tag):
            operations.append(dist.P2POp(dist.isend, sent, self._next, self.group, tag))
            operations.append(dist.P2POp(dist.irecv, target, self._previous, self.group, tag))
        return partial(_wait, dist.batch_isend_irecv(operations), tensors, received)


def _wait(works: Sequence[dist.Work], sent: object, received: list[Tensor]) -> list[Tensor]:
    """Wait for a transfer. `sent` keeps the sent tensors in memory until then."""
    for work in works:
        work.wait()
    return received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        group: dist.ProcessGroup | None,
        is_causal: bool,
        scale: float | None,
    ) -> Tensor:
        ring = Ring(group)
        if q.stride(-1) != 1:
            q = q.contiguous()  # required by the kernels
        k = k.contiguous()
        v = v.contiguous()
        local_k = k
        local_v = v
        out = None
        lse = None  # log-sum-exp of the scores of each query, by which blocks are weighed
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size  # rank to which the current keys and values belong
            transfer = ring.start((k, v)) if step < ring.size - 1 else None
            queries, keys, causal = _block(ring.rank, source, q.shape[2], is_causal)
            block, block_lse = forward_block(
                q[:, :, queries], k[:, :, keys], v[:, :, keys], is_causal=causal, scale=scale
            )
            if out is None or lse is None:  # the rank's own block, which has all queries
                out = block.to(accumulator_dtype(q))
                lse = block_lse.clone()
            else:
                _merge(out[:, :, queries], lse[:, :, queries], block, block_lse)
            if transfer is not None:
                k, v = transfer()
        assert out is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, local_k, local_v, out, lse)
        ctx.group = group
        ctx.is_causal = is_causal
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradient = gradient.contiguous()  # the gradient of a sum is an expanded scalar
        ring = Ring(ctx.group)
        dtype = accumulator_dtype(q)
        dq = torch.zeros_like(q, dtype=dtype)
        dk = torch.zeros_like(k, dtype=dtype)
        dv = torch.zeros_like(v, dtype=dtype)
        # Gradients of keys and values travel with them, one step behind: each rank adds its part, and sends them on.
        gradient_transfer = None
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            transfer = ring.start((k, v)) if step < ring.size - 1 else None
            queries, keys, causal = _block(ring.rank, source, q.shape[2], ctx.is_causal)
            block_dq, block_dk, block_dv = backward_block(
                gradient[:, :, queries],
                q[:, :, queries],
                k[:, :, keys],
                v[:, :, keys],
                out[:, :, queries],
                lse[:, :, queries],
                is_causal=causal,
                scale=ctx.scale,
            )
            if gradient_transfer is not None:
                dk, dv = gradient_transfer()
            dq[:, :, queries] += block_dq
            dk[:, :, keys] += block_dk
            dv[:, :, keys] += block_dv
            if ring.size > 1:
                gradient_transfer = ring.start((dk, dv), first_tag=2)  # tags 0 and 1 are those of k and v
            if transfer is not None:
                k, v = transfer()
        if gradient_transfer is not None:
            dk, dv = gradient_transfer()  # after a full round, the gradients of this rank's own keys and values
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None


def _merge(out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor) -> None:
    """Merge another block's result into `out` and `lse`, in place."""
    # The weights are exp(lse) and exp(block_lse), divided by their sum. This form does not overflow:
    # exp(b) / (exp(a) + exp(b)) = sigmoid(b - a), and log(exp(a) + exp(b)) = a - logsigmoid(a - b).
    block_weight = (block_lse - lse).sigmoid().unsqueeze(-1)
    out.sub_(block_weight * (out - block))
    lse.sub_(logsigmoid(lse - block_lse))
