"""The module paths of Hugging Face Accelerate and Lightning, and the names that each has here.

    python -m tests.pinned.module_paths

writes the modules anew: each re-exports names lazily from the files where they are defined.
"""

from __future__ import annotations

import re
from pathlib import Path

from tests.helpers.sources import ROOT
from trainwright.core.names import lazy_names

PACKAGE = ROOT / "src/trainwright"
# Names that are not in the package's own list, by the module where they are defined.
_HOMES = {
    "accelerator.gradient_state": "GradientState",
    "accelerator.functions": (
        "extract_model_from_parallel get_grad_scaler get_mixed_precision_context_manager "
        "get_module_class_from_name get_parameters_from_modules load merge_fsdp_weights save"
    ),
    "accelerator.megatron.megatron_loop": "avg_losses_across_data_parallel_group gather_across_data_parallel_groups",
    "accelerator.megatron.megatron_schedule": "MegatronLMDummyDataLoader MegatronLMDummyScheduler",
    "accelerator.megatron.train_steps": "AbstractTrainStep BertTrainStep GPTTrainStep T5TrainStep",
    "accelerator.prepared.accelerated_optimizer": "DeepSpeedSchedulerWrapper",
    "accelerator.sharded_parts": "load_fsdp_model load_fsdp_optimizer save_fsdp_model save_fsdp_optimizer",
    "bigmodels.maps.sizes": "dtype_byte_size extract_submodules_state_dict named_module_tensors",
    "bigmodels.pipeline": "prepare_pippy",
    "callbacks.model_summary": "LayerSummary summarize",
    "core.names.kwargs_handler": "parse_choice_from_env parse_flag_from_env str_to_bool",
    "core.names.lightning_types": (
        "EVAL_DATALOADERS LRSchedulerConfigType LRSchedulerTypeUnion OptimizerConfig "
        "OptimizerLRScheduler OptimizerLRSchedulerConfig STEP_OUTPUT TRAIN_DATALOADERS"
    ),
    "strategies.units": "has_compiled_regions is_compiled_module",
    "trainer.search.tuner": "Tuner",
    "core.host.memory": "should_reduce_batch_size",
    "core.host.cpu_affinity": "get_cpu_distributed_information override_numa_affinity set_numa_affinity",
    "strategies.deepspeed.hf_config": "HfDeepSpeedConfig",
    "accelerator.prepared.free_loaders": "DataLoaderDispatcher DataLoaderShard prepare_data_loader",
    "accelerator.trackers": (
        "ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker LOGGER_TYPE_TO_CLASS MLflowTracker SwanLabTracker "
        "TensorBoardTracker TrackioTracker WandBTracker register_tracker_class"
    ),
    "accelerator.logging": "MultiProcessAdapter get_logger on_main_process tqdm",
    "core.names.constants": (
        "ACCELERATE_VERSION FSDP_AUTO_WRAP_POLICY FSDP_BACKWARD_PREFETCH FSDP_MODEL_NAME FSDP_SHARDING_STRATEGY "
        "FSDP_STATE_DICT_TYPE "
        "ComputeEnvironment LoggerType MODEL_NAME OPTIMIZER_NAME PrecisionType RNGType RNG_STATE_NAME SAFE_MODEL_NAME "
        "SAFE_WEIGHTS_INDEX_NAME SAFE_WEIGHTS_NAME SAMPLER_NAME SCALER_NAME SCHEDULER_NAME SageMakerDistributedType "
        "WEIGHTS_INDEX_NAME WEIGHTS_NAME"
    ),
    "core.names.packages": " ".join(
        re.findall(r"^(?:def )?([a-z]\w+)(?: = _|\()", (PACKAGE / "core/names/packages.py").read_text(), re.MULTILINE)
    ),
    "data.batch_shards": "BatchSamplerShard IterableDatasetShard SeedableRandomSampler SkipBatchSampler SkipDataLoader",
    "processes.collectives": (
        "convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size find_device honor_type "
        "is_namedtuple "
        "is_torch_tensor listify pad_input_tensors slice_tensors"
    ),
    "core.errors": "CannotPadNestedTensorWarning DistributedOperationException",
    "processes.launcher": (
        "clear_environment disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading patch_environment "
        "purge_accelerate_environment"
    ),
    "launch.config_file": "write_basic_config",
    "processes.random_states": "set_seed synchronize_rng_state synchronize_rng_states",
    "strategies.steps.fp8": (
        "AORecipeKwargs convert_model_to_fp8_ao filter_first_and_last_linear_layers filter_linear_layers "
        "find_first_last_linear_layers has_ao_layers"
    ),
    "strategies.steps.te_layers": (
        "FP8RecipeKwargs TERecipeKwargs apply_fp8_autowrap contextual_fp8_autocast convert_model "
        "has_transformer_engine_layers"
    ),
}
_CONSTANTS = " ".join(name for name in _HOMES["core.names.constants"].split() if name.isupper())
_FP8_BY_ENGINE = "apply_fp8_autowrap contextual_fp8_autocast convert_model has_transformer_engine_layers"
_CHOICES = " ".join(name for name in _HOMES["core.names.constants"].split() if not name.isupper())
_HOOKS = (
    "AlignDevicesHook CpuOffload ModelHook SequentialHook UserCpuOffloadHook add_hook_to_module "
    "attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook remove_hook_from_module "
    "remove_hook_from_submodules"
)
_UTILS = {
    "bnb": "BnbQuantizationConfig load_and_quantize_model",
    "constants": _CONSTANTS,
    "dataclasses": (
        f"{_CHOICES} AORecipeKwargs FP8RecipeKwargs TERecipeKwargs "
        "AutocastKwargs BnbQuantizationConfig CustomDtype DDPCommunicationHookType "
        "DataLoaderConfiguration DeepSpeedPlugin get_module_class_from_name "
        "DistributedDataParallelKwargs DistributedType DynamoBackend FullyShardedDataParallelPlugin GradScalerKwargs "
        "GradientAccumulationPlugin InitProcessGroupKwargs KwargsHandler MegatronLMPlugin ProfileKwargs "
        "ProjectConfiguration TorchDynamoPlugin TorchTensorParallelPlugin"
    ),
    "deepspeed": "DeepSpeedSchedulerWrapper DummyOptim DummyScheduler HfDeepSpeedConfig get_active_deepspeed_plugin",
    "environment": (
        "check_cuda_fp8_capability clear_environment get_cpu_distributed_information override_numa_affinity "
        "parse_choice_from_env parse_flag_from_env patch_environment purge_accelerate_environment "
        "set_numa_affinity str_to_bool"
    ),
    "fsdp_utils": (
        "disable_fsdp_ram_efficient_loading enable_fsdp_ram_efficient_loading get_parameters_from_modules "
        "load_fsdp_model load_fsdp_optimizer merge_fsdp_weights save_fsdp_model save_fsdp_optimizer"
    ),
    "imports": " ".join(
        name for name in _HOMES["core.names.packages"].split() if name.endswith(("_available", "_gaudi1"))
    ),
    "megatron_lm": (
        "AbstractTrainStep BertTrainStep GPTTrainStep MegatronLMDummyDataLoader MegatronLMDummyScheduler T5TrainStep "
        "avg_losses_across_data_parallel_group gather_across_data_parallel_groups"
    ),
    "memory": "clear_device_cache find_executable_batch_size release_memory should_reduce_batch_size",
    "modeling": (
        "CustomDtype align_module_device calculate_maximum_sizes check_device_map clean_device_map "
        "compute_module_sizes compute_module_total_buffer_size find_tied_parameters get_balanced_memory "
        "get_max_layer_size get_max_memory has_offloaded_params infer_auto_device_map "
        "get_mixed_precision_context_manager get_grad_scaler load_checkpoint_in_model load_offloaded_weights "
        "convert_file_size_to_int dtype_byte_size load_state_dict named_module_tensors retie_parameters "
        "set_module_tensor_to_device"
    ),
    "offload": (
        "OffloadedWeightsLoader PrefixedDataset extract_submodules_state_dict load_offloaded_weight offload_state_dict "
        "offload_weight "
        "save_offload_index"
    ),
    "operations": (
        "CannotPadNestedTensorWarning DistributedOperationException broadcast broadcast_object_list concatenate "
        "convert_outputs_to_fp32 convert_to_fp32 copy_tensor_to_devices find_batch_size find_device gather "
        "gather_object honor_type is_namedtuple is_torch_tensor listify pad_across_processes pad_input_tensors "
        "recursively_apply reduce send_to_device slice_tensors"
    ),
    "other": (
        "convert_model_to_fp8_ao filter_linear_layers filter_first_and_last_linear_layers "
        "find_first_last_linear_layers has_ao_layers "
        "clear_environment convert_file_size_to_int extract_model_from_parallel has_compiled_regions "
        "is_compiled_module is_peft_model load "
        "patch_environment save wait_for_everyone write_basic_config"
    ),
    "random": "set_seed synchronize_rng_state synchronize_rng_states",
    "versions": "compare_versions is_torch_version",
}
PATHS: dict[str, str] = {
    "big_modeling": (
        f"{_HOOKS} attach_layerwise_casting_hooks check_device_map cpu_offload cpu_offload_with_hook disk_offload "
        "dispatch_model init_empty_weights init_on_device load_checkpoint_and_dispatch"
    ),
    "data_loader": (
        "BatchSamplerShard DataLoaderDispatcher DataLoaderShard GradientState IterableDatasetShard "
        "SeedableRandomSampler synchronize_rng_states "
        "SkipBatchSampler SkipDataLoader prepare_data_loader skip_first_batches"
    ),
    "hooks": _HOOKS,
    "inference": "prepare_pippy",
    "launchers": "debug_launcher notebook_launcher",
    "local_sgd": "LocalSGD",
    "logging": "MultiProcessAdapter get_logger",
    "optimizer": "AcceleratedOptimizer",
    "parallelism_config": "ParallelismConfig",
    "scheduler": "AcceleratedScheduler",
    "state": "AcceleratorState GradientState PartialState",
    "tracking": (
        "ClearMLTracker CometMLTracker DVCLiveTracker GeneralTracker LOGGER_TYPE_TO_CLASS LoggerType MLflowTracker "
        "SwanLabTracker TensorBoardTracker TrackioTracker WandBTracker get_logger on_main_process "
        "register_tracker_class"
    ),
    "tuner": "Tuner",
    "utilities.model_summary": "LayerSummary summarize",
    "utilities.types": _HOMES["core.names.lightning_types"],
    "utils": " ".join([*_UTILS.values(), _FP8_BY_ENGINE, "ParallelismConfig tqdm"]),
    **{f"utils.{name}": names for name, names in _UTILS.items()},
}
"""Module of Accelerate or Lightning, without the name of the package → its names here."""
_OF_LIGHTNING = ("tuner", "utilities.model_summary", "utilities.types")


def homes() -> dict[str, str]:
    """Return the module of ours that defines each name."""
    listed = lazy_names.listed_names(str(PACKAGE / "__init__.py"))
    own = {name: f"trainwright.{home}" for home, names in _HOMES.items() for name in names.split()}
    return listed | own


def files() -> dict[Path, str]:
    """Return the files of all modules, with their texts."""
    found = {}
    of_name = homes()
    for path, names in PATHS.items():
        place = PACKAGE / path.replace(".", "/")
        place = place / "__init__" if path == "utils" else place
        library = "lightning.pytorch" if path in _OF_LIGHTNING else "accelerate"
        found[place.with_suffix(".py")] = (
            f'"""The names of `{library}.{path}`, imported on first use."""\n\nfrom __future__ import annotations\n\n'
            "from trainwright.core.names.lazy_names import lazy_names\n\n"
            "__getattr__, __dir__ = lazy_names(__name__, __file__)\n"
        )
        modules = {"utils": [f"utils.{module}" for module in sorted(_UTILS)], "big_modeling": ["hooks"]}.get(path, [])
        own = set(names.split()) - {name for module in modules for name in PATHS[module].split()}
        ordered = sorted(own, key=lambda name: (of_name[name], _kind(name), _natural(name)))
        lines = [_line(of_name[name], name) for name in ordered]
        lines += [f"from trainwright.{module} import *\n" for module in modules]
        found[place.with_suffix(".pyi")] = "".join(lines)
    return found


def _kind(name: str) -> int:
    """Return the place of constants, classes and functions in a sorted import."""
    return 0 if name.isupper() else 1 if name[0].isupper() else 2


def _natural(name: str) -> str:
    """Return a text that sorts fp8 before fp16, as ruff does."""
    return re.sub(r"\d+", lambda digits: digits.group().zfill(4), name)


def _line(home: str, name: str) -> str:
    line = f"from {home} import {name} as {name}\n"
    return line if len(line) <= 121 else f"from {home} import (\n    {name} as {name},\n)\n"


if __name__ == "__main__":
    for file, text in files().items():
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
