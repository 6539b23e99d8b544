"""User-written loops under DeepSpeed: what the contract suite does not cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils.data import DataLoader

from tests.contracts.test_own_loop import Net, data, make_optimizer
from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, DeepSpeedPlugin, DeepSpeedStrategy, DummyOptim, DummyScheduler
from trainwright.core.errors import ConfigurationError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]


def _run(function: Any, *arguments: Any) -> list[Any]:
    found: list[Any] = run_distributed(function, 2, *arguments, init=False, timeout=240)
    return found


def _train(accelerator: Accelerator, model: nn.Module, optimizer: Any, steps: int = 4) -> list[float]:
    losses = []
    for i in range(steps):
        x = torch.full((2, 4), 0.1 * (i + accelerator.process_index))
        with accelerator.accumulate(model):
            output = model(x)
            assert output.dtype is torch.float32
            loss = (output - x.sum(1, keepdim=True)).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


def _two(stages: tuple[int, ...]) -> Any:
    """Train a model of each stage's strategy; two under one Accelerator, in turn, and each alone."""
    (stage,) = stages
    found = []
    for chosen in ([0, 1], [0], [1]):
        accelerator = Accelerator(strategy=DeepSpeedStrategy(stage=stage))
        nets = [Net() for _ in chosen]
        prepared = accelerator.prepare(*nets, *[make_optimizer(net) for net in nets])
        models, optimizers = prepared[: len(nets)], prepared[len(nets) :]
        losses = []
        for model, optimizer in zip(models, optimizers, strict=True):
            losses.append(_train(accelerator, model, optimizer))
        found.append(losses)
        accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", [1, 3])
def test_disjoint_models_train_as_each_would_alone(stage: int) -> None:
    for both, first, second in _run(_two, (stage,)):
        assert both == [*first, *second]


def _teacher(folder: str) -> Any:
    accelerator = Accelerator(strategy=DeepSpeedStrategy(stage=3))
    teacher, student = Net().requires_grad_(False), Net()
    with torch.no_grad():
        expected = teacher(torch.ones(2, 4))
    student_model, optimizer, teacher_model = accelerator.prepare(student, make_optimizer(student), teacher)
    with torch.no_grad():
        found = teacher_model(torch.ones(2, 4))
    losses = _train(accelerator, student_model, optimizer)
    accelerator.save_model(teacher_model, folder, max_shard_size="500B")
    sharded = [p.ds_numel for p in teacher.parameters()]  # type: ignore[attr-defined]  # DeepSpeed's
    accelerator.end_training()
    return expected, found, losses, len(sharded)


def test_a_model_without_an_optimizer_is_sharded_evaluated_and_saved(tmp_path: Path) -> None:
    for expected, found, losses, count in _run(_teacher, str(tmp_path)):
        torch.testing.assert_close(found, expected)
        assert len(set(losses)) == len(losses)
        assert count == len(list(Net().parameters()))
    saved = {k: v for file in tmp_path.glob("*.safetensors") for k, v in load_file(file).items()}
    torch.testing.assert_close(saved, dict(Net().state_dict()), rtol=0, atol=0)


_CONFIG = {
    "zero_optimization": {"stage": 2},
    "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto"}},
    "scheduler": {
        "type": "WarmupLR",
        "params": {
            "warmup_min_lr": "auto",
            "warmup_max_lr": "auto",
            "warmup_num_steps": "auto",
            "warmup_type": "linear",
        },
    },
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "train_batch_size": "auto",
    "zero_allow_untested_optimizer": True,
}


def _dummies() -> Any:
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=_CONFIG), gradient_accumulation_steps=2)
    net = Net()
    optimizer = DummyOptim(net.parameters(), lr=0.05)
    scheduler = DummyScheduler(optimizer, warmup_num_steps=4)
    model, prepared, loader, schedule = accelerator.prepare(net, optimizer, DataLoader(data(24), 2), scheduler)
    rates, losses = [], []
    for x, y, _ in loader:
        with accelerator.accumulate(model):
            loss = (model(x) - y).square().mean()
            accelerator.backward(loss)
            prepared.step()
            schedule.step()
            prepared.zero_grad()
            losses.append(float(loss.detach()))
            if accelerator.sync_gradients:
                rates.append(prepared.param_groups[0]["lr"])
    config = accelerator.engine.resolved_config  # type: ignore[attr-defined]  # of this engine
    accelerator.end_training()
    return rates, losses, config["train_batch_size"], config["optimizer"]["params"]["lr"]


def test_the_configurations_optimizer_and_scheduler_are_stepped_through_their_stand_ins() -> None:
    for rates, losses, batch, rate in _run(_dummies):
        assert (batch, rate) == (8, 0.05)
        assert rates == sorted(rates)
        assert 0 < rates[-1] <= 0.05
        assert losses != sorted(losses)


def _mixed(strategy: Any) -> Any:
    accelerator = Accelerator(strategy=strategy, mixed_precision="bf16")
    net = Net()
    model, optimizer = accelerator.prepare(net, make_optimizer(net))
    losses = _train(accelerator, model, optimizer)
    weights = accelerator.get_state_dict(model)
    accelerator.end_training()
    return losses, {str(value.dtype) for value in weights.values()}


def test_bfloat16_keeps_float32_weights() -> None:
    expected = _run(_mixed, "ddp")
    for (losses, dtypes), (wanted, _) in zip(_run(_mixed, DeepSpeedStrategy(stage=2)), expected, strict=True):
        torch.testing.assert_close(losses, wanted, rtol=0.05, atol=0.02)
        assert dtypes in ({"torch.float32"}, set())


def _refusals() -> list[str]:
    found = []

    def attempt(make: Any) -> None:
        accelerator = Accelerator(strategy=DeepSpeedStrategy(stage=2))
        try:
            make(accelerator)
        except ConfigurationError as error:
            found.append(str(error))
        accelerator.end_training()

    def late(accelerator: Accelerator) -> None:
        net = Net()
        accelerator.prepare(net)
        accelerator.prepare(make_optimizer(net))

    def several(accelerator: Accelerator) -> None:
        net = Net()
        accelerator.prepare(net, *(torch.optim.SGD(part.parameters(), lr=0.1) for part in (net.embed, net.head)))

    def shared(accelerator: Accelerator) -> None:
        nets = Net(), Net()
        accelerator.prepare(*nets, torch.optim.SGD([p for net in nets for p in net.parameters()], lr=0.1))

    def joint(accelerator: Accelerator) -> None:
        nets = Net(), Net()
        first, second, *_ = accelerator.prepare(*nets, *map(make_optimizer, nets))
        accelerator.backward((first(torch.ones(2, 4)) + second(torch.ones(2, 4))).mean())

    def twice(accelerator: Accelerator) -> None:
        net = Net()
        model, _ = accelerator.prepare(net, make_optimizer(net))
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 4)).mean())

    for make in (late, several, shared, joint, twice):
        attempt(make)
    return found


def test_what_an_engine_cannot_train_is_refused() -> None:
    for late, several, shared, joint, twice in _run(_refusals):
        assert "was passed to prepare() after its model" in late
        assert "2 optimizers hold parameters of Net" in several
        assert "holds parameters of Net and of other models" in shared
        assert "after the forwards of 2 models" in joint
        assert "To sum losses, add them and call backward once" in twice
