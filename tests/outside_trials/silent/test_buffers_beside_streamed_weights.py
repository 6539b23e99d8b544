"""Buffers of offloaded modules must fit beside the weights that come and go; otherwise it is said."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from trainwright import infer_auto_device_map
from trainwright.core.errors import TrainwrightWarning


class Block(nn.Module):
    """A weight of 40,000 bytes and a buffer of 4,000."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(100, 100, device="meta"))
        self.register_buffer("mask", torch.empty(1000, device="meta"))


def _map(budget: int) -> list[str]:
    model = nn.Sequential(*[Block() for _ in range(5)])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        infer_auto_device_map(model, {0: budget, "cpu": 10**9}, no_split_module_classes=["Block"])
    return [str(one.message) for one in caught if one.category is TrainwrightWarning]


def test_buffers_that_do_not_fit_beside_the_largest_streamed_weight_are_warned_of() -> None:
    # One block lies on the device (44,000 bytes); four stream their weights (40,000) and leave 16,000 of buffers.
    found = _map(44_000 + 40_000 + 15_999)
    assert len(found) == 1
    assert "offload_buffers=True" in found[0]


@pytest.mark.parametrize("spare", [0, 1000])
def test_buffers_that_fit_are_not(spare: int) -> None:
    assert _map(44_000 + 40_000 + 16_000 + spare) == []
