"""Properties of the types of accelerators that torch or a vendor's package supports."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DeviceType:
    """Properties of a type of device that torch's own functions do not return.

    Attributes:
        module: import name of the package that adds the type to torch; `""` if unknown. None if torch has the type.
        install: package or command to install if torch finds no device of the type. `""` if unknown.
        backend: backend of torch.distributed that supports this type. None means that gloo is used.
        visible: environment variable that lists the devices that a process may use. Default:
            `"CUDA_VISIBLE_DEVICES"`, also for types that have no such variable.
        distributed_type: member of `DistributedType` for runs with several processes.
        copies_beside: copies with `non_blocking=True` from and to pinned host memory are safe, and run asynchronously
            to host and device. False for the CPU and MPS: with torch 2.13, such a copy may read freed or overwritten
            memory. Also False for types on which this has not been tested.
        has_float64: the device computes in float64.
        is_unified: the device shares the memory of the host and has no index. Several processes run on the CPU instead.
    """

    module: str | None = None
    install: str = ""
    backend: str | None = None
    visible: str = "CUDA_VISIBLE_DEVICES"
    distributed_type: str = "MULTI_GPU"
    copies_beside: bool = True
    has_float64: bool = True
    is_unified: bool = False


DEVICE_TYPES = {
    "cpu": DeviceType(distributed_type="MULTI_CPU", copies_beside=False, is_unified=True),
    "cuda": DeviceType(install="a CUDA or ROCm build of torch", backend="nccl"),
    "xpu": DeviceType(
        install="an XPU build of torch", backend="xccl", visible="ZE_AFFINITY_MASK", distributed_type="MULTI_XPU"
    ),
    "mps": DeviceType(
        install="torch for macOS, on Apple silicon", copies_beside=False, has_float64=False, is_unified=True
    ),
    "hpu": DeviceType(
        module="habana_frameworks",
        install="pip install habana-torch-plugin",
        backend="hccl",
        visible="HABANA_VISIBLE_MODULES",
        distributed_type="MULTI_HPU",
        has_float64=False,
    ),
    "npu": DeviceType("torch_npu", "pip install torch-npu", "hccl", "ASCEND_RT_VISIBLE_DEVICES", "MULTI_NPU"),
    "mlu": DeviceType("torch_mlu", "torch_mlu of Cambricon", "cncl", "MLU_VISIBLE_DEVICES", "MULTI_MLU"),
    "musa": DeviceType("torch_musa", "torch_musa of Moore Threads", "mccl", "MUSA_VISIBLE_DEVICES", "MULTI_MUSA"),
    "sdaa": DeviceType("torch_sdaa", "torch_sdaa of Tecorigin", "tccl", "SDAA_VISIBLE_DEVICES", "MULTI_SDAA"),
    "neuron": DeviceType(
        module="torch_neuronx",
        install="pip install torch-neuronx --extra-index-url https://pip.repos.neuron.amazonaws.com",
        backend="neuron",
        visible="NEURON_RT_VISIBLE_CORES",
        distributed_type="MULTI_NEURON",
        copies_beside=False,
        has_float64=False,
    ),
    "xla": DeviceType("torch_xla", distributed_type="XLA", copies_beside=False, has_float64=False),
    "meta": DeviceType(copies_beside=False),
}
"""Properties of each type, by torch's name of the type."""

_OTHER = DeviceType("", copies_beside=False)  # any other type that a package adds to torch

NAMED = tuple(name for name in DEVICE_TYPES if name not in ("cpu", "xla", "meta"))
"""The types that `Trainer(accelerator=)` accepts by name, in addition to those that a package has added to torch."""


def properties(kind: str) -> DeviceType:
    """Return the properties of a type of device, under torch's name of it. Unknown types are regarded as types that an
    unknown package adds to torch.
    """
    return DEVICE_TYPES.get(kind, _OTHER)


def advice(kind: str) -> str:
    """Return the end of an error message for a missing device: the package to install or to check. Empty if unknown."""
    device_type = properties(kind)
    if not device_type.install:
        return ""
    module = device_type.module
    if module is None:
        return f" It needs {device_type.install}."
    if importlib.util.find_spec(module) is None:
        return f" It needs the package {module}: {device_type.install}."
    return (
        f" {module} is installed, but added no device to torch: check the driver, and that "
        "TORCH_DEVICE_BACKEND_AUTOLOAD is not 0."
    )
