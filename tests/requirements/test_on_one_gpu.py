"""What only a GPU shows: each strategy of one process, memory that really runs out, forecasts, profiles, kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.helpers.runs import quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import DataModule, TaskModule
from trainwright.core.host.memory import find_executable_batch_size
from trainwright.profilers import PyTorchProfiler
from trainwright.strategies import OffloadStrategy
from trainwright.trainer.search.tuner import Tuner

pytestmark = [
    pytest.mark.requires("cuda", reason="computes on a GPU"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
_MIB = 2**20


class LayersTask(TaskModule):
    """Layers of one width, which strategies can shard and bring to the device one by one."""

    def __init__(self, width: int, num_layers: int = 4) -> None:
        super().__init__()
        self.steps_on_host = False
        torch.manual_seed(0)
        layers = [nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(num_layers)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            x = x + layer(x)
        return x

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self(batch[0]).square().mean()
        self.log("loss", loss, on_step=True)
        return loss

    def shard_units(self) -> list[nn.Module]:
        return list(self.layers)

    def configure_optimizers(self) -> Any:
        if self.steps_on_host:
            from deepspeed.ops.adam import DeepSpeedCPUAdam

            return DeepSpeedCPUAdam(self.parameters(), lr=1e-3, weight_decay=1e-2)
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _inputs(rows: int, width: int, batch_size: int) -> DataLoader[Any]:
    values = torch.randn(rows, width, generator=torch.Generator().manual_seed(3))
    return DataLoader(TensorDataset(values), batch_size=batch_size, pin_memory=True)


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("auto", {"compile": True}),
        ("auto", {"compile": "reduce-overhead"}),
        ("ddp", {}),
        ("local_sgd", {}),
        ("fsdp", {}),
        ("fsdp_cpu_offload", {}),
        ("fsdp", {"compile": True}),
        ("megatron", {}),
        ("offload", {}),
        (lambda: OffloadStrategy("cpu", stream=True), {"precision": "bf16-mixed"}),
        ("fsdp", {"precision": "bf16-mixed"}),
        pytest.param("deepspeed_stage_1", {}, marks=pytest.mark.requires("deepspeed", reason="its engine")),
        pytest.param("deepspeed_stage_2", {}, marks=pytest.mark.requires("deepspeed", reason="its engine")),
        pytest.param("deepspeed_stage_3", {}, marks=pytest.mark.requires("deepspeed", reason="its engine")),
        pytest.param("deepspeed_stage_2_offload", {}, marks=pytest.mark.requires("deepspeed", reason="its engine")),
        pytest.param("deepspeed_stage_3_offload", {}, marks=pytest.mark.requires("deepspeed", reason="its engine")),
    ],
)
def test_a_strategy_trains_as_a_loop_by_hand(strategy: Any, options: dict[str, Any]) -> None:
    precision = options.get("precision", "32-true")
    expected = LayersTask(64).to("cuda")
    optimizer = expected.configure_optimizers()
    for (batch,) in _inputs(64, 64, 8):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=precision == "bf16-mixed"):
            loss = expected(batch.to("cuda")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    task = LayersTask(64)
    task.steps_on_host = "deepspeed" in str(strategy) and "offload" in str(strategy)
    strategy = strategy() if callable(strategy) else strategy
    quiet_trainer(accelerator="cuda", strategy=strategy, max_epochs=1, **options).fit(task, _inputs(64, 64, 8))
    near = {"rtol": 1e-4, "atol": 1e-5} if precision == "32-true" else {"rtol": 0, "atol": 2e-3}
    for name, weight in weights_of(task).items():
        torch.testing.assert_close(weight.cpu(), expected.state_dict()[name].cpu(), **near)


class WideData(DataModule):
    batch_size = 8

    def train_dataloader(self) -> Any:
        return _inputs(64 * 8192, 256, self.batch_size)


def test_searches_recover_when_the_memory_of_the_device_runs_out() -> None:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(400 * _MIB / torch.cuda.get_device_properties(0).total_memory)
    try:
        tried: list[int] = []

        @find_executable_batch_size(starting_batch_size=2**20)
        def train(size: int) -> int:
            tried.append(size)
            return int(torch.ones(size, 1024, device="cuda").shape[0])

        found = train()
        assert 2**15 <= found < 2**17  # 4 KiB each
        assert tried == [2**20 >> i for i in range(len(tried))]
        size = Tuner(quiet_trainer(accelerator="cuda", max_steps=3)).scale_batch_size(
            LayersTask(256, 8), datamodule=WideData(), init_val=1024, max_val=2**19
        )
        assert 1024 < size < 2**18  # 8 KiB and more each
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        torch.cuda.empty_cache()


@pytest.mark.parametrize("strategy", ["auto", "offload"])
def test_a_plan_forecasts_the_measured_peak(strategy: str) -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    trainer = quiet_trainer(accelerator="cuda", strategy=strategy, max_steps=4)
    task, loader = LayersTask(4096, 16), _inputs(64, 4096, 8)
    forecast = trainer.plan(task, loader).memory["forecast_bytes"]
    trainer.fit(task, loader)
    measured = trainer.plan(task, loader).memory["peak_bytes"]
    assert isinstance(forecast, int)
    assert measured == pytest.approx(forecast, rel=0.1)


def test_a_profile_has_kernels_of_the_device_and_its_memory(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, memory_snapshot=True, schedule={"wait": 1, "warmup": 1, "active": 2})
    quiet_trainer(accelerator="cuda", max_epochs=1, profiler=profiler).fit(RegressionTask(), regression_loader(32, 4))
    (trace,) = [path for path in tmp_path.rglob("*.json") if "trace" not in path.name][:1]
    kernels = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    assert kernels
    (snapshot,) = tmp_path.rglob("*-memory.pickle")
    assert snapshot.stat().st_size > 1000


@pytest.mark.requires("bitsandbytes", reason="layers in 8 and 4 bits")
@pytest.mark.parametrize("bits", [8, 4])
def test_quantized_weights_compute_on_the_device(bits: int, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from trainwright.bigmodels import BnbQuantizationConfig, init_empty_weights, load_and_quantize_model

    model = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)).to("cuda", torch.float16)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with init_empty_weights():
        empty = nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256))
    config = BnbQuantizationConfig(load_in_8bit=bits == 8, load_in_4bit=bits == 4, skip_modules=[])
    quantized = load_and_quantize_model(empty, config, tmp_path, device_map={"": 0})
    inputs = torch.randn(8, 256, device="cuda", dtype=torch.float16)
    expected, found = model(inputs).float(), quantized(inputs).float()
    assert {type(module).__name__ for module in quantized.modules()} & {"Linear8bitLt", "Linear4bit"}
    assert (found - expected).norm() / expected.norm() < {8: 0.03, 4: 0.2}[bits]
