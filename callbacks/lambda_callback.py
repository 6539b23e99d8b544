"""A callback made of functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.core.errors import ConfigurationError, nearest


class LambdaCallback(Callback):
    """Callback that calls functions at events:
    `LambdaCallback(on_train_epoch_end=lambda trainer, task: print(trainer.state))`.

    Args:
        events: function for each event name. It receives the event's arguments, `(trainer, task, …)`. Functions that
            are sent to other processes by plain pickle must be module-level functions.

    Raises:
        ConfigurationError: an event does not exist, or its value is not a function.
    """

    def __init__(self, **events: Callable[..., Any]) -> None:
        for name, function in events.items():
            if name not in EVENTS:
                raise ConfigurationError(
                    f"LambdaCallback({name}=...): there is no event {name!r}.{nearest(name, EVENTS)} "
                    f"Events: {', '.join(EVENTS)}."
                )
            if not callable(function):
                raise ConfigurationError(f"LambdaCallback({name}={function!r}): expected a function.")
            setattr(self, name, function)  # an attribute of the instance: only these events have a hook
