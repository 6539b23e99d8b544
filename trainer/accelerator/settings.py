"""The Accelerator's arguments, read and checked before anything is touched."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.process import detect
from trainwright.strategies.precision import Precision
from trainwright.strategies.select import ENGINE_ARGUMENTS, select_for_loop
from trainwright.strategies.strategy import Strategy

_PRECISIONS = {"no": "32-true", "fp16": "16-mixed", "bf16": "bf16-mixed"}
# Arguments and methods of Hugging Face's Accelerator, and where their meaning went.
_ELSEWHERE = {
    "dataloader_config": "the DataLoader's own arguments: what is prepared keeps its workers, collation and pinning",
    **{
        name: f"a TaskModule with {trainer}, which takes the same options" for name, trainer in ENGINE_ARGUMENTS.items()
    },
    "gradient_accumulation_plugin": "gradient_accumulation_steps=n: each pass ends with a step",
    "rng_types": "seed=: the order of the data depends on it alone",
    "log_with": "a logger of trainwright.loggers in your own loop",
    "project_dir": "a folder of your own",
    "project_config": "a folder of your own",
    "dynamo_backend": "torch.compile(model) before prepare()",
    "dynamo_plugin": "torch.compile(model) before prepare()",
}
_METHODS = {
    "init_trackers": "a logger of trainwright.loggers",
    "log": "a logger of trainwright.loggers",
    "get_tracker": "a logger of trainwright.loggers",
    "register_save_state_pre_hook": "register_for_checkpointing(object), or code before save_state",
    "register_load_state_pre_hook": "code before load_state",
    "trigger_sync_in_backward": "accumulate(), or no_sync() for the other passes",
    "save": "save_model, or torch.save on is_main_process",
    "gradient_state": "sync_gradients, gradient_accumulation_steps",
    "join_uneven_inputs": "prepare() on the loader: ranks that run out of data are padded",
    "profile": "torch.profiler",
}


@dataclass(frozen=True, slots=True)
class LoopSettings:
    """What an Accelerator's arguments say.

    Attributes:
        strategy: configured, not set up.
        precision: of models' forwards.
    """

    strategy: Strategy
    precision: Precision


def read_settings(
    split_batches: bool,
    mixed_precision: str | None,
    gradient_accumulation_steps: int,
    cpu: bool,
    kwargs_handlers: Sequence[Any] | None,
    strategy: Any,
    unknown: dict[str, Any],
) -> LoopSettings:
    """Read and check the arguments of an Accelerator; see there.

    Raises:
        ConfigurationError: the first thing that is wrong.
    """
    _refuse(unknown)
    steps = gradient_accumulation_steps
    if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
        raise ConfigurationError(f"gradient_accumulation_steps={steps!r}: write a whole number of at least 1.")
    precision = _precision(mixed_precision)
    topology = detect()
    if split_batches and topology.world_size > 1:
        raise ConfigurationError(
            "split_batches=True is not served: a loader's batch size is that of one process. Divide it by "
            f"{topology.world_size}, the number of processes."
        )
    return LoopSettings(select_for_loop(strategy, kwargs_handlers or (), cpu=cpu, precision=precision), precision)


def _refuse(unknown: dict[str, Any]) -> None:
    for name, value in unknown.items():
        if name not in _ELSEWHERE:
            known = ("mixed_precision", "gradient_accumulation_steps", "split_batches", "cpu", *_ELSEWHERE)
            raise ConfigurationError(f"Accelerator has no argument {name!r}.{nearest(name, known)}")
        if value is not None:
            raise ConfigurationError(f"Accelerator does not take {name}= . Instead: {_ELSEWHERE[name]}.")


def _precision(name: str | None) -> Precision:
    if name in (None, *_PRECISIONS):
        return Precision.parse(_PRECISIONS[name or "no"])
    if name == "fp8":
        raise ConfigurationError("mixed_precision='fp8' is not served. Use 'bf16'.")
    raise ConfigurationError(
        f"mixed_precision={name!r} is unknown.{nearest(str(name), _PRECISIONS)} Write 'no', 'fp16' or 'bf16'."
    )


def refuse_attribute(name: str, known: Iterable[str]) -> AttributeError:
    """Return the error for an attribute that an Accelerator does not have, naming what serves instead."""
    if name in _METHODS:
        return AttributeError(f"Accelerator has no {name!r} yet. Instead: {_METHODS[name]}.")
    return AttributeError(f"Accelerator has no attribute {name!r}.{nearest(name, known)}")
