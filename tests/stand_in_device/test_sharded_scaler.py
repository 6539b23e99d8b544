"""A float16 loss scale whose gradients are on the host, as `cpu_offload` keeps them, while ranks meet on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.helpers.stand_in_device import STAND_IN, is_there, stand_in_device
from trainwright.strategies.fsdp.sharded_gradients import ShardScaler


def test_ranks_agree_on_an_overflow_where_they_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    shared: list[bool] = []
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, op: shared.append(is_there(tensor)))
    with stand_in_device():
        scaler: Any = ShardScaler(STAND_IN.type)
        scaler._lazy_init_scale_growth_tracker(STAND_IN)
        parameters = [torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2, device=STAND_IN))]
        for parameter in parameters:
            parameter.grad = torch.ones_like(parameter)
        optimizer = torch.optim.SGD(parameters, lr=0.1)
        scaler.unscale_(optimizer)
        flags = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    assert shared == [True, True]
    assert {flag.device.type for flag in flags.values()} == {"cpu", STAND_IN.type}
