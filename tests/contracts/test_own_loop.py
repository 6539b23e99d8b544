"""User-written loops under every strategy: the numbers of a hand-written loop on one device."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.contracts.documented import documented_strategy
from tests.helpers.distributed import run_distributed
from trainwright.accelerator.accelerator import Accelerator
from trainwright.strategies import DeepSpeedStrategy, FSDPStrategy, OffloadStrategy, Strategy, TensorParallelStrategy

_STEPS, _ACCUMULATE, _ROWS = 3, 2, 2


class Block(nn.Module):
    """A unit, whose two layers tensor parallelism splits."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = inputs + self.down(functional.gelu(self.up(inputs)))
        return found


class Net(nn.Module):
    """A small network of blocks; not a TaskModule."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks, self.head = nn.Linear(4, 8), nn.ModuleList([Block(), Block()]), nn.Linear(8, 1)

    def shard_units(self) -> list[nn.Module]:
        return list(self.blocks)

    def tensor_parallel_plan(self, mesh: Any) -> dict[str, str]:
        return {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        found: torch.Tensor = self.head(hidden)
        return found


def data(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    inputs = torch.randn(num, 4, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin(), torch.arange(num) % 3 + 1)


def make_optimizer(net: nn.Module) -> torch.optim.Optimizer:
    biases = [p for name, p in net.named_parameters() if name.endswith("bias")]
    weights = [p for name, p in net.named_parameters() if not name.endswith("bias")]
    return torch.optim.AdamW(
        [{"params": weights, "weight_decay": 0.1}, {"params": biases, "weight_decay": 0.0}], lr=0.05
    )


def _reference(num_ranks: int, *, counts: bool, clip: float | None, norm_type: float = 2.0) -> dict[str, Any]:
    net = Net()
    optimizer = make_optimizer(net)
    rows = _ROWS * num_ranks * _ACCUMULATE
    inputs, targets, items = data(rows * _STEPS).tensors
    found: dict[str, Any] = {"losses": [], "norms": []}
    for start in range(0, len(inputs), rows):
        x, y, n = (each[start : start + rows] for each in (inputs, targets, items))
        squares = (net(x) - y).square().squeeze(1)
        loss = (squares * n).sum() / n.sum() if counts else squares.mean()
        loss.backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(net.parameters(), clip, norm_type)
            found["norms"].append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(loss.detach()))
    return found | {"weights": {k: v.detach() for k, v in net.state_dict().items()}}


def _loop(
    strategy: Strategy | str,
    order: str = "model first",
    *,
    counts: bool,
    clip: float | None,
    norm_type: float = 2.0,
    **arguments: Any,
) -> dict[str, Any]:
    """Train with an Accelerator on this rank."""
    accelerator = Accelerator(strategy=strategy, gradient_accumulation_steps=_ACCUMULATE, seed=0, **arguments)
    net = Net()
    optimizer = make_optimizer(net)
    ranks = accelerator.engine.data_ranks.size
    loader = DataLoader(data(_ROWS * ranks * _ACCUMULATE * _STEPS), batch_size=_ROWS)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    if order == "model first":
        model, prepared, batches, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    elif order == "model last":
        scheduler, prepared, batches, model = accelerator.prepare(scheduler, optimizer, loader, net)
    else:
        model, batches = accelerator.prepare(net), accelerator.prepare(loader)
        prepared, scheduler = accelerator.prepare(optimizer), accelerator.prepare(scheduler)
    found: dict[str, Any] = {"norms": [], "losses": []}
    shares: list[torch.Tensor] = []
    for x, y, n in batches:
        with accelerator.accumulate(model):
            squares = (model(x) - y).square().squeeze(1)
            loss = (squares * n).sum() / n.sum() if counts else squares.mean()
            shares.append(loss.detach() * (float(n.sum()) if counts else 1.0))
            accelerator.backward(loss, num_items=n.sum() if counts else None)
            if accelerator.sync_gradients:
                if clip is not None:
                    norm = accelerator.clip_grad_norm_(model.parameters(), clip, norm_type)
                    found["norms"].append(float(norm))
                sums = accelerator.reduce(torch.stack(shares).sum()) / accelerator.num_processes * ranks
                found["losses"].append(float(sums))
                shares.clear()
            prepared.step()
            scheduler.step()
            prepared.zero_grad()
    with torch.no_grad():
        model.eval()
        found["outputs"] = model(torch.ones(2, 4))
    found["weights"] = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return found


_STRATEGIES: dict[str, tuple[Callable[[], Strategy | str], int]] = {
    "ddp": (lambda: "ddp", 2),
    "fsdp": (lambda: "fsdp", 2),
    "fsdp grads": (lambda: FSDPStrategy(sharding_strategy="SHARD_GRAD_OP"), 2),
    "fsdp each batch": (lambda: FSDPStrategy(sync_each_batch=True), 2),
    "hsdp": (lambda: FSDPStrategy(device_mesh=(2, 1)), 2),
    "fsdp recomputed": (lambda: FSDPStrategy(activation_checkpointing=True), 2),
    "tp": (lambda: TensorParallelStrategy(), 2),
    "documented": (documented_strategy, 2),
    "offload": (lambda: OffloadStrategy(stream=True), 1),
    "offload to disk": (lambda: OffloadStrategy("disk", "disk", stream=True), 1),
    "offload gradients": (lambda: OffloadStrategy("device", stream=True, prefetch=2), 1),
    **{f"deepspeed {stage}": (partial(DeepSpeedStrategy, stage=stage), 2) for stage in range(4)},
    "fsdp x tp": (lambda: FSDPStrategy(tp=2), 4),
}
# One of each engine; the others are exhaustive.
_KEPT = {"ddp", "fsdp", "tp", "offload", "deepspeed 2"}


def _all(name: str) -> dict[str, Any]:
    make, _ = _STRATEGIES[name]
    apart = "model first" if name.startswith("deepspeed") else "one by one"
    return {
        "plain": _loop(make(), counts=False, clip=None),
        "clipped": _loop(make(), "model last", counts=True, clip=0.2),
        "largest": _loop(make(), apart, counts=True, clip=0.05, norm_type=float("inf")),
    }


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in _KEPT else pytest.mark.exhaustive) for name in _STRATEGIES]
)
def test_a_loop_of_ones_own_trains_as_on_one_device(name: str) -> None:
    processes = _STRATEGIES[name][1]
    ranks = 1 if name.startswith(("tp", "offload")) else 2
    expected = {
        "plain": _reference(ranks, counts=False, clip=None),
        "clipped": _reference(ranks, counts=True, clip=0.2),
        "largest": _reference(ranks, counts=True, clip=0.05, norm_type=float("inf")),
    }
    by_rank = run_distributed(_all, processes, name, init=False, timeout=240)
    for case, wanted in expected.items():
        for found in by_rank:
            torch.testing.assert_close(found[case]["norms"], wanted["norms"], rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(found[case]["outputs"], by_rank[0][case]["outputs"], rtol=0, atol=0)
        torch.testing.assert_close(by_rank[0][case]["weights"], wanted["weights"], rtol=1e-5, atol=1e-6)
