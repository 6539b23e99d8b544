"""The table {event: who listens}, built once before a run, and the search for misspelt hooks.

An event's entry is a tuple of callables `(trainer, task, …)`: the bound methods of the callbacks that override the
event, in their order, then the task's own hook. Firing an event is one loop over that tuple; an event without
listeners costs one look-up whatever the number of callbacks.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.core.errors import ConfigurationError
from trainwright.core.hooks import RENAMED_HOOKS, TaskHooks
from trainwright.core.task import TaskModule

Listener = Callable[..., Any]
Listeners = tuple[Listener, ...]

# A task's hook of the same name has the arguments of the callback's, less the first two.
_TASK_EVENTS = frozenset(EVENTS) & frozenset(vars(TaskHooks)) - {"setup", "teardown"}
# The Trainer calls the task's own `setup` and `teardown` beside the data module's.
_TASK_ONLY_EVENTS = tuple(name for name in vars(TaskHooks) if name.endswith(("_model_eval", "_model_train")))


class HookTable:
    """Who listens to which event: `table.on_train_batch_start` is a tuple of callables.

    Args:
        callbacks: in any order; sorted by `Callback.order`, equal ones as given.
        task: its own hooks come last; None: nobody listens but the callbacks.
    """

    def __init__(self, callbacks: Iterable[Callback] = (), task: TaskModule | None = None) -> None:
        ordered = sorted(callbacks, key=lambda callback: callback.order)
        for event in (*EVENTS, *_TASK_ONLY_EVENTS):
            listeners: list[Listener] = [
                getattr(callback, event)
                for callback in ordered
                if event in EVENTS and overrides(callback, event, Callback)
            ]
            of_task = event in _TASK_EVENTS or event in _TASK_ONLY_EVENTS
            if task is not None and of_task and overrides(task, event, TaskHooks):
                listeners.append(_without_run(getattr(task, event)))
            setattr(self, event, tuple(listeners))

    def only_read(self, events: Iterable[str]) -> bool:
        """Tell whether all who listen to some events say that they write no weights (`Callback.reads_only`).

        A task's own hooks do not say so, nor do functions.
        """
        return all(_only_reads(listener) for event in events for listener in getattr(self, event))

    def __getattr__(self, event: str) -> Listeners:  # for type checkers: the entries are set above
        raise AttributeError(f"there is no event {event!r}")


def overrides(obj: object, name: str, base: type) -> bool:
    """Tell whether `obj` has its own method `name`, in a sub-class of `base` or set on the instance."""
    if name in vars(obj):
        return True
    return getattr(type(obj), name, None) is not getattr(base, name)


def check_hook_names(obj: object, base: type, known: Sequence[str]) -> None:
    """Find hooks of `obj` that are misspelt or belong to an older interface.

    Args:
        obj: a callback or a task.
        base: the class whose methods are right by definition.
        known: the names that a misspelt one may have meant.

    Raises:
        ConfigurationError: naming the method and what it should be called.
    """
    own: dict[str, None] = {}
    for cls in type(obj).__mro__:
        if cls is base or cls.__module__.startswith(("torch.", "trainwright.")):
            continue
        own |= dict.fromkeys(name for name, value in vars(cls).items() if callable(value) and not name.startswith("_"))
    for name in own:
        if name in known or hasattr(base, name):
            continue
        meant = RENAMED_HOOKS.get(name)
        if meant is None and (name.startswith("on_") or name.split("_")[0] in _FIRST_WORDS or "step" in name):
            close = difflib.get_close_matches(name, known, n=1, cutoff=0.86)
            meant = close[0] if close else None
        if meant is not None:
            raise ConfigurationError(
                f"{type(obj).__name__}.{name} is never called: the hook is named {meant!r}. Rename the method (or give "
                "it a leading underscore if it is your own)."
            )


_FIRST_WORDS = frozenset(
    {"configure", "config", "train", "training", "val", "validation", "test", "predict", "prepare"}
)


def _only_reads(listener: Listener) -> bool:
    owner = getattr(listener, "__self__", None)
    if not isinstance(owner, Callback):
        return False
    # What a class says is not said by those who inherit from it: they may override anything.
    said = vars(owner).get("reads_only", vars(type(owner)).get("reads_only", False))
    return bool(said)


def _without_run(hook: Callable[..., Any]) -> Listener:
    def listener(_run: Any, _task: Any, *args: Any) -> Any:
        return hook(*args)

    return listener
