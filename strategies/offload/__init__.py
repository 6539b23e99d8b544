"""Models larger than the machine: empty construction, sizes, device maps, and weights that come when needed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainwright.core.registry import import_object

if TYPE_CHECKING:
    from trainwright.core.byte_sizes import convert_file_size_to_int
    from trainwright.strategies.offload.device_map import (
        check_device_map,
        clean_device_map,
        explain_device_map,
        get_balanced_memory,
        infer_auto_device_map,
        resolve_device_map,
    )
    from trainwright.strategies.offload.devices import get_max_memory
    from trainwright.strategies.offload.empty import init_empty_weights, init_on_device
    from trainwright.strategies.offload.explain import DeviceMapReport
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

_HERE = "trainwright.strategies.offload"
# Where each name lives; the block above says the same to editors and type checkers.
_PUBLIC = {
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
    "CustomDtype",
    "DeviceMapReport",
    "calculate_maximum_sizes",
    "check_device_map",
    "clean_device_map",
    "compute_module_sizes",
    "compute_module_total_buffer_size",
    "convert_file_size_to_int",
    "dtype_byte_size",
    "explain_device_map",
    "find_tied_parameters",
    "get_balanced_memory",
    "get_max_layer_size",
    "get_max_memory",
    "infer_auto_device_map",
    "init_empty_weights",
    "init_on_device",
    "named_module_tensors",
    "resolve_device_map",
    "retie_parameters",
]


def __getattr__(name: str) -> Any:
    if name in _PUBLIC:
        return import_object(f"{_PUBLIC[name]}:{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
