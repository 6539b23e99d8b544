"""The table of optimizers by name, and the function that creates them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest, require_package, unknown

_TABLE = {
    "adamw": "torch.optim.AdamW",
    "sgd": "torch.optim.SGD",
    "adafactor": "torch.optim.Adafactor",
    "muon": "torch.optim.Muon",
    "adamw_8bit": "torchao.optim.AdamW8bit",
    "adamw_4bit": "torchao.optim.AdamW4bit",
    "adamw_fp8": "torchao.optim.AdamWFp8",
    "adamw_bnb_8bit": "bitsandbytes.optim.AdamW8bit",
    "adamw_low_rank": "trainwright.optimizers.low_rank.LowRankAdamW",
}
_STOCHASTIC_ROUNDING = "bf16_stochastic_round"


def optimizer_names() -> list[str]:
    """Return the names that `create_optimizer` accepts."""
    return list(_TABLE)


def create_optimizer(
    name: str, params: Iterable[torch.Tensor] | Iterable[dict[str, Any]], lr: float | None = None, **options: Any
) -> Optimizer:
    """Create an optimizer by its name in the table.

    Args:
        name: One of `optimizer_names()`.
        params: Parameters, or parameter groups.
        lr: Learning rate. Default: None, which is the default of the optimizer's class.
        **options: Further arguments of the optimizer's class, such as `weight_decay` or, for the optimizers of torchao,
            `bf16_stochastic_round=True`, which rounds weights in bfloat16 up or down at random.

    Raises:
        ConfigurationError: The name or an option is unknown, or the optimizer does not take the parameters.
        MissingPackageError: The optimizer's package is not installed.
    """
    if name not in _TABLE:
        raise unknown("name", name, _TABLE)
    kind = _load(name)
    _check_options(name, kind, options)
    if lr is not None:
        options["lr"] = lr
    groups = list(params)
    if name == "muon":
        _check_matrices(groups)
    if options.get(_STOCHASTIC_ROUNDING) and not any(p.dtype is torch.bfloat16 for p in _parameters(groups)):
        warnings.warn(
            f"{_STOCHASTIC_ROUNDING}=True rounds weights in bfloat16, and no parameter is. Train with "
            "precision='bf16-true', or remove the option.",
            TrainwrightWarning,
            stacklevel=2,
        )
    created: Optimizer = kind(groups, **options)
    return created


def _load(name: str) -> Any:
    """Import the class of an optimizer."""
    module, _, class_name = _TABLE[name].rpartition(".")
    kind = getattr(require_package(module, purpose=f"The optimizer {name!r}"), class_name, None)
    if kind is None:
        package = module.partition(".")[0]
        raise ConfigurationError(
            f"The optimizer {name!r} needs {_TABLE[name]}, which the installed version of {package} does not have. "
            f"Run: pip install --upgrade {package}"
        )
    return kind


def _check_options(name: str, kind: Any, options: dict[str, Any]) -> None:
    known = [option for option in inspect.signature(kind).parameters if option not in ("self", "params", "lr")]
    for option in options:
        if option == _STOCHASTIC_ROUNDING and option not in known:
            supporting = [repr(other) for other, path in _TABLE.items() if path.startswith("torchao")]
            raise ConfigurationError(
                f"{option}={options[option]!r}: {name!r} has no stochastic rounding. Use {', '.join(supporting)}, or "
                "remove the option."
            )
        if option not in known:
            raise ConfigurationError(
                f"The optimizer {name!r} has no option {option!r}.{nearest(option, known)} It takes: lr, "
                f"{', '.join(known)}."
            )


def _parameters(groups: list[Any]) -> Iterator[torch.Tensor]:
    """Yield the parameters of a list of parameters or of parameter groups."""
    for group in groups:
        members = group["params"] if isinstance(group, dict) else [group]
        yield from [members] if isinstance(members, torch.Tensor) else members


def _check_matrices(groups: list[Any]) -> None:
    for parameter in _parameters(groups):
        if parameter.dim() != 2:
            raise ConfigurationError(
                f"The optimizer 'muon' takes matrices, and one parameter has the shape {tuple(parameter.shape)}. "
                "Give it parameters with p.dim() == 2, and the others to a second optimizer, such as 'adamw'."
            )
