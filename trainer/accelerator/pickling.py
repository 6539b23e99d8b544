"""Pickle an Accelerator: its settings, and in one process what it has prepared."""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

from trainwright.core.errors import ConfigurationError
from trainwright.trainer.accelerator.prepare import PreparesObjects, prepared_from

_OF_PROCESS = ("_prepared", "_ranks")  # made again where it is unpickled


def picklable_state(accelerator: PreparesObjects) -> dict[str, Any]:
    """Return what pickle takes of an Accelerator.

    Raises:
        ConfigurationError: It joins several processes and has prepared something, or has a strategy object: both hold
            connections to the others.
    """
    state = {name: value for name, value in vars(accelerator).items() if name not in _OF_PROCESS}
    if accelerator.state.num_processes == 1:
        return state
    if accelerator._prepared or not isinstance(vars(accelerator)["_strategy_argument"], str):
        raise ConfigurationError(
            "this Accelerator holds connections to other processes, which cannot be pickled. Pickle it before "
            "prepare(), and with its strategy by name, or pickle accelerator.unwrap_model(model) and state dicts."
        )
    del state["strategy"], state["_items"]
    return state


def restore_prepared(accelerator: PreparesObjects) -> None:
    """Note what an unpickled Accelerator has prepared, so that it is not prepared twice."""
    accelerator._prepared = WeakValueDictionary()
    for kept in (accelerator._models, accelerator._optimizers, accelerator._schedulers, accelerator._dataloaders):
        for one in kept:
            own = prepared_from(one)
            accelerator._prepared[id(one if own is None else own)] = one
