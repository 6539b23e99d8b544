"""Availability and versions of packages and devices, under Accelerate's names. torch is imported on first use."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import operator
import re
from collections.abc import Callable
from typing import Any

from trainwright.core.errors import ConfigurationError, require_package

_OPERATIONS: dict[str, Callable[[Any, Any], bool]] = {
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}


def _is_installed(package: str) -> Callable[[], bool]:
    """Return the function `is_…_available` of a package."""

    def is_available() -> bool:
        """Return whether the package is installed."""
        return importlib.util.find_spec(package) is not None

    return is_available


is_aim_available = _is_installed("aim")
is_boto3_available = _is_installed("boto3")
is_clearml_available = _is_installed("clearml")
is_comet_ml_available = _is_installed("comet_ml")
is_datasets_available = _is_installed("datasets")
is_deepspeed_available = _is_installed("deepspeed")
is_dvclive_available = _is_installed("dvclive")
is_import_timer_available = _is_installed("import_timer")
is_ipex_available = _is_installed("intel_extension_for_pytorch")
is_lomo_available = _is_installed("lomo_optim")
is_matplotlib_available = _is_installed("matplotlib")
is_megatron_lm_available = _is_installed("megatron")
is_mlflow_available = _is_installed("mlflow")
is_msamp_available = _is_installed("msamp")
is_pandas_available = _is_installed("pandas")
is_peft_available = _is_installed("peft")
is_pynvml_available = _is_installed("pynvml")
is_pytest_available = _is_installed("pytest")
is_rich_available = _is_installed("rich")
is_sagemaker_available = _is_installed("sagemaker")
is_schedulefree_available = _is_installed("schedulefree")
is_swanlab_available = _is_installed("swanlab")
is_tensorboard_available = _is_installed("tensorboard")
is_timm_available = _is_installed("timm")
is_torchao_available = _is_installed("torchao")
is_torchdata_available = _is_installed("torchdata")
is_torchvision_available = _is_installed("torchvision")
is_tqdm_available = _is_installed("tqdm")
is_trackio_available = _is_installed("trackio")
is_transformer_engine_available = _is_installed("transformer_engine")
is_transformers_available = _is_installed("transformers")
is_triton_available = _is_installed("triton")
is_wandb_available = _is_installed("wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, in version `min_version` or later if it is passed."""
    if not _is_installed("bitsandbytes")():
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def _has_device(kind: str) -> Callable[..., bool]:
    """Return the function `is_…_available` of a device type, under torch's name of the type."""

    def is_available(check_device: bool = False) -> bool:
        """Return whether torch finds a device of this kind. `check_device` has no effect."""
        import torch

        del check_device
        device = torch.accelerator.current_accelerator(check_available=True)
        return device is not None and device.type == kind

    return is_available


is_cuda_available = _has_device("cuda")
is_hpu_available = _has_device("hpu")
is_mlu_available = _has_device("mlu")
is_musa_available = _has_device("musa")
is_neuron_available = _has_device("neuron")
is_npu_available = _has_device("npu")
is_sdaa_available = _has_device("sdaa")
is_xpu_available = _has_device("xpu")


def is_mps_available(min_version: str = "1.12") -> bool:
    """Return whether torch finds an Apple GPU, and has version `min_version` or later. Default: `"1.12"`."""
    return _has_device("mps")() and is_torch_version(">=", min_version)


def is_torch_xla_available(check_is_tpu: bool = False, check_is_gpu: bool = False) -> bool:
    """Return whether torch_xla is installed. With an argument, also start torch_xla and check its type of device."""
    if not _is_installed("torch_xla")():
        return False
    if not (check_is_tpu or check_is_gpu):
        return True
    kind = importlib.import_module("torch_xla.runtime").device_type()
    return kind == "TPU" if check_is_tpu else kind in ("CUDA", "GPU")


def is_bf16_available(ignore_tpu: bool = False) -> bool:
    """Return whether this machine's device computes in bfloat16. True for the CPU. `ignore_tpu` has no effect."""
    import torch

    del ignore_tpu
    return torch.cuda.is_bf16_supported() if is_cuda_available() else not is_mps_available()


def is_rocm_available() -> bool:
    """Return whether torch is built for ROCm and finds an AMD GPU."""
    import torch

    return torch.version.hip is not None and torch.cuda.is_available()


def is_habana_gaudi1() -> bool:
    """Return whether the device is a Gaudi of the first generation."""
    if not is_hpu_available():
        return False
    devices = importlib.import_module("habana_frameworks.torch.utils.experimental")
    return bool(devices._get_device_type() == devices.synDeviceType.synDeviceGaudi)


def is_pippy_available() -> bool:
    """Return True: pipelines are a part of torch."""
    return True


def is_torchdata_stateful_dataloader_available() -> bool:
    """Return whether torchdata is installed, in a version with `StatefulDataLoader` (0.8 or later)."""
    return is_torchdata_available() and compare_versions("torchdata", ">=", "0.8.0")


def is_fp16_available() -> bool:
    """Return whether this machine's device trains in float16. True for accelerators, False for the CPU."""
    import torch

    return torch.accelerator.is_available()


def is_fp8_available() -> bool:
    """Return whether a package that trains in 8 bits is installed: transformer_engine, torchao or msamp."""
    return is_transformer_engine_available() or is_torchao_available() or is_msamp_available()


def is_transformer_engine_mxfp8_available() -> bool:
    """Return whether transformer_engine is installed and the device computes in its format MXFP8."""
    if not is_transformer_engine_available():
        return False
    return bool(importlib.import_module("transformer_engine.pytorch.fp8").check_mxfp8_support()[0])


def check_cuda_fp8_capability() -> bool:
    """Return whether the CUDA device computes in 8 bits, which requires compute capability 8.9 or later.

    False without a CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= (8, 9)


def is_peft_model(model: object) -> bool:
    """Return whether a model is a `PeftModel` of peft."""
    if not is_peft_available():
        return False
    is_peft: bool = isinstance(model, importlib.import_module("peft").PeftModel)
    return is_peft


def compare_versions(library_or_version: str | object, operation: str, requirement_version: str) -> bool:
    """Return whether `library_or_version operation requirement_version` holds.

    Only the numbers at the beginning of a version are compared: `2.9.0a1+cpu` equals `2.9`.

    Args:
        library_or_version: a version or the name of an installed package.
        operation: `==`, `!=`, `<`, `<=`, `>` or `>=`.
        requirement_version: the version on the right side.

    Raises:
        ConfigurationError: the operation is unknown.
        importlib.metadata.PackageNotFoundError: the package is not installed.
    """
    if operation not in _OPERATIONS:
        raise ConfigurationError(f"operation={operation!r}: write one of {', '.join(_OPERATIONS)}.")
    text = str(library_or_version)
    version = text if text[:1].isdigit() else importlib.metadata.version(text)
    left = _numbers(version)
    right = _numbers(requirement_version)
    # Append zeros to the shorter one: 2.9 equals 2.9.0, but (2, 9) does not equal (2, 9, 0).
    length = max(len(left), len(right))
    left += (0,) * (length - len(left))
    right += (0,) * (length - len(right))
    return _OPERATIONS[operation](left, right)


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch with another version; see `compare_versions`."""
    return compare_versions("torch", operation, version)


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers at the beginning of a version: `2.9.0a1` → (2, 9, 0)."""
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match.group().split("."))) if match else ()


def load_transformers(purpose: str, module: str = "transformers") -> Any:
    """Import transformers, or one of its modules. The error for a missing package names `purpose`."""
    return require_package(module, purpose=purpose)
