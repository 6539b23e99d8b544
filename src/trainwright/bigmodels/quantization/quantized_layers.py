"""The layers that stand for `nn.Linear` in a quantized model, made from a weight or from the pieces of a saved one."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn import functional

from trainwright.bigmodels.maps.sizes import CustomDtype, DType
from trainwright.core.errors import CheckpointError, ConfigurationError, load_torchao, require_package

TORCHAO_TYPES = ("int8_weight_only", "int8_dynamic", "float8_weight_only", "int4_weight_only")

Parts = Mapping[str, torch.Tensor]
"""`"weight"` and `"bias"` of a layer as a checkpoint has them, and the pieces of a weight that is quantized there."""


class QuantizedLayers(Protocol):
    """One way to quantize linear layers.

    Attributes:
        width: of a weight's element, for sizes.
        pieces: what a saved layer has beside `"weight"` and `"bias"`.
    """

    width: DType
    pieces: tuple[str, ...]

    def check(self, device: torch.device) -> None:
        """Raise ConfigurationError where this cannot run on a device."""

    def make(self, linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """Return the layer for `linear`, which is not changed, with its weights on `device`; blocks."""

    def make_offloaded(self, linear: nn.Linear, parts: Parts) -> nn.Module | None:
        """Return a layer that may be brought to a device for each forward; None to leave it as it is."""


def _check_shape(linear: nn.Linear, weight: torch.Tensor) -> torch.Tensor:
    if weight.shape != linear.weight.shape or not weight.is_floating_point():
        raise CheckpointError(
            f"the checkpoint has a weight of {weight.dtype} {tuple(weight.shape)}, expected a floating-point one of "
            f"{tuple(linear.weight.shape)}."
        )
    return weight


def _bias(linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter | None:
    if "bias" not in linear._parameters or linear._parameters["bias"] is None:
        return None
    if "bias" not in parts:
        raise CheckpointError("the checkpoint has the weight of a layer and not its bias.")
    bias = parts["bias"].to(device, dtype or linear.bias.dtype, copy=True)
    return nn.Parameter(bias, requires_grad=False)


class Bnb8Bit:
    """bitsandbytes' int8 layers: a scale per row, large activations apart."""

    width: DType = torch.int8
    pieces: tuple[str, ...] = ("SCB", "weight_format")

    def __init__(self, threshold: float) -> None:
        self.threshold = threshold
        self.bnb: Any = require_package("bitsandbytes", purpose="quantization in 8 bits")

    def check(self, device: torch.device) -> None:
        """Every device that bitsandbytes has a backend for."""
        _check_backend(self.bnb, device)

    def make(self, linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """Return a `Linear8bitLt`."""
        made = self.bnb.nn.Linear8bitLt(
            linear.in_features, linear.out_features, linear.bias is not None, has_fp16_weights=False,
            threshold=self.threshold, device="meta",
        )  # fmt: skip
        if "SCB" in parts:
            weight, scale = (parts[key].to(device, copy=True) for key in ("weight", "SCB"))
            made.weight = self.bnb.nn.Int8Params(
                weight, requires_grad=False, has_fp16_weights=False, CB=weight, SCB=scale
            )
        else:
            weight = _check_shape(linear, parts["weight"]).to(torch.float16)
            made.weight = self.bnb.nn.Int8Params(weight, requires_grad=False, has_fp16_weights=False).to(device)
        made.bias = _bias(linear, parts, device, dtype)
        layer: nn.Module = made
        return layer

    def make_offloaded(self, linear: nn.Linear, parts: Parts) -> nn.Module | None:
        """Return an `Int8Linear`."""
        if "SCB" in parts:
            return Int8Linear(linear, parts["weight"], parts["SCB"] / 127, parts.get("bias"))
        weight = _check_shape(linear, parts["weight"]).float()
        scale = weight.abs().amax(dim=1).clamp(min=torch.finfo(torch.float32).tiny) / 127
        return Int8Linear(linear, (weight / scale[:, None]).round().to(torch.int8), scale, parts.get("bias"))


class Int8Linear(nn.Module):
    """A linear layer of int8 weights with a scale per row. What it computes has the dtype of its input.

    Args:
        linear: for its sizes.
        weight: int8 (out, in).
        scale: float32 (out,): the weight is `weight * scale`.
        bias: (out,), or None.
    """

    def __init__(self, linear: nn.Linear, weight: torch.Tensor, scale: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight = nn.Parameter(weight.contiguous(), requires_grad=False)
        self.scale = nn.Parameter(scale.float(), requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias.clone(), requires_grad=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Return (…, out) for inputs of (…, in)."""
        result = functional.linear(inputs, self.weight.to(inputs.dtype)) * self.scale.to(inputs.dtype)
        return result if self.bias is None else result + self.bias.to(inputs.dtype)


def to_absmax(scale: torch.Tensor) -> torch.Tensor:
    """Return what bitsandbytes keeps for an `Int8Linear`'s scale (out,): it divides by 127, and gets the same bits."""
    return scale * 127


def is_quantized(module: nn.Module) -> bool:
    """Say whether a module is what stands here for a linear layer in 8 or 4 bits, torchao's plain ones left out."""
    return isinstance(module, Int8Linear) or type(module).__module__.startswith("bitsandbytes.")


def plain_linear(module: Any) -> nn.Linear:
    """Return an empty layer of the sizes that a quantized one has."""
    return nn.Linear(module.in_features, module.out_features, module.bias is not None, device="meta")


_PACKED_ROWS = 32  # of weights that bitsandbytes packs together for a CPU


class Bnb4Bit:
    """bitsandbytes' 4-bit layers."""

    width: DType = CustomDtype.INT4
    pieces: tuple[str, ...]

    def __init__(self, quant_type: str, double_quant: bool, compute_dtype: torch.dtype) -> None:
        self.quant_type, self.double_quant, self.compute_dtype = quant_type, double_quant, compute_dtype
        self.pieces = (
            *("weight.absmax", "weight.quant_map", "weight.nested_absmax", "weight.nested_quant_map"),
            f"weight.quant_state.bitsandbytes__{quant_type}",
        )
        self.bnb: Any = require_package("bitsandbytes", purpose="quantization in 4 bits")

    def check(self, device: torch.device) -> None:
        """Every device that bitsandbytes has a backend for."""
        _check_backend(self.bnb, device)

    def make(self, linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """Return a `Linear4bit`."""
        made = self.bnb.nn.Linear4bit(
            linear.in_features, linear.out_features, linear.bias is not None, compute_dtype=self.compute_dtype,
            compress_statistics=self.double_quant, quant_type=self.quant_type, device="meta",
        )  # fmt: skip
        pieces = {key: parts[key] for key in self.pieces if key in parts}
        if pieces:
            made.weight = self.bnb.nn.Params4bit.from_prequantized(
                parts["weight"].clone(), {key: piece.clone() for key, piece in pieces.items()}, device=device,
                module=made,
            )  # fmt: skip
        else:
            weight = _check_shape(linear, parts["weight"])
            made.weight = self.bnb.nn.Params4bit(
                weight.to(dtype or weight.dtype).contiguous(), requires_grad=False, quant_type=self.quant_type,
                compress_statistics=self.double_quant, module=made,
            ).to(device)  # fmt: skip
        made.bias = _bias(linear, parts, device, dtype)
        state = made.weight.quant_state
        if linear.out_features % _PACKED_ROWS or linear.in_features % state.blocksize:
            made.support_avx512bf16_for_cpu = False  # such a layer cannot be packed, and computes without
        # Packing puts other tensors into the state, so that keeping these costs memory only from then on.
        state.trainwright_unpacked = copy.copy(state)
        made.register_state_dict_pre_hook(_unpack_first)
        layer: nn.Module = made
        return layer

    def make_offloaded(self, linear: nn.Linear, parts: Parts) -> nn.Module | None:
        """Leave it as it is: 4-bit weights cannot be brought to a device and back."""
        return None


def unpack_4bit_weights(model: nn.Module) -> None:
    """Undo what bitsandbytes does to 4-bit weights for a CPU that multiplies bfloat16, wherever it has been done.

    It packs them at the first forward without gradients, scales in bfloat16 and transposed, and un-packs them for a
    state dict with the scales as they are then: wrong ones, in the model as well (bitsandbytes 0.49,
    `_convert_weight_packed_for_cpu_inverse`). Here scales are again what they were before; those of a layer that
    somebody else made are what it computes with. The next forward packs the weights as before.
    """
    for module in model.modules():
        state = getattr(module._parameters.get("weight"), "quant_state", None)
        if getattr(state, "packing_format_for_cpu", False):
            _unpack(module.weight, state)


def _unpack(weight: Any, state: Any) -> None:
    scratch = copy.copy(state)  # is written to
    scratch.original_nested = False  # else scales would be quantized, to be thrown away
    functions: Any = require_package("bitsandbytes.functional", purpose="a model in 4 bits")
    weight.data, _ = functions._convert_weight_packed_for_cpu_inverse(weight.data, scratch)
    former = getattr(state, "trainwright_unpacked", None)
    if former is None:
        state.absmax = state.absmax.T.float().flatten()
        state.dtype = state.original_dtype
    else:
        former = copy.copy(former)
        former.to(weight.device)
        vars(state).update(vars(former))
    state.packing_format_for_cpu = False


def _unpack_first(module: nn.Module, prefix: str, keep_vars: bool) -> None:
    """Go before a layer's state dict, which would else un-pack the weight in its own way."""
    unpack_4bit_weights(module)


def _check_backend(bnb: Any, device: torch.device) -> None:
    known = getattr(bnb, "supported_torch_devices", None)
    if known is not None and device.type not in known:
        raise ConfigurationError(
            f"bitsandbytes has no backend for {device.type}; it has {', '.join(sorted(known))}. Use another device."
        )


class Torchao:
    """torchao's weights, which are tensor subclasses in an ordinary `nn.Linear`."""

    def __init__(self, quant_type: str, group_size: int) -> None:
        self.quant_type, self.group_size = quant_type, group_size
        self.width: DType = CustomDtype.INT4 if quant_type.startswith("int4") else torch.int8
        self.pieces = tuple(f"weight.{key}" for key in ("qdata", "scale", "zero_point"))
        self.torchao: Any = load_torchao(f"quant_type={quant_type!r}")

    def check(self, device: torch.device) -> None:
        """Int4 needs kernels that there are for CUDA and XPU only."""
        if self.quant_type == "int4_weight_only" and device.type not in ("cuda", "xpu"):
            raise ConfigurationError(
                f"torchao has no int4 kernels for {device.type}. Use quant_type='int8_weight_only', or "
                "BnbQuantizationConfig(load_in_4bit=True), which has."
            )

    def make(self, linear: nn.Linear, parts: Parts, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
        """Return a `nn.Linear` whose weight is quantized."""
        dtype = dtype or linear.weight.dtype
        made: Any = nn.Linear(
            linear.in_features, linear.out_features, linear.bias is not None, device="meta", dtype=dtype
        )
        pieces = {key.removeprefix("weight."): parts[key] for key in self.pieces if key in parts}
        if pieces:
            weight = torch.zeros(made.weight.shape, dtype=dtype, device=device)
        else:
            weight = _check_shape(linear, parts["weight"]).to(device, dtype, copy=True)
        made.weight = nn.Parameter(weight, requires_grad=False)
        made.bias = _bias(linear, parts, device, dtype)
        plain = type(made.weight.data)
        self.torchao.quantization.quantize_(made, self._config())
        if type(made.weight.data) is plain:
            raise ConfigurationError(
                f"quant_type={self.quant_type!r} leaves a layer of {linear.in_features} × {linear.out_features} as it "
                f"is, for it is no multiple of group_size={self.group_size}. Name it in skip_modules, or use a smaller "
                "group_size."
            )
        if pieces:
            made.weight = nn.Parameter(_with_pieces(made.weight.data, pieces, device), requires_grad=False)
        layer: nn.Module = made
        return layer

    def make_offloaded(self, linear: nn.Linear, parts: Parts) -> nn.Module | None:
        """Leave it as it is."""
        return None

    def _config(self) -> Any:
        kinds = self.torchao.quantization
        if self.quant_type == "int4_weight_only":
            return kinds.Int4WeightOnlyConfig(group_size=self.group_size, version=2)
        names = {
            "int8_weight_only": "Int8WeightOnlyConfig",
            "int8_dynamic": "Int8DynamicActivationInt8WeightConfig",
            "float8_weight_only": "Float8WeightOnlyConfig",
        }
        return getattr(kinds, names[self.quant_type])(version=2)  # torchao 0.17 chooses 1: tensors inside of tensors


def _with_pieces(weight: Any, pieces: Mapping[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """Return a tensor of the same class and settings as `weight` with other values."""
    names, settings = weight.__tensor_flatten__()
    own = {name: getattr(weight, name) for name in names}
    missing = [name for name, piece in own.items() if piece is not None and name not in pieces]
    if missing:
        raise CheckpointError(f"a saved weight lacks {', '.join(missing)}: it was quantized in another way.")
    new = {
        name: None if piece is None else pieces[name].to(device, copy=True).view(piece.shape)
        for name, piece in own.items()
    }
    found: torch.Tensor = type(weight).__tensor_unflatten__(new, settings, weight.shape, weight.stride())
    return found


def flatten_quantized(state: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state dict with tensor subclasses in the pieces that they consist of, by dotted names."""
    flat: dict[str, torch.Tensor] = {}
    for name, tensor in state.items():
        if type(tensor) in (torch.Tensor, nn.Parameter) or not hasattr(tensor, "__tensor_flatten__"):
            flat[name] = tensor
            continue
        for piece in tensor.__tensor_flatten__()[0]:
            value = getattr(tensor, piece)
            if value is not None:
                flat[f"{name}.{piece}"] = value
    return flat
