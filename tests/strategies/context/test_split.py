"""A sequence that is split over ranks: who holds which positions, splitting, joining, and gradients of both."""

from __future__ import annotations

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.strategies.context.joining import join_sequence
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.context.split import positions, split_sequence

pytestmark = pytest.mark.distributed


def _positions(order: str) -> list[int]:
    return positions(8, None, order).tolist()


@pytest.mark.parametrize(
    ("order", "expected"), [("plain", [[0, 1, 2, 3], [4, 5, 6, 7]]), ("zigzag", [[0, 1, 6, 7], [2, 3, 4, 5]])]
)
def test_each_rank_holds_the_positions_of_the_order(order: str, expected: list[list[int]]) -> None:
    assert run_distributed(_positions, 2, order) == expected


def _join_parts(order: str) -> None:
    full = torch.randn(3, 8, 2, generator=torch.Generator().manual_seed(0)).requires_grad_()
    part = split_sequence(full, -2, None, order)
    assert part.is_contiguous()
    assert part.shape == (3, 4, 2)
    assert torch.equal(join_sequence(part, -2, None, order), full)
    (gradient,) = torch.autograd.grad((join_sequence(part, -2, None, order) * full.detach()).sum(), full)
    expected = torch.zeros_like(full)
    expected[:, positions(8, None, order)] = 2 * full.detach()[:, positions(8, None, order)]  # of the sum of two losses
    assert torch.equal(gradient, expected)


@pytest.mark.parametrize("order", ["plain", "zigzag"])
def test_joining_the_parts_gives_the_full_sequence_and_sums_gradients(order: str) -> None:
    run_distributed(_join_parts, 2, order)


def _refused(order: str) -> str:
    with pytest.raises(ConfigurationError) as error:
        split_sequence(torch.zeros(1, 9), 1, None, order)
    return str(error.value)


@pytest.mark.parametrize(("order", "following"), [("plain", 10), ("zigzag", 12)])
def test_a_length_that_is_not_divisible_is_refused_with_the_next_one_that_is(order: str, following: int) -> None:
    message = run_distributed(_refused, 2, order)[0]
    assert "9 positions" in message
    assert f"Pad it to {following}" in message
