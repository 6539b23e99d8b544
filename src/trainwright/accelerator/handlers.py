"""Options of an Accelerator that belong to no engine: compilation, autocast, loss scale, process group."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from enum import Enum
from typing import Any

import torch

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.names.foreign_names import check_class, check_owner
from trainwright.core.names.kwargs_handler import KwargsHandler, as_flag, from_variable
from trainwright.strategies.ddp.comm_hooks import DistributedDataParallelKwargs


@dataclass(slots=True)
class DataLoaderConfiguration:
    """Options for preparing loaders, by Accelerate's names. Those that are always on accept both values.

    Args:
        split_batches: the batch size is that of all processes, which get equal parts of each batch. Default: False.
        dispatch_batches: the first process reads the data and sends each other process its share. Default: None, which
            is True for iterable data sets that do not declare how they are divided.
        even_batches: all processes get the same number of batches; those that a process repeats have weight 0. False:
            each gets only its own, for `join_uneven_inputs`. Makes no difference with `dispatch_batches`. Default:
            True.
        use_seedable_sampler: always on: shuffled data has the order of a seed. Default: False.
        data_seed: the same as `Accelerator(seed=…)`. Default: None.
        non_blocking: always on: batches are copied to the device without waiting. Default: False.
        use_stateful_dataloader: always on: prepared loaders have `state_dict` and `load_state_dict`. Default: False.
        custom_classes: only None: prepared loaders keep their class. Default: None.

    Raises:
        ConfigurationError: a value is not one of these.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: bool = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool = False
    custom_classes: object = None

    def __post_init__(self) -> None:
        if self.custom_classes is not None:
            raise ConfigurationError(
                "custom_classes is not supported. Remove it: a prepared loader keeps the class of yours."
            )


class DynamoBackend(str, Enum):  # noqa: UP042 -- as text a member shows its class, as Accelerate's does
    """Backends of `torch.compile`; a member equals its name in upper case. Some need another package."""

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


@dataclass(frozen=True)
class TorchDynamoPlugin(KwargsHandler):
    """Options of `torch.compile` for the models that are prepared.

    A field that is None takes the value of its environment variable (`ACCELERATE_DYNAMO_BACKEND`, …).

    Attributes:
        backend: A `DynamoBackend`, its name, or a function. `"no"` compiles nothing. Default: `"no"`.
        mode, fullgraph, dynamic, options, disable: See `torch.compile`.
        use_regional_compilation: Compile each repeated block of a model, which takes less time than compiling the whole
            model. Sharded models are always compiled by their units. Default: False.
    """

    backend: DynamoBackend | str | Callable[..., Any] | None = from_variable("ACCELERATE_DYNAMO_BACKEND")
    mode: str | None = from_variable("ACCELERATE_DYNAMO_MODE")
    fullgraph: bool | None = from_variable("ACCELERATE_DYNAMO_USE_FULLGRAPH", as_flag)
    dynamic: bool | None = from_variable("ACCELERATE_DYNAMO_USE_DYNAMIC", as_flag)
    options: dict[str, Any] | None = None
    disable: bool = False
    use_regional_compilation: bool | None = from_variable("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", as_flag)

    def compile_options(self) -> dict[str, Any] | None:
        """Return the arguments of `torch.compile`; None if nothing is compiled.

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
        options = {"mode": self.mode, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "options": self.options}
        found = {name: value for name, value in options.items() if value is not None}
        return {"backend": backend, **found, **({"disable": True} if self.disable else {})}


def read_dynamo(backend: DynamoBackend | str | None, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return how models are compiled, from the two arguments that may say it, or else from variables.

    Raises:
        ConfigurationError: Both are given, or the plugin is not a `TorchDynamoPlugin`.
    """
    if plugin is None:
        return TorchDynamoPlugin(backend)
    if backend is not None:
        raise ConfigurationError(f"dynamo_backend={backend!r} and dynamo_plugin both select a compiler. Pass one.")
    check_class("dynamo_plugin", plugin, TorchDynamoPlugin)
    return plugin


@dataclass(frozen=True)
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scale with `mixed_precision="fp16"`; see `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass(frozen=True)
class AutocastKwargs(KwargsHandler):
    """Options of autocast in mixed precision; see `torch.autocast`.

    Attributes:
        enabled: False computes in the precision of the weights.
        cache_enabled: Keep the weights that were cast until the end of the context. Default: None, which is torch's.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass(frozen=True)
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group, which the first `Accelerator` or `PartialState` of a script creates.

    Attributes:
        backend: Of torch.distributed. The default, `"nccl"`, says nothing: gloo is used on the CPU.
        init_method: `"env://"` alone. Default: None, which is the same.
        timeout: How long a collective may take. Default: None, which is torch's.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass(frozen=True)
class Handlers:
    """What `kwargs_handlers` holds: at most one of each kind; None for a kind that is missing."""

    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    autocast: AutocastKwargs | None = None
    processes: InitProcessGroupKwargs | None = None


_KINDS = (DistributedDataParallelKwargs, GradScalerKwargs, AutocastKwargs, InitProcessGroupKwargs)


def sort_handlers(handlers: Sequence[Any]) -> Handlers:
    """Return the elements of `kwargs_handlers` by their kinds.

    Raises:
        ConfigurationError: One is of another kind, or two are of the same.
    """
    found: dict[Any, Any] = {}
    for handler in handlers:
        kind = next((kind for kind in _KINDS if isinstance(handler, kind)), None)
        if kind is None:
            check_owner(handler)
            known = ", ".join(kind.__name__ for kind in _KINDS)
            raise ConfigurationError(f"kwargs_handlers holds a {type(handler).__name__}. Pass objects of: {known}.")
        if kind in found:
            raise ConfigurationError(f"kwargs_handlers holds two {type(handler).__name__}. Pass one.")
        found[kind] = handler
    return Handlers(*(found.get(kind) for kind in _KINDS))
