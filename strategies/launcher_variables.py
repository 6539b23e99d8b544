"""Read what `accelerate launch` says by environment variables to a script that says nothing itself."""

from __future__ import annotations

import warnings
from typing import Any

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.process import variables
from trainwright.strategies.select import ENGINE_ARGUMENTS

_PREFIX = "ACCELERATE_"
_PRECISION, _STEPS, _CPU = (_PREFIX + name for name in ("MIXED_PRECISION", "GRADIENT_ACCUMULATION_STEPS", "USE_CPU"))
_PRECISIONS = ("no", "fp16", "bf16")
_SAYS_NOTHING = ("", "0", "no", "none", "false", "default")
_ENGINES = {
    "USE_FSDP": "fsdp_plugin",
    "USE_DEEPSPEED": "deepspeed_plugin",
    "USE_MEGATRON_LM": "megatron_lm_plugin",
    "USE_PARALLELISM_CONFIG": "parallelism_config",
}
_INSTEAD = {
    **{
        name: f"Accelerator trains replicas of a model; write a TaskModule for {ENGINE_ARGUMENTS[plugin]}"
        for name, plugin in _ENGINES.items()
    },
    "DYNAMO_BACKEND": "call torch.compile(model) before prepare()",
    "CPU_AFFINITY": "start the processes under numactl or taskset",
    "TORCH_DEVICE": "choose devices by CUDA_VISIBLE_DEVICES",
    "USE_SAGEMAKER": "start the script with torchrun",
}
# Read elsewhere (DEBUG_MODE), about the launcher's own output, or details of what is warned of by another name.
_QUIET = ("DEBUG_MODE", "ENABLE_RICH", "DISABLE_RICH", "LOG_LEVEL", "CONFIG_DS_FIELDS", "GRADIENT_CLIPPING")
_DETAILS = ("DYNAMO_", "DEEPSPEED_", "FP8_", "SAGEMAKER_")


def read_launcher_variables(
    mixed_precision: str | None, steps: Any, plugin: Any, cpu: bool, *, warns: bool
) -> tuple[str | None, Any, bool]:
    """Return the precision, the accumulation steps and `cpu`, from the variables where the arguments say nothing.

    Args:
        mixed_precision: the argument; None says nothing.
        steps: the argument `gradient_accumulation_steps`; 1 says nothing.
        plugin: the argument `gradient_accumulation_plugin`, which has `num_steps`; None says nothing.
        cpu: the argument; False says nothing.
        warns: of variables that an argument overrides or that are not honoured, by name.

    Raises:
        ConfigurationError: A variable has a value that it cannot have.
    """
    said = variables(_PREFIX)
    unheard: list[str] = []
    precision = said.pop(_PRECISION, "no").lower()
    if mixed_precision is None and precision != "no":
        if precision not in _PRECISIONS:
            raise ConfigurationError(f"{_PRECISION}={precision!r}: expected 'no', 'fp16' or 'bf16'.")
        mixed_precision = precision
    elif precision not in ("no", mixed_precision):
        unheard.append(f"{_PRECISION}={precision} is overridden by mixed_precision={mixed_precision!r}.")
    wanted = _steps(said.pop(_STEPS, "1"))
    own = steps if plugin is None else getattr(plugin, "num_steps", None) or 1
    if plugin is None and steps == 1:
        steps = wanted
    elif wanted not in (1, own):
        unheard.append(f"{_STEPS}={wanted} is overridden by the script's {own} gradient accumulation steps.")
    cpu = cpu or said.pop(_CPU, "false").lower() not in _SAYS_NOTHING
    unheard += [text for name, value in sorted(said.items()) if (text := _unheard(name, value))]
    if warns:
        for text in unheard:
            warnings.warn(text, TrainwrightWarning, stacklevel=4)
    return mixed_precision, steps, cpu


def _steps(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ConfigurationError(f"{_STEPS}={text!r}: expected a whole number of at least 1.")
    return int(text)


def _unheard(name: str, value: str) -> str | None:
    """Return what to say of a variable; None where it says nothing, or is for others."""
    short = name.removeprefix(_PREFIX)
    if value.lower() in _SAYS_NOTHING or short in _QUIET:
        return None
    if short in _INSTEAD:
        return f"{name}={value} is not honoured: {_INSTEAD[short]}."
    if short.startswith(_DETAILS):
        return None
    return f"{name}={value} is not read by Trainwright. Unset it, or pass what it says as an argument."
