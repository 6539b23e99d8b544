"""Quantized replacements of `nn.Linear`, created from a weight or from the tensors of a saved quantized weight."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional

from trainwright.bigmodels.maps.sizes import CustomDtype, DType
from trainwright.core.errors import CheckpointError, ConfigurationError, load_torchao, require_package

TORCHAO_TYPES = ("int8_weight_only", "int8_dynamic", "float8_weight_only", "int4_weight_only")

Parts = Mapping[str, torch.Tensor]
"""A layer's tensors in a checkpoint by name: `"weight"`, `"bias"`, and the tensors of a quantized weight."""


class QuantizedLayers(ABC):
    """A factory of quantized linear layers.

    Attributes:
        width: Dtype of a quantized weight, from which the size of a layer is computed.
        extra_keys: Names of the tensors that a saved layer has in addition to `"weight"` and `"bias"`. If a checkpoint
            has one of them for a layer, the layer's weight in the checkpoint is already quantized.
        bnb: The module `bitsandbytes`. Layers of torchao do not set it.
    """

    width: DType
    extra_keys: tuple[str, ...]
    bnb: Any

    def check(self, device: torch.device) -> None:
        """Raise ConfigurationError if the layers cannot run on a device."""
        known = getattr(self.bnb, "supported_torch_devices", None)
        if known is not None and device.type not in known:
            raise ConfigurationError(
                f"bitsandbytes has no backend for {device.type}; it has {', '.join(sorted(known))}. Use another device."
            )

    @abstractmethod
    def make(self, linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """Return a quantized copy of `linear` on `device` with the values in `parts`. Blocks.

        Args:
            linear: A linear layer on any device. Only its sizes and dtypes are used.
            parts: The values. The weight may be quantized already, see `extra_keys`.
            device: The device of the new layer.
            dtype: Dtype of the bias, and of the weight before its quantization. None: those of `linear` or of the
                values, depending on the backend.

        Raises:
            CheckpointError: `parts` does not match `linear`, or lacks a tensor.
            ConfigurationError: The backend does not support the layer's size.
        """

    def make_offloaded(self, linear: nn.Linear, parts: Parts) -> nn.Module | None:
        """Return a quantized copy of `linear` that supports offloading, or None if the backend has no such layer.

        Raises:
            CheckpointError: `parts` does not match `linear`.
        """
        return None


def _check_shape(linear: nn.Linear, weight: torch.Tensor) -> torch.Tensor:
    """Return a weight that is not quantized. Raise CheckpointError if it does not match `linear`."""
    if weight.shape != linear.weight.shape or not weight.is_floating_point():
        raise CheckpointError(
            f"the checkpoint has a weight of {weight.dtype} {tuple(weight.shape)}, expected a floating-point one of "
            f"{tuple(linear.weight.shape)}."
        )
    return weight


def _bias(linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter | None:
    """Return the bias of a new layer, or None if `linear` has none."""
    if "bias" not in linear._parameters or linear._parameters["bias"] is None:
        return None
    if "bias" not in parts:
        raise CheckpointError("the checkpoint contains the weight of this layer but not its bias. Pass another one.")
    bias = parts["bias"].to(device, dtype or linear.bias.dtype, copy=True)
    return nn.Parameter(bias, requires_grad=False)


class Bnb8Bit(QuantizedLayers):
    """int8 layers of bitsandbytes with a scale per row. Large activations are computed in floating point."""

    width: DType = torch.int8
    extra_keys = ("SCB", "weight_format")

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.bnb: Any = require_package("bitsandbytes", purpose="quantization in 8 bits")

    def make(self, linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """Return a `Linear8bitLt`."""
        layer = self.bnb.nn.Linear8bitLt(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            has_fp16_weights=False,
            threshold=self.threshold,
            device="meta",
        )
        if "SCB" in parts:  # already quantized. SCB is the scale of each row, CB the int8 weight.
            weight = parts["weight"].to(device, copy=True)
            scale = parts["SCB"].to(device, copy=True)
            layer.weight = self.bnb.nn.Int8Params(
                weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=scale
            )
        else:
            weight = _check_shape(linear, parts["weight"]).to(torch.float16)
            # `to` quantizes the weight.
            layer.weight = self.bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(device)
        layer.bias = _bias(linear, parts, device, dtype)
        return cast("nn.Module", layer)

    def make_offloaded(self, linear: nn.Linear, parts: Parts) -> nn.Module | None:
        """Return an `Int8Linear`."""
        if "SCB" in parts:  # the largest absolute value of each row, which int8 stores as 127
            return Int8Linear(linear, parts["weight"], parts["SCB"] / 127, parts.get("bias"))
        weight = _check_shape(linear, parts["weight"]).float()
        # Clamped, because a row of zeros would be divided by 0.
        scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return Int8Linear(linear, (weight / scale[:, None]).round().to(torch.int8), scale, parts.get("bias"))


class Int8Linear(nn.Module):
    """A linear layer with int8 weights and a scale per row: row `i` of the weight is `weight[i] * scale[i]`.

    Its tensors are parameters without gradients, so that hooks can offload them. The output has the dtype of the input.

    Args:
        linear: A layer with the same sizes.
        weight: int8 of (out, in). Used without a copy if it is contiguous.
        scale: Scale of each row, of (out,).
        bias: Copied. None for a layer without a bias.
    """

    def __init__(self, linear: nn.Linear, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.scale = nn.Parameter(scale.float(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (…, out) for inputs of (…, in)."""
        result = functional.linear(inputs, self.weight.to(inputs.dtype)) * self.scale.to(inputs.dtype)
        return result if self.bias is None else result + self.bias.to(inputs.dtype)


def to_absmax(scale: torch.Tensor) -> torch.Tensor:
    """Convert the scale of an `Int8Linear` exactly to that of bitsandbytes, which is 127 times larger."""
    return scale * 127


def is_quantized(module: nn.Module) -> bool:
    """Return whether a module is a quantized linear layer. False for torchao, which quantizes only the weight."""
    return isinstance(module, Int8Linear) or type(module).__module__.startswith("bitsandbytes.")


_PACKED_ROWS = 32  # rows of a weight that bitsandbytes packs together for the CPU; see `unpack_4bit_weights`


class Bnb4Bit(QuantizedLayers):
    """4-bit layers of bitsandbytes."""

    width: DType = CustomDtype.INT4

    def __init__(self, quant_type: str, double_quant: bool, compute_dtype: torch.dtype) -> None:
        self.quant_type = quant_type
        self.double_quant = double_quant
        self.compute_dtype = compute_dtype
        self.extra_keys = (
            *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
            f"weight.quant_state.bitsandbytes__{quant_type}",
        )
        self.bnb: Any = require_package("bitsandbytes", purpose="quantization in 4 bits")

    def make(self, linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """Return a `Linear4bit`."""
        layer = self.bnb.nn.Linear4bit(
            linear.in_features,
            linear.out_features,
            linear.bias is not None,
            compute_dtype=self.compute_dtype,
            compress_statistics=self.double_quant,
            quant_type=self.quant_type,
            device="meta",
        )
        extra = {key: parts[key].clone() for key in self.extra_keys if key in parts}
        if extra:  # already quantized
            layer.weight = self.bnb.nn.Params4bit.from_prequantized(
                parts["weight"].clone(), extra, device=device, module=layer
            )
        else:
            weight = _check_shape(linear, parts["weight"])
            layer.weight = self.bnb.nn.Params4bit(
                weight.to(dtype or weight.dtype).contiguous(),
                requires_grad=False,
                quant_type=self.quant_type,
                compress_statistics=self.double_quant,
                module=layer,
            ).to(device)  # `to` quantizes the weight
        layer.bias = _bias(linear, parts, device, dtype)
        state = layer.weight.quant_state
        if linear.out_features % _PACKED_ROWS or linear.in_features % state.blocksize:
            layer.support_avx512bf16_for_cpu = False  # a layer of this size cannot be packed
        # For `unpack_4bit_weights`. A shallow copy: packing replaces the tensors of the state, so that the copy takes
        # memory only afterwards.
        state.trainwright_unpacked = copy.copy(state)
        layer.register_state_dict_pre_hook(_unpack_first)
        return cast("nn.Module", layer)


def unpack_4bit_weights(model: nn.Module) -> None:
    """Undo bitsandbytes' packing of 4-bit weights for CPUs with bfloat16 instructions.

    bitsandbytes packs weights in the first forward without gradients, with transposed scales in bfloat16. It unpacks
    them for a state dict, but does not convert the scales back, so that the state dict and the model become wrong
    (bitsandbytes 0.49, `_convert_weight_packed_for_cpu_inverse`). This function restores the original scales. For a
    layer that was not created here, it converts the packed scales. The next forward packs the weights again.
    """
    for module in model.modules():
        state = getattr(module._parameters.get("weight"), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            _unpack(module.weight, state)


def _unpack(weight: Any, state: Any) -> None:
    scratch = copy.copy(state)  # the function below changes it. Only the weight that it returns is used.
    scratch.original_nested = False  # do not quantize its scales, which are not used
    functions: Any = require_package("bitsandbytes.functional", purpose="a model in 4 bits")
    weight.data, _ = functions._convert_weight_packed_for_cpu_inverse(weight.data, scratch)
    unpacked = getattr(state, "trainwright_unpacked", None)
    if unpacked is None:  # not created by `Bnb4Bit`. The rounding of the scales to bfloat16 remains.
        state.absmax = state.absmax.T.float().flatten()
        state.dtype = state.original_dtype
    else:
        unpacked = copy.copy(unpacked)  # `to` replaces its tensors
        unpacked.to(weight.device)
        vars(state).update(vars(unpacked))
    state.packing_format_for_cpu = False


def _unpack_first(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Unpack a layer's weight before bitsandbytes unpacks it for a state dict."""
    unpack_4bit_weights(module)


class Torchao(QuantizedLayers):
    """Layers of torchao: ordinary `nn.Linear` modules whose weights are tensor subclasses."""

    def __init__(self, quant_type: str, group_size: int) -> None:
        self.quant_type = quant_type
        self.group_size = group_size
        self.width: DType = CustomDtype.INT4 if quant_type.startswith("int4") else torch.int8
        self.extra_keys = tuple(f"weight.{key}" for key in ("qdata", "scale", "zero_point"))
        self.torchao: Any = load_torchao(f"quant_type={quant_type!r}")

    def check(self, device: torch.device) -> None:
        """Raise an error for int4 on devices other than CUDA and XPU, for which torchao has no int4 kernels."""
        if self.quant_type == "int4_weight_only" and device.type not in ("cuda", "xpu"):
            raise ConfigurationError(
                f"torchao has no int4 kernels for {device.type}. Use quant_type='int8_weight_only', or bitsandbytes: "
                "BnbQuantizationConfig(load_in_4bit=True)."
            )

    def make(self, linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """Return an `nn.Linear` with a quantized weight."""
        dtype = dtype or linear.weight.dtype
        layer: Any = nn.Linear(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta", dtype=dtype
        )
        saved = {key.removeprefix("weight."): parts[key] for key in self.extra_keys if key in parts}
        if saved:  # already quantized. Zeros are quantized, and then replaced by the saved tensors.
            weight = torch.zeros(layer.weight.shape, dtype=dtype, device=device)
        else:
            weight = _check_shape(linear, parts["weight"]).to(device, dtype, copy=True)
        layer.weight = nn.Parameter(weight, requires_grad=False)
        layer.bias = _bias(linear, parts, device, dtype)
        plain = type(layer.weight.data)
        self.torchao.quantization.quantize_(layer, self._config())
        if type(layer.weight.data) is plain:  # torchao skips sizes that it does not support, without an error
            raise ConfigurationError(
                f"quant_type={self.quant_type!r} does not support a layer of {linear.in_features} × "
                f"{linear.out_features}: its size is not a multiple of group_size={self.group_size}. Add it to "
                "skip_modules, or use a smaller group_size."
            )
        if saved:
            layer.weight = nn.Parameter(_with_values(layer.weight.data, saved, device), requires_grad=False)
        return cast("nn.Module", layer)

    def _config(self) -> Any:
        kinds = self.torchao.quantization
        if self.quant_type == "int4_weight_only":
            return kinds.Int4WeightOnlyConfig(group_size=self.group_size, version=2)
        names = {
            "int8_weight_only": "Int8WeightOnlyConfig",
            "int8_dynamic": "Int8DynamicActivationInt8WeightConfig",
            "float8_weight_only": "Float8WeightOnlyConfig",
        }
        return getattr(kinds, names[self.quant_type])(version=2)  # default of torchao 0.17: version 1, nested tensors


def _with_values(weight: Any, values: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a tensor of the same class and settings as `weight` with the inner tensors in `values`.

    Raises:
        CheckpointError: An inner tensor is not in `values`.
    """
    names, settings = weight.__tensor_flatten__()
    template = {name: getattr(weight, name) for name in names}
    missing = [name for name, inner in template.items() if inner is not None and name not in values]
    if missing:
        raise CheckpointError(
            f"a saved weight lacks {', '.join(missing)}. Use the quantization configuration that it was saved with."
        )
    inner_tensors: dict[str, torch.Tensor | None] = {}
    for name, inner in template.items():
        if inner is None:
            inner_tensors[name] = None
        else:
            inner_tensors[name] = values[name].to(device, copy=True).view(inner.shape)
    new: torch.Tensor = type(weight).__tensor_unflatten__(inner_tensors, settings, weight.shape, weight.stride())
    return new


def flatten_quantized(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Replace the tensor subclasses in a state dict by their inner tensors, under dotted names."""
    flat: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if type(tensor) in (torch.Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
            flat[name] = tensor
            continue
        inner_names, _ = tensor.__tensor_flatten__()
        for inner in inner_names:
            value = getattr(tensor, inner)
            if value is not None:
                flat[f"{name}.{inner}"] = value
    return flat
