"""A context in which torch's scaled dot-product attention spans a sequence that is split over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.context.ring import ring_attention
from trainwright.strategies.context.split import Order, check_order
from trainwright.strategies.context.ulysses import ulysses_attention

Kind = Literal["ring", "ulysses"]


@contextmanager
def attention_over(group: dist.ProcessGroup | None, kind: Kind = "ring", order: Order | None = None) -> Iterator[None]:
    """Compute every `torch.nn.functional.scaled_dot_product_attention` of this thread over the ranks of a group.

    Each rank passes its part of the queries, keys and values. Other attention, such as flex attention and kernels of
    other packages, is not changed and sees this rank's part only. Under activation checkpointing, the backward pass
    must run inside the context too.

    Args:
        group: the process group that splits the sequence. None means all ranks.
        kind: `"ring"` sends keys and values from rank to rank. `"ulysses"` divides the heads among the ranks.
        order: the order of the split sequence. Default: `"zigzag"` for a ring, and `"plain"`, the only one, for
            `"ulysses"`.

    Raises:
        ConfigurationError: `kind` or `order` is unknown, or `kind="ulysses"` is used with order `"zigzag"`. Inside the
            context, an attention with a mask or dropout, or of `torch.nn.MultiheadAttention`.
    """
    if kind not in ("ring", "ulysses"):
        raise ConfigurationError(f"kind={kind!r} is unknown. Use 'ring' or 'ulysses'.")
    if order is None:
        order = "zigzag" if kind == "ring" else "plain"
    check_order(order)
    if kind == "ulysses" and order != "plain":
        raise ConfigurationError(f"kind='ulysses' needs order='plain', not {order!r}.")
    with _AttentionOver(group, kind, order):
        yield


class _AttentionOver(TorchFunctionMode):
    def __init__(self, group: dist.ProcessGroup | None, kind: Kind, order: Order) -> None:
        super().__init__()
        self._group, self._kind, self._order = group, kind, order

    def __torch_function__(
        self,
        func: Callable[..., object],
        types: Sequence[type],
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        """Replace scaled dot-product attention; call any other function as it is."""
        if func is functional.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))  # type: ignore[arg-type]  # those of the function it replaces
        if func is functional.multi_head_attention_forward:  # its inner calls do not reach this mode
            raise ConfigurationError(
                "torch.nn.MultiheadAttention cannot attend over a sequence that is split over ranks. Use a module that "
                "calls torch.nn.functional.scaled_dot_product_attention."
            )
        return func(*args, **(kwargs or {}))

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
                f"An attention mask of shape {tuple(attn_mask.shape)} covers this rank's part of the sequence only. "
                "For causal attention, pass attn_mask=None and is_causal=True. Models of transformers build a mask for "
                "padding, and for positions with gaps unless attention_mask is all ones."
            )
        if dropout_p > 0:
            raise ConfigurationError(
                f"dropout_p={dropout_p}: attention over a split sequence recomputes its weights in the backward pass, "
                "block by block, and cannot repeat their dropout. Set the model's attention dropout to 0."
            )
        query, key, value = (_autocast(tensor) for tensor in (query, key, value))
        parts = (query, key, value, self._group)
        if self._kind == "ulysses":
            return ulysses_attention(*parts, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)
        return ring_attention(*parts, is_causal=is_causal, scale=scale, order=self._order, enable_gqa=enable_gqa)


def _autocast(tensor: Tensor) -> Tensor:
    """Cast as autocast casts the arguments of scaled dot-product attention."""
    kind = tensor.device.type
    if not torch.is_autocast_enabled(kind) or tensor.dtype == torch.float64:
        return tensor
    return tensor.to(torch.get_autocast_dtype(kind))
