"""Models larger than the machine: empty construction, sizes, device maps, and weights that come when needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.core.registry import import_object

if TYPE_CHECKING:
    from trainwright.core.byte_sizes import convert_file_size_to_int
    from trainwright.strategies.offload.align import (
        AlignDevicesHook,
        align_module_device,
        has_offloaded_params,
    )
    from trainwright.strategies.offload.attach import (
        attach_align_device_hook,
        attach_align_device_hook_on_blocks,
        attach_execution_device_hook,
    )
    from trainwright.strategies.offload.device_map import (
        check_device_map,
        clean_device_map,
        explain_device_map,
        get_balanced_memory,
        infer_auto_device_map,
        resolve_device_map,
    )
    from trainwright.strategies.offload.devices import get_max_memory
    from trainwright.strategies.offload.dispatch import (
        cpu_offload,
        cpu_offload_with_hook,
        disk_offload,
        dispatch_model,
    )
    from trainwright.strategies.offload.empty import init_empty_weights, init_on_device
    from trainwright.strategies.offload.explain import DeviceMapReport
    from trainwright.strategies.offload.hooks import (
        CpuOffload,
        ModelHook,
        SequentialHook,
        UserCpuOffloadHook,
        add_hook_to_module,
        remove_hook_from_module,
        remove_hook_from_submodules,
    )
    from trainwright.strategies.offload.layerwise_casting import (
        attach_layerwise_casting_hooks,
    )
    from trainwright.strategies.offload.loading import (
        LoadedKeys,
        load_checkpoint_and_dispatch,
        load_checkpoint_in_model,
        load_offloaded_weights,
    )
    from trainwright.strategies.offload.pipeline import prepare_pippy
    from trainwright.strategies.offload.quantization import (
        BnbQuantizationConfig,
        TorchaoQuantizationConfig,
        load_and_quantize_model,
        quantized_state_dict,
    )
    from trainwright.strategies.offload.saving import save_model, save_quantized_model
    from trainwright.strategies.offload.single_tensors import load_state_dict, set_module_tensor_to_device
    from trainwright.strategies.offload.sizes import (
        CustomDtype,
        calculate_maximum_sizes,
        compute_module_sizes,
        compute_module_total_buffer_size,
        dtype_byte_size,
        find_tied_parameters,
        get_max_layer_size,
        named_module_tensors,
        retie_parameters,
    )
    from trainwright.strategies.offload.weights_map import (
        OffloadedWeightsLoader,
        PrefixedDataset,
        load_offloaded_weight,
        offload_state_dict,
        offload_weight,
        save_offload_index,
    )

_HERE = "trainwright.strategies.offload"
# Where each name lives; the block above says the same to editors and type checkers.
_PUBLIC = {
    "AlignDevicesHook": f"{_HERE}.align",
    "BnbQuantizationConfig": f"{_HERE}.quantization",
    "CpuOffload": f"{_HERE}.hooks",
    "LoadedKeys": f"{_HERE}.loading",
    "ModelHook": f"{_HERE}.hooks",
    "OffloadedWeightsLoader": f"{_HERE}.weights_map",
    "PrefixedDataset": f"{_HERE}.weights_map",
    "SequentialHook": f"{_HERE}.hooks",
    "TorchaoQuantizationConfig": f"{_HERE}.quantization",
    "UserCpuOffloadHook": f"{_HERE}.hooks",
    "add_hook_to_module": f"{_HERE}.hooks",
    "align_module_device": f"{_HERE}.align",
    "attach_align_device_hook": f"{_HERE}.attach",
    "attach_align_device_hook_on_blocks": f"{_HERE}.attach",
    "attach_execution_device_hook": f"{_HERE}.attach",
    "attach_layerwise_casting_hooks": f"{_HERE}.layerwise_casting",
    "cpu_offload": f"{_HERE}.dispatch",
    "cpu_offload_with_hook": f"{_HERE}.dispatch",
    "disk_offload": f"{_HERE}.dispatch",
    "dispatch_model": f"{_HERE}.dispatch",
    "has_offloaded_params": f"{_HERE}.align",
    "load_and_quantize_model": f"{_HERE}.quantization",
    "load_checkpoint_and_dispatch": f"{_HERE}.loading",
    "load_checkpoint_in_model": f"{_HERE}.loading",
    "load_offloaded_weight": f"{_HERE}.weights_map",
    "load_offloaded_weights": f"{_HERE}.loading",
    "load_state_dict": f"{_HERE}.single_tensors",
    "offload_state_dict": f"{_HERE}.weights_map",
    "offload_weight": f"{_HERE}.weights_map",
    "prepare_pippy": f"{_HERE}.pipeline",
    "quantized_state_dict": f"{_HERE}.quantization",
    "remove_hook_from_module": f"{_HERE}.hooks",
    "remove_hook_from_submodules": f"{_HERE}.hooks",
    "save_offload_index": f"{_HERE}.weights_map",
    "save_model": f"{_HERE}.saving",
    "save_quantized_model": f"{_HERE}.saving",
    "set_module_tensor_to_device": f"{_HERE}.single_tensors",
    "CustomDtype": f"{_HERE}.sizes",
    "DeviceMapReport": f"{_HERE}.explain",
    "calculate_maximum_sizes": f"{_HERE}.sizes",
    "check_device_map": f"{_HERE}.device_map",
    "clean_device_map": f"{_HERE}.device_map",
    "compute_module_sizes": f"{_HERE}.sizes",
    "compute_module_total_buffer_size": f"{_HERE}.sizes",
    "convert_file_size_to_int": "trainwright.core.byte_sizes",
    "dtype_byte_size": f"{_HERE}.sizes",
    "explain_device_map": f"{_HERE}.device_map",
    "find_tied_parameters": f"{_HERE}.sizes",
    "get_balanced_memory": f"{_HERE}.device_map",
    "get_max_layer_size": f"{_HERE}.sizes",
    "get_max_memory": f"{_HERE}.devices",
    "infer_auto_device_map": f"{_HERE}.device_map",
    "init_empty_weights": f"{_HERE}.empty",
    "init_on_device": f"{_HERE}.empty",
    "named_module_tensors": f"{_HERE}.sizes",
    "resolve_device_map": f"{_HERE}.device_map",
    "retie_parameters": f"{_HERE}.sizes",
}
__all__ = [
    "AlignDevicesHook",
    "BnbQuantizationConfig",
    "CpuOffload",
    "CustomDtype",
    "DeviceMapReport",
    "LoadedKeys",
    "ModelHook",
    "OffloadedWeightsLoader",
    "PrefixedDataset",
    "SequentialHook",
    "TorchaoQuantizationConfig",
    "UserCpuOffloadHook",
    "add_hook_to_module",
    "align_module_device",
    "attach_align_device_hook",
    "attach_align_device_hook_on_blocks",
    "attach_execution_device_hook",
    "attach_layerwise_casting_hooks",
    "calculate_maximum_sizes",
    "check_device_map",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "cpu_offload",
    "cpu_offload_with_hook",
    "disk_offload",
    "dispatch_model",
    "dtype_byte_size",
    "explain_device_map",
    "find_tied_parameters",
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
    "named_module_tensors",
    "offload_state_dict",
    "offload_weight",
    "prepare_pippy",
    "quantized_state_dict",
    "remove_hook_from_module",
    "remove_hook_from_submodules",
    "resolve_device_map",
    "retie_parameters",
    "save_model",
    "save_offload_index",
    "save_quantized_model",
    "set_module_tensor_to_device",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return import_object(f"{_PUBLIC[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
