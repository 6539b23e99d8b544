"""Selection of accelerators for a run."""

from __future__ import annotations

import contextlib
import importlib.util
import platform
import re
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from pathlib import Path

import torch
import torch.distributed as dist

from trainwright.core.errors import ConfigurationError, MissingPackageError, unknown
from trainwright.core.host.device_types import DEVICE_TYPES, NAMED, advice, properties
from trainwright.core.process import variable
from trainwright.processes.launcher import set_variable

if sys.platform != "win32":
    import resource

_OLDEST_KERNEL = (5, 5)  # processes may hang on older kernels of Linux
_TPUS = ("/dev/accel0", "/dev/vfio/0")
ONECCL = "oneccl_bindings_for_pytorch"  # registers the backend "ccl" on import


def device_type(accelerator: str) -> str:
    """Return torch's device type for an `accelerator=` argument.

    `"gpu"` selects the machine's accelerator, and `"auto"` the accelerator, or else the CPU. `"tpu"` and `"xla"` are
    not checked here, because torch does not report such devices.

    Raises:
        ConfigurationError: the name is unknown, or the machine has no such device.
    """
    if accelerator == "cpu":
        return "cpu"
    if accelerator in ("tpu", "xla"):
        return "xla"
    available: str | None = None
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is not None:
        available = current.type
    known = ["auto", "cpu", "gpu", "tpu", *NAMED]
    if available is not None and available not in NAMED:
        known.append(available)  # a device type that a package adds to torch
    if accelerator not in known:
        raise unknown("accelerator", accelerator, known)
    if accelerator == "auto" and available is None:
        return "xla" if _has_tpu() else "cpu"
    if available is None or accelerator not in ("auto", "gpu", available):
        raise ConfigurationError(
            f"accelerator={accelerator!r}, but torch {torch.__version__} sees {available or 'no accelerator'} on this "
            f"machine.{advice(accelerator)} Use accelerator='auto' or 'cpu'."
        )
    return available


def _has_tpu() -> bool:
    """Return whether torch_xla is installed, and either `PJRT_DEVICE` is set or the machine has a TPU."""
    if importlib.util.find_spec("torch_xla") is None:
        return False
    return bool(variable("PJRT_DEVICE")) or any(Path(place).exists() for place in _TPUS)


def kernel_problem() -> list[str]:
    """Return a list with one warning if processes may hang with this machine's old kernel, otherwise an empty list."""
    version = re.match(r"(\d+)\.(\d+)", platform.release())  # "5.15.0-1234-aws"
    if sys.platform != "linux" or version is None:
        return []
    if (int(version[1]), int(version[2])) >= _OLDEST_KERNEL:
        return []
    return [f"the Linux kernel is {version[0]}. Processes may hang with kernels before 5.5. Update the kernel."]


def device_indices(devices: int | str | list[int], kind: str) -> list[int]:
    """Return the device indices of this node for a `devices=` argument. Each index is used by one process.

    Args:
        devices: a count, a list of indices, text such as `"2"` or `"0,3"`, or `-1` or `"auto"`, which is all devices,
            but one process on the CPU and with XLA.
        kind: torch's device type.

    Raises:
        ConfigurationError: the argument is invalid, or a device does not exist.
    """
    available: int | None = None  # any number of processes on the CPU; torch does not count the devices of XLA
    if kind not in ("cpu", "xla"):
        available = torch.accelerator.device_count()
    argument = devices  # for the errors: `devices` becomes a number or a list below
    if isinstance(devices, str) and devices != "auto":
        try:
            numbers = [int(part) for part in devices.split(",") if part.strip()]
        except ValueError:
            numbers = []
        if not numbers:
            raise ConfigurationError(f"devices={argument!r}: write a count, 'auto', or indices such as '0,3'.")
        devices = numbers if "," in devices else numbers[0]  # "2," is the device 2, and "2" two devices
    if devices == "auto" or devices == -1:
        return list(range(1 if available is None else available))
    if isinstance(devices, Sequence):
        try:
            indices = [int(str(index)) for index in devices]  # int(1.7) and int(True) would be no error
        except ValueError:
            raise ConfigurationError(f"devices={argument!r}: write indices such as [0, 3].") from None
        if not indices:
            raise ConfigurationError(
                f"devices={argument!r} names no device. Write a count, 'auto', or indices such as [0, 3]."
            )
        if len(set(indices)) != len(indices) or min(indices) < 0:
            raise ConfigurationError(f"devices={argument!r}: indices must be different and not negative.")
    elif isinstance(devices, int) and not isinstance(devices, bool) and devices > 0:
        indices = list(range(devices))
    else:
        raise ConfigurationError(f"devices={argument!r}: write a count of at least 1, -1, 'auto' or a list of indices.")
    if kind == "xla" and indices != list(range(len(indices))):
        raise ConfigurationError(
            f"devices={argument!r}: torch_xla assigns the devices to processes. Write a count: devices={len(indices)}."
        )
    if available is not None and max(indices) >= available:
        raise ConfigurationError(
            f"devices={argument!r}, but this machine has {available} {kind} device(s). Use devices={available} or "
            "fewer."
        )
    return indices


def check_backend(backend: str | None, kind: str, argument: str = "process_group_backend") -> None:
    """Check that a backend of torch.distributed serves this type of device. Imports nothing.

    Raises:
        ConfigurationError: The backend serves another device type.
        MissingPackageError: `"ccl"`, and its package is not installed.
    """
    if backend == "ccl":
        if kind not in ("cpu", "xpu"):
            raise ConfigurationError(
                f"{argument}='ccl' needs the CPU or XPUs, but this process is on {kind}. Remove it."
            )
        if importlib.util.find_spec(ONECCL) is None:
            raise MissingPackageError(
                f"{argument}='ccl' needs the package {ONECCL!r}, which is not installed. Without it the CPU uses gloo, "
                "and XPUs use xccl, which is part of torch. Run: pip install oneccl_bind_pt --extra-index-url "
                "https://pytorch-extension.intel.com/release-whl/stable/cpu/us/"
            )
        return
    if backend is None:
        return
    owners = [name for name, one in DEVICE_TYPES.items() if one.backend == backend]  # none: a backend such as gloo
    if owners and kind not in owners:
        owner = " or ".join(owners).upper()
        raise ConfigurationError(
            f"{argument}={backend!r} needs {owner} devices, but this process is on {kind}. Remove it."
        )


def default_backend(device: torch.device) -> str:
    """Return torch's default backend for a device, or the vendor's backend if torch has none."""
    try:
        return dist.get_default_backend_for_device(device)
    except ValueError:
        return properties(device.type).backend or "gloo"


@contextlib.contextmanager
def kernel_choice(
    benchmark: bool | None, deterministic: bool | str | None, detect_anomaly: bool = False
) -> Iterator[None]:
    """Context manager that sets torch's `cudnn.benchmark`, `use_deterministic_algorithms` and `set_detect_anomaly`.

    None does not change a setting, nor does False for `deterministic` and `detect_anomaly`. `deterministic="warn"` only
    warns of other algorithms. `deterministic` also disables `benchmark`, and sets `CUBLAS_WORKSPACE_CONFIG` if it is
    not set. That variable stays set at the end.
    """
    previous_deterministic = torch.are_deterministic_algorithms_enabled()
    previous_warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    previous_benchmark = torch.backends.cudnn.benchmark
    if benchmark is not None:
        torch.backends.cudnn.benchmark = benchmark
    if deterministic:
        # cuBLAS reads it when its first handle is created, and is not deterministic without it (CUDA 10.2 and later).
        set_variable("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True, warn_only=deterministic == "warn")
        torch.backends.cudnn.benchmark = False  # timing may choose another kernel in each run
    try:
        with torch.autograd.set_detect_anomaly(True) if detect_anomaly else contextlib.nullcontext():
            yield
    finally:
        torch.use_deterministic_algorithms(previous_deterministic, warn_only=previous_warn_only)
        if benchmark is not None or deterministic:
            torch.backends.cudnn.benchmark = previous_benchmark


def peak_memory(device: torch.device) -> int | None:
    """Return the peak memory of this process in bytes, or None if it is not reported. Does not wait for the device.

    On an accelerator, this is the memory allocated for tensors. On the CPU, it is the resident memory of the process.
    """
    if device.type == "cpu":
        if sys.platform == "win32":
            return None
        unit = 1 if sys.platform == "darwin" else 1024  # getrusage reports bytes on macOS and KiB on Linux
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None or accelerator.type != device.type:
        return None  # such as XLA
    peak: int | None = torch.accelerator.memory_stats(device).get("allocated_bytes.all.peak")
    return peak


class DistributedType(str, Enum):  # noqa: UP042 -- as text a member shows its class, as Accelerate's does
    """Kind of distribution. A member is equal to its name as text.

    A `PartialState` has `NO` or the member for its device type. An `Accelerator` may also have the member of its
    strategy, such as `FSDP`. Other members only exist for comparisons in scripts.
    """

    NO = "NO"
    MULTI_CPU = "MULTI_CPU"
    MULTI_GPU = "MULTI_GPU"
    MULTI_XPU = "MULTI_XPU"
    DEEPSPEED = "DEEPSPEED"
    FSDP = "FSDP"
    XLA = "XLA"
    TPU = "XLA"  # noqa: PIE796  # its name in older scripts
    MEGATRON_LM = "MEGATRON_LM"
    MULTI_NPU = "MULTI_NPU"
    MULTI_MLU = "MULTI_MLU"
    MULTI_SDAA = "MULTI_SDAA"
    MULTI_MUSA = "MULTI_MUSA"
    MULTI_HPU = "MULTI_HPU"
    MULTI_NEURON = "MULTI_NEURON"
