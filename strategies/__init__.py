"""How a task is trained: the Strategy contract and one file or folder per engine.

`strategy.py` is the contract, the files beside it are what engines share, and `processes/` starts and watches the
processes that they train on.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from trainwright.core.foreign_names import missing
from trainwright.core.registry import Registry, import_object

if TYPE_CHECKING:
    from trainwright.strategies.capabilities import Capabilities
    from trainwright.strategies.data_parallel import DataParallel
    from trainwright.strategies.ddp.comm_hooks import DDPCommunicationHookType, DistributedDataParallelKwargs
    from trainwright.strategies.ddp.local_sgd import LocalSGDStrategy
    from trainwright.strategies.ddp.strategy import DDPStrategy
    from trainwright.strategies.deepspeed.placeholders import DummyOptim, DummyScheduler
    from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy
    from trainwright.strategies.engine_settings import EngineSettings
    from trainwright.strategies.fsdp.strategy import FSDPStrategy
    from trainwright.strategies.offload.training import OffloadStrategy
    from trainwright.strategies.precision import Precision
    from trainwright.strategies.processes.collectives import (
        broadcast,
        broadcast_object_list,
        concatenate,
        gather,
        gather_object,
        pad_across_processes,
        recursively_apply,
        reduce,
        send_to_device,
        wait_for_everyone,
    )
    from trainwright.strategies.processes.distributed_type import DistributedType
    from trainwright.strategies.processes.partial_state import PartialState
    from trainwright.strategies.single import SingleDeviceStrategy
    from trainwright.strategies.strategy import Strategy
    from trainwright.strategies.tensor_parallel.ready import ready_plan
    from trainwright.strategies.tensor_parallel.sizes import need_divisible
    from trainwright.strategies.tensor_parallel.strategy import ModelParallelStrategy, TensorParallelStrategy

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
        "tp": "trainwright.strategies.tensor_parallel.strategy:TensorParallelStrategy",
        "fsdp_cpu_offload": "trainwright.strategies.fsdp.on_host:FSDPOffloadStrategy",
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

_PUBLIC = {
    "Capabilities": "trainwright.strategies.capabilities",
    "DDPCommunicationHookType": "trainwright.strategies.ddp.comm_hooks",
    "DDPStrategy": "trainwright.strategies.ddp.strategy",
    "DataParallel": "trainwright.strategies.data_parallel",
    "DistributedDataParallelKwargs": "trainwright.strategies.ddp.comm_hooks",
    "DeepSpeedStrategy": "trainwright.strategies.deepspeed.strategy",
    "DistributedType": "trainwright.strategies.processes.distributed_type",
    "DummyOptim": "trainwright.strategies.deepspeed.placeholders",
    "DummyScheduler": "trainwright.strategies.deepspeed.placeholders",
    "EngineSettings": "trainwright.strategies.engine_settings",
    "FSDPStrategy": "trainwright.strategies.fsdp.strategy",
    "LocalSGDStrategy": "trainwright.strategies.ddp.local_sgd",
    "ModelParallelStrategy": "trainwright.strategies.tensor_parallel.strategy",
    "OffloadStrategy": "trainwright.strategies.offload.training",
    "PartialState": "trainwright.strategies.processes.partial_state",
    "Precision": "trainwright.strategies.precision",
    "SingleDeviceStrategy": "trainwright.strategies.single",
    "Strategy": "trainwright.strategies.strategy",
    "TensorParallelStrategy": "trainwright.strategies.tensor_parallel.strategy",
    "need_divisible": "trainwright.strategies.tensor_parallel.sizes",
    "ready_plan": "trainwright.strategies.tensor_parallel.ready",
    "broadcast": "trainwright.strategies.processes.collectives",
    "broadcast_object_list": "trainwright.strategies.processes.collectives",
    "concatenate": "trainwright.strategies.processes.collectives",
    "gather": "trainwright.strategies.processes.collectives",
    "gather_object": "trainwright.strategies.processes.collectives",
    "pad_across_processes": "trainwright.strategies.processes.collectives",
    "recursively_apply": "trainwright.strategies.processes.collectives",
    "reduce": "trainwright.strategies.processes.collectives",
    "send_to_device": "trainwright.strategies.processes.collectives",
    "wait_for_everyone": "trainwright.strategies.processes.collectives",
}
__all__ = [
    "STRATEGIES",
    "Capabilities",
    "DDPCommunicationHookType",
    "DDPStrategy",
    "DataParallel",
    "DeepSpeedStrategy",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "EngineSettings",
    "FSDPStrategy",
    "LocalSGDStrategy",
    "ModelParallelStrategy",
    "OffloadStrategy",
    "PartialState",
    "Precision",
    "SingleDeviceStrategy",
    "Strategy",
    "TensorParallelStrategy",
    "broadcast",
    "broadcast_object_list",
    "concatenate",
    "gather",
    "gather_object",
    "need_divisible",
    "pad_across_processes",
    "ready_plan",
    "recursively_apply",
    "reduce",
    "send_to_device",
    "wait_for_everyone",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return import_object(f"{_PUBLIC[name]}:{name}")
    raise missing(__name__, name, __all__)
