"""Training in fp8 by NVIDIA's transformer_engine: its layers in place of torch's, and its autocast around forwards."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.names.kwargs_handler import KwargsHandler
from trainwright.core.names.packages import is_transformer_engine_available
from trainwright.strategies.precision import Precision

_INSTALL = "--no-build-isolation 'transformer_engine[pytorch]'"
_DEVICES = ("cuda",)
_MULTIPLE = 16
_STATE = "_extra_state"


@dataclass(frozen=True)
class TERecipeKwargs(KwargsHandler):
    """Options of fp8 by transformer_engine, by Accelerate's names. Those that are None have transformer_engine's
    defaults.

    Attributes:
        use_autocast_during_eval: Compute in fp8 also where gradients are disabled. Default: None, which is False.
        margin, interval, amax_history_len, amax_compute_algo, override_linear_precision: See transformer_engine's
            `DelayedScaling`.
        fp8_format: `"HYBRID"`, `"E4M3"` or `"E5M2"`.
        use_mxfp8_block_scaling: Use `MXFP8BlockScaling` instead of `DelayedScaling`. Default: None, which is False.
    """

    use_autocast_during_eval: bool | None = None
    margin: int | None = None
    interval: int | None = None
    fp8_format: str | None = None
    amax_history_len: int | None = None
    amax_compute_algo: str | None = None
    override_linear_precision: tuple[bool, bool, bool] | None = None
    use_mxfp8_block_scaling: bool | None = None

    def precision(self) -> Precision:
        """Return the precision that these options describe."""
        return TransformerEnginePrecision(options=self)

    def make_recipe(self) -> Any:
        """Return transformer_engine's recipe.

        Raises:
            ConfigurationError: The format is unknown, or block scaling has options of delayed scaling.
        """
        recipes = _load(".common.recipe")
        named = {
            "margin": self.margin,
            "interval": self.interval,
            "fp8_format": self.fp8_format,
            "amax_history_len": self.amax_history_len,
            "amax_compute_algo": self.amax_compute_algo,
            "override_linear_precision": self.override_linear_precision,
        }
        given = {name: value for name, value in named.items() if value is not None}
        if self.use_mxfp8_block_scaling and given.keys() - {"margin", "fp8_format"}:
            raise ConfigurationError(
                f"use_mxfp8_block_scaling=True has no {', '.join(sorted(given.keys() - {'margin', 'fp8_format'}))}, "
                "which are options of delayed scaling. Leave them out."
            )
        if self.fp8_format is not None:
            name = str(self.fp8_format).upper()
            if name not in ("HYBRID", "E4M3", "E5M2"):
                raise ConfigurationError(f"fp8_format={self.fp8_format!r}: expected 'HYBRID', 'E4M3' or 'E5M2'.")
            given["fp8_format"] = getattr(recipes.Format, name)
        return (recipes.MXFP8BlockScaling if self.use_mxfp8_block_scaling else recipes.DelayedScaling)(**given)


@dataclass(frozen=True)
class FP8RecipeKwargs(TERecipeKwargs):
    """`TERecipeKwargs` by Accelerate's older name.

    Attributes:
        backend: Only `"TE"`.
    """

    backend: str = "TE"

    def __post_init__(self) -> None:
        if self.backend.upper() != "TE":
            raise ConfigurationError(
                f"FP8RecipeKwargs(backend={self.backend!r}): MS-AMP is not supported, as it needs a patched build of "
                "an old torch. Pass AORecipeKwargs for torchao, or backend='TE'."
            )


@dataclass(frozen=True)
class TransformerEnginePrecision(Precision):
    """fp8 by transformer_engine; everything else as in `bf16-mixed`.

    Linear layers whose sizes are multiples of 16, and layer norms, are replaced during a stage. Parameters stay the
    same objects.

    Attributes:
        options: See `TERecipeKwargs`.
    """

    name: str = field(default="transformer-engine", init=False)
    param_dtype: torch.dtype | None = field(default=None, init=False)
    autocast_dtype: torch.dtype | None = field(default=torch.bfloat16, init=False)
    scaled: bool = field(default=False, init=False)
    options: TERecipeKwargs = TERecipeKwargs()

    converts_layers: ClassVar[bool] = True
    splits_converted: ClassVar[bool] = False
    fp8_backend: ClassVar[str] = "TE"

    def check_device(self, device_type: str) -> None:
        if not is_transformer_engine_available():
            raise ConfigurationError(
                f"fp8 by transformer_engine needs the package. Install it: pip install {_INSTALL}. Or use "
                "precision='fp8', which is torchao's."
            )
        if device_type not in _DEVICES:
            raise ConfigurationError(
                f"transformer_engine computes on CUDA devices, not on {device_type!r}. Use precision='fp8', which is "
                "torchao's."
            )

    def convert(self, models: Sequence[nn.Module], device: torch.device, undo: ExitStack) -> None:
        if models and not sum(_convert(model, undo) for model in models):
            raise ConfigurationError(
                f"{', '.join(type(model).__name__ for model in models)} has no linear layer or layer norm that "
                f"transformer_engine replaces: sizes must be multiples of {_MULTIPLE}. Use precision='bf16-mixed'."
            )

    def autocast(self, device_type: str, **options: Any) -> Any:
        return _Autocast(super().autocast(device_type, **options), self.options)


class _Autocast(AbstractContextManager[None]):
    """torch's autocast with transformer_engine's in it. Can be reused, but not nested in itself."""

    def __init__(self, outer: Any, options: TERecipeKwargs) -> None:
        self._outer, self._evaluates = outer, bool(options.use_autocast_during_eval)
        self._recipe = options.make_recipe()
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            entered.enter_context(self._outer)
            entered.enter_context(_autocast(self._evaluates or torch.is_grad_enabled(), self._recipe))
            self._entered = entered.pop_all()

    def __exit__(self, *_: object) -> None:
        self._entered.close()


def _load(part: str) -> Any:
    require_package("transformer_engine", purpose="fp8 by transformer_engine", install=_INSTALL)
    return importlib.import_module(f"transformer_engine{part}")


def _autocast(enabled: bool, recipe: Any) -> Any:
    te = _load(".pytorch")
    if hasattr(te, "autocast"):  # since 2.9
        return te.autocast(enabled=enabled, recipe=recipe)
    return te.fp8_autocast(enabled=enabled, fp8_recipe=recipe)


def _convert(model: nn.Module, undo: ExitStack, *, linear: bool = True, norms: bool = True) -> int:
    """Replace layers of a model. Return how many."""
    te, made = _load(".pytorch"), 0
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            new: Any = None
            if type(child) is nn.Linear and linear and not any(size % _MULTIPLE for size in child.weight.shape):
                bias = child.bias is not None
                new = te.Linear(child.in_features, child.out_features, bias=bias, params_dtype=child.weight.dtype)
            elif type(child) is nn.LayerNorm and norms and len(child.normalized_shape) == 1 and child.bias is not None:
                new = te.LayerNorm(child.normalized_shape[0], eps=child.eps, params_dtype=child.weight.dtype)
            if new is not None and child is not None:
                _exchange(parent, name, child, new)
                undo.callback(_exchange, parent, name, new, child)
                # Maxima of past steps stay out of checkpoints, which every precision reads.
                new.register_state_dict_post_hook(_drop_extra_state)
                new.register_load_state_dict_post_hook(_forget_missing)
                made += 1
    return made


def _exchange(parent: nn.Module, name: str, old: nn.Module, new: nn.Module) -> None:
    """Put a layer in the place of another one, with the same parameters."""
    for key, parameter in old._parameters.items():
        if parameter is not None and key in new._parameters:
            new._parameters[key] = parameter
    new.train(old.training)
    parent._modules[name] = new


def _drop_extra_state(_: nn.Module, state: dict[str, Any], prefix: str, __: Any) -> None:
    state.pop(prefix + _STATE, None)


def _forget_missing(_: nn.Module, keys: Any) -> None:
    keys.missing_keys[:] = [key for key in keys.missing_keys if not key.endswith(_STATE)]


def convert_model(
    model: nn.Module, to_transformer_engine: bool = True, _convert_linear: bool = True, _convert_ln: bool = True
) -> None:
    """Replace linear layers and layer norms of a model by transformer_engine's in place, or those by torch's.

    Args:
        model: The model.
        to_transformer_engine: False replaces transformer_engine's layers by torch's. Default: True.
    """
    if to_transformer_engine:
        _convert(model, ExitStack(), linear=_convert_linear, norms=_convert_ln)
        return
    te = _load(".pytorch")
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):
            new: nn.Module | None = None
            if isinstance(child, te.Linear) and _convert_linear:
                has_bias = child._parameters.get("bias") is not None
                new = nn.Linear(child.in_features, child.out_features, bias=has_bias, device="meta")
            elif isinstance(child, te.LayerNorm) and _convert_ln:
                new = nn.LayerNorm(tuple(child.weight.shape), eps=child.eps, device="meta")
            if new is not None and child is not None:
                _exchange(parent, name, child, new)


def has_transformer_engine_layers(model: nn.Module) -> bool:
    """Return whether a model has layers of transformer_engine."""
    te = _load(".pytorch")
    return any(isinstance(module, (te.Linear, te.LayerNorm, te.TransformerLayer)) for module in model.modules())


def contextual_fp8_autocast(
    model_forward: Callable[..., Any], fp8_recipe: Any, use_during_eval: bool = False
) -> Callable[..., Any]:
    """Return a forward function, with the module as its first argument, that computes in fp8.

    Args:
        model_forward: The bound forward of a model.
        fp8_recipe: transformer_engine's recipe.
        use_during_eval: Compute in fp8 also in `eval()` mode. Default: False.
    """

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with _autocast(use_during_eval or self.training, fp8_recipe):
            return model_forward(*args, **kwargs)

    vars(forward)["__wrapped__"] = model_forward
    return forward


def apply_fp8_autowrap(model: nn.Module, fp8_recipe_handler: TERecipeKwargs | None) -> nn.Module:
    """Have the forward of a model compute in fp8, for loops without an Accelerator.

    Args:
        model: Changed in place, with transformer_engine's layers.
        fp8_recipe_handler: Options. Default: None, which are transformer_engine's defaults.
    """
    options = fp8_recipe_handler or TERecipeKwargs()
    forward = contextual_fp8_autocast(model.forward, options.make_recipe(), bool(options.use_autocast_during_eval))
    vars(model)["forward"] = functools.partial(forward, model)
    return model
