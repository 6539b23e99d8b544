"""Load a model with the weights of its linear layers in 8 or 4 bits: bitsandbytes or torchao, one layer at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from trainwright.bigmodels.dispatch.attach import innermost
from trainwright.bigmodels.dispatch.dispatch import dispatch_model
from trainwright.bigmodels.dispatch.loading import PathLike, load_stored_weights
from trainwright.bigmodels.dispatch.undo import restored_on_failure
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
    plain_linear,
    unpack_4bit_weights,
)
from trainwright.bigmodels.weights.moving import Device, check_present, default_device, to_device
from trainwright.bigmodels.weights.stored_weights import StoredWeights, read_checkpoint
from trainwright.core.errors import CheckpointError, ConfigurationError, nearest
from trainwright.core.host.device_types import properties

_COMPUTE_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass
class BnbQuantizationConfig:
    """How bitsandbytes quantizes a model; one of the first two must be True.

    Attributes:
        load_in_8bit: int8 weights with a scale per row; activations beyond the threshold are computed in `torch_dtype`.
        llm_int8_threshold: that threshold.
        load_in_4bit: 4-bit weights with a scale per block of 64.
        bnb_4bit_quant_type: `"fp4"` or `"nf4"` (NormalFloat, the better one for weights of a normal distribution).
        bnb_4bit_use_double_quant: quantize the scales too.
        bnb_4bit_compute_dtype: of the multiplication: `"fp16"`, `"bf16"`, `"fp32"`, or a dtype of torch.
        torch_dtype: of everything that is not quantized, written as the compute dtype is; float16 for 8 bits, the
            compute dtype for 4 bits unless given.
        skip_modules: names of modules (parts of dotted names) that are not quantized; unless given, the last module and
            those with tied weights. `[]` skips none.
        keep_in_fp32_modules: names of modules that are not quantized and stay float32.

    Raises:
        ConfigurationError: both or neither width, or a type or dtype that there is not.
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
            if not isinstance(getattr(self, name), bool):
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
        """Return what makes the quantized layers."""
        if self.load_in_8bit:
            return Bnb8Bit(self.llm_int8_threshold)
        assert isinstance(self.bnb_4bit_compute_dtype, torch.dtype)
        return Bnb4Bit(self.bnb_4bit_quant_type, self.bnb_4bit_use_double_quant, self.bnb_4bit_compute_dtype)


@dataclass
class TorchaoQuantizationConfig:
    """How torchao quantizes a model.

    Attributes:
        quant_type: `"int8_weight_only"`, `"int8_dynamic"` (activations too, by row, as they come),
            `"float8_weight_only"`, or `"int4_weight_only"` (on accelerators that torchao has kernels for).
        group_size: weights that share a scale, for int4; the width of a layer must be a multiple.
        torch_dtype: of everything that is not quantized, and of what is computed, of torch or as `"bf16"`; the model's
            own unless given.
        skip_modules: see `BnbQuantizationConfig`.
        keep_in_fp32_modules: as there.

    Raises:
        ConfigurationError: a type or dtype that there is not.
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
        if self.torch_dtype is not None:
            self.torch_dtype = _to_dtype("torch_dtype", self.torch_dtype)
        _check_names(self)

    def layers(self) -> QuantizedLayers:
        """Return what makes the quantized layers."""
        return Torchao(self.quant_type, self.group_size)


QuantizationConfig = BnbQuantizationConfig | TorchaoQuantizationConfig


def _to_dtype(argument: str, dtype: Any) -> torch.dtype:
    found = _COMPUTE_DTYPES.get(dtype, getattr(torch, dtype, None)) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ConfigurationError(
            f"{argument}={dtype!r}, expected one of {', '.join(map(repr, _COMPUTE_DTYPES))} or a floating-point dtype "
            "of torch."
        )
    return found


def _check_names(config: QuantizationConfig) -> None:
    for argument in ("skip_modules", "keep_in_fp32_modules"):
        names = getattr(config, argument)
        if names is None:
            continue
        if isinstance(names, str) or not all(isinstance(name, str) for name in names):
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
    """Quantize a model's linear layers while its weights are loaded: at most one stands there unquantized at a time.

    Layers that the map puts on the CPU or the disk and that run elsewhere are int8 with a scale per row (8 bits), or
    stay as they are in `torch_dtype` (4 bits, torchao).

    Args:
        model: is changed. On the meta device if `weights_location` is given, or quantized by an earlier call; else its
            own weights are quantized.
        bnb_quantization_config: which layers and how; `TorchaoQuantizationConfig` is taken too.
        weights_location: see `load_checkpoint_in_model`; also what `save_model` wrote of such a model, with
            the same configuration: quantized layers are taken as they are.
        device_map: see `load_checkpoint_and_dispatch`; unless given, all is on the present device.
        no_split_module_classes: as there.
        max_memory: as there.
        offload_folder: for int8 layers on the disk, and as there.
        offload_state_dict: is accepted and changes nothing.

    Returns:
        The model.

    Raises:
        ConfigurationError: the backend cannot do this on the device, or no layer is quantized.
        CheckpointError: weights are missing, or do not fit the model. The model is as before.
        MissingPackageError: bitsandbytes or torchao is not installed.
    """
    config = bnb_quantization_config
    layers = config.layers()
    dtype = config.torch_dtype
    assert not isinstance(dtype, str)  # it is a dtype since the configuration was made
    stored = _stored_weights(model, weights_location)
    linears = _linears_to_quantize(model, config, may_be_quantized=weights_location is not None)
    places = _resolve_map(model, config, linears, layers, device_map, no_split_module_classes, max_memory)
    check_present(places)
    runs_on = _main_device(places)
    layers.check(runs_on)
    new: dict[str, nn.Module] = {}
    for name, linear in linears.items():
        device = places[innermost(name, places) or ""]
        away = device == "disk" or (device == "cpu" and not properties(runs_on.type).is_unified)
        parts = _parts(name, stored, layers)
        try:
            if away:
                made = layers.make_offloaded(linear, parts)
            else:
                made = layers.make(linear, parts, to_device(device), dtype)
        except CheckpointError as error:
            raise CheckpointError(f"{name}.weight: {error}") from error
        if made is not None:
            new[name] = made
        elif any(key in parts for key in layers.pieces):
            raise ConfigurationError(
                f"{name} is quantized in {weights_location}, and the map puts it on {device!r}, where only int8 of "
                "bitsandbytes can lie: other layers are not quantized there. Give it another place, or load the "
                "original weights."
            )
    with restored_on_failure(model):
        _load_rest(model, config, dtype, stored, new, places, weights_location, offload_folder)
        return dispatch_model(model, places, offload_dir=offload_folder)


def _stored_weights(model: nn.Module, weights_location: PathLike | None) -> StoredWeights:
    if weights_location is not None:
        return read_checkpoint(Path(weights_location))
    empty = [name for name, tensor in model.state_dict().items() if tensor.is_meta]
    if empty:
        raise ConfigurationError(
            f"{len(empty)} tensors of the model are on the meta device, {empty[0]!r} first, and no weights_location "
            "says where their values are. Name a file or folder of weights."
        )
    stored = StoredWeights()
    for name, tensor in model.state_dict().items():
        stored.add(name, tensor.detach())
    return stored


def _linears_to_quantize(
    model: nn.Module, config: QuantizationConfig, *, may_be_quantized: bool
) -> dict[str, nn.Linear]:
    """Return the linear layers that the configuration does not leave out, by name.

    Layers that an earlier call has quantized count too where their weights come from elsewhere, as empty plain ones.
    """
    skip = default_skip_modules(model) if config.skip_modules is None else config.skip_modules
    left_out = [*skip, *(config.keep_in_fp32_modules or ())]
    found: dict[str, nn.Linear] = {}
    for name, module in model.named_modules():
        if any(f".{each}." in f".{name}." for each in left_out):
            continue
        if type(module) is nn.Linear:
            found[name] = module
        elif may_be_quantized and is_quantized(module):
            found[name] = plain_linear(module)
    if not found:
        raise ConfigurationError(
            f"nothing is left to quantize: the model has no nn.Linear outside of {left_out}. Name fewer skip_modules."
        )
    return found


def default_skip_modules(model: nn.Module) -> list[str]:
    """Return the modules that lose most by being quantized: the last one (the output), and those with tied weights."""
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
    if device_map is None:
        first = next(model.parameters(), None)
        at_hand = first is not None and first.device.type not in ("cpu", "meta")
        return {"": first.device if first is not None and at_hand else default_device()}
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


def _main_device(places: Mapping[str, Device]) -> torch.device:
    first = next((device for device in places.values() if device not in ("cpu", "disk")), None)
    if first is not None:
        return to_device(first)
    return default_device() if set(places.values()) == {"disk"} else torch.device("cpu")


def _parts(name: str, stored: StoredWeights, layers: QuantizedLayers) -> dict[str, torch.Tensor]:
    """Return what a checkpoint holds of a linear layer: `"weight"`, `"bias"`, and pieces of a quantized weight."""
    prefix = f"{name}."
    found = {key: stored[prefix + key] for key in ("weight", "bias") if prefix + key in stored}
    for key in layers.pieces:
        if prefix + key in stored:
            found[key] = stored[prefix + key]
    if "weight" not in found and not any(key in found for key in layers.pieces):
        raise CheckpointError(f"{prefix}weight, which is to be quantized, is not in the checkpoint.")
    return found


def _load_rest(
    model: nn.Module,
    config: QuantizationConfig,
    dtype: torch.dtype | None,
    stored: StoredWeights,
    new: Mapping[str, nn.Module],
    places: Mapping[str, Device],
    weights_location: PathLike | None,
    offload_folder: PathLike | None,
) -> None:
    """Load what is not quantized, then put the quantized layers in."""
    rest = StoredWeights()
    for name, tensor in stored.items():
        if not any(name.startswith(f"{module}.") for module in new):
            rest.add(name, tensor, stored.locate(name))
    former = {name: _swap(model, name, nn.Identity()) for name in new}
    load_stored_weights(
        model,
        rest,
        str(weights_location or "the model itself"),
        device_map=places,
        offload_folder=offload_folder,
        dtype=dtype,
        keep_in_fp32_modules=config.keep_in_fp32_modules,
    )
    for name, module in new.items():
        _swap(model, name, module.train(former[name].training))


def _swap(model: nn.Module, name: str, module: nn.Module) -> nn.Module:
    parent, _, leaf = name.rpartition(".")
    owner = model.get_submodule(parent)
    former: nn.Module = getattr(owner, leaf)
    setattr(owner, leaf, module)
    return former


def quantized_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict of a quantized model as plain tensors, which any format takes.

    A torchao weight is in pieces (`"weight.qdata"`, `"weight.scale"`, …); bitsandbytes has its own pieces already.
    """
    unpack_4bit_weights(model)
    return flatten_quantized(model.state_dict())
