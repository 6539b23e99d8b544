"""The names of strategies for the Trainer, configurations and the command line."""

from __future__ import annotations

import ast
import inspect
from functools import partial
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
        known = inspect.signature(make).parameters
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


def _make(name: str, /, **options: object) -> Any:
    """Create the strategy `name` with preset options. Arguments of the call override these options."""
    return STRATEGIES.get(name)(**options)


STRATEGIES.register("fsdp_cpu_offload", partial(_make, "fsdp", cpu_offload=True))
for _stage in (1, 2, 3):
    _on_host = {"offload_optimizer": True, **({"offload_parameters": True} if _stage == 3 else {})}
    STRATEGIES.register(f"deepspeed_stage_{_stage}", partial(_make, "deepspeed", stage=_stage))
    STRATEGIES.register(f"deepspeed_stage_{_stage}_offload", partial(_make, "deepspeed", stage=_stage, **_on_host))
_on_disk = {**_on_host, "offload_optimizer_device": "nvme", "offload_params_device": "nvme"}
STRATEGIES.register("deepspeed_stage_3_offload_nvme", partial(_make, "deepspeed", stage=3, **_on_disk))

for _spmd in ("ddp", "fsdp"):
    STRATEGIES.register(f"xla_{_spmd}", partial(_make, "xla", spmd=_spmd))

# Lightning's names. All of them start processes in the same way: the launcher decides.
STRATEGIES.register("single_device", partial(_make, "single"))
STRATEGIES.register("single_xla", partial(_make, "xla"))
for _start in ("ddp", "ddp_spawn", "ddp_fork", "ddp_notebook"):
    if _start != "ddp":
        STRATEGIES.register(_start, partial(_make, "ddp"))
    for _flag in (True, False):
        STRATEGIES.register(
            f"{_start}_find_unused_parameters_{_flag}".lower(), partial(_make, "ddp", find_unused_parameters=_flag)
        )
