"""Make torch's scaled dot-product attention span a sequence that is split over ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.nn import functional

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.context.ring import ring_attention
from trainwright.strategies.context.split import Order

Kind = Literal["ring", "ulysses"]
_attention = functional.scaled_dot_product_attention  # torch's function, even while SplitAttention replaces it


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: dist.ProcessGroup | None,
    *,
    is_causal: bool,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Return the attention of this rank's queries over the keys and values of all ranks.

    An all-to-all gives each rank the full sequence for some heads. A second all-to-all restores the split sequence.
    Source: Jacobs et al., "DeepSpeed Ulysses: System Optimizations for Enabling Training of Extreme Long Sequence
    Transformer Models" (2023). Collective, in backward too: every rank passes tensors of the same shapes. The arguments
    are those of `ring_attention`, but the sequence must be split in order `"plain"` (see `Order`).

    Raises:
        ConfigurationError: The number of heads of `q`, `k` or `v` is not divisible by the number of ranks.
    """
    size = dist.get_world_size(group)
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        if tensor.shape[1] % size:
            raise ConfigurationError(
                f"{name} has {tensor.shape[1]} heads, which Ulysses attention cannot divide among {size} ranks. Use a "
                "number of ranks that divides the number of heads, or ring attention."
            )
    q = _exchange(q, group, to_heads=True)
    k = _exchange(k, group, to_heads=True)
    v = _exchange(v, group, to_heads=True)
    out = _attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
    return _exchange(out, group, to_heads=False)


def _exchange(tensor: Tensor, group: dist.ProcessGroup | None, *, to_heads: bool) -> Tensor:
    """Exchange a part of the sequence with all heads for the full sequence of some heads. Collective, in backward too.

    With `to_heads=False`, exchange in the opposite direction.
    """
    # (batch, heads, length, head size): dimension 1 is the heads, 2 is the sequence.
    if to_heads:
        split_dim = 1
        joined_dim = 2
    else:
        split_dim = 2
        joined_dim = 1
    sent = torch.stack(tensor.chunk(dist.get_world_size(group), split_dim))  # one part for each rank
    group = group or dist.group.WORLD
    assert group is not None  # the world's exists once processes have joined
    received = all_to_all_single_autograd(sent, None, None, group)
    return torch.cat(received.unbind(), joined_dim)


class SplitAttention:
    """`torch.nn.functional.scaled_dot_product_attention` over a sequence that is split over the ranks of a group.

    Each rank passes its part of the queries, keys and values. Other kinds of attention, such as flex attention and
    kernels of other packages, are not changed and see only this rank's part. Modules that have imported the function by
    name are not changed either.

    Args:
        group: Process group that splits the sequence. None means all ranks.
        kind: `"ring"` sends keys and values from rank to rank. `"ulysses"` divides the heads among the ranks.

    Attributes:
        order: Order in which the ranks must split the sequence; see `Order`.
        is_active: True within `over_ranks`, where attention covers the sequences of all ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, kind: Kind) -> None:
        self.order: Order = "zigzag" if kind == "ring" else "plain"
        self.is_active = False
        self._group = group
        self._kind = kind
        self._num_calls = 0  # calls of the function that covered the sequences of all ranks

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Return a context that replaces torch's function for all threads of the process.

        The function behaves as before, except within `over_ranks` and in the backward of its steps, where activations
        may be recomputed in another thread.
        """
        plain = functional.scaled_dot_product_attention
        plain_module = functional.multi_head_attention_forward

        def attention(query: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            if query.is_meta or not self._spans():
                return plain(query, *args, **kwargs)
            self._num_calls += 1
            return self._attend(query, *args, **kwargs)

        def multi_head(*args: object, **kwargs: object) -> object:
            if self._spans():
                raise ConfigurationError(
                    "torch.nn.MultiheadAttention cannot attend over a sequence that is split over ranks. Use a module "
                    "that calls torch.nn.functional.scaled_dot_product_attention."
                )
            return plain_module(*args, **kwargs)  # type: ignore[arg-type]  # arguments of the replaced function

        functional.scaled_dot_product_attention = attention
        functional.multi_head_attention_forward = multi_head  # type: ignore[assignment]  # accepts the same arguments
        try:
            yield
        finally:
            functional.scaled_dot_product_attention = plain
            functional.multi_head_attention_forward = plain_module

    def _spans(self) -> bool:
        """Return whether the current call covers the sequences of all ranks."""
        if self.is_active:
            return True
        # The backward of a step may recompute activations after `over_ranks` has ended. Inside of a backward, the id of
        # torch's current graph task is not -1.
        return self._num_calls > 0 and torch._C._current_graph_task_id() != -1

    @contextmanager
    def over_ranks(self, *, required: bool = True) -> Iterator[None]:
        """Return a context in which attention covers the sequences of all ranks. Needs `installed`.

        Args:
            required: Raise an error if the model does not call attention. Default: True.

        Raises:
            ConfigurationError: Attention has a mask or dropout, or `torch.nn.MultiheadAttention` is called. At the end
                of the context: attention is `required`, and the model has not called it.
        """
        was_active = self.is_active
        self.is_active = True
        num_earlier_calls = self._num_calls
        try:
            yield
        finally:
            self.is_active = was_active
        if required and self._num_calls == num_earlier_calls:
            raise ConfigurationError(
                "Sequences are split over ranks, but the model has not called "
                "torch.nn.functional.scaled_dot_product_attention, so each position attends only to positions of its "
                "own rank. Call the function as an attribute of torch.nn.functional, or do not split sequences."
            )

    def _attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if attn_mask is not None:
            raise ConfigurationError(
                f"An attention mask of shape {tuple(attn_mask.shape)} covers only this rank's part of the sequence. "
                "For causal attention, pass attn_mask=None and is_causal=True. Transformers models create such a "
                "mask for padding. They also create one for position_ids with gaps, unless attention_mask is all "
                "ones."
            )
        if dropout_p > 0:
            raise ConfigurationError(
                f"dropout_p={dropout_p}: attention over a split sequence recomputes its weights in backward, and "
                "cannot repeat the dropout of the forward. Set the model's attention dropout to 0."
            )
        attend = ring_attention if self._kind == "ring" else ulysses_attention
        return attend(
            _autocast(query),
            _autocast(key),
            _autocast(value),
            self._group,
            is_causal=is_causal,
            scale=scale,
            enable_gqa=enable_gqa,
        )


def _autocast(tensor: Tensor) -> Tensor:
    """Cast a tensor as autocast casts the arguments of scaled dot-product attention."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
