"""Quantization of linear layers by torchao: after training, and fake quantization during training."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import CheckpointError, ConfigurationError, load_torchao, nearest, require_package, unknown

ModuleFilter = Callable[[nn.Module, str], bool]

_NAMES = ("int8_dynamic_int4_weight", "int8_dynamic_int8_weight", "int4_weight", "int8_weight")
_PURPOSE = "Quantization by torchao"
_require: Callable[[str], Any] = partial(require_package, purpose=_PURPOSE)
_FAKE = ("activation_fake_quantizer", "weight_fake_quantizer")  # attributes of torchao's layers


def check_config(config: object) -> None:
    """Check the name of a configuration, without an import of torchao."""
    if isinstance(config, str) and config not in _NAMES:
        raise unknown("config", config, _NAMES, " A configuration object of torchao is accepted too.")


def torchao_config(config: object, group_size: int) -> Any:
    """Return torchao's configuration for a name. A configuration object is returned unchanged. See `quantize_model`."""
    check_config(config)
    kinds = load_torchao(_PURPOSE).quantization
    if isinstance(config, str):
        dtype = torch.int8
        granularity = kinds.PerAxis(0)
        if "int4" in config:
            dtype = torch.int4  # type: ignore[attr-defined]  # torch's annotations lack it
            granularity = kinds.PerGroup(group_size)
        if "dynamic" in config:
            return kinds.Int8DynamicActivationIntxWeightConfig(weight_dtype=dtype, weight_granularity=granularity)
        return kinds.IntxWeightOnlyConfig(weight_dtype=dtype, granularity=granularity)
    if not isinstance(config, _require("torchao.core.config").AOBaseConfig):
        raise unknown("config", config, _NAMES, " A configuration object of torchao is accepted too.")
    return config


def quantize_model(
    model: nn.Module,
    config: object = "int8_dynamic_int4_weight",
    *,
    group_size: int = 32,
    skip: str | Sequence[str] = (),
    module_filter: ModuleFilter | None = None,
    path: str | os.PathLike[str] | None = None,
) -> nn.Module:
    """Quantize the weights of a trained model's linear layers in place. Not collective.

    Args:
        model: Any module with its weights, such as a TaskModule.
        config: `"int8_dynamic_int4_weight"` (activations in int8 per token, weights in int4 per group),
            `"int8_dynamic_int8_weight"`, `"int4_weight"` or `"int8_weight"` (weights only); int8 weights have a scale
            for each output feature. Or a configuration object of `torchao.quantization`. Default:
            `"int8_dynamic_int4_weight"`.
        group_size: Number of weights that share a scale, if `config` is a name with int4. Default: 32.
        skip: Names of layers, or of modules that contain them, that are not quantized. Default: none.
        module_filter: A function of a layer and its name that returns True for layers to be quantized. Default: None,
            which is all.
        path: A safetensors file to write the weights to; see `load_quantized_model`. Default: None.

    Returns:
        The model.

    Raises:
        ConfigurationError: The configuration is unknown, a chosen layer cannot be quantized, no layer is chosen, or no
            module has a name in `skip`. The model is unchanged.
        CheckpointError: The file cannot be written.
        MissingPackageError: torchao is not installed.
    """
    layers = linear_layers(model, skip, module_filter)
    quantize_layers(layers, torchao_config(config, group_size))
    if path is not None:
        write_quantized(model, path)
    return model


def linear_layers(
    model: nn.Module, skip: str | Sequence[str], module_filter: ModuleFilter | None
) -> dict[str, nn.Linear]:
    """Return the chosen linear layers of a model by name; see `quantize_model`."""
    names = (skip,) if isinstance(skip, str) else tuple(skip)
    modules = dict(model.named_modules())
    for skipped in names:
        if skipped not in modules:
            raise ConfigurationError(
                f"skip={names!r}: {type(model).__name__} has no module {skipped!r}.{nearest(skipped, modules)}"
            )
    layers: dict[str, nn.Linear] = {}
    for name, layer in modules.items():
        # Not sub-classes: torchao's fake quantization replaces the class, with its forward.
        if type(layer) is not nn.Linear:
            continue
        if any(name == skipped or name.startswith(f"{skipped}.") for skipped in names):
            continue
        if module_filter is None or module_filter(layer, name):
            layers[name] = layer
    if not layers:
        raise ConfigurationError(
            f"No nn.Linear of {type(model).__name__} can be quantized: it has none outside of skip={names!r} and "
            "module_filter."
        )
    check_float(model, layers)
    return layers


def check_float(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Check that layers of a model, by name, are not quantized. Otherwise raise a ConfigurationError."""
    quantized = [name for name, layer in layers.items() if is_quantized(layer)]
    if quantized:
        raise ConfigurationError(
            f"{_listed(quantized)} of {type(model).__name__} is quantized already. Create a new "
            f"{type(model).__name__}, and load a checkpoint of the training into it."
        )


def check_no_fp8(model: nn.Module) -> None:
    """Check that no layer of a model computes in fp8, which replaces the forward that fake quantization needs.
    Otherwise raise a ConfigurationError.
    """
    for name, layer in model.named_modules():
        if type(layer).__module__.startswith(("torchao.float8", "transformer_engine")):
            raise ConfigurationError(
                f"QuantizationAwareTraining cannot be combined with fp8, in which {name} of {type(model).__name__} "
                "computes. Use precision='bf16-mixed'."
            )


def is_quantized(layer: nn.Module) -> bool:
    """Return whether the weight of a layer is a quantized tensor of torchao."""
    weight = layer._parameters.get("weight")
    return weight is not None and type(weight.data).__module__.startswith("torchao.")


def quantize_layers(layers: Mapping[str, nn.Linear], config: object) -> Callable[[], None]:
    """Quantize layers in place, or none of them if one cannot be quantized. Return a function that undoes it.

    Raises:
        ConfigurationError: A layer cannot be quantized.
        MissingPackageError: torchao is not installed.
    """
    weights = {name: layer.weight for name, layer in layers.items()}

    def undo() -> None:
        for name, layer in layers.items():
            layer.weight = weights[name]

    def quantize(layer: nn.Linear) -> str:
        load_torchao(_PURPOSE).quantization.quantize_(layer, config, filter_fn=lambda module, _: True)
        vars(layer).pop("extra_repr", None)  # torchao's, which cannot be pickled
        if not is_quantized(layer):  # torchao skips layers of some sizes without an error
            return "torchao left it unchanged"
        layer.weight.requires_grad_(False)
        return ""

    try:
        _apply(quantize, layers, config)
    except ConfigurationError:
        undo()
        raise
    return undo


def prepare_layers(layers: Mapping[str, nn.Linear], config: object) -> Callable[[], None]:
    """Add torchao's fake quantization to layers in place, or to none of them. Return a function that undoes it.

    Layers stay the same objects, with their parameters and hooks.

    Raises:
        ConfigurationError: A layer cannot be quantized.
        MissingPackageError: torchao is not installed.
    """
    load_torchao(_PURPOSE)
    step = _require("torchao.quantization.qat").QATConfig(config, step="prepare")
    prepared: dict[nn.Linear, nn.Module] = {}

    def prepare(layer: nn.Linear) -> str:
        # A layer without memory gives the class and the quantizers, and draws no random numbers.
        empty_layer = nn.Linear(
            layer.in_features, layer.out_features, layer.bias is not None, device="meta", dtype=layer.weight.dtype
        )
        holder = nn.Sequential(empty_layer)  # torchao replaces children only
        load_torchao(_PURPOSE).quantization.quantize_(holder, step)
        prepared[layer] = holder[0]
        return ""

    _apply(prepare, layers, config)
    undo = contextlib.ExitStack()
    for layer, like in prepared.items():
        undo.callback(_replace_class(layer, like))
    return undo.close


def _apply(change: Callable[[nn.Linear], str], layers: Mapping[str, nn.Linear], config: object) -> None:
    """Call `change` on each layer. It returns the reason if the layer cannot be changed, else an empty text.

    Raises:
        ConfigurationError: some layers cannot be changed. The message lists them with the reasons. The other layers are
            changed.
    """
    reasons = []
    for name, layer in layers.items():
        try:
            reason = change(layer)
        except (AssertionError, ImportError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = str(error) or type(error).__name__
        if reason:
            reasons.append(f"{name} ({layer.in_features} × {layer.out_features}: {reason})")
    if reasons:
        raise ConfigurationError(
            f"{type(config).__name__} cannot quantize {_listed(reasons)}. Write names in skip=, or use another config "
            "or group_size."
        )


def _replace_class(layer: nn.Linear, like: Any) -> Callable[[], None]:
    """Give a layer the class and the fake quantizers of the layer `like`. Return a function that undoes it.

    The class is replaced instead of the module, so that parameters, hooks and references to the layer remain valid.
    """
    layer.__class__ = type(like)
    for name in _FAKE:
        setattr(layer, name, getattr(like, name))
    # torch's fused TransformerEncoderLayer reads weights without the layer's forward, unless there are hooks.
    handle = layer.register_forward_pre_hook(_no_fused_kernels)

    def undo() -> None:
        handle.remove()
        for name in _FAKE:
            delattr(layer, name)
        layer.__class__ = nn.Linear

    return undo


def _no_fused_kernels(module: nn.Module, inputs: object) -> None:
    """Do nothing. The presence of the hook is sufficient."""


def _listed(names: Sequence[str]) -> str:
    listed = ", ".join(names[:5])
    if len(names) > 5:
        listed += f" and {len(names) - 5} more"
    return listed


def write_quantized(model: nn.Module, path: str | os.PathLike[str]) -> None:
    """Write a quantized model's weights as a safetensors file with torchao's metadata. An existing file is replaced.

    Raises:
        CheckpointError: torchao cannot store a weight as plain tensors, or the file cannot be written.
    """
    support = _require("torchao.prototype.safetensors.safetensors_support")
    safetensors = _require("safetensors")
    safetensors_torch = _require("safetensors.torch")
    target = Path(path)
    temporary = target.with_name(f".{target.name}.tmp")
    # torchao cannot read names without a dot in its metadata, so these tensors are added to the file without it.
    with_dot: dict[str, torch.Tensor] = {}
    without_dot: dict[str, torch.Tensor] = {}
    for name, value in model.state_dict().items():
        if not isinstance(value, torch.Tensor):
            continue
        tensor = value.data
        if type(tensor) is torch.Tensor:
            tensor = tensor.clone()  # safetensors refuses tensors that share memory, as tied weights do
        if "." in name:
            with_dot[name] = tensor
        else:
            without_dot[name] = tensor
    try:
        tensors, metadata = support.flatten_tensor_state_dict(with_dot)
        tensors |= without_dot
        target.parent.mkdir(parents=True, exist_ok=True)
        stored = {name: value.contiguous() for name, value in tensors.items()}
        safetensors_torch.save_file(stored, temporary, metadata)
        temporary.replace(target)
    except (safetensors.SafetensorError, OSError, TypeError, ValueError) as error:
        with contextlib.suppress(OSError):  # the folder, or the file itself, may be another kind of entry
            temporary.unlink(missing_ok=True)
        raise CheckpointError(f"The quantized weights cannot be written to {target}: {error}") from error


def load_quantized_model(model: nn.Module, path: str | os.PathLike[str]) -> nn.Module:
    """Load a file of `quantize_model` or `QuantizationAwareTraining` into a model in place.

    No code of the file is executed. torchao reads such files too (`torchao.prototype.safetensors`).

    Args:
        model: The model with unquantized layers. Its weights are replaced. They may be on the meta device.
        path: The file.

    Returns:
        The model, with the weights on the CPU.

    Raises:
        CheckpointError: The file cannot be read, or does not fit the model.
        MissingPackageError: torchao is not installed.
    """
    load_torchao(_PURPOSE)
    support = _require("torchao.prototype.safetensors.safetensors_support")
    try:
        with _require("safetensors").safe_open(path, "pt") as file:
            if "tensor_names" not in (file.metadata() or {}):
                raise ValueError("it has no quantized weights. load_checkpoint_in_model reads files of float weights")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
            quantized, others = support.unflatten_tensor_state_dict(tensors, file.metadata() or {})
        model.load_state_dict({**quantized, **others}, assign=True)
    except Exception as error:
        raise CheckpointError(f"{path} cannot be loaded into {type(model).__name__}: {error}") from error
    for layer in model.modules():
        if is_quantized(layer):
            layer._parameters["weight"].requires_grad_(False)  # type: ignore[union-attr]  # it is quantized
    return model
