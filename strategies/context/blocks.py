"""Attention between a block of queries and a block of keys and values, with its log-sum-exp.

The log-sum-exp is used to merge the results of several blocks. The backward of a block receives the merged output and
log-sum-exp of all blocks, and returns this block's contribution to the gradients.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

_ops = torch.ops.aten


def forward_block(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool, scale: float | None) -> tuple[Tensor, Tensor]:
    """Return the output, in the dtype of `q`, and the log-sum-exp, in float32 or float64, of one block.

    Args:
        q: (batch, heads, query length, head size).
        k: (batch, key heads, key length, head size). The number of heads is a multiple of the number of key heads.
        v: (batch, key heads, key length, value size).
        is_causal: Query i sees only keys up to i. Both lengths must be equal.
        scale: Factor of the scores. None means 1 / √(head size).
    """
    k = _repeat_heads(k, q)
    v = _repeat_heads(v, q)
    kernel = _kernel(q, k, v, is_causal)
    if kernel == "cpu":
        out, lse = _ops._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, is_causal, scale=scale)
    elif kernel == "flash":
        out, lse, *_ = _ops._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    elif kernel == "efficient":
        out, lse, *_ = _ops._scaled_dot_product_efficient_attention(q, k, v, None, True, 0.0, is_causal, scale=scale)
        lse = lse[..., : q.shape[2]]  # padded to a multiple of 32
    else:
        scores = _scores(q, k, is_causal, scale)
        lse = scores.logsumexp(-1)
        with torch.autocast(q.device.type, enabled=False):
            out = ((scores - lse.unsqueeze(-1)).exp() @ v.to(scores.dtype)).to(q.dtype)
    return out, lse


def backward_block(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this block's contribution to the gradients of `q`, `k` and `v`.

    Args:
        gradient: Gradient of the output.
        q, k, v, is_causal, scale: See `forward_block`.
        out: Output over all blocks, in the dtype of `q`.
        lse: Log-sum-exp over all blocks, (batch, heads, query length).
    """
    key_heads = k.shape[1]
    k = _repeat_heads(k, q)
    v = _repeat_heads(v, q)
    kernel = _kernel(q, k, v, is_causal)
    if kernel == "cpu":
        lse = lse.transpose(1, 2).contiguous().transpose(1, 2)  # the memory layout of the forward's result
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient, q, k, v, out, lse, 0.0, is_causal, scale=scale
        )
    elif kernel == "flash":
        state = torch.zeros(2, dtype=torch.uint64, device=q.device)  # random state of dropout, which is not used
        saved = (gradient, q, k, v, out, lse.contiguous())
        lengths = (None, None, q.shape[2], k.shape[2])
        dq, dk, dv = _ops._scaled_dot_product_flash_attention_backward(
            *saved, *lengths, 0.0, is_causal, state, state.new_empty(()), scale=scale
        )
    elif kernel == "efficient":
        state = torch.zeros((), dtype=torch.int64, device=q.device)
        lse = torch.nn.functional.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        dq, dk, dv, _ = _ops._scaled_dot_product_efficient_attention_backward(
            gradient, q, k, v, None, out, lse, state, state, 0.0, [True, True, True, False], is_causal, scale=scale
        )
    else:
        dq, dk, dv = _plain_backward(gradient, q, k, v, out, lse, is_causal, scale)
    return dq, _sum_heads(dk, key_heads), _sum_heads(dv, key_heads)


def _kernel(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> str:
    """Return the kernel to use, or `"plain"` if torch has no kernel that returns a log-sum-exp."""
    if q.shape[-1] != v.shape[-1]:
        return "plain"
    if q.device.type == "cpu":
        return "cpu"
    if q.device.type == "cuda":
        parameters = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, is_causal, False)
        is_aligned = q.shape[-1] * q.element_size() % 16 == 0  # torch's public function pads other sizes
        if is_aligned and torch.backends.cuda.can_use_flash_attention(parameters):
            return "flash"
        if is_aligned and torch.backends.cuda.can_use_efficient_attention(parameters):
            return "efficient"
    return "plain"


def _repeat_heads(tensor: Tensor, q: Tensor) -> Tensor:
    """Repeat the heads of keys or values, so that there are as many as heads of queries."""
    repeats = q.shape[1] // tensor.shape[1]
    return tensor if repeats == 1 else tensor.repeat_interleave(repeats, dim=1)


def _sum_heads(gradient: Tensor, key_heads: int) -> Tensor:
    """Return the gradient of a tensor that `_repeat_heads` has repeated."""
    if gradient.shape[1] == key_heads:
        return gradient
    batch, heads, *rest = gradient.shape
    return gradient.reshape(batch, key_heads, heads // key_heads, *rest).sum(2, dtype=accumulator_dtype(gradient))


def accumulator_dtype(tensor: Tensor) -> torch.dtype:
    """Return float64 for float64, else float32."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _scores(q: Tensor, k: Tensor, is_causal: bool, scale: float | None) -> Tensor:
    """Return the scores in float32 or float64. They are -∞ for keys that a causal query does not see."""
    dtype = accumulator_dtype(q)
    with torch.autocast(q.device.type, enabled=False):
        scores = q.to(dtype) @ k.to(dtype).transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(hidden, -math.inf)
    return scores


def _plain_backward(
    gradient: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, is_causal: bool, scale: float | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of `q`, `k` and `v` with matrix products.

    With weights P, output O and its gradient dO: dV = Pᵀ dO. The gradient of the scores is
    P * (dO Vᵀ - rowsum(dO * O)), which dQ and dK multiply by K and Q.
    """
    weights = (_scores(q, k, is_causal, scale) - lse.unsqueeze(-1)).exp()
    gradient = gradient.to(weights.dtype)
    out = out.to(weights.dtype)
    q = q.to(weights.dtype)
    k = k.to(weights.dtype)
    v = v.to(weights.dtype)
    with torch.autocast(q.device.type, enabled=False):
        of_weights = gradient @ v.transpose(-1, -2) - (gradient * out).sum(-1, keepdim=True)
        of_scores = weights * of_weights * (q.shape[-1] ** -0.5 if scale is None else scale)
        return of_scores @ k, of_scores.transpose(-1, -2) @ q, weights.transpose(-1, -2) @ gradient
