"""DeepSpeed in user-written loops: several models, clipping, precision and dropped gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

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


def _alone(seed: int, *, sign: float, rates: list[float], clip: float | None = None) -> dict[str, torch.Tensor]:
    """Train on one device, with one learning rate for each step."""
    net = _net(seed)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(net.parameters(), lr=0.05)
    if clip is not None:
        optimizer = torch.optim.SGD(net.parameters(), lr=0.05)
    inputs, targets = (each.flatten(0, 0) for each in _loader(2).dataset.tensors)  # type: ignore[attr-defined]
    rows = len(inputs) // len(rates)
    for i, rate in enumerate(rates):
        optimizer.param_groups[0]["lr"] = rate
        here = slice(i * rows, (i + 1) * rows)
        functional.mse_loss(net(inputs[here]), sign * targets[here]).backward()
        if clip is not None:
            assert nn.utils.clip_grad_norm_(net.parameters(), clip) > clip
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in net.state_dict().items()}


def _two_models(stage: int) -> list[dict[str, torch.Tensor]]:
    accelerator = Accelerator(strategy=DeepSpeedStrategy(stage=stage), gradient_accumulation_steps=2, seed=0)
    nets = [_net(1), _net(2)]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in nets]
    first, second, one, two, batches = accelerator.prepare(*nets, *reversed(optimizers), _loader(2))
    for inputs, targets in batches:
        for model, optimizer, sign in ((first, two, 1.0), (second, one, -1.0)):
            with accelerator.accumulate(model):
                accelerator.backward(functional.mse_loss(model(inputs), sign * targets))
                optimizer.step()
                optimizer.zero_grad()
    found = [{k: v.clone() for k, v in accelerator.get_state_dict(model).items()} for model in (first, second)]
    accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_each_of_two_models_has_its_engine(stage: int) -> None:
    found, _ = run_distributed(_two_models, 2, stage, init=False, timeout=240)
    for seed, sign in ((1, 1.0), (2, -1.0)):
        wanted = _alone(seed, sign=sign, rates=[0.05, 0.05])
        torch.testing.assert_close(found[seed - 1], wanted, rtol=1e-4, atol=1e-5)


def _clipped_by_config(stage: int, written_later: bool = False) -> dict[str, torch.Tensor]:
    """Train with the configuration's clipping and micro-batches; the loop itself does not clip."""
    config = {
        "zero_optimization": {"stage": stage}, "gradient_clipping": 0.1, "gradient_accumulation_steps": 2,
        "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    if written_later:
        config["gradient_clipping"] = "auto"
        accelerator = Accelerator(deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config), seed=0)
        plugin = AcceleratorState().deepspeed_plugin
        assert plugin is not None
        plugin.deepspeed_config["gradient_clipping"] = 0.1
    else:
        accelerator = Accelerator(strategy=DeepSpeedStrategy(config), gradient_accumulation_steps=2, seed=0)
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


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_the_configuration_clips_too(stage: int) -> None:
    found, _ = run_distributed(_clipped_by_config, 2, stage, init=False, timeout=240)
    wanted = _alone(1, sign=1.0, rates=[0.5, 0.5], clip=0.1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_values_that_are_written_into_the_plugins_configuration_before_prepare_are_used() -> None:
    found, _ = run_distributed(_clipped_by_config, 2, 1, True, init=False, timeout=240)
    wanted = _alone(1, sign=1.0, rates=[0.5, 0.5], clip=0.1)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def _narrow(stage: int) -> dict[str, Any]:
    accelerator = Accelerator(strategy=DeepSpeedStrategy(stage=stage), mixed_precision="bf16", seed=0)
    net = _net(1)
    model, optimizer, batches = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=0.05), _loader(accelerator.num_processes)
    )
    losses, norms = [], []
    for _ in range(5):
        for inputs, targets in batches:
            with accelerator.accumulate(model):
                output = model(inputs)
                assert output.dtype is torch.float32
                loss = functional.mse_loss(output, targets)
                accelerator.backward(loss)
                norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 1.0)))
                optimizer.step()
                optimizer.zero_grad()
            losses.append(float(loss.detach()))
    weights = accelerator.get_state_dict(model)
    held = {p.dtype for p in model.parameters()}
    accelerator.end_training()
    return {"losses": losses, "held": held, "weights": {v.dtype for v in weights.values()}, "norms": norms}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("processes", [1, 2])
def test_models_compute_in_bf16_beside_float32_weights(stage: int, processes: int) -> None:
    found = run_distributed(_narrow, processes, stage, init=False, timeout=240)[0]
    assert found["held"] == {torch.bfloat16}
    assert found["weights"] == {torch.float32}
    assert sum(found["losses"][-4:]) < 0.7 * sum(found["losses"][:4])
    assert min(found["norms"]) > 0


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
            accelerator.backward(functional.mse_loss(model(inputs), targets))
            accelerator.clip_grad_value_(model.parameters(), 0.1)
            optimizer.step()
            optimizer.zero_grad()
        found.append({k: v.clone() for k, v in accelerator.get_state_dict(model).items()})
        accelerator.end_training()
    return found


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_zero_grad_without_a_step_drops_gradients(stage: int) -> None:
    (dropped, plain), _ = run_distributed(_dropped, 2, stage, init=False, timeout=240)
    torch.testing.assert_close(dropped, plain, rtol=0, atol=0)


def _offload_with_torchs_adam() -> str:
    accelerator = Accelerator(strategy="deepspeed_stage_2_offload")
    net = _net(1)
    with pytest.raises(ConfigurationError) as error:
        accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.end_training()
    return str(error.value)


def test_errors_about_an_optimizer_name_prepare() -> None:
    for text in run_distributed(_offload_with_torchs_adam, 2, init=False):
        assert "prepare() received AdamW" in text
        assert "configure_optimizers" not in text
        assert "DeepSpeedCPUAdam(model.parameters(), lr=…)" in text
