"""The names of strategies for the Trainer, configurations and the command line."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.registry import Registry

STRATEGIES: Registry[Any] = Registry(
    "strategy",
    {
        "single": "trainwright.strategies.strategy:SingleDeviceStrategy",
        "ddp": "trainwright.strategies.ddp.strategy:DDPStrategy",
        "local_sgd": "trainwright.strategies.ddp.local_sgd:LocalSGDStrategy",
        "fsdp": "trainwright.strategies.fsdp.strategy:FSDPStrategy",
        "deepspeed": "trainwright.strategies.deepspeed.strategy:DeepSpeedStrategy",
        "offload": "trainwright.strategies.offload.training:OffloadStrategy",
        "xla": "trainwright.strategies.xla.strategy:XLAStrategy",
        "tp": "trainwright.strategies.fsdp.tensor_parallel:TensorParallelStrategy",
        "torchft": "trainwright.strategies.torchft.strategy:TorchFTStrategy",
        "megatron": "trainwright.strategies.megatron.strategy:MegatronStrategy",
    },
)


def make_strategy(text: str) -> Any:
    """Create a strategy from its name and options: `"megatron:pp=2:tp=2"`.

    Options are numbers, `True`, `False`, `None` or words.

    Raises:
        ConfigurationError: The name, an option or the value of an option is unknown.
    """
    name, *parts = text.split(":")
    make = STRATEGIES.get(name)
    described = make  # whose signature names the options
    if isinstance(make, _Preset):
        described = STRATEGIES.get(make.base)
    options: dict[str, Any] = {}
    for part in parts:
        key, is_given, value = part.partition("=")
        if not is_given or not key.isidentifier() or key in options:
            raise ConfigurationError(
                f"strategy={text!r}: {part!r} is not an option. Write NAME:OPTION=VALUE:OPTION=VALUE, for example "
                "'megatron:pp=2:tp=2'."
            )
        options[key] = _value(value)
    try:
        known = inspect.signature(described).parameters
    except ValueError:  # the class has no signature
        return make(**options)
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        for key in options:
            if key not in known:
                raise ConfigurationError(
                    f"strategy={text!r}: {name} has no option {key!r}.{nearest(key, known)} Known: {', '.join(known)}."
                )
    return make(**options)


def _value(text: str) -> Any:
    """Parse a number or constant. Any other text is returned unchanged."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


@dataclass(frozen=True, slots=True)
class _Preset:
    """Another name for the strategy `base`, with preset options. Arguments of the call override these options."""

    base: str
    options: Mapping[str, Any]

    def __call__(self, **options: Any) -> Any:
        return STRATEGIES.get(self.base)(**{**self.options, **options})


def _register_preset(name: str, base: str, **options: Any) -> None:
    STRATEGIES.register(name, _Preset(base, options))


# Presets of Lightning.
_register_preset("fsdp_cpu_offload", "fsdp", cpu_offload=True)
_register_preset("deepspeed_stage_1", "deepspeed", stage=1)
_register_preset("deepspeed_stage_2", "deepspeed", stage=2)
_register_preset("deepspeed_stage_3", "deepspeed", stage=3)
_register_preset("deepspeed_stage_1_offload", "deepspeed", stage=1, offload_optimizer=True)
_register_preset("deepspeed_stage_2_offload", "deepspeed", stage=2, offload_optimizer=True)
_register_preset("deepspeed_stage_3_offload", "deepspeed", stage=3, offload_optimizer=True, offload_parameters=True)
_register_preset(
    "deepspeed_stage_3_offload_nvme",
    "deepspeed",
    stage=3,
    offload_optimizer=True,
    offload_parameters=True,
    offload_optimizer_device="nvme",
    offload_params_device="nvme",
)
_register_preset("xla_ddp", "xla", spmd="ddp")
_register_preset("xla_fsdp", "xla", spmd="fsdp")

# Other names of Lightning. All names of DDP start processes in the same way: the launcher decides.
_register_preset("single_device", "single")
_register_preset("single_xla", "xla")
_register_preset("ddp_spawn", "ddp")
_register_preset("ddp_fork", "ddp")
_register_preset("ddp_notebook", "ddp")
for _ddp in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"):
    _register_preset(f"{_ddp}_find_unused_parameters_true", "ddp", find_unused_parameters=True)
    _register_preset(f"{_ddp}_find_unused_parameters_false", "ddp", find_unused_parameters=False)
