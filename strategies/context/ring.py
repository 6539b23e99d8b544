"""Ring attention: keys and values travel from rank to rank, and each rank merges the results for its own queries.

After "Ring Attention with Blockwise Transformers for Near-Infinite Context" (Liu et al., 2023). Besides its own part, a
rank holds at most two blocks of keys and values: the present one and the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import logsigmoid

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.context.blocks import accumulator_dtype, backward_block, forward_block
from trainwright.strategies.context.split import Order, check_order


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    *,
    is_causal: bool,
    scale: float | None = None,
    order: Order = "zigzag",
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of this rank's queries over the keys and values of all ranks, in the dtype of `q`.

    Keys and values are sent round the group, in the forward pass and again in the backward pass, with their gradients.
    The next block is received while the present one is computed. Partial results are merged in float32, or float64 for
    float64. Every rank of the group must call this, in both passes, with tensors of the same shapes. Second derivatives
    are not supported.

    Args:
        q: (batch, heads, local length, head size).
        k: (batch, heads, local length, head size).
        v: (batch, heads, local length, value size).
        group: the process group that splits the sequence. None means all ranks.
        is_causal: whether a position sees earlier positions and itself only. Blocks that it hides entirely are not
            computed.
        scale: the factor of the scores. Default: 1 / √(head size).
        order: the order of the split sequence. Default: `"zigzag"`.
        enable_gqa: whether `k` and `v` may have fewer heads than `q`, whose number is a multiple of theirs.

    Raises:
        ConfigurationError: the shapes or dtypes do not fit each other or the order.
    """
    _check(q, k, v, is_causal, order, enable_gqa)
    arguments = (q, k, v, group, is_causal, scale, order)
    out: Tensor = _RingAttention.apply(*arguments)  # type: ignore[no-untyped-call]  # untyped in torch
    return out


def _check(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, order: Order, enable_gqa: bool) -> None:
    check_order(order)
    shapes = f"q, k and v have the shapes {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
    if not q.dtype == k.dtype == v.dtype:
        raise ConfigurationError(f"q, k and v have the dtypes {q.dtype}, {k.dtype} and {v.dtype}. Cast them to one.")
    if not q.dim() == k.dim() == v.dim() == 4 or k.shape[:3] != v.shape[:3] or q.shape[-1] != k.shape[-1]:
        raise ConfigurationError(f"{shapes}; ring attention expects (batch, heads, local length, head size).")
    if q.shape[1] != k.shape[1] and (not enable_gqa or q.shape[1] % k.shape[1]):
        raise ConfigurationError(
            f"{shapes}: {q.shape[1]} heads of queries, {k.shape[1]} of keys. With enable_gqa=True, the first must be a "
            "multiple of the second; without it, they must be equal."
        )
    if is_causal and q.shape[2] != k.shape[2]:
        raise ConfigurationError(f"{shapes}; causal attention over a split sequence needs as many queries as keys.")
    if is_causal and order == "zigzag" and q.shape[2] % 2:
        raise ConfigurationError(f"{shapes}; the local length is even in order 'zigzag'. Use split_sequence().")


@dataclass(frozen=True)
class _VisibleBlock:
    """The queries and keys of one step of the ring that see each other."""

    queries: slice
    keys: slice
    is_causal: bool


def _block(rank: int, source: int, length: int, is_causal: bool, order: Order) -> _VisibleBlock | None:
    """Return the block that `rank` computes with the keys of `source`; None if all of them are in the future."""
    everything, half = slice(None), length // 2
    if not is_causal or source == rank:  # a rank's own positions ascend in both orders
        return _VisibleBlock(everything, everything, is_causal)
    if order == "plain":
        return _VisibleBlock(everything, everything, False) if source < rank else None
    # Rank r holds chunks r and 2n-1-r. The second chunk of an earlier rank is later than both of this one's, and the
    # first chunk of this rank is earlier than both of a later one's.
    if source < rank:
        return _VisibleBlock(everything, slice(0, half), False)
    return _VisibleBlock(slice(half, None), everything, False)


class Ring:
    """The sends to the next rank and the receives from the previous one."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = dist.group.WORLD if group is None else group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        assert self.group is not None
        self._next = dist.get_global_rank(self.group, (self.rank + 1) % self.size)
        self._previous = dist.get_global_rank(self.group, (self.rank - 1) % self.size)

    def start(self, tensors: Sequence[Tensor], first_tag: int = 0) -> Transfer:
        """Start to send contiguous `tensors` to the next rank and to receive as many from the previous one."""
        received = [torch.empty_like(tensor) for tensor in tensors]
        operations = []
        for tag, (sent, target) in enumerate(zip(tensors, received, strict=True), first_tag):
            operations.append(dist.P2POp(dist.isend, sent, self._next, self.group, tag))
            operations.append(dist.P2POp(dist.irecv, target, self._previous, self.group, tag))
        return Transfer(tensors, received, dist.batch_isend_irecv(operations))


@dataclass
class Transfer:
    """Tensors on their way. The sent ones are kept until `wait()` returns."""

    sent: Sequence[Tensor]
    received: list[Tensor]
    works: list[Any]

    def wait(self) -> list[Tensor]:
        """Return the received tensors."""
        for work in self.works:
            work.wait()
        return self.received


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
        order: Order,
    ) -> Tensor:
        ring = Ring(group)
        q = q if q.stride(-1) == 1 else q.contiguous()  # as kernels need it
        own_k, own_v = k, v = k.contiguous(), v.contiguous()
        out = lse = None
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            transfer = ring.start((k, v)) if step < ring.size - 1 else None
            block = _block(ring.rank, source, q.shape[2], is_causal, order)
            if block is not None:
                at, of = block.queries, block.keys
                new, new_lse = forward_block(
                    q[:, :, at], k[:, :, of], v[:, :, of], is_causal=block.is_causal, scale=scale
                )
                if out is None or lse is None:  # the rank's own block, which holds all of its queries
                    out, lse = new.to(accumulator_dtype(q)), new_lse.clone()
                else:
                    _merge(out[:, :, at], lse[:, :, at], new, new_lse)
            if transfer is not None:
                k, v = transfer.wait()
        assert out is not None
        out = out.to(q.dtype)
        ctx.save_for_backward(q, own_k, own_v, out, lse)
        ctx.group, ctx.is_causal, ctx.scale, ctx.order = group, is_causal, scale, order
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        gradient = gradient.contiguous()  # that of a sum is expanded from one number
        ring = Ring(ctx.group)
        dtype = accumulator_dtype(q)
        dq = torch.zeros_like(q, dtype=dtype)
        dk, dv = torch.zeros_like(k, dtype=dtype), torch.zeros_like(v, dtype=dtype)
        of_keys = None  # the gradients that arrive for the keys and values of this step
        for step in range(ring.size):
            source = (ring.rank - step) % ring.size
            transfer = ring.start((k, v)) if step < ring.size - 1 else None
            block = _block(ring.rank, source, q.shape[2], ctx.is_causal, ctx.order)
            parts = None
            if block is not None:
                at, of = block.queries, block.keys
                saved = (q[:, :, at], k[:, :, of], v[:, :, of], out[:, :, at], lse[:, :, at])
                options = {"is_causal": block.is_causal, "scale": ctx.scale}
                parts = backward_block(gradient[:, :, at], *saved, **options)
            if of_keys is not None:
                dk, dv = of_keys.wait()
            if block is not None and parts is not None:
                dq[:, :, at] += parts[0]
                dk[:, :, of] += parts[1]
                dv[:, :, of] += parts[2]
            if ring.size > 1:
                of_keys = ring.start((dk, dv), first_tag=2)
            if transfer is not None:
                k, v = transfer.wait()
        if of_keys is not None:
            dk, dv = of_keys.wait()  # after a full turn, those of this rank's own
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None, None, None


def _merge(out: Tensor, lse: Tensor, new: Tensor, new_lse: Tensor) -> None:
    """Merge another block's result into `out` and `lse`, in place."""
    out.sub_((new_lse - lse).sigmoid().unsqueeze(-1) * (out - new))
    lse.sub_(logsigmoid(lse - new_lse))
