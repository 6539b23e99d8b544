"""Loading of a model, and quantization of its linear layers to 8 or 4 bits with bitsandbytes or torchao."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trainwright.bigmodels.dispatch.attach import innermost
from trainwright.bigmodels.dispatch.dispatch import choose_main_device, dispatch_model
from trainwright.bigmodels.dispatch.model_weights import PathLike
from trainwright.bigmodels.dispatch.undo import restored_on_failure
from trainwright.bigmodels.dispatch.weight_places import WeightPlaces
from trainwright.bigmodels.maps.device_map import resolve_device_map
from trainwright.bigmodels.maps.sizes import DType, find_tied_parameters
from trainwright.bigmodels.quantization.quantized_layers import (
    TORCHAO_TYPES,
    Bnb4Bit,
    Bnb8Bit,
    QuantizedLayers,
    Torchao,
    flatten_quantized,
    is_quantized,
    unpack_4bit_weights,
)
from trainwright.bigmodels.weights.moving import Device, check_available, default_device, to_device
from trainwright.bigmodels.weights.stored_weights import StoredWeights, read_checkpoint
from trainwright.core.errors import CheckpointError, ConfigurationError, nearest
from trainwright.core.host.device_types import properties

_COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """Quantization with bitsandbytes. Set either `load_in_8bit` or `load_in_4bit` to True.

    Attributes:
        load_in_8bit: Use int8 weights with a scale per row.
        llm_int8_threshold: With 8 bits, input columns with an activation above this threshold are multiplied in the
            dtype of the input. 0 multiplies all columns in int8.
        load_in_4bit: Use 4-bit weights with a scale per block of 64.
        bnb_4bit_quant_type: `"fp4"`, or `"nf4"` (NormalFloat), which is better for normally distributed weights.
        bnb_4bit_use_double_quant: Also quantize the scales.
        bnb_4bit_compute_dtype: Dtype of the multiplication: `"fp16"`, `"bf16"`, `"fp32"`, or a torch dtype.
        torch_dtype: Dtype of tensors that are not quantized, in the same form as `bnb_4bit_compute_dtype`. Default:
            float16 for 8 bits, and the compute dtype for 4 bits.
        skip_modules: Names of modules (parts of dotted names) that are not quantized. `[]` skips no module. Default:
            the model's last child, and modules with tied weights.
        keep_in_fp32_modules: Names of modules that are not quantized and are converted to float32.

    Raises:
        ConfigurationError: Both or neither of `load_in_8bit` and `load_in_4bit` are True, or a type or dtype is
            unknown.
    """

    load_in_8bit: bool = False
    llm_int8_threshold: float = 6.0
    load_in_4bit: bool = False
    bnb_4bit_quant_type: str = "fp4"
    bnb_4bit_use_double_quant: bool = False
    bnb_4bit_compute_dtype: str | torch.dtype = "fp16"
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        for name in ("load_in_8bit", "load_in_4bit", "bnb_4bit_use_double_quant"):
            if not isinstance(getattr(self, name), bool):  # a text such as "False" would count as True
                raise ConfigurationError(f"{name}={getattr(self, name)!r}, expected True or False.")
        if self.load_in_8bit == self.load_in_4bit:
            raise ConfigurationError(
                f"load_in_8bit={self.load_in_8bit} and load_in_4bit={self.load_in_4bit}: set one of them to True."
            )
        if self.bnb_4bit_quant_type not in ("fp4", "nf4"):
            raise ConfigurationError(f"bnb_4bit_quant_type={self.bnb_4bit_quant_type!r}, expected 'fp4' or 'nf4'.")
        self.bnb_4bit_compute_dtype = _to_dtype("bnb_4bit_compute_dtype", self.bnb_4bit_compute_dtype)
        if self.torch_dtype is None:
            self.torch_dtype = torch.float16 if self.load_in_8bit else self.bnb_4bit_compute_dtype
        self.torch_dtype = _to_dtype("torch_dtype", self.torch_dtype)
        _check_names(self)

    def layers(self) -> QuantizedLayers:
        """Return the factory of quantized layers."""
        if self.load_in_8bit:
            return Bnb8Bit(self.llm_int8_threshold)
        assert isinstance(self.bnb_4bit_compute_dtype, torch.dtype)
        return Bnb4Bit(self.bnb_4bit_quant_type, self.bnb_4bit_use_double_quant, self.bnb_4bit_compute_dtype)


@dataclass
class TorchaoQuantizationConfig:
    """Quantization with torchao.

    Attributes:
        quant_type: `"int8_weight_only"`, `"int8_dynamic"` (also quantizes the activations of each row in the forward),
            `"float8_weight_only"`, or `"int4_weight_only"` (on accelerators for which torchao has kernels).
        group_size: Number of int4 weights that share a scale. The input width of a layer must be a multiple of
            `group_size`. Other types need the default.
        torch_dtype: Dtype of computations, and of tensors that are not quantized: a torch dtype, or a name such as
            `"bf16"`. Default: the dtype of the model.
        skip_modules, keep_in_fp32_modules: See `BnbQuantizationConfig`.

    Raises:
        ConfigurationError: A type or dtype is unknown, or `group_size` is set for a type other than int4.
    """

    quant_type: Literal["int8_weight_only", "int8_dynamic", "float8_weight_only", "int4_weight_only"] = (
        "int8_weight_only"
    )
    group_size: int = 128
    torch_dtype: str | torch.dtype | None = None
    skip_modules: list[str] | None = None
    keep_in_fp32_modules: list[str] | None = None

    def __post_init__(self) -> None:
        if self.quant_type not in TORCHAO_TYPES:
            raise ConfigurationError(
                f"quant_type={self.quant_type!r} is unknown.{nearest(self.quant_type, TORCHAO_TYPES)} Expected one of "
                f"{', '.join(map(repr, TORCHAO_TYPES))}."
            )
        if self.group_size != 128 and self.quant_type != "int4_weight_only":
            raise ConfigurationError(
                f"group_size={self.group_size} needs quant_type='int4_weight_only'; {self.quant_type!r} has a scale "
                "for each row. Remove group_size."
            )
        if self.torch_dtype is not None:
            self.torch_dtype = _to_dtype("torch_dtype", self.torch_dtype)
        _check_names(self)

    def layers(self) -> QuantizedLayers:
        """Return the factory of quantized layers."""
        return Torchao(self.quant_type, self.group_size)


QuantizationConfig = BnbQuantizationConfig | TorchaoQuantizationConfig


def _to_dtype(argument: str, dtype: object) -> torch.dtype:
    """Convert `"bf16"` or `"bfloat16"` to a dtype. Raise ConfigurationError for other values."""
    found = dtype
    if isinstance(dtype, str):
        found = _COMPUTE_DTYPES.get(dtype, getattr(torch, dtype, None))
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            f"{argument}={dtype!r}, expected one of {', '.join(map(repr, _COMPUTE_DTYPES))} or a floating-point dtype "
            "of torch."
        )
    return found


def _check_names(config: QuantizationConfig) -> None:
    for argument in ("skip_modules", "keep_in_fp32_modules"):
        names = getattr(config, argument)
        if isinstance(names, str):  # its letters would count as names
            raise ConfigurationError(f"{argument}={names!r}, expected a list of names of modules, such as ['lm_head'].")


def load_and_quantize_model(
    model: nn.Module,
    bnb_quantization_config: QuantizationConfig,
    weights_location: PathLike | None = None,
    device_map: str | Mapping[str, Device] | None = None,
    no_split_module_classes: list[str] | None = None,
    max_memory: Mapping[int | str, int | str] | None = None,
    offload_folder: PathLike | None = None,
    offload_state_dict: bool = False,
) -> nn.Module:
    """Load a model's weights and quantize its linear layers one at a time.

    With 8-bit bitsandbytes, layers that are offloaded to the CPU or the disk have int8 weights with a scale per row.
    With other configurations, offloaded layers are not quantized and have `torch_dtype`.

    Args:
        model: The model, which is changed. With `weights_location`, the model may be on the meta device, or quantized
            by an earlier call. Without `weights_location`, the weights of the model are quantized.
        bnb_quantization_config: A `BnbQuantizationConfig` or `TorchaoQuantizationConfig`.
        weights_location: See `load_checkpoint_in_model`. May be a quantized model that `save_model` wrote with the same
            configuration. Its layers are not quantized again.
        device_map: See `load_checkpoint_and_dispatch`. Default: the model's accelerator, or the current one, or the CPU
            without an accelerator.
        no_split_module_classes, max_memory: See `load_checkpoint_and_dispatch`.
        offload_folder: See `load_checkpoint_and_dispatch`. Also required for int8 layers on the disk.
        offload_state_dict: Accepted without effect: the state dict is never in memory as a whole.

    Returns:
        The model.

    Raises:
        ConfigurationError: The backend does not support the device or the size of a layer, the model has no layer to
            quantize, the device map is invalid, or a folder or `weights_location` is required.
        CheckpointError: Weights are missing, or do not match the model. The model is as before.
        MissingPackageError: bitsandbytes or torchao is not installed.
    """
    config = bnb_quantization_config
    layers = config.layers()
    dtype = config.torch_dtype
    assert not isinstance(dtype, str)  # __post_init__ has converted it
    stored = _stored_weights(model, weights_location)
    linears = _linears_to_quantize(model, config, may_be_quantized=weights_location is not None)
    resolved = _resolve_map(model, config, linears, layers, device_map, no_split_module_classes, max_memory)
    check_available(resolved)
    runs_on = choose_main_device(list(resolved.values()))
    layers.check(runs_on)
    # All layers are created before the model is changed, so that most errors leave the model as it is.
    quantized: dict[str, nn.Module] = {}
    for name, linear in linears.items():
        device = resolved[innermost(name, resolved) or ""]
        # On unified memory, and if the CPU runs the model, layers on the CPU are not offloaded.
        is_offloaded = device == "disk" or (device == "cpu" and not properties(runs_on.type).is_unified)
        parts = _parts(name, stored, layers)
        layer: nn.Module | None
        try:
            if is_offloaded:
                layer = layers.make_offloaded(linear, parts)
            else:
                layer = layers.make(linear, parts, to_device(device), dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{name}.weight: {error}") from error
        if layer is not None:
            quantized[name] = layer
        elif any(key in parts for key in layers.extra_keys):
            raise ConfigurationError(
                f"{name} is quantized in {weights_location}, and the map puts it on {device!r}, which only supports "
                "int8 layers of bitsandbytes. Map it to an accelerator, or load the original weights."
            )
    with restored_on_failure(model):
        _load_rest(model, config, dtype, stored, quantized, resolved, weights_location, offload_folder)
        return dispatch_model(model, resolved, offload_dir=offload_folder)


def _stored_weights(model: nn.Module, weights_location: PathLike | None) -> StoredWeights:
    """Return the weights of a checkpoint, or without one the values of the model."""
    if weights_location is not None:
        return read_checkpoint(Path(weights_location))
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if empty:
        raise ConfigurationError(
            f"{len(empty)} tensors of the model are on the meta device, {empty[0]!r} first. Pass weights_location, a "
            "file or folder with their values."
        )
    stored = StoredWeights()
    for name, tensor in model.state_dict().items():
        stored.add(name, tensor.detach())
    return stored


def _linears_to_quantize(
    model: nn.Module, config: QuantizationConfig, *, may_be_quantized: bool
) -> dict[str, nn.Linear]:
    """Return the linear layers to quantize, by name.

    With `may_be_quantized`, layers that an earlier call quantized are included, as linear layers on the meta device.

    Raises:
        ConfigurationError: The model has no layer to quantize.
    """
    skip = default_skip_modules(model) if config.skip_modules is None else config.skip_modules
    skipped = [*skip, *(config.keep_in_fp32_modules or ())]
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if any(f".{each}." in f".{name}." for each in skipped):
            continue
        if type(module) is nn.Linear:
            found[name] = module
        elif may_be_quantized and is_quantized(module):
            layer: Any = module  # `Int8Linear`, or a layer of bitsandbytes
            has_bias = layer.bias is not None
            found[name] = nn.Linear(layer.in_features, layer.out_features, has_bias, device="meta")
    if not found:
        raise ConfigurationError(
            f"there is no layer to quantize: the model has no nn.Linear outside of {skipped}. Pass fewer skip_modules."
        )
    return found


def default_skip_modules(model: nn.Module) -> list[str]:
    """Return the modules that are most sensitive to quantization: the model's last child, and modules with ties.

    The last child is usually the output layer. Names are sorted.
    """
    tied = {name.rpartition(".")[0] for group in find_tied_parameters(model) for name in group}
    last = [name for name, _ in model.named_children()][-1:]
    return sorted(tied | set(last))


def _resolve_map(
    model: nn.Module,
    config: QuantizationConfig,
    linears: Mapping[str, nn.Linear],
    layers: QuantizedLayers,
    device_map: str | Mapping[str, Device] | None,
    no_split_module_classes: list[str] | None,
    max_memory: Mapping[int | str, int | str] | None,
) -> dict[str, Device]:
    """Return the device map, which is computed for the sizes of quantized layers if `device_map` is a word."""
    if device_map is None:
        first = next(model.parameters(), None)
        if first is not None and first.device.type not in ("cpu", "meta"):
            return {"": first.device}
        return {"": default_device()}
    special: dict[str, DType] = {f"{name}.weight": layers.width for name in linears}
    for name, _ in model.named_parameters():
        if any(f".{each}." in f".{name}" for each in config.keep_in_fp32_modules or ()):
            special[name] = torch.float32
    found = resolve_device_map(
        model,
        device_map,
        max_memory=max_memory,
        no_split_module_classes=no_split_module_classes,
        dtype=config.torch_dtype,
        special_dtypes=special,
    )
    return dict(found)


def _parts(name: str, stored: StoredWeights, layers: QuantizedLayers) -> dict[str, torch.Tensor]:
    """Return the tensors of a linear layer in a checkpoint: `"weight"`, `"bias"`, and parts of a quantized weight."""
    prefix = f"{name}."
    parts: dict[str, torch.Tensor] = {}
    for key in ("weight", "bias", *layers.extra_keys):
        if prefix + key in stored:
            parts[key] = stored[prefix + key]
    # A quantized weight of torchao has only the extra keys.
    if "weight" not in parts and not any(key in parts for key in layers.extra_keys):
        raise CheckpointError(f"{prefix}weight, which is to be quantized, is not in the checkpoint. Pass another one.")
    return parts


def _load_rest(
    model: nn.Module,
    config: QuantizationConfig,
    dtype: torch.dtype | None,
    stored: StoredWeights,
    quantized: Mapping[str, nn.Module],
    device_map: Mapping[str, Device],
    weights_location: PathLike | None,
    offload_folder: PathLike | None,
) -> None:
    """Load the weights that are not quantized, then insert the quantized layers."""
    rest = StoredWeights()
    for name, tensor in stored.items():
        if not any(name.startswith(f"{module}.") for module in quantized):
            rest.add(name, tensor, stored.locate(name))
    was_training = {name: model.get_submodule(name).training for name in quantized}
    for name in quantized:
        model.set_submodule(name, nn.Identity())  # `fill` then finds no weights of these layers
    WeightPlaces(model, device_map, folder=offload_folder).fill(
        rest,
        str(weights_location or "the model itself"),
        dtype=dtype,
        keep_in_fp32=config.keep_in_fp32_modules or (),
        strict=False,
    )
    for name, module in quantized.items():
        model.set_submodule(name, module.train(was_training[name]))


def quantized_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a quantized model with plain tensors, which can be saved in any format.

    4-bit weights that bitsandbytes has packed for the CPU are unpacked in the model. The tensors of a torchao weight
    get separate names: `"weight.qdata"`, `"weight.scale"`, and so on.
    """
    unpack_4bit_weights(model)
    return flatten_quantized(model.state_dict())
