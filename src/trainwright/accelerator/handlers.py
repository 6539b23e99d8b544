"""Options of an Accelerator that do not depend on the engine: data loading, autocast, loss scale, process group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, get_args, get_type_hints

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.foreign_names import check_owner
from trainwright.core.names.kwargs_handler import KwargsHandler
from trainwright.profilers.pytorch import ProfileKwargs
from trainwright.strategies.ddp.comm_hooks import DistributedDataParallelKwargs
from trainwright.strategies.steps.fp8 import AORecipeKwargs
from trainwright.strategies.steps.te_layers import TERecipeKwargs

EvenBatches = bool | Literal["pad"]


@dataclass(slots=True)
class DataLoaderConfiguration:
    """Options for preparing loaders, with Accelerate's names. Options that are always on accept both values.

    Args:
        split_batches: The batch size is that of all processes together. Each gets an equal part. Default: False.
        dispatch_batches: The first process reads the data, and sends each other process its part. False: every process
            reads the data and keeps its own batches; an iterable data set must yield the same samples on every process.
            Default: None, which is True for iterable data sets that do not declare their division over processes.
        even_batches: What happens if the last round, of one batch for each process, is not full. True: as in
            Accelerate, it is completed with samples from the beginning, or dropped if the loader drops incomplete
            batches. All processes get the same number of equally large batches. Of data that has no indices, a process
            repeats its last batch. `gather_for_metrics` drops the repeated samples. `"pad"`: a process without a batch
            repeats its last one with weight 0, so that no sample is trained twice. The last batch may be short. False:
            no batch is repeated, and processes may get different numbers of batches, for `join_uneven_inputs`. A loader
            that drops incomplete batches then drops an incomplete last round, as in Accelerate. Default: True.
        use_seedable_sampler: Always on. The order of shuffled data depends on a seed. Default: False.
        data_seed: Another name of `Accelerator(seed=…)`. Default: None.
        non_blocking: Always on. Batches are copied to the device asynchronously. Default: False.
        use_stateful_dataloader: After `load_state`, the pass that was interrupted continues at its position. False: it
            begins at the first batch of its epoch, for loops that skip batches by themselves. Default: None, which is
            True and logs a line when a pass continues, and False under `trainwright.as_accelerate()`. With True, data
            that cannot seek is fetched again from its beginning.
        custom_classes: Must be None. Default: None.
    """

    split_batches: bool = False
    dispatch_batches: bool | None = None
    even_batches: EvenBatches = True
    use_seedable_sampler: bool = False
    data_seed: int | None = None
    non_blocking: bool = False
    use_stateful_dataloader: bool | None = None
    custom_classes: object = None

    def __post_init__(self) -> None:
        check_even_batches(self.even_batches)
        if self.custom_classes is not None:
            raise ConfigurationError(
                "custom_classes is not supported. Remove it: a prepared loader keeps the class of the original loader."
            )


def check_even_batches(value: object) -> None:
    """Raise a ConfigurationError for a value that `even_batches` cannot have."""
    if value not in (True, False, "pad"):
        raise ConfigurationError(f"even_batches={value!r}: expected True, False or 'pad'.")


@dataclass
class GradScalerKwargs(KwargsHandler):
    """Options of the loss scale with `mixed_precision="fp16"`; see `torch.amp.GradScaler`."""

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    enabled: bool = True


@dataclass
class AutocastKwargs(KwargsHandler):
    """Options of autocast in mixed precision; see `torch.autocast`.

    Attributes:
        enabled: False computes in the precision of the weights.
        cache_enabled: Cache cast weights until the end of the context. Default: None, which is torch's default.
    """

    enabled: bool = True
    cache_enabled: bool | None = None


@dataclass
class InitProcessGroupKwargs(KwargsHandler):
    """Options of the process group, which the first `Accelerator` or `PartialState` of a script creates.

    Attributes:
        backend: Backend of torch.distributed. Default: `"nccl"`, with which gloo is used on the CPU.
        init_method: Must be None or `"env://"`. Default: None, which is `"env://"`.
        timeout: Maximum duration of a collective. Default: None, which is 30 minutes.
    """

    backend: str | None = "nccl"
    init_method: str | None = None
    timeout: timedelta | None = None


@dataclass(frozen=True)
class Handlers:
    """The objects in `kwargs_handlers`, one field for each class. None if no object of the class was passed."""

    # `_CLASSES` reads the classes from these annotations.
    ddp: DistributedDataParallelKwargs | None = None
    scaler: GradScalerKwargs | None = None
    autocast: AutocastKwargs | None = None
    processes: InitProcessGroupKwargs | None = None
    profile: ProfileKwargs | None = None
    float8: AORecipeKwargs | None = None
    engine: TERecipeKwargs | None = None


# The class of each field of `Handlers`: the first part of an annotation such as `AutocastKwargs | None`.
_CLASSES: dict[str, Any] = {name: get_args(hint)[0] for name, hint in get_type_hints(Handlers).items()}


def sort_handlers(handlers: Sequence[Any]) -> Handlers:
    """Return `kwargs_handlers` by class. Raise a ConfigurationError for unknown classes and two objects of a class."""
    by_field: dict[str, Any] = {}
    for handler in handlers:
        name = next((name for name, handler_class in _CLASSES.items() if isinstance(handler, handler_class)), None)
        if name is None:
            check_owner(handler)
            known = ", ".join(handler_class.__name__ for handler_class in _CLASSES.values())
            raise ConfigurationError(f"kwargs_handlers holds a {type(handler).__name__}. Pass objects of: {known}.")
        if name in by_field:
            raise ConfigurationError(f"kwargs_handlers holds two {type(handler).__name__}. Pass one.")
        by_field[name] = handler
    return Handlers(**by_field)
