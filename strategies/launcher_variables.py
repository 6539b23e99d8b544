"""Settings from the launcher's environment variables, for Trainers and Accelerators without the same arguments."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.names.foreign_names import check_class
from trainwright.core.names.kwargs_handler import KwargsHandler, as_flag, read_variable
from trainwright.core.process import variable, variables
from trainwright.strategies.engine_tables import ENGINE_TABLES
from trainwright.strategies.steps.option_table import DYNAMO, FP8

_PREFIX = "ACCELERATE_"
_PRECISION = f"{_PREFIX}MIXED_PRECISION"
_STEPS = f"{_PREFIX}GRADIENT_ACCUMULATION_STEPS"
_CPU = f"{_PREFIX}USE_CPU"
_EMPTY = ("", "0", "no", "none", "false", "default")
# Variables without the prefix, which scripts and older libraries set.
_UNPREFIXED = "MIXED_PRECISION"
_XLA_BF16 = "XLA_USE_BF16"
_INSTEAD = {
    "USE_IPEX": "remove it: intel_extension_for_pytorch ended with torch 2.8, and torch includes its optimizations",
    "TORCH_DEVICE": "select devices with CUDA_VISIBLE_DEVICES",
    "SAGEMAKER_DISTRIBUTED_TYPE": "submit the job with `trainwright launch`, which starts one process for each GPU",
}
# Variables that other modules read, or that only affect the launcher's output.
_READ_ELSEWHERE = ("CPU_AFFINITY", "DEBUG_MODE", "ENABLE_RICH", "DISABLE_RICH", "LOG_LEVEL", "CONFIG_DS_FIELDS")
_SWITCHES = tuple(table.switch_variable for table in ENGINE_TABLES)
_DETAILS = (*DYNAMO.prefixes, *FP8.prefixes, f"{_PREFIX}SAGEMAKER_", f"{_PREFIX}USE_SAGEMAKER")
_ENGINES = tuple(prefix for table in ENGINE_TABLES for prefix in table.prefixes)
_ALWAYS_READ = ("FSDP_CPU_RAM_EFFICIENT_LOADING",)


@dataclass(frozen=True, slots=True)
class Launched:
    """Settings from the launcher's variables.

    Attributes:
        mixed_precision: `"fp16"`, `"bf16"` or `"fp8"`. None if the variable is not set.
        accumulation: Micro-batches per optimizer step. 1 if the variable is not set.
        cpu: Use the CPU even if there is an accelerator.
        not_read: Warnings about variables that are set but not used.
    """

    mixed_precision: str | None
    accumulation: int
    cpu: bool
    not_read: list[str]

    def unused(self, precision: str | None, accumulation: str | None) -> list[str]:
        """Return a warning for each variable that is set and has no effect.

        Args:
            precision: Name of the argument that overrides the precision. None if no argument does.
            accumulation: Name of the argument that overrides the number of micro-batches. None if no argument does.
        """
        found = []
        if precision is not None and self.mixed_precision is not None:
            found.append(f"{_PRECISION}={self.mixed_precision} is overridden by {precision}.")
        if accumulation is not None and self.accumulation != 1:
            found.append(f"{_STEPS}={self.accumulation} is overridden by {accumulation}.")
        plain = (variable(_UNPREFIXED) or "").lower()
        if precision is None and self.mixed_precision is None and plain in ("fp16", "bf16", "fp8"):
            found.append(f"{_UNPREFIXED}={plain} is not read. Set {_PRECISION}={plain}, or pass the precision.")
        xla = variable(_XLA_BF16) or ""
        if xla.lower() not in _EMPTY:
            found.append(f"{_XLA_BF16}={xla} is not read. Pass precision bf16, or XLAStrategy(downcast_bf16=True).")
        return found + self.not_read


def read_launched(argument: str | None) -> Launched:
    """Read the launcher's variables.

    Args:
        argument: Name of the Accelerator's argument for the selected engine, such as `"fsdp_plugin"`. The engine may
            have been selected by this argument or by a variable. None if no plugin is used.

    Raises:
        ConfigurationError: A variable has an invalid value.
    """
    found = variables(_PREFIX)
    precision = found.pop(_PRECISION, "no").lower()
    if precision not in ("no", "fp16", "bf16", "fp8"):
        raise ConfigurationError(f"{_PRECISION}={precision!r}: expected 'no', 'fp16', 'bf16' or 'fp8'.")
    steps = found.pop(_STEPS, "1")
    if not steps.isdecimal() or int(steps) < 1:
        raise ConfigurationError(f"{_STEPS}={steps!r}: expected an integer of at least 1.")
    cpu = found.pop(_CPU, "false").lower() not in _EMPTY
    texts = []
    for name, value in sorted(found.items()):
        text = _not_read(name, value)
        if text is not None:
            texts.append(text)
    texts += _engine_options_not_read(argument)
    return Launched(None if precision == "no" else precision, int(steps), cpu, texts)


def _not_read(name: str, value: str) -> str | None:
    """Return the warning for a variable that is never read, or None if the variable is read or empty."""
    short = name.removeprefix(_PREFIX)
    if value.lower() in _EMPTY or short in _READ_ELSEWHERE:
        return None
    if name in _SWITCHES or name.startswith(_ENGINES):
        return None
    if short in _INSTEAD:
        return f"{name}={value} is not supported: {_INSTEAD[short]}."
    if name.startswith(_DETAILS):
        return None
    return f"{name}={value} is not read by Trainwright. Unset it, or pass the setting as an argument."


def _engine_options_not_read(argument: str | None) -> list[str]:
    """Return warnings for variables that set options of unused engines, and for variables with unknown options."""
    found = []
    for table in ENGINE_TABLES:
        names = []
        for prefix in table.prefixes:
            for name, value in sorted(variables(prefix).items()):
                if value.strip() and name not in _ALWAYS_READ:
                    names.append(name)
        switch = table.switch_variable
        if table.argument != argument and names and not read_variable(switch, as_flag):
            found.append(f"{', '.join(names)}: not used, because {switch} is not set.")
        elif names:
            unknown = sorted(set(names) - set(table.variables))
            found += [f"{name} is not known, and not used.{nearest(name, table.variables)}" for name in unknown]
    return found


class DynamoBackend(str, Enum):  # noqa: UP042 -- str() of a member includes its class, as in Accelerate
    """Backends of `torch.compile`. A member equals its name in upper case. Some backends need another package."""

    NO = "NO"
    EAGER = "EAGER"
    AOT_EAGER = "AOT_EAGER"
    INDUCTOR = "INDUCTOR"
    AOT_TS_NVFUSER = "AOT_TS_NVFUSER"
    NVPRIMS_NVFUSER = "NVPRIMS_NVFUSER"
    CUDAGRAPHS = "CUDAGRAPHS"
    OFI = "OFI"
    FX2TRT = "FX2TRT"
    ONNXRT = "ONNXRT"
    TENSORRT = "TENSORRT"
    AOT_TORCHXLA_TRACE_ONCE = "AOT_TORCHXLA_TRACE_ONCE"
    TORCHXLA_TRACE_ONCE = "TORCHXLA_TRACE_ONCE"
    IPEX = "IPEX"
    TVM = "TVM"
    HPU_BACKEND = "HPU_BACKEND"


@dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile` for prepared models.

    A field that is None takes the value of its environment variable (`ACCELERATE_DYNAMO_BACKEND`, …).

    Attributes:
        backend: A `DynamoBackend`, its name, or a function. `"no"` compiles nothing. Default: `"no"`.
        mode, fullgraph, dynamic, options, disable: See `torch.compile`.
        use_regional_compilation: Compile each repeated block of a model, which takes less time than compiling the full
            model. The units of sharded models are always compiled separately. Default: False.
    """

    backend: DynamoBackend | str | Callable[..., Any] | None = DYNAMO.field("backend")
    mode: str | None = DYNAMO.field("mode")
    fullgraph: bool | None = DYNAMO.field("use_fullgraph")
    dynamic: bool | None = DYNAMO.field("use_dynamic")
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = DYNAMO.field("use_regional_compilation")

    def compile_options(self) -> dict[str, Any] | None:
        """Return the arguments of `torch.compile`, plus `regional=True` for regional compilation. None: do not compile.

        Raises:
            ConfigurationError: The backend is unknown.
        """
        backend: Any = self.backend
        if isinstance(backend, str):
            name = backend.value if isinstance(backend, DynamoBackend) else backend
            known = [member.lower() for member in DynamoBackend.__members__]
            backend = name.lower() if name.lower() in known else name
            if backend not in known and backend not in torch.compiler.list_backends():
                raise ConfigurationError(
                    f"dynamo backend {name!r} is unknown.{nearest(name, known)} Known: {', '.join(known)}."
                )
        if backend in (None, "no"):
            return None
        options = {"backend": backend}
        for name in ("mode", "fullgraph", "dynamic", "options"):
            value = getattr(self, name)
            if value is not None:
                options[name] = value
        if self.use_regional_compilation:
            options["regional"] = True
        if self.disable:
            options["disable"] = True
        return options


def read_dynamo(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return the options of compilation. Options that the arguments do not set are read from environment variables.

    Raises:
        ConfigurationError: Both arguments are set, or the plugin is not a `TorchDynamoPlugin`.
    """
    if plugin is None:
        return TorchDynamoPlugin(backend)
    if backend is not None:
        raise ConfigurationError(f"dynamo_backend={backend!r} and dynamo_plugin both select a compiler. Pass one.")
    check_class("dynamo_plugin", plugin, TorchDynamoPlugin)
    return plugin
