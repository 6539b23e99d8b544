"""The short names of strategies that a Trainer, a configuration or the command line may use."""

from __future__ import annotations

from functools import partial
from typing import Any

from trainwright.core.registry import Registry

STRATEGIES: Registry[Any] = Registry(
    "strategy",
    {
        "single": "trainwright.strategies.single:SingleDeviceStrategy",
        "ddp": "trainwright.strategies.ddp.strategy:DDPStrategy",
        "local_sgd": "trainwright.strategies.ddp.local_sgd:LocalSGDStrategy",
        "fsdp": "trainwright.strategies.fsdp.strategy:FSDPStrategy",
        "deepspeed": "trainwright.strategies.deepspeed.strategy:DeepSpeedStrategy",
        "deepspeed_stage_1": "trainwright.strategies.deepspeed.presets:ZeroStage1",
        "deepspeed_stage_1_offload": "trainwright.strategies.deepspeed.presets:ZeroStage1Offload",
        "deepspeed_stage_2": "trainwright.strategies.deepspeed.presets:ZeroStage2",
        "deepspeed_stage_2_offload": "trainwright.strategies.deepspeed.presets:ZeroStage2Offload",
        "deepspeed_stage_3": "trainwright.strategies.deepspeed.presets:ZeroStage3",
        "deepspeed_stage_3_offload": "trainwright.strategies.deepspeed.presets:ZeroStage3Offload",
        "deepspeed_stage_3_offload_nvme": "trainwright.strategies.deepspeed.presets:ZeroStage3OffloadNvme",
        "offload": "trainwright.strategies.offload.training:OffloadStrategy",
        "tp": "trainwright.strategies.fsdp.tensor_parallel:TensorParallelStrategy",
        "fsdp_cpu_offload": "trainwright.strategies.fsdp.strategy:FSDPOffloadStrategy",
    },
)


def _make(name: str, **options: Any) -> Any:
    """Make the strategy that another name stands for."""
    return STRATEGIES.get(name)(**options)


# Lightning's names. How processes are started is the launcher's affair and the same for all of them.
STRATEGIES.register("single_device", partial(_make, "single"))
for _start in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"):
    if _start != "ddp":
        STRATEGIES.register(_start, partial(_make, "ddp"))
    for _flag in (True, False):
        STRATEGIES.register(
            f"{_start}_find_unused_parameters_{_flag}".lower(), partial(_make, "ddp", find_unused_parameters=_flag)
        )
