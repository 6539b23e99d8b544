"""Trainwright: a PyTorch training framework with two front doors, `Trainer` and `Accelerator`, over one engine.

Names are imported when they are first touched (PEP 562), so that `import trainwright` and the command line stay fast:
importing this package imports neither torch nor anything that is not part of Python.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright import callbacks, checkpoint, cli, core, data, loggers, strategies, templates, trainer, utilities
    from trainwright.callbacks import Callback, EarlyStopping, LearningRateMonitor, ModelCheckpoint
    from trainwright.cli.script import CLI
    from trainwright.core.byte_sizes import convert_file_size_to_int
    from trainwright.core.duration import Duration
    from trainwright.core.errors import (
        CheckpointError,
        ConfigurationError,
        MissingPackageError,
        Preempted,
        TaskError,
        TrainwrightError,
        TrainwrightWarning,
        WorkerError,
    )
    from trainwright.core.memory import clear_device_cache, find_executable_batch_size, release_memory
    from trainwright.core.rng import seed_everything
    from trainwright.core.state import StepResult, TrainState
    from trainwright.core.task import TaskModule
    from trainwright.data import CombinedLoader, DataModule, ShardedIterable
    from trainwright.loggers import (
        ConsoleLogger,
        CSVLogger,
        JSONLinesLogger,
        Logger,
        TensorBoardLogger,
        WandbLogger,
    )
    from trainwright.strategies import (
        DDPCommunicationHookType,
        DDPStrategy,
        DeepSpeedStrategy,
        DistributedDataParallelKwargs,
        DistributedType,
        DummyOptim,
        DummyScheduler,
        FSDPStrategy,
        LocalSGDStrategy,
        OffloadStrategy,
        PartialState,
        SingleDeviceStrategy,
        Strategy,
        TensorParallelStrategy,
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
    from trainwright.strategies.offload import (
        AlignDevicesHook,
        BnbQuantizationConfig,
        CpuOffload,
        CustomDtype,
        DeviceMapReport,
        LoadedKeys,
        ModelHook,
        OffloadedWeightsLoader,
        PrefixedDataset,
        SequentialHook,
        TorchaoQuantizationConfig,
        UserCpuOffloadHook,
        add_hook_to_module,
        align_module_device,
        attach_align_device_hook,
        attach_align_device_hook_on_blocks,
        attach_execution_device_hook,
        attach_layerwise_casting_hooks,
        calculate_maximum_sizes,
        check_device_map,
        clean_device_map,
        compute_module_sizes,
        compute_module_total_buffer_size,
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
        explain_device_map,
        find_tied_parameters,
        get_balanced_memory,
        get_max_layer_size,
        get_max_memory,
        has_offloaded_params,
        infer_auto_device_map,
        init_empty_weights,
        init_on_device,
        load_and_quantize_model,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
        load_offloaded_weight,
        load_offloaded_weights,
        load_state_dict,
        offload_state_dict,
        offload_weight,
        prepare_pippy,
        quantized_state_dict,
        remove_hook_from_module,
        remove_hook_from_submodules,
        retie_parameters,
        save_model,
        save_offload_index,
        save_quantized_model,
        set_module_tensor_to_device,
    )
    from trainwright.trainer.accelerator.accelerator import Accelerator
    from trainwright.trainer.accelerator.accumulation import GradientAccumulationPlugin
    from trainwright.trainer.accelerator.loader import AcceleratedLoader
    from trainwright.trainer.accelerator.model import AcceleratedModel
    from trainwright.trainer.accelerator.optimizer import AcceleratedOptimizer
    from trainwright.trainer.accelerator.scheduler import AcceleratedScheduler
    from trainwright.trainer.trainer import Trainer
    from trainwright.trainer.tuner import Tuner

    __version__: str

_SUBMODULES = (
    "callbacks",
    "checkpoint",
    "cli",
    "core",
    "data",
    "loggers",
    "strategies",
    "templates",
    "trainer",
    "utilities",
)

# Where each public name lives; the block above says the same to editors and type checkers, and a test compares them.
_HOMES = {
    "AcceleratedLoader": "trainwright.trainer.accelerator.loader",
    "AcceleratedModel": "trainwright.trainer.accelerator.model",
    "AcceleratedOptimizer": "trainwright.trainer.accelerator.optimizer",
    "AcceleratedScheduler": "trainwright.trainer.accelerator.scheduler",
    "Accelerator": "trainwright.trainer.accelerator.accelerator",
    "add_hook_to_module": "trainwright.strategies.offload",
    "align_module_device": "trainwright.strategies.offload",
    "AlignDevicesHook": "trainwright.strategies.offload",
    "attach_align_device_hook": "trainwright.strategies.offload",
    "attach_align_device_hook_on_blocks": "trainwright.strategies.offload",
    "attach_execution_device_hook": "trainwright.strategies.offload",
    "attach_layerwise_casting_hooks": "trainwright.strategies.offload",
    "BnbQuantizationConfig": "trainwright.strategies.offload",
    "broadcast": "trainwright.strategies",
    "broadcast_object_list": "trainwright.strategies",
    "calculate_maximum_sizes": "trainwright.strategies.offload",
    "Callback": "trainwright.callbacks",
    "check_device_map": "trainwright.strategies.offload",
    "CheckpointError": "trainwright.core.errors",
    "clean_device_map": "trainwright.strategies.offload",
    "clear_device_cache": "trainwright.core.memory",
    "CLI": "trainwright.cli.script",
    "CombinedLoader": "trainwright.data",
    "compute_module_sizes": "trainwright.strategies.offload",
    "compute_module_total_buffer_size": "trainwright.strategies.offload",
    "concatenate": "trainwright.strategies",
    "ConfigurationError": "trainwright.core.errors",
    "ConsoleLogger": "trainwright.loggers",
    "convert_file_size_to_int": "trainwright.core.byte_sizes",
    "cpu_offload": "trainwright.strategies.offload",
    "cpu_offload_with_hook": "trainwright.strategies.offload",
    "CpuOffload": "trainwright.strategies.offload",
    "CSVLogger": "trainwright.loggers",
    "CustomDtype": "trainwright.strategies.offload",
    "DataModule": "trainwright.data",
    "DDPCommunicationHookType": "trainwright.strategies",
    "DDPStrategy": "trainwright.strategies",
    "DeepSpeedStrategy": "trainwright.strategies",
    "DeviceMapReport": "trainwright.strategies.offload",
    "disk_offload": "trainwright.strategies.offload",
    "dispatch_model": "trainwright.strategies.offload",
    "DistributedDataParallelKwargs": "trainwright.strategies",
    "DistributedType": "trainwright.strategies",
    "DummyOptim": "trainwright.strategies",
    "DummyScheduler": "trainwright.strategies",
    "Duration": "trainwright.core.duration",
    "EarlyStopping": "trainwright.callbacks",
    "explain_device_map": "trainwright.strategies.offload",
    "find_executable_batch_size": "trainwright.core.memory",
    "find_tied_parameters": "trainwright.strategies.offload",
    "FSDPStrategy": "trainwright.strategies",
    "GradientAccumulationPlugin": "trainwright.trainer.accelerator.accumulation",
    "gather": "trainwright.strategies",
    "gather_object": "trainwright.strategies",
    "get_balanced_memory": "trainwright.strategies.offload",
    "get_max_layer_size": "trainwright.strategies.offload",
    "get_max_memory": "trainwright.strategies.offload",
    "has_offloaded_params": "trainwright.strategies.offload",
    "infer_auto_device_map": "trainwright.strategies.offload",
    "init_empty_weights": "trainwright.strategies.offload",
    "init_on_device": "trainwright.strategies.offload",
    "JSONLinesLogger": "trainwright.loggers",
    "LearningRateMonitor": "trainwright.callbacks",
    "load_and_quantize_model": "trainwright.strategies.offload",
    "load_checkpoint_and_dispatch": "trainwright.strategies.offload",
    "load_checkpoint_in_model": "trainwright.strategies.offload",
    "load_offloaded_weight": "trainwright.strategies.offload",
    "load_offloaded_weights": "trainwright.strategies.offload",
    "load_state_dict": "trainwright.strategies.offload",
    "LoadedKeys": "trainwright.strategies.offload",
    "LocalSGDStrategy": "trainwright.strategies",
    "Logger": "trainwright.loggers",
    "MissingPackageError": "trainwright.core.errors",
    "ModelCheckpoint": "trainwright.callbacks",
    "ModelHook": "trainwright.strategies.offload",
    "offload_state_dict": "trainwright.strategies.offload",
    "offload_weight": "trainwright.strategies.offload",
    "OffloadedWeightsLoader": "trainwright.strategies.offload",
    "OffloadStrategy": "trainwright.strategies",
    "pad_across_processes": "trainwright.strategies",
    "PartialState": "trainwright.strategies",
    "Preempted": "trainwright.core.errors",
    "PrefixedDataset": "trainwright.strategies.offload",
    "prepare_pippy": "trainwright.strategies.offload",
    "quantized_state_dict": "trainwright.strategies.offload",
    "recursively_apply": "trainwright.strategies",
    "reduce": "trainwright.strategies",
    "release_memory": "trainwright.core.memory",
    "remove_hook_from_module": "trainwright.strategies.offload",
    "remove_hook_from_submodules": "trainwright.strategies.offload",
    "retie_parameters": "trainwright.strategies.offload",
    "save_model": "trainwright.strategies.offload",
    "save_offload_index": "trainwright.strategies.offload",
    "save_quantized_model": "trainwright.strategies.offload",
    "seed_everything": "trainwright.core.rng",
    "send_to_device": "trainwright.strategies",
    "SequentialHook": "trainwright.strategies.offload",
    "set_module_tensor_to_device": "trainwright.strategies.offload",
    "ShardedIterable": "trainwright.data",
    "SingleDeviceStrategy": "trainwright.strategies",
    "StepResult": "trainwright.core.state",
    "Strategy": "trainwright.strategies",
    "TaskError": "trainwright.core.errors",
    "TaskModule": "trainwright.core.task",
    "TensorBoardLogger": "trainwright.loggers",
    "TensorParallelStrategy": "trainwright.strategies",
    "TorchaoQuantizationConfig": "trainwright.strategies.offload",
    "Trainer": "trainwright.trainer.trainer",
    "TrainState": "trainwright.core.state",
    "TrainwrightError": "trainwright.core.errors",
    "TrainwrightWarning": "trainwright.core.errors",
    "Tuner": "trainwright.trainer.tuner",
    "UserCpuOffloadHook": "trainwright.strategies.offload",
    "wait_for_everyone": "trainwright.strategies",
    "WandbLogger": "trainwright.loggers",
    "WorkerError": "trainwright.core.errors",
}

__all__ = [
    "CLI",
    "AcceleratedLoader",
    "AcceleratedModel",
    "AcceleratedOptimizer",
    "AcceleratedScheduler",
    "Accelerator",
    "AlignDevicesHook",
    "BnbQuantizationConfig",
    "CSVLogger",
    "Callback",
    "CheckpointError",
    "CombinedLoader",
    "ConfigurationError",
    "ConsoleLogger",
    "CpuOffload",
    "CustomDtype",
    "DDPCommunicationHookType",
    "DDPStrategy",
    "DataModule",
    "DeepSpeedStrategy",
    "DeviceMapReport",
    "DistributedDataParallelKwargs",
    "DistributedType",
    "DummyOptim",
    "DummyScheduler",
    "Duration",
    "EarlyStopping",
    "FSDPStrategy",
    "GradientAccumulationPlugin",
    "JSONLinesLogger",
    "LearningRateMonitor",
    "LoadedKeys",
    "LocalSGDStrategy",
    "Logger",
    "MissingPackageError",
    "ModelCheckpoint",
    "ModelHook",
    "OffloadStrategy",
    "OffloadedWeightsLoader",
    "PartialState",
    "Preempted",
    "PrefixedDataset",
    "SequentialHook",
    "ShardedIterable",
    "SingleDeviceStrategy",
    "StepResult",
    "Strategy",
    "TaskError",
    "TaskModule",
    "TensorBoardLogger",
    "TensorParallelStrategy",
    "TorchaoQuantizationConfig",
    "TrainState",
    "Trainer",
    "TrainwrightError",
    "TrainwrightWarning",
    "Tuner",
    "UserCpuOffloadHook",
    "WandbLogger",
    "WorkerError",
    "__version__",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "broadcast",
    "broadcast_object_list",
    "calculate_maximum_sizes",
    "callbacks",
    "check_device_map",
    "checkpoint",
    "clean_device_map",
    "clear_device_cache",
    "cli",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "concatenate",
    "convert_file_size_to_int",
    "core",
    "cpu_offload",
    "cpu_offload_with_hook",
    "data",
    "disk_offload",
    "dispatch_model",
    "explain_device_map",
    "find_executable_batch_size",
    "find_tied_parameters",
    "gather",
    "gather_object",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "has_offloaded_params",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "load_and_quantize_model",
    "load_checkpoint_and_dispatch",
    "load_checkpoint_in_model",
    "load_offloaded_weight",
    "load_offloaded_weights",
    "load_state_dict",
    "loggers",
    "offload_state_dict",
    "offload_weight",
    "pad_across_processes",
    "prepare_pippy",
    "quantized_state_dict",
    "recursively_apply",
    "reduce",
    "release_memory",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "retie_parameters",
    "save_model",
    "save_offload_index",
    "save_quantized_model",
    "seed_everything",
    "send_to_device",
    "set_module_tensor_to_device",
    "strategies",
    "templates",
    "trainer",
    "utilities",
    "wait_for_everyone",
]

# A checkout whose links to the top-level folders were not created (a clone without symlinks): find them at the root.
_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(_here))
if not os.path.isdir(os.path.join(_here, "trainer")) and os.path.isfile(os.path.join(_root, "pyproject.toml")):
    __path__.append(_root)


def _find_version() -> str:
    """Return the installed distribution's version; `"0+unknown"` in a checkout that was never installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("trainwright")
    except PackageNotFoundError:
        return "0+unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        value: Any = _find_version()
    elif name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _SUBMODULES:
        value = import_module(f"trainwright.{name}")
    else:
        from trainwright.core.foreign_names import missing

        raise missing("trainwright", name, __all__)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
