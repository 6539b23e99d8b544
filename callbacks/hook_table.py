"""The table of registered hooks by event, built once before a run, and the check for misspelt hooks.

An event's entry is a tuple of callables `(trainer, task, …)`: the bound methods of the callbacks that override the
event, in their order, then the task's own hook. Firing an event is one loop over that tuple. An event without hooks
costs one look-up. Arguments that a hook does not accept are not passed to it (see `core.signatures`): evaluations pass
`dataloader_idx` with several loaders only.
"""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Callable, Iterable, Sequence
from types import FunctionType
from typing import Any

from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.hooks import REMOVED_HOOKS, RENAMED_HOOKS, TaskHooks
from trainwright.core.signatures import own_hook
from trainwright.core.task import TaskModule

Listener = Callable[..., Any]
Listeners = tuple[Listener, ...]

_warned: set[tuple[type, str]] = set()  # classes and methods with a warning in this process
_FIRST_WORDS = frozenset(
    {"configure", "config", "train", "training", "val", "validation", "test", "predict", "prepare"}
)

# A task's hook of the same name has the arguments of the callback's, without the first two.
# The Trainer calls the task's own `setup` and `teardown` along with the data module's.
_TASK_EVENTS = (frozenset(EVENTS) & frozenset(vars(TaskHooks))) - {"setup", "teardown"}
_TASK_ONLY_EVENTS = tuple(name for name in vars(TaskHooks) if name.endswith(("_model_eval", "_model_train")))


class HookTable:
    """Registered hooks of each event: `table.on_train_batch_start` is a tuple of callables."""

    def __init__(self, callbacks: Iterable[Callback] = (), task: TaskModule | None = None) -> None:
        ordered = sorted(callbacks, key=lambda callback: callback.order)
        for event in EVENTS:
            listeners: list[Listener] = []
            for callback in ordered:
                hook = own_hook(callback, event, Callback)
                if hook is not None:
                    listeners.append(hook)
            if event in _TASK_EVENTS:
                listeners.extend(_task_listeners(task, event))
            setattr(self, event, tuple(listeners))
        for event in _TASK_ONLY_EVENTS:
            setattr(self, event, _task_listeners(task, event))

    def wrap(self, wrap: Callable[[str, Listener], Listener]) -> None:
        """Replace each hook by `wrap(name, hook)`, with a name such as `[Callback]ModelCheckpoint.on_train_end`."""
        for event, listeners in list(vars(self).items()):
            wrapped = []
            for listener in listeners:
                owner = getattr(listener, "__self__", None)
                if owner is None:  # a plain function, as LambdaCallback has
                    name = "[Callback]function"
                elif isinstance(owner, Callback):
                    name = f"[Callback]{type(owner).__name__}"
                else:
                    name = f"[TaskModule]{type(owner).__name__}"
                wrapped.append(wrap(f"{name}.{event}", listener))
            setattr(self, event, tuple(wrapped))

    def only_read(self, events: Iterable[str]) -> bool:
        """Return whether all hooks of `events` belong to callbacks with `reads_only`. A hook of the task does not."""
        return all(all(map(_only_reads, getattr(self, event))) for event in events)

    def __getattr__(self, event: str) -> Listeners:  # for type checkers: the entries are set above
        raise AttributeError(f"there is no event {event!r}")


def check_hook_names(obj: object, base: type, known: Sequence[str]) -> None:
    """Find hooks of `obj` that are misspelt or belong to an older interface.

    Raises:
        ConfigurationError: a method's name is one edit away from a hook that `obj` does not have, or is a hook of older
            versions of Lightning. Less similar names cause a warning.
    """
    cls = type(obj)
    own_methods = _own_methods(cls, base)
    for name in own_methods:
        if name in known or hasattr(base, name):
            continue
        if _is_called(cls, name):  # a helper of the user's hooks
            continue
        if name in REMOVED_HOOKS:
            raise ConfigurationError(f"{cls.__name__}.{name} is never called: {REMOVED_HOOKS[name]}")
        renamed = RENAMED_HOOKS.get(name)
        similar = renamed or _similar_hook(name, known)
        if similar is None:
            continue
        # If the similar hook exists, too, the name is hardly a misspelling of it.
        is_misspelt = similar not in own_methods and _is_one_edit_apart(name, similar)
        if renamed is not None or is_misspelt:
            raise ConfigurationError(
                f"{cls.__name__}.{name} is never called: the hook is named {similar!r}. Rename the method (or give it "
                "a leading underscore if it is your own)."
            )
        if (cls, name) in _warned:
            continue
        _warned.add((cls, name))
        warnings.warn(
            f"{cls.__name__}.{name} resembles the hook {similar!r}, and is not called as a hook. Rename it if it is "
            "meant to be that hook; otherwise give it a leading underscore.",
            TrainwrightWarning,
            stacklevel=2,
        )


def _own_methods(cls: type, base: type) -> list[str]:
    """Return the public methods that the user's classes define, each once, those of sub-classes first."""
    names: dict[str, None] = {}  # a set in the order of insertion
    for ancestor in cls.__mro__:
        if ancestor is base or ancestor.__module__.startswith(("torch.", "trainwright.")):
            continue
        for name, value in vars(ancestor).items():
            if callable(value) and not name.startswith("_"):
                names[name] = None
    return list(names)


def _is_called(cls: type, name: str) -> bool:
    """Return whether another method of a class reads the attribute `name`."""
    for ancestor in cls.__mro__:
        for key, method in vars(ancestor).items():
            if key == name or not isinstance(method, FunctionType):
                continue
            # The names that a function's code reads: the source may not be available.
            if name in method.__code__.co_names:
                return True
    return False


def _similar_hook(name: str, known: Sequence[str]) -> str | None:
    has_first_word = name.startswith("on_") or name.split("_")[0] in _FIRST_WORDS
    if not has_first_word and "step" not in name:
        return None
    similar = difflib.get_close_matches(name, known, n=1, cutoff=0.86)
    return similar[0] if similar else None


def _is_one_edit_apart(first: str, second: str) -> bool:
    """Return whether two names differ by one added, missing or wrong letter, or by two swapped neighbours."""
    if len(first) == len(second):
        differences = [i for i in range(len(first)) if first[i] != second[i]]
        if len(differences) != 2:
            return len(differences) == 1
        i, j = differences
        return j == i + 1 and first[i] == second[j] and first[j] == second[i]
    short, long = sorted((first, second), key=len)
    # Removing the additional letter gives the shorter name: "on_fitt_end" without its second "t" is "on_fit_end".
    return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def _only_reads(listener: Listener) -> bool:
    owner = getattr(listener, "__self__", None)
    if not isinstance(owner, Callback):
        return False
    # The declaration is not inherited: a sub-class may override anything.
    of_class = vars(type(owner)).get("reads_only", False)
    return bool(vars(owner).get("reads_only", of_class))


def _task_listeners(task: TaskModule | None, event: str) -> Listeners:
    """Return the task's own hook of an event, which does not receive the run and the task."""
    hook = None if task is None else own_hook(task, event, TaskHooks)
    if hook is None:
        return ()

    def listener(_run: object, _task: object, *args: object) -> Any:
        return hook(*args)

    vars(listener)["__self__"] = getattr(hook, "__self__", None)  # the task, as for a bound method
    return (listener,)
