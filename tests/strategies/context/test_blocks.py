"""Blocks of attention: two of them merge into attention over both, with every kernel."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from trainwright.strategies.context import blocks
from trainwright.strategies.context.blocks import backward_block, forward_block


def _largest_error(dtype: torch.dtype, device: str) -> float:
    """Return the largest error of the output and gradients of two merged blocks; full attention in float64 is true."""
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, 40, 16), (2, 2, 80, 16), (2, 2, 80, 16)
    inputs = [torch.randn(*shape, generator=generator).to(device, dtype) for shape in shapes]
    full = [tensor.double().requires_grad_() for tensor in inputs]
    expected = functional.scaled_dot_product_attention(*full, enable_gqa=True)
    true = torch.autograd.grad(expected.sum(), full)
    q, k, v = inputs
    halves: list[tuple[Tensor, Tensor]] = [(k[:, :, at], v[:, :, at]) for at in (slice(0, 40), slice(40, None))]
    results = [forward_block(q, *half, is_causal=False, scale=None) for half in halves]
    lse = torch.stack([of for _, of in results]).logsumexp(0)
    out = sum((of - lse).exp().unsqueeze(-1) * part for part, of in results)
    assert isinstance(out, Tensor)
    arguments = out.to(dtype), lse
    grads = [backward_block(torch.ones_like(q), q, *half, *arguments, is_causal=False, scale=None) for half in halves]
    found = [out, grads[0][0] + grads[1][0], *(torch.cat([grads[0][i], grads[1][i]], 2) for i in (1, 2))]
    return max((one - other).abs().max().item() for one, other in zip((expected, *true), found, strict=True))


@pytest.mark.parametrize("kernel", ["cpu", "plain"])
def test_blocks_merge_on_the_cpu(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_kernel", lambda *_: kernel)
    assert _largest_error(torch.float64, "cpu") < 1e-12
    assert _largest_error(torch.float32, "cpu") < 1e-5


@pytest.mark.requires("cuda", reason="flash and efficient attention have kernels for CUDA only")
@pytest.mark.parametrize(
    ("kernel", "dtype", "bound"),
    [("flash", torch.bfloat16, 5e-2), ("efficient", torch.float32, 1e-4), ("plain", torch.float64, 1e-12)],
)
def test_blocks_merge_on_cuda(kernel: str, dtype: torch.dtype, bound: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_kernel", lambda *_: kernel)
    assert _largest_error(dtype, "cuda") < bound
