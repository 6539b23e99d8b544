"""fp8 training with torchao, whose linear layers multiply matrices in float8."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, load_torchao, nearest
from trainwright.core.host.rank_zero import rank_zero_info, rank_zero_warn
from trainwright.core.names.kwargs_handler import KwargsHandler
from trainwright.core.names.packages import is_torchao_available
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.option_table import FP8

ModuleFilter = Callable[[nn.Module, str], bool]

_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
MULTIPLE = 16  # float8 matrix products need sizes that are multiples of this
_MOST_NAMES = 10


@dataclass(frozen=True)
class Fp8(Precision):
    """The precision `"fp8"`: matrix products of linear layers are computed in fp8, the rest as in `bf16-mixed`.

    Parameters, gradients and optimizers stay in float32. Linear layers whose sizes are multiples of 16 are converted,
    except for the first and the last linear layer of the model.

    Attributes:
        recipe: torchao's scaling recipe: `"tensorwise"`, `"rowwise"` or `"rowwise_with_gw_hp"`, or a
            `torchao.float8.Float8LinearConfig`. Default: `"tensorwise"`.
        skip: Names of layers, or of modules that contain them, that are not converted. In a Trainer these are names in
            the task, such as `"model.2"`.
        min_features: Layers with fewer input or output features are not converted. Default: 0.
        module_filter: Function of a module and its name that returns True for layers to be converted. It replaces the
            rule that excludes the first and the last layer. Default: None.
        fp8_all_gather: FSDP gathers the weights of converted layers in float8 instead of bf16, which halves the
            communication. Needs the recipe `"tensorwise"`. Other strategies ignore this option. Default: False, or the
            value in a `Float8LinearConfig`.

    Raises:
        ConfigurationError: The recipe is unknown or cannot be combined with `fp8_all_gather`, or `min_features` is
            negative. At the conversion: no layer can be converted, a name in `skip` does not exist, the device does not
            support the recipe, or torchao is not installed.
    """

    name: str = field(default="fp8", init=False)
    param_dtype: torch.dtype | None = field(default=None, init=False)
    autocast_dtype: torch.dtype | None = field(default=torch.bfloat16, init=False)
    scaled: bool = field(default=False, init=False)
    recipe: Any = "tensorwise"
    skip: str | tuple[str, ...] = ()
    min_features: int = 0
    module_filter: ModuleFilter | None = None
    fp8_all_gather: bool = False  # type: ignore[misc]  # a class variable of other precisions

    converts_layers: ClassVar[bool] = True
    fp8_backend: ClassVar[str] = "AO"

    def __post_init__(self) -> None:
        if isinstance(self.skip, str):
            object.__setattr__(self, "skip", (self.skip,))
        if self.min_features < 0:
            raise ConfigurationError(f"min_features={self.min_features}: write a number of features, 0 or more.")
        if isinstance(self.recipe, str) and self.recipe not in _RECIPES:
            raise ConfigurationError(
                f"recipe={self.recipe!r} is unknown.{nearest(self.recipe, _RECIPES)} Known: {', '.join(_RECIPES)}."
            )
        if not isinstance(self.recipe, str) and self.recipe.enable_fsdp_float8_all_gather:
            object.__setattr__(self, "fp8_all_gather", True)
        if self.fp8_all_gather and not _is_tensorwise(self.recipe):
            raise ConfigurationError(
                f"fp8_all_gather=True needs one scale for all shards of a weight, which recipe={self.recipe!r} does "
                "not have. Use recipe='tensorwise', or remove fp8_all_gather."
            )

    def check_device(self, device_type: str) -> None:
        if not is_torchao_available():
            raise ConfigurationError(
                "precision='fp8' needs torchao. Install it: pip install 'trainwright[quantization]'."
            )

    def convert(self, models: Sequence[nn.Module], device: torch.device, undo: contextlib.ExitStack) -> None:
        config = self._config(device)
        if not models:
            return
        class_names = ", ".join(type(model).__name__ for model in models)
        module_names = [name for model in models for name, _ in model.named_modules()]
        for skipped in self.skip:
            if skipped not in module_names:
                raise ConfigurationError(
                    f"Fp8(skip={self.skip!r}): {class_names} has no module {skipped!r}.{nearest(skipped, module_names)}"
                )
        converted: set[nn.Linear] = set()  # models may share layers
        in_bf16: list[str] = []  # remaining layers, each with the reason
        for model in models:
            for name, layer in linear_layers(model):
                if is_converted(layer):  # by the user, or because models share the layer
                    converted.add(layer)
                    continue
                reason = self._reason_against(model, name, layer)
                if reason:
                    sizes = f"{layer.in_features} × {layer.out_features}"
                    in_bf16.append(f"{name or type(layer).__name__} ({sizes}: {reason})")
                    continue
                undo.callback(convert_layer(layer, config))
                converted.add(layer)
        if not converted:
            reasons = _listed(in_bf16) if in_bf16 else "It has no linear layers"
            raise ConfigurationError(
                f"precision='fp8', but no linear layer of {class_names} can be converted. {reasons}. Use "
                "precision='bf16-mixed', or larger layers."
            )
        rank_zero_info(f"fp8: {len(converted)} linear layers compute in float8. Left in bf16: {_listed(in_bf16)}.")

    def _config(self, device: torch.device) -> Any:
        """Return torchao's configuration for a device. On a device without float8 hardware, float8 is emulated."""
        config = self.recipe
        if isinstance(config, str):
            # Padding allows micro-batches with any number of rows.
            config = replace(float8().Float8LinearConfig.from_recipe_name(config), pad_inner_dim=True)
        # torchao's option would replace the parameters before they are sharded; `Float8Gather` extends the shards.
        config = replace(config, enable_fsdp_float8_all_gather=False)
        if config.emulate or has_float8_products(device):
            return config
        if device.type != "cuda" and _keeps_an_operand(config):
            raise ConfigurationError(
                "the recipe 'rowwise_with_gw_hp' needs a CUDA device. Use 'rowwise', or precision='bf16-mixed'."
            )
        name = device.type
        if name == "cuda":
            major, minor = torch.cuda.get_device_capability(device)
            name = f"cuda with compute capability {major}.{minor}"
        rank_zero_warn(
            f"{name} has no float8 matrix products and emulates them, which is slower than bf16. Use "
            "precision='bf16-mixed' unless you test a model for other devices.",
            category=TrainwrightWarning,
        )
        return replace(config, emulate=True)

    def _reason_against(self, model: nn.Module, name: str, layer: nn.Linear) -> str:
        """Return the reason for which a layer is not converted. Empty if it is converted."""
        sizes = (layer.in_features, layer.out_features)
        if type(layer) is not nn.Linear:
            return f"a {type(layer).__name__}"
        if any(size % MULTIPLE for size in sizes):
            return f"not multiples of {MULTIPLE}"
        if min(sizes) < self.min_features:
            return f"smaller than min_features={self.min_features}"
        if any(name == skipped or name.startswith(f"{skipped}.") for skipped in self.skip):
            return "in skip"
        if self.module_filter is not None:
            return "" if self.module_filter(layer, name) else "by module_filter"
        first, last = find_first_last_linear_layers(model)
        if name == first:
            return "first"
        if name == last:
            return "last"
        return ""


@dataclass
class AORecipeKwargs(KwargsHandler):
    """Options of `mixed_precision="fp8"`, with Accelerate's names.

    `pad_inner_dim=None` uses the variable `ACCELERATE_FP8_PAD_INNER_DIM`, and `enable_fsdp_float8_all_gather=None` the
    variable `ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER`.

    Attributes:
        config: A `torchao.float8.Float8LinearConfig`. Default: None, the recipe `"tensorwise"`.
        module_filter_func: Function of a module and its name that returns True for layers to be converted. Layers whose
            sizes are not multiples of 16 are never converted. Default: None, which converts all linear layers except
            the first and the last.
        pad_inner_dim: Pad micro-batches to a multiple of 16 rows, if `config` is None. Default: None, which is True.
        enable_fsdp_float8_all_gather: FSDP gathers weights of converted layers in float8. Default: None, the value in
            `config`, or else False. Accelerate's default is True.
    """

    config: Any = None
    module_filter_func: ModuleFilter | None = None
    pad_inner_dim: bool | None = FP8.field("pad_inner_dim")
    enable_fsdp_float8_all_gather: bool | None = FP8.field("enable_fsdp_float8_all_gather")

    def precision(self) -> Fp8:
        """Return the precision with these options.

        Raises:
            ConfigurationError: An option is not supported, or torchao is not installed.
        """
        recipe = "tensorwise" if self.config is None else self.config
        if self.config is None and self.pad_inner_dim is False:
            Fp8().check_device("cpu")  # raises the error if torchao is not installed
            recipe = float8().Float8LinearConfig()
        elif self.config is not None and self.enable_fsdp_float8_all_gather is False:
            recipe = replace(self.config, enable_fsdp_float8_all_gather=False)
        module_filter = self.module_filter_func
        if module_filter is filter_first_and_last_linear_layers:
            module_filter = None  # the default rule; the function itself needs the model, not the layer
        return Fp8(
            recipe=recipe,
            module_filter=module_filter,
            fp8_all_gather=bool(self.enable_fsdp_float8_all_gather),
        )


def float8() -> Any:
    """Import torchao's package for float8 training."""
    return load_torchao("precision='fp8'").float8  # takes a second


def has_float8_products(device: torch.device) -> bool:
    """Return whether a device multiplies matrices in float8."""
    # Compute capability 8.9 is Ada, 9.0 is Hopper.
    return device.type == "cuda" and bool(torch.cuda.get_device_capability(device) >= (8, 9))


def _is_tensorwise(recipe: Any) -> bool:
    if isinstance(recipe, str):
        return recipe == "tensorwise"
    return bool(recipe.cast_config_weight.scaling_granularity.name == "TENSORWISE")


def _keeps_an_operand(config: Any) -> bool:
    """Return whether the recipe has products with a high-precision operand, which torchao supports on CUDA only."""
    return bool(config.cast_config_input_for_grad_weight.scaling_type.name == "DISABLED")


def _listed(layers: Sequence[str]) -> str:
    """Join the first layers by commas, and count the others. "none" for no layers."""
    if not layers:
        return "none"
    text = ", ".join(layers[:_MOST_NAMES])
    if len(layers) > _MOST_NAMES:
        text += f" and {len(layers) - _MOST_NAMES} more"
    return text


def linear_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the linear layers of a model with their names."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            yield name, module


def is_converted(module: nn.Module) -> bool:
    """Return whether a layer computes in float8."""
    return any(kind.__module__.startswith("torchao.float8") for kind in type(module).__mro__)


def convert_layer(layer: nn.Linear, config: object) -> Callable[[], None]:
    """Convert one layer in place. It remains the same object with the same parameters and hooks.

    Returns:
        A function that restores the layer.
    """
    original_class = type(layer)
    original_attributes = set(vars(layer))
    converted = float8().convert_to_float8_training(layer, config=config)
    added = {name: value for name, value in vars(converted).items() if name not in original_attributes}
    vars(layer).update(added)
    # torchao returns a new module. References of the user and of hooks to the layer must stay valid.
    layer.__class__ = type(converted)

    def undo() -> None:
        layer.__class__ = original_class
        for name in added:
            vars(layer).pop(name, None)

    return undo


def float8_linear(
    layer: nn.Module, inputs: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Return the output of a converted layer for a shard of its weight. Each shard has its own scales."""
    if torch.is_autocast_enabled(inputs.device.type):
        inputs = inputs.to(torch.get_autocast_dtype(inputs.device.type))
    output: torch.Tensor = float8().float8_linear.matmul_with_hp_or_float8_args.apply(
        inputs, weight.t(), layer.linear_mm_config, layer.config
    )
    if bias is None:
        return output
    return output + bias.to(output.dtype)


def has_ao_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of torchao's float8 training."""
    return any(map(is_converted, model.modules()))


def find_first_last_linear_layers(model: nn.Module) -> tuple[str | None, str | None]:
    """Return the names of a model's first and last linear layer, or (None, None) if it has no linear layer."""
    names = [name for name, _ in linear_layers(model)]
    if not names:
        return None, None
    return names[0], names[-1]


def filter_linear_layers(module: nn.Module, fqn: str, layers_to_filter: Iterable[str | None]) -> bool:
    """Return whether a layer's sizes are multiples of 16 and its name is not in the list.

    Args:
        module: The layer. If it is not linear, only the name is checked.
        fqn: Its name in the model.
        layers_to_filter: Names of layers that are not converted.
    """
    if isinstance(module, nn.Linear) and (module.in_features % MULTIPLE or module.out_features % MULTIPLE):
        return False
    return fqn not in layers_to_filter


def filter_first_and_last_linear_layers(module: nn.Module, fqn: str) -> bool:
    """Return whether a layer passes `filter_linear_layers` and is not the first or last linear layer of the model.

    Passed as `module_filter_func`, this function selects the default rule.

    Args:
        module: The model. If this is a single layer, only the sizes are checked.
        fqn: The layer's name in the model.
    """
    layer = module if isinstance(module, nn.Linear) else module.get_submodule(fqn)
    return filter_linear_layers(layer, fqn, find_first_last_linear_layers(module))


def convert_model_to_fp8_ao(
    model: nn.Module, config: object = None, module_filter_func: ModuleFilter | None = None
) -> None:
    """Convert linear layers of a model in place, for loops without an Accelerator. The conversion is permanent.

    Args:
        model: The model.
        config: A `torchao.float8.Float8LinearConfig`. Default: None, torchao's default.
        module_filter_func: Function of a module and its name that returns True for layers to be converted. Default:
            None, which converts linear layers whose sizes are multiples of 16, except for the first and the last one.
    """
    if module_filter_func is filter_first_and_last_linear_layers:
        module_filter_func = None
    first_and_last = find_first_last_linear_layers(model)
    for name, layer in list(linear_layers(model)):
        if module_filter_func is None:
            is_selected = filter_linear_layers(layer, name, first_and_last)
        else:
            is_selected = module_filter_func(layer, name)
        if is_selected and not is_converted(layer):
            convert_layer(layer, config)
