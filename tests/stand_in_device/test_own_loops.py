from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.stand_in_device import STAND_IN, is_there, stand_in_device
from trainwright import Accelerator


def test_a_loop_reads_nothing_and_mixes_no_devices() -> None:
    rows = [(torch.ones(4), torch.ones(1)) for _ in range(24)]
    with stand_in_device() as reads:
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        accelerator.state.device = accelerator.engine.device = STAND_IN
        with STAND_IN:
            net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))
        optimizer = torch.optim.AdamW(net.parameters())
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        loader = DataLoader(rows, batch_size=4)  # type: ignore[arg-type]  # a list is a data set
        net, optimizer, loader, schedule = accelerator.prepare(
            net, optimizer, loader, schedule, device_placement=[False, None, True, None]
        )
        losses = []
        for inputs, targets in loader:
            with accelerator.accumulate(net):
                assert is_there(inputs)
                loss = nn.functional.mse_loss(net(inputs), targets)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(net.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
        assert (reads.values, reads.copies) == (0, 0)
        gathered = accelerator.gather_for_metrics((net(inputs), targets))
        assert all(is_there(tensor) for tensor in gathered)
        assert torch.stack(losses).mean().item() == 0.0
        assert reads.values == 1
