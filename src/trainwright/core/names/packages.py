"""Availability of packages and devices, under Accelerate's names. torch is imported on first use."""

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


def _is_there(package: str) -> Callable[[], bool]:
    def is_available() -> bool:
        """Return whether the package is installed."""
        return importlib.util.find_spec(package) is not None

    return is_available


is_aim_available = _is_there("aim")
is_boto3_available = _is_there("boto3")
is_clearml_available = _is_there("clearml")
is_comet_ml_available = _is_there("comet_ml")
is_datasets_available = _is_there("datasets")
is_deepspeed_available = _is_there("deepspeed")
is_dvclive_available = _is_there("dvclive")
is_import_timer_available = _is_there("import_timer")
is_ipex_available = _is_there("intel_extension_for_pytorch")
is_lomo_available = _is_there("lomo_optim")
is_matplotlib_available = _is_there("matplotlib")
is_megatron_lm_available = _is_there("megatron")
is_mlflow_available = _is_there("mlflow")
is_msamp_available = _is_there("msamp")
is_pandas_available = _is_there("pandas")
is_peft_available = _is_there("peft")
is_pynvml_available = _is_there("pynvml")
is_pytest_available = _is_there("pytest")
is_rich_available = _is_there("rich")
is_sagemaker_available = _is_there("sagemaker")
is_schedulefree_available = _is_there("schedulefree")
is_swanlab_available = _is_there("swanlab")
is_tensorboard_available = _is_there("tensorboard")
is_timm_available = _is_there("timm")
is_torchao_available = _is_there("torchao")
is_torchdata_available = _is_there("torchdata")
is_torchvision_available = _is_there("torchvision")
is_tqdm_available = _is_there("tqdm")
is_trackio_available = _is_there("trackio")
is_transformer_engine_available = _is_there("transformer_engine")
is_transformers_available = _is_there("transformers")
is_triton_available = _is_there("triton")
is_wandb_available = _is_there("wandb")


def is_bnb_available(min_version: str | None = None) -> bool:
    """Return whether bitsandbytes is installed, in version `min_version` or later if it is passed."""
    if not _is_there("bitsandbytes")():
        return False
    return min_version is None or compare_versions("bitsandbytes", ">=", min_version)


def _has_device(kind: str) -> Callable[..., bool]:
    def is_available(check_device: bool = False) -> bool:
        """Return whether torch finds a device of this kind. `check_device` has no effect."""
        import torch

        del check_device
        found = torch.accelerator.current_accelerator(check_available=True)
        return found is not None and found.type == kind

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
    if not _is_there("torch_xla")():
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
    """Return whether the CUDA device computes in 8 bits, which requires compute capability 8.9 or later."""
    import torch

    return torch.cuda.get_device_capability() >= (8, 9)


def is_peft_model(model: object) -> bool:
    """Return whether a model is a `PeftModel` of peft."""
    if not is_peft_available():
        return False
    found: bool = isinstance(model, importlib.import_module("peft").PeftModel)
    return found


def compare_versions(library_or_version: str | object, operation: str, requirement_version: str) -> bool:
    """Return whether `library_or_version operation requirement_version` holds. Local parts (`+cpu`) are ignored.

    `library_or_version` is a version or the name of an installed package. `operation` is ==, !=, <, <=, > or >=.

    Raises:
        importlib.metadata.PackageNotFoundError: The package is not installed.
    """
    if operation not in _OPERATIONS:
        raise ConfigurationError(f"operation={operation!r}: write one of {', '.join(_OPERATIONS)}.")
    text = str(library_or_version)
    version = text if text[:1].isdigit() else importlib.metadata.version(text)
    own = _numbers(version)
    other = _numbers(requirement_version)
    length = max(len(own), len(other))
    return _OPERATIONS[operation](own + (0,) * (length - len(own)), other + (0,) * (length - len(other)))


def is_torch_version(operation: str, version: str) -> bool:
    """Compare the version of torch with another version; see `compare_versions`."""
    return compare_versions("torch", operation, version)


def _numbers(version: str) -> tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found.group().split("."))) if found else ()


def load_transformers(purpose: str, module: str = "transformers") -> Any:
    """Import transformers, or one of its modules. The error for a missing package names `purpose`."""
    return require_package(module, purpose=purpose)
