"""The functions of large models have the arguments, their order and the defaults that Accelerate documents."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest

import trainwright

NEEDED = inspect.Parameter.empty

# Arguments in their order, "name=default"; what is ours alone can be given by name only and stands in OURS.
DOCUMENTED: dict[str, str] = {
    # construction
    "init_empty_weights": "include_buffers=None",
    "init_on_device": "device, include_buffers=None",
    # sizes and maps
    "compute_module_sizes": "model, dtype=None, special_dtypes=None, buffers_only=False",
    "compute_module_total_buffer_size": "model, dtype=None, special_dtypes=None",
    "calculate_maximum_sizes": "model",
    "get_max_layer_size": "modules, module_sizes, no_split_module_classes",
    "get_max_memory": "max_memory=None",
    "get_balanced_memory": "model, max_memory=None, no_split_module_classes=None, dtype=None, special_dtypes=None, "
    "low_zero=False",
    "infer_auto_device_map": "model, max_memory=None, no_split_module_classes=None, dtype=None, special_dtypes=None, "
    "verbose=False, clean_result=True, offload_buffers=False, fallback_allocation=False",
    "clean_device_map": "device_map, module_name=''",
    "check_device_map": "model, device_map",
    "retie_parameters": "model, tied_params",
    "convert_file_size_to_int": "size",
    # dispatch and loading
    "cpu_offload": "model, execution_device=None, offload_buffers=False, state_dict=None, preload_module_classes=None",
    "cpu_offload_with_hook": "model, execution_device=None, prev_module_hook=None",
    "disk_offload": "model, offload_dir, execution_device=None, offload_buffers=False, preload_module_classes=None",
    "dispatch_model": "model, device_map=None, main_device=None, state_dict=None, offload_dir=None, "
    "offload_index=None, offload_buffers=False, skip_keys=None, preload_module_classes=None, force_hooks=False",
    "load_checkpoint_in_model": "model, checkpoint, device_map=None, offload_folder=None, dtype=None, "
    "offload_state_dict=False, offload_buffers=False, keep_in_fp32_modules=None, strict=False, full_state_dict=True, "
    "broadcast_from_rank0=False",
    "load_checkpoint_and_dispatch": "model, checkpoint, device_map=None, max_memory=None, "
    "no_split_module_classes=None, offload_folder=None, offload_buffers=False, dtype=None, offload_state_dict=None, "
    "skip_keys=None, preload_module_classes=None, force_hooks=False, strict=False, full_state_dict=True, "
    "broadcast_from_rank0=False",
    "offload_state_dict": "save_dir, state_dict",
    "offload_weight": "weight, weight_name, offload_folder, index=None",
    "load_offloaded_weight": "weight_file, weight_info",
    "save_offload_index": "index, offload_folder",
    "load_offloaded_weights": "model, index, offload_folder",
    "load_state_dict": "checkpoint_file, device_map=None",
    "set_module_tensor_to_device": "module, tensor_name, device, value=None, dtype=None, fp16_statistics=None, "
    "tied_params_map=None, non_blocking=False, clear_cache=True",
    "has_offloaded_params": "module",
    "align_module_device": "module, execution_device=None",
    "attach_layerwise_casting_hooks": "module, storage_dtype, compute_dtype, skip_modules_pattern=None, "
    "skip_modules_classes=None, non_blocking=False",
    # hooks
    "add_hook_to_module": "module, hook, append=False",
    "remove_hook_from_module": "module, recurse=False",
    "remove_hook_from_submodules": "module",
    "attach_execution_device_hook": "module, execution_device, skip_keys=None, preload_module_classes=None, "
    "tied_params_map=None",
    "attach_align_device_hook": "module, execution_device=None, offload=False, weights_map=None, "
    "offload_buffers=False, module_name='', skip_keys=None, preload_module_classes=None, tied_params_map=None",
    "attach_align_device_hook_on_blocks": "module, execution_device=None, offload=False, weights_map=None, "
    "offload_buffers=False, module_name='', skip_keys=None, preload_module_classes=None, tied_params_map=None",
    "AlignDevicesHook": "execution_device=None, offload=False, io_same_device=False, weights_map=None, "
    "offload_buffers=False, place_submodules=False, skip_keys=None, tied_params_map=None",
    "CpuOffload": "execution_device=None, prev_module_hook=None",
    "UserCpuOffloadHook": "model, hook",
    "OffloadedWeightsLoader": "state_dict=None, save_folder=None, index=None, device=None",
    "PrefixedDataset": "dataset, prefix",
    # quantization, pipelines, memory
    "BnbQuantizationConfig": "load_in_8bit=False, llm_int8_threshold=6.0, load_in_4bit=False, "
    "bnb_4bit_quant_type='fp4', bnb_4bit_use_double_quant=False, bnb_4bit_compute_dtype='fp16', torch_dtype=None, "
    "skip_modules=None, keep_in_fp32_modules=None",
    "load_and_quantize_model": "model, bnb_quantization_config, weights_location=None, device_map=None, "
    "no_split_module_classes=None, max_memory=None, offload_folder=None, offload_state_dict=False",
    "save_model": "model, save_directory, max_shard_size='10GB', safe_serialization=True",
    "prepare_pippy": "model, split_points='auto', no_split_module_classes=None, example_args=(), example_kwargs=None, "
    "num_chunks=None, gather_output=False",
    "find_executable_batch_size": "function=None, starting_batch_size=128, reduce_batch_size_fn=None",
    "clear_device_cache": "garbage_collection=False",
}

# What ours have besides, each to be given by name.
OURS: dict[str, set[str]] = {
    "AlignDevicesHook": {"prefetcher", "tensor_names"},  # weights ahead of time; a map may name single tensors
    "attach_align_device_hook": {"prefetcher"},
    "attach_align_device_hook_on_blocks": {"prefetcher"},
    "check_device_map": {"strict"},  # the overview documents it for dispatch_model
    "cpu_offload": {"prefetch_bytes"},
    "disk_offload": {"prefetch_bytes"},
    "dispatch_model": {"prefetch_bytes", "strict"},
    "load_checkpoint_and_dispatch": {"keep_in_fp32_modules", "prefetch_bytes"},
    "offload_state_dict": {"origin"},  # which checkpoint was converted, so that it is converted once
}

# Accelerate's code differs from the table above in these, on purpose.
REASONS = {
    ("load_checkpoint_in_model", "offload_8bit_bnb"): "documented nowhere; quantized layers are offloaded as they are",
    ("dispatch_model", "device_map"): "needed there; the overview documents None as its default, which is 'auto' here",
}

# The overview and the page of transformers list some functions more briefly: each name must be taken.

METHODS = {
    ("ModelHook", "init_hook"): "self, module",
    ("ModelHook", "pre_forward"): "self, module, *args, **kwargs",
    ("ModelHook", "post_forward"): "self, module, output",
    ("ModelHook", "detach_hook"): "self, module",
    ("SequentialHook", "__init__"): "self, *hooks",
    ("UserCpuOffloadHook", "offload"): "self",
    ("UserCpuOffloadHook", "remove"): "self",
}


def _parse(text: str) -> list[tuple[str, Any]]:
    """Return names and defaults as Python reads them."""
    namespace: dict[str, Any] = {}
    exec(f"def function({text}): ...", namespace)
    return _positional(namespace["function"])


def _positional(function: Callable[..., Any]) -> list[tuple[str, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(each.name, each.default) for each in parameters if each.kind is not inspect.Parameter.KEYWORD_ONLY]


@pytest.mark.parametrize("name", DOCUMENTED)
def test_arguments_are_those_that_are_documented(name: str) -> None:
    function = getattr(trainwright, name)
    assert _positional(function) == _parse(DOCUMENTED[name])
    by_name = {each.name for each in inspect.signature(function).parameters.values()} - dict(
        _positional(function)
    ).keys()
    assert by_name == OURS.get(name, set())


@pytest.mark.parametrize(("kind", "method"), METHODS)
def test_methods_of_hooks_take_what_is_documented(kind: str, method: str) -> None:
    function = getattr(getattr(trainwright, kind), method)
    text = ", ".join(str(each.replace(annotation=NEEDED)) for each in inspect.signature(function).parameters.values())
    assert text == METHODS[kind, method]


def test_objects_are_released_in_any_number() -> None:
    (objects,) = inspect.signature(trainwright.release_memory).parameters.values()
    assert objects.kind is inspect.Parameter.VAR_POSITIONAL


@pytest.mark.slow
@pytest.mark.requires("accelerate", reason="what its present version has")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", DOCUMENTED)
def test_arguments_are_those_of_the_installed_accelerate(name: str) -> None:
    import accelerate
    import accelerate.big_modeling as big
    import accelerate.hooks as hooks
    import accelerate.utils as utils
    import accelerate.utils.memory as memory
    import accelerate.utils.modeling as modeling
    import accelerate.utils.offload as offload

    homes = (accelerate, utils, big, hooks, memory, modeling, offload, accelerate.Accelerator)
    theirs = next(getattr(home, name) for home in homes if hasattr(home, name))
    ours = _positional(getattr(trainwright, name))
    compared = [entry for entry in _positional(theirs) if entry[0] != "self" and (name, entry[0]) not in REASONS]
    if dataclasses.is_dataclass(theirs):  # documents texts as the defaults of some dtypes, and holds others
        assert [argument for argument, _ in compared] == [argument for argument, _ in ours]
    else:
        assert compared == [entry for entry in ours if (name, entry[0]) not in REASONS]
