"""User-written loops under DeepSpeed: what the contract suite does not cover."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from tests.contracts.test_own_loop import Net, make_optimizer
from tests.helpers.deepspeed_operations import needs_operation
from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, AcceleratorState, DeepSpeedPlugin, DeepSpeedStrategy
from trainwright.core.errors import ConfigurationError

pytestmark = [pytest.mark.distributed, pytest.mark.slow]
_ROWS, _BATCHES = 2, 4


def _net(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _loader(ranks: int) -> DataLoader[Any]:
    inputs = torch.randn(_ROWS * ranks * _BATCHES, 4, generator=torch.Generator().manual_seed(1))
    return DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), batch_size=_ROWS)


def _alone(clip: float) -> dict[str, torch.Tensor]:
    net = _net(1)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    inputs, targets = _loader(2).dataset.tensors  # type: ignore[attr-defined]
    for rows, wanted in zip(inputs.chunk(2), targets.chunk(2), strict=True):
        functional.mse_loss(net(rows), wanted).backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), clip) > clip
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in net.state_dict().items()}


def _clipped_by_config(stage: int) -> dict[str, torch.Tensor]:
    """Train with a clipping that is written to the plugin's configuration after the Accelerator's construction."""
    config = {
        "zero_optimization": {"stage": stage}, "gradient_clipping": "auto", "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), seed=0)
    plugin = AcceleratorState().deepspeed_plugin
    plugin.deepspeed_config["gradient_clipping"] = 0.1
    net = _net(1)
    model, optimizer, batches = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.5), _loader(2))
    for inputs, targets in batches:
        with accelerator.accumulate(model):
            accelerator.backward(functional.mse_loss(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    found = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    del model, optimizer
    accelerator.free_memory()
    assert not any(hasattr(module, "ds_id") or module._forward_hooks for module in net.modules())
    accelerator.end_training()
    return found


def _dropped(stage: int) -> list[dict[str, torch.Tensor]]:
    """Train with and without a group whose gradients are dropped before its step."""
    found = []
    for drops in (True, False):
        accelerator = Accelerator(strategy=DeepSpeedStrategy(stage=stage), seed=0)
        net = _net(1)
        model, optimizer, batches = accelerator.prepare(
            net, torch.optim.AdamW(net.parameters(), lr=0.05), _loader(accelerator.num_processes)
        )
        for inputs, targets in batches:
            if drops:
                accelerator.backward(functional.mse_loss(model(2 * inputs), targets))
                optimizer.zero_grad()
                with accelerator.no_sync(model):
                    accelerator.backward(functional.mse_loss(model(2 * inputs), targets))
                    optimizer.zero_grad()
                    accelerator.backward(0 * functional.mse_loss(model(inputs), targets))
            accelerator.backward(functional.mse_loss(model(inputs), targets))
            accelerator.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append({k: v.clone() for k, v in accelerator.get_state_dict(model).items()})
        accelerator.end_training()
    return found


class _Switching(torch.optim.SGD):
    """Has other weights for evaluations, as schedule-free optimizers do."""

    def eval(self, added: float = 1.0) -> None:
        for parameter in self.param_groups[0]["params"]:
            parameter.data.add_(added)

    def train(self) -> None:
        self.eval(-1.0)


def _switched(stage: int, **options: Any) -> list[dict[str, torch.Tensor]]:
    accelerator = Accelerator(strategy=DeepSpeedStrategy(stage=stage), **options)
    net, found = _net(1), []
    model, optimizer = accelerator.prepare(net, _Switching(net.parameters(), lr=0.5))
    for switch in (optimizer.eval, optimizer.train):
        switch()
        found.append({k: v.clone() for k, v in accelerator.get_state_dict(model).items()})
    accelerator.end_training()
    return found


def _train_all() -> dict[Any, Any]:
    found: dict[Any, Any] = {("dropped", stage): _dropped(stage) for stage in (0, 3)}
    found |= {("switched", stage): _switched(stage) for stage in (0, 2)}
    found["in bf16"] = _switched(2, mixed_precision="bf16")
    return found | {("clipped", stage): _clipped_by_config(stage) for stage in (0, 3)}


@pytest.fixture(scope="module")
def trained() -> list[dict[Any, Any]]:
    return run_distributed(_train_all, 2, init=False, timeout=290)


@pytest.mark.parametrize("stage", [0, 3])
def test_the_configuration_clips_too_also_if_it_is_written_before_prepare(stage: int, trained: list[Any]) -> None:
    torch.testing.assert_close(trained[0]["clipped", stage], _alone(clip=0.1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("stage", [0, 3])
def test_zero_grad_without_a_step_drops_gradients(stage: int, trained: list[dict[Any, Any]]) -> None:
    dropped, plain = trained[0]["dropped", stage]
    torch.testing.assert_close(dropped, plain, rtol=0, atol=0)


@pytest.mark.parametrize("stage", [0, 2])
def test_an_optimizer_switches_the_weights_of_the_model(stage: int, trained: list[dict[Any, Any]]) -> None:
    weights = dict(_net(1).state_dict())
    wanted = [{name: value + 1.0 for name, value in weights.items()}, weights]
    torch.testing.assert_close(trained[1]["switched", stage], wanted)
    # An engine of 16 bits rounds the weights at its start, and then keeps them in float32.
    torch.testing.assert_close(trained[0]["in bf16"][1], {name: w.bfloat16().float() for name, w in weights.items()})


def _grouped(net: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    first, *others = net.parameters()
    groups = [{"params": [first], "lr": 0.02, "betas": (0.8, 0.9)}, {"params": others, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=0.05, weight_decay=0.02)
    return optimizer, torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def _offloaded(folder: str) -> dict[str, Any]:
    """Train with offloaded states of torch's optimizer, and again from the state after the first step."""
    plugin = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu")
    accelerator = Accelerator(deepspeed_plugin=plugin, seed=0)
    net = _net(1)
    model, optimizer, schedule, batches = accelerator.prepare(net, *_grouped(net), _loader(2))
    assert type(optimizer.optimizer.optimizer).__name__ == "DeepSpeedCPUAdam"
    rates = []

    def train() -> None:
        for inputs, targets in batches:
            rates.append([group["lr"] for group in optimizer.param_groups])
            accelerator.backward(functional.mse_loss(model(inputs), targets))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if len(rates) == 1:
                accelerator.save_state(folder)

    train()
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.load_state(folder)
    train()
    again = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return {"weights": weights, "again": again, "rates": rates}


@pytest.mark.engines
@needs_operation("CPUAdamBuilder")
def test_offloaded_states_of_torchs_optimizer_are_stepped_on_the_host(tmp_path: Path) -> None:
    found, _ = run_distributed(_offloaded, 2, str(tmp_path / "state"), init=False, timeout=280)
    net = _net(1)
    optimizer, schedule = _grouped(net)
    inputs, targets = _loader(2).dataset.tensors  # type: ignore[attr-defined]
    for rows, wanted in zip(inputs.split(2 * _ROWS), targets.split(2 * _ROWS), strict=True):
        functional.mse_loss(net(rows), wanted).backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found["weights"], dict(net.state_dict()), rtol=1e-3, atol=1e-4)
    torch.testing.assert_close(found["again"], found["weights"], rtol=1e-3, atol=1e-4)
    rates = [[0.02 * 0.5**i, 0.05 * 0.5**i] for i in range(_BATCHES)]
    assert found["rates"] == [*rates, *rates[1:]]


def _clipped_twice() -> dict[str, torch.Tensor]:
    """Train with offloading, where both the loop and the configuration clip, as with transformers' Trainer."""
    plugin = DeepSpeedPlugin(zero_stage=2, offload_optimizer_device="cpu", gradient_clipping=0.1)
    accelerator = Accelerator(deepspeed_plugin=plugin, seed=0)
    net = _net(1)
    model, optimizer, batches = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=0.05), _loader(2))
    for inputs, targets in batches:
        accelerator.backward(functional.mse_loss(model(inputs), targets))
        accelerator.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return weights


@pytest.mark.engines
@needs_operation("CPUAdamBuilder")
def test_gradients_that_the_loop_has_clipped_are_not_clipped_again() -> None:
    found, _ = run_distributed(_clipped_twice, 2, init=False, timeout=280)
    net = _net(1)
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    inputs, targets = _loader(2).dataset.tensors  # type: ignore[attr-defined]
    for rows, wanted in zip(inputs.split(2 * _ROWS), targets.split(2 * _ROWS), strict=True):
        functional.mse_loss(net(rows), wanted).backward()
        assert nn.utils.clip_grad_norm_(net.parameters(), 0.1) > 0.1
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(found, dict(net.state_dict()), rtol=1e-3, atol=1e-4)


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

    for make in (late, shared, joint, twice):
        attempt(make)
    return found


def test_what_an_engine_cannot_train_is_refused() -> None:
    for late, shared, joint, twice in run_distributed(_refusals, 2, init=False, timeout=240):
        assert "was passed to prepare() after its model" in late
        assert "holds parameters of Net and of other models" in shared
        assert "after the forwards of 2 models" in joint
        assert "To sum losses, add them and call backward once" in twice
