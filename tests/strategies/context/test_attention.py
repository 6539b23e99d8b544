"""Attention over a split sequence equals attention over the full one, and its memory is that of the parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from tests.helpers.distributed import run_distributed
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.context import blocks
from trainwright.strategies.context.attention import Kind, SplitAttention
from trainwright.strategies.context.blocks import backward_block, forward_block
from trainwright.strategies.context.ring import ring_attention
from trainwright.strategies.context.split import positions, split_sequence


@contextmanager
def attention_over(group: dist.ProcessGroup | None, kind: Kind = "ring") -> Iterator[None]:
    attention = SplitAttention(group, kind)
    with attention.installed(), attention.over_ranks(required=False):
        yield


_TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}


def _inputs(
    dtype: torch.dtype = torch.float32, kv_heads: int = 4, length: int = 32, head_size: int = 8, value_size: int = 8
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (2, 4, length, head_size), (2, kv_heads, length, head_size), (2, kv_heads, length, value_size)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def _largest_error(kind: str, order: str, is_causal: bool, inputs: list[Tensor], scale: float | None = None) -> float:
    """Return the largest error of the output and of the gradients of q, k and v, over this rank's parts."""
    full = [tensor.clone().requires_grad_() for tensor in inputs]
    parts = [split_sequence(tensor, 2, None, order).requires_grad_() for tensor in inputs]
    options = {"is_causal": is_causal, "enable_gqa": inputs[0].shape[1] != inputs[1].shape[1], "scale": scale}
    expected = functional.scaled_dot_product_attention(*full, **options)
    with attention_over(None, kind):
        found = functional.scaled_dot_product_attention(*parts, **options)
        weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1), dtype=expected.dtype)
        (expected * weights).sum().backward()
        (found * split_sequence(weights, 2, None, order)).sum().backward()
    pairs = [(expected, found), *((one.grad, other.grad) for one, other in zip(full, parts, strict=True))]
    return max((split_sequence(one, 2, None, order) - other).abs().max().item() for one, other in pairs)


def _check_cases(cases: list[tuple[str, str, bool, torch.dtype, int]]) -> None:
    for kind, order, is_causal, dtype, kv_heads in cases:
        error = _largest_error(kind, order, is_causal, _inputs(dtype, kv_heads))
        assert error < _TOLERANCE[dtype], (kind, order, is_causal, dtype, kv_heads, error)


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize(("kind", "order"), [("ring", "zigzag"), ("ulysses", "plain")])
def test_outputs_and_gradients_equal_those_of_full_attention(kind: str, order: str, world_size: int) -> None:
    cases = [(kind, order, True, torch.float64, 4), (kind, order, False, torch.float32, 4)]
    if kind == "ring" or world_size == 2:
        cases.append((kind, order, True, torch.float32, 2))
    run_distributed(_check_cases, world_size, cases)


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
def test_autocast_lowers_the_precision_as_it_does_for_plain_attention() -> None:
    q, k, v = _inputs()
    with torch.autocast("cpu", torch.bfloat16), attention_over(None):
        assert functional.scaled_dot_product_attention(q, k, v.bfloat16()).dtype == torch.bfloat16


_X = torch.randn(2, 4, 8)
_REFUSED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    r"mask of shape \(32, 32\).*is_causal=True": lambda q, k, v: functional.scaled_dot_product_attention(
        q, k, v, attn_mask=torch.ones(32, 32, dtype=torch.bool)
    ),
    r"dropout_p=0\.1: .* dropout to 0": lambda q, k, v: functional.scaled_dot_product_attention(q, k, v, dropout_p=0.1),
    "MultiheadAttention": lambda q, k, v: nn.MultiheadAttention(8, 2, batch_first=True)(_X, _X, _X),
    "4 heads of queries and 2 heads": lambda q, k, v: ring_attention(q, k[:, :2], v[:, :2], None, is_causal=True),
    "an even local length": lambda q, k, v: ring_attention(q[:, :, :3], k[:, :, :3], v[:, :, :3], None, is_causal=True),
}


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("message", _REFUSED)
def test_what_ranks_cannot_share_is_refused(message: str) -> None:
    with attention_over(None), pytest.raises(ConfigurationError, match=message):
        _REFUSED[message](*_inputs())


def _refused_heads() -> str:
    q, k, v = (split_sequence(tensor, 2, None, "plain") for tensor in _inputs(kv_heads=1))
    with attention_over(None, "ulysses"), pytest.raises(ConfigurationError) as error:
        functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    return str(error.value)


@pytest.mark.distributed
def test_heads_that_ulysses_cannot_divide_are_refused() -> None:
    assert "k has 1 heads" in run_distributed(_refused_heads, 2)[0]


def _largest_error_of_blocks(dtype: torch.dtype, device: str) -> float:
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
    arguments = out.to(dtype), lse
    grads = [backward_block(torch.ones_like(q), q, *half, *arguments, is_causal=False, scale=None) for half in halves]
    found = [out, grads[0][0] + grads[1][0], *(torch.cat([grads[0][i], grads[1][i]], 2) for i in (1, 2))]
    return max((one - other).abs().max().item() for one, other in zip((expected, *true), found, strict=True))


@pytest.mark.parametrize("kernel", ["cpu", "plain"])
def test_blocks_merge_on_the_cpu(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks, "_kernel", lambda *_: kernel)
    assert _largest_error_of_blocks(torch.float64, "cpu") < 1e-12
    assert _largest_error_of_blocks(torch.float32, "cpu") < 1e-5


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("order", "expected"), [("plain", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]])]
)
def test_each_rank_holds_the_positions_of_the_order(order: str, expected: list[list[int]]) -> None:
    assert run_distributed(lambda order: positions(8, None, order).tolist(), 2, order) == expected


def _largest_errors(cases: list[dict[str, Any]]) -> list[float]:
    return [
        _largest_error(
            "ring", "zigzag", True, _inputs(**{k: v for k, v in case.items() if k != "scale"}), case.get("scale")
        )
        for case in cases
    ]


@pytest.mark.distributed
def test_a_ring_takes_odd_head_sizes_other_value_sizes_and_a_scale() -> None:
    cases: list[dict[str, Any]] = [
        {"head_size": 7, "value_size": 7},
        {"value_size": 5},
        {"scale": 0.3},
        {"kv_heads": 1},
    ]
    assert max(max(errors) for errors in run_distributed(_largest_errors, 2, cases)) < 1e-5
