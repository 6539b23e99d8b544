"""Train with FSDP and DeepSpeed on two ranks, save as they do, and continue: what conversions are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

RANKS, ROWS = 2, 4


class Net(nn.Module):
    """A model with a buffer and sizes that two ranks cannot divide."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 5)
        self.second = nn.Linear(5, 5)
        self.head = nn.Linear(5, 1)
        self.register_buffer("offset", torch.tensor([0.5]))

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x))))) + self.offset


def net() -> Net:
    """Return the model with the weights that every run begins with."""
    torch.manual_seed(0)
    return Net()


def groups(model: nn.Module) -> list[dict[str, Any]]:
    """Return two parameter groups: decay for matrices only."""
    parameters = list(model.parameters())
    return [
        {"params": [parameter for parameter in parameters if parameter.dim() > 1], "weight_decay": 0.1},
        {"params": [parameter for parameter in parameters if parameter.dim() < 2], "weight_decay": 0.0},
    ]


def batch(step: int, rank: int | None = None) -> torch.Tensor:
    full = torch.randn(RANKS * ROWS, 3, generator=torch.Generator().manual_seed(step))
    return full if rank is None else full[rank * ROWS : (rank + 1) * ROWS]


def loss_of(model: nn.Module, inputs: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(inputs).float().pow(2).mean()
    return loss


def _full(value: Any) -> torch.Tensor:
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.clone()


def _mean(loss: torch.Tensor) -> float:
    found = loss.detach().clone()
    torch.distributed.all_reduce(found)
    return float(found) / RANKS


def fsdp(folder: Path) -> dict[str, Any]:
    """Train with FSDP, save as Accelerate's SHARDED_STATE_DICT does, and continue; return full values and losses."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rank = torch.distributed.get_rank()
    model = net()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = torch.optim.AdamW(groups(model), lr=0.01)

    def step(number: int) -> float:
        loss = loss_of(model, batch(number, rank))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return _mean(loss)

    for number in range(3):
        step(number)
    dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=folder / "pytorch_model_fsdp_0")
    dcp.save({"optimizer": get_optimizer_state_dict(model, optimizer)}, checkpoint_id=folder / "optimizer_0")
    weights = {name: _full(value) for name, value in get_model_state_dict(model).items()}
    state = get_optimizer_state_dict(model, optimizer)["state"]
    moments = {name: {key: _full(value) for key, value in values.items()} for name, values in state.items()}
    return {"weights": weights, "moments": moments, "losses": [step(number) for number in range(3, 6)]}


def deepspeed_zero(folder: Path, stage: int, is_bf16: bool) -> dict[str, Any]:
    """Train with DeepSpeed itself, save with its `save_checkpoint`, and continue; return its own full values."""
    from trainwright.core.process import Topology
    from trainwright.strategies.deepspeed.library import connect, load_library

    rank = torch.distributed.get_rank()
    library = load_library("cpu")
    connect(library, Topology("torchrun", rank=rank, world_size=RANKS, local_rank=rank))
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    model = net()
    config = {
        "train_micro_batch_size_per_gpu": ROWS, "zero_optimization": {"stage": stage}, "bf16": {"enabled": is_bf16},
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    engine, *_ = library.initialize(model=model, optimizer=torch.optim.AdamW(groups(model), lr=0.01), config=config)

    def step(number: int) -> float:
        inputs = batch(number, rank)
        loss = loss_of(engine, inputs.bfloat16() if is_bf16 else inputs)
        engine.backward(loss)
        engine.step()
        return _mean(loss)

    for number in range(3):
        step(number)
    engine.save_checkpoint(str(folder))
    weights = {name: safe_get_full_fp32_param(p).clone() for name, p in engine.module.named_parameters()}
    if stage < 3:  # DeepSpeed 0.19.8 links them after the first group's first step, when those of others are empty
        engine.optimizer._hp_optimizer_states_linked = False
        engine.optimizer._lazy_init_hp_params_optimizer_state()
    moments = {
        name: {key: safe_get_full_optimizer_state(p, key).clone() for key in ("exp_avg", "exp_avg_sq")}
        for name, p in engine.module.named_parameters()
    }
    return {"weights": weights, "moments": moments, "losses": [step(number) for number in range(3, 6)]}
