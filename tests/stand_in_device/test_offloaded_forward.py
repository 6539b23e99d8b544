"""Weights that visit a stand-in for an accelerator for the time of their module's forward."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers.stand_in_device import STAND_IN, is_there, stand_in_device
from trainwright import cpu_offload


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor:UserWarning")
def test_offloaded_weights_meet_their_inputs_on_the_device_and_are_read_by_nobody() -> None:
    met: list[bool] = []

    def note(module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        met.extend(is_there(tensor) for tensor in (*module.parameters(), *args, output))

    with stand_in_device() as reads:
        net = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
        for part in net:
            part.register_forward_hook(note)
        cpu_offload(net, STAND_IN)
        for _ in range(2):
            outputs = net(torch.ones(3, 4))
            assert outputs.device.type == "cpu"  # where the inputs came from
        assert not any(is_there(parameter) for parameter in net.parameters())
    assert all(met)
    assert len(met) == 2 * 3 * 4
    assert (reads.values, reads.copies) == (0, 2)  # the two outputs
