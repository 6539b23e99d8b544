"""fp8 training with NVIDIA's transformer_engine, whose layers replace torch's and run under its autocast."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from types import ModuleType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.names.kwargs_handler import KwargsHandler, as_flag, read_variable
from trainwright.core.names.packages import is_transformer_engine_available
from trainwright.strategies.precision import Contexts, Precision
from trainwright.strategies.steps.fp8 import MULTIPLE, AORecipeKwargs
from trainwright.strategies.steps.option_table import FP8

_INSTALL = "--no-build-isolation 'transformer_engine[pytorch]'"
_DEVICES = ("cuda",)
_STATE = "_extra_state"  # end of the key of a layer's amax history in a state dict
_NOT_OF_RECIPES = ("use_autocast_during_eval", "use_mxfp8_block_scaling", "backend")  # options of this package


def _three_flags(text: str) -> tuple[bool, bool, bool]:
    """Convert text such as "true,false,false" or "(True, False, False)". A single flag counts three times."""
    flags = [as_flag(part.strip()) for part in text.strip("()[] ").split(",")]
    if len(flags) == 1:
        flags *= 3
    if len(flags) != 3:
        raise ValueError("expected three of true and false, such as true,false,false")
    return flags[0], flags[1], flags[2]


@dataclass
class TERecipeKwargs(KwargsHandler):
    """Options of fp8 training with transformer_engine, with Accelerate's names.

    Options that are None take the values of their environment variables (`ACCELERATE_FP8_MARGIN`, …), or else
    transformer_engine's defaults.

    Attributes:
        use_autocast_during_eval: Also compute in fp8 if gradients are disabled. Default: None, which is False.
        margin, interval, amax_history_len, amax_compute_algo, override_linear_precision: See transformer_engine's
            `DelayedScaling`.
        fp8_format: `"HYBRID"`, `"E4M3"` or `"E5M2"`.
        use_mxfp8_block_scaling: Use `MXFP8BlockScaling` instead of `DelayedScaling`. Default: None, which is False.
    """

    use_autocast_during_eval: bool | None = FP8.field("use_autocast_during_eval")
    margin: int | None = FP8.field("margin")
    interval: int | None = FP8.field("interval")
    fp8_format: str | None = FP8.field("fp8_format")
    amax_history_len: int | None = FP8.field("amax_history_len")
    amax_compute_algo: str | None = FP8.field("amax_compute_algo")
    override_linear_precision: tuple[bool, bool, bool] | None = FP8.field("override_linear_precision", _three_flags)
    use_mxfp8_block_scaling: bool | None = None

    def precision(self) -> Precision:
        """Return the precision that these options describe. Later assignments do not change it."""
        return TransformerEnginePrecision(options=replace(self))

    def make_recipe(self) -> Any:
        """Return transformer_engine's recipe.

        Raises:
            ConfigurationError: The format is unknown, or block scaling has options of delayed scaling.
            MissingPackageError: transformer_engine is not installed.
        """
        recipes: Any = _load(".common.recipe")
        options = {name: value for name, value in self.to_kwargs().items() if name not in _NOT_OF_RECIPES}
        delayed = sorted(options.keys() - {"margin", "fp8_format"})
        if self.use_mxfp8_block_scaling and delayed:
            raise ConfigurationError(
                f"use_mxfp8_block_scaling=True does not support the options {', '.join(delayed)}, which belong to "
                "delayed scaling. Remove them."
            )
        if self.fp8_format is not None:
            name = str(self.fp8_format).upper()
            if name not in ("HYBRID", "E4M3", "E5M2"):
                raise ConfigurationError(f"fp8_format={self.fp8_format!r}: expected 'HYBRID', 'E4M3' or 'E5M2'.")
            options["fp8_format"] = getattr(recipes.Format, name)
        if self.use_mxfp8_block_scaling:
            return recipes.MXFP8BlockScaling(**options)
        return recipes.DelayedScaling(**options)


@dataclass
class FP8RecipeKwargs(TERecipeKwargs):
    """`TERecipeKwargs` under Accelerate's older name.

    Attributes:
        backend: Only `"TE"`. Default: None, which is the value of `ACCELERATE_FP8_BACKEND`, or else `"TE"`.
        opt_level, optimization_level: Options of MS-AMP, which is not supported. Must be None.

    Raises:
        ConfigurationError: The backend is not `"TE"`, or an option of MS-AMP is set.
    """

    backend: str | None = FP8.field("backend")
    opt_level: str | None = None
    optimization_level: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.backend = self.backend or "TE"
        for name in ("backend", "opt_level", "optimization_level"):
            value = getattr(self, name)
            is_te = name == "backend" and value.upper() == "TE"
            if value is not None and not is_te:
                raise ConfigurationError(
                    f"FP8RecipeKwargs({name}={value!r}): only 'TE' (transformer_engine) is supported. Pass "
                    "backend='TE' alone, or AORecipeKwargs for torchao. MS-AMP needs a patched build of an old torch."
                )


@dataclass(frozen=True)
class TransformerEnginePrecision(Precision):
    """Precision with matrix products in fp8 by transformer_engine. All other computation is as in `bf16-mixed`.

    During a stage, layers of transformer_engine replace layer norms, and linear layers whose sizes are multiples of 16.
    The new layers use the same parameter objects.

    Attributes:
        options: See `TERecipeKwargs`.
    """

    name: str = field(default="transformer-engine", init=False)
    param_dtype: torch.dtype | None = field(default=None, init=False)
    autocast_dtype: torch.dtype | None = field(default=torch.bfloat16, init=False)
    scaled: bool = field(default=False, init=False)
    options: TERecipeKwargs = field(default_factory=TERecipeKwargs, hash=False)

    converts_layers: ClassVar[bool] = True
    splits_converted: ClassVar[bool] = False
    fp8_backend: ClassVar[str] = "TE"

    def check_device(self, device_type: str) -> None:
        if not is_transformer_engine_available():
            raise ConfigurationError(
                f"fp8 with transformer_engine needs the package. Install it: pip install {_INSTALL}. Or use "
                "precision='fp8', which uses torchao."
            )
        if device_type not in _DEVICES:
            raise ConfigurationError(
                f"transformer_engine needs a CUDA device, not {device_type!r}. Use precision='fp8', which uses torchao."
            )

    def convert(self, models: Sequence[nn.Module], device: torch.device, undo: ExitStack) -> None:
        num_replaced = 0
        for model in models:
            num_replaced += _convert(model, _engine_layer, undo)
        if models and num_replaced == 0:
            raise ConfigurationError(
                f"{', '.join(type(model).__name__ for model in models)} has no linear layer or layer norm that "
                f"transformer_engine replaces: sizes must be multiples of {MULTIPLE}. Use precision='bf16-mixed'."
            )

    def autocast(
        self, device_type: str, *, enabled: bool = True, cache_enabled: bool | None = None
    ) -> AbstractContextManager[None]:
        outer = partial(super().autocast, device_type, enabled=enabled, cache_enabled=cache_enabled)
        recipe = self.options.make_recipe()
        evaluates = bool(self.options.use_autocast_during_eval)

        def inner() -> Any:
            # At each entry: training and evaluation enter the same context.
            is_on = enabled and (evaluates or torch.is_grad_enabled())
            return _autocast(is_on, recipe)

        return Contexts(outer, inner)


def recipe_of_variables() -> AORecipeKwargs | TERecipeKwargs:
    """Return the options of fp8 in environment variables: torchao's, or with `ACCELERATE_FP8_BACKEND=TE` TE's.

    Raises:
        ConfigurationError: A variable has an invalid value.
    """
    backend = read_variable("ACCELERATE_FP8_BACKEND", str.upper) or "AO"
    if backend not in ("AO", "TE"):
        raise ConfigurationError(
            f"ACCELERATE_FP8_BACKEND={backend} is not supported. Unset it, or set AO for torchao or TE for "
            "transformer_engine."
        )
    if backend == "AO":
        return AORecipeKwargs()
    return TERecipeKwargs()


def _load(part: str) -> ModuleType:
    require_package("transformer_engine", purpose="fp8 with transformer_engine", install=_INSTALL)
    return importlib.import_module(f"transformer_engine{part}")


def _autocast(enabled: bool, recipe: object) -> Any:
    te: Any = _load(".pytorch")
    if hasattr(te, "autocast"):  # since 2.9
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)


def _engine_layer(layer: nn.Module, *, linear: bool = True, norms: bool = True) -> Any:
    """Return transformer_engine's layer for a layer of torch, or None if there is none."""
    te: Any = _load(".pytorch")
    new: Any
    if type(layer) is nn.Linear and linear:
        if layer.in_features % MULTIPLE or layer.out_features % MULTIPLE:
            return None
        new = te.Linear(
            layer.in_features, layer.out_features, bias=layer.bias is not None, params_dtype=layer.weight.dtype
        )
    elif type(layer) is nn.LayerNorm and norms:
        # te.LayerNorm normalizes the last dimension, and always has a bias.
        if len(layer.normalized_shape) != 1 or layer.bias is None:
            return None
        new = te.LayerNorm(layer.normalized_shape[0], eps=layer.eps, params_dtype=layer.weight.dtype)
    else:
        return None
    # Checkpoints do not contain the amax history, so that every precision can load them.
    new.register_state_dict_post_hook(_drop_extra_state)
    new.register_load_state_dict_post_hook(_forget_missing)
    return new


def _torch_layer(layer: object, *, linear: bool = True, norms: bool = True) -> Any:
    """Return torch's layer for a layer of transformer_engine, or None if there is none."""
    te: Any = _load(".pytorch")
    if isinstance(layer, te.Linear) and linear:
        has_bias = layer._parameters.get("bias") is not None
        return nn.Linear(layer.in_features, layer.out_features, bias=has_bias, device="meta")
    if isinstance(layer, te.LayerNorm) and norms:
        return nn.LayerNorm(layer.weight.shape, layer.eps, device="meta")
    return None


def _convert(model: nn.Module, make: Callable[[nn.Module], Any], undo: ExitStack) -> int:
    """Replace the layers of a model for which `make` returns another layer. Return the number of replaced layers.

    `undo` restores them.
    """
    num_replaced = 0
    for parent in list(model.modules()):
        for name, old in list(parent._modules.items()):
            new = None if old is None else make(old)
            if old is None or new is None:
                continue
            _exchange(parent, name, old, new)
            undo.callback(_exchange, parent, name, new, old)
            num_replaced += 1
    return num_replaced


def _exchange(parent: nn.Module, name: str, old: nn.Module, new: nn.Module) -> None:
    """Replace a layer by another layer with the same parameters."""
    for key, parameter in old._parameters.items():
        if parameter is not None and key in new._parameters:
            new._parameters[key] = parameter
    new.train(old.training)
    parent._modules[name] = new


def _drop_extra_state(_: nn.Module, state: dict[str, object], prefix: str, __: object) -> None:
    state.pop(prefix + _STATE, None)


def _forget_missing(_: nn.Module, keys: _IncompatibleKeys) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(_STATE)]


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace torch's linear layers and layer norms of a model in place by transformer_engine's, or vice versa.

    Args:
        model: The model. It is not replaced itself, only layers within it.
        to_transformer_engine: False replaces transformer_engine's layers by torch's. Default: True.
        _convert_linear: Replace linear layers. Default: True.
        _convert_ln: Replace layer norms. Default: True.
    """
    make = _engine_layer if to_transformer_engine else _torch_layer
    _convert(model, partial(make, linear=_convert_linear, norms=_convert_ln), ExitStack())


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of transformer_engine."""
    te: Any = _load(".pytorch")
    return any(isinstance(module, (te.Linear, te.LayerNorm, te.TransformerLayer)) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: object, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a forward function, with the module as its first argument, that computes in fp8.

    Args:
        model_forward: The bound forward of a model.
        fp8_recipe: transformer_engine's recipe.
        use_during_eval: Compute in fp8 also in `eval()` mode. Default: False.
    """

    def forward(self: nn.Module, *args: object, **kwargs: object) -> Any:
        with _autocast(use_during_eval or self.training, fp8_recipe):
            return model_forward(*args, **kwargs)

    vars(forward)["__wrapped__"] = model_forward
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Make the forward of a model run in fp8, for loops without an Accelerator. Return the model.

    Args:
        model: The model with transformer_engine's layers. Its forward is replaced in place.
        fp8_recipe_handler: Options. None selects those in environment variables, or else transformer_engine's defaults.
    """
    options = fp8_recipe_handler or TERecipeKwargs()
    forward = contextual_fp8_autocast(model.forward, options.make_recipe(), bool(options.use_autocast_during_eval))
    vars(model)["forward"] = partial(forward, model)
    return model
