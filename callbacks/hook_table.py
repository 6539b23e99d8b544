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

# A task's hook of the same name has the arguments of the callback's, without the first two.
_TASK_EVENTS = frozenset(EVENTS) & frozenset(vars(TaskHooks)) - {"setup", "teardown"}
# The Trainer calls the task's own `setup` and `teardown` along with the data module's.
_TASK_ONLY_EVENTS = tuple(name for name in vars(TaskHooks) if name.endswith(("_model_eval", "_model_train")))


class HookTable:
    """Registered hooks of each event: `table.on_train_batch_start` is a tuple of callables."""

    def __init__(self, callbacks: Iterable[Callback] = (), task: TaskModule | None = None) -> None:
        ordered = sorted(callbacks, key=lambda callback: callback.order)
        for event in (*EVENTS, *_TASK_ONLY_EVENTS):
            hooks = (own_hook(callback, event, Callback) for callback in ordered if event in EVENTS)
            listeners: list[Listener] = [hook for hook in hooks if hook is not None]
            of_task = task is not None and (event in _TASK_EVENTS or event in _TASK_ONLY_EVENTS)
            own = own_hook(task, event, TaskHooks) if of_task else None
            if own is not None:
                listeners.append(_without_run(own))
            setattr(self, event, tuple(listeners))

    def wrap(self, wrap: Callable[[str, Listener], Listener]) -> None:
        """Replace each hook by `wrap(name, hook)`, with a name such as `[Callback]ModelCheckpoint.on_train_end`."""
        for event, listeners in list(vars(self).items()):
            named = []
            for listener in listeners:
                owner = getattr(listener, "__self__", None)
                kind = "Callback" if isinstance(owner, Callback) or owner is None else "TaskModule"
                name = "function" if owner is None else type(owner).__name__
                named.append(wrap(f"[{kind}]{name}.{event}", listener))
            setattr(self, event, tuple(named))

    def only_read(self, events: Iterable[str]) -> bool:
        """Return whether all hooks of `events` belong to callbacks with `reads_only`. A hook of the task does not."""
        return all(_only_reads(listener) for event in events for listener in getattr(self, event))

    def __getattr__(self, event: str) -> Listeners:  # for type checkers: the entries are set above
        raise AttributeError(f"there is no event {event!r}")


def check_hook_names(obj: object, base: type, known: Sequence[str]) -> None:
    """Find hooks of `obj` that are misspelt or belong to an older interface.

    Raises:
        ConfigurationError: a method's name is one edit away from a hook that `obj` does not have, or is a hook of older
            versions of Lightning. Less similar names cause a warning.
    """
    own: dict[str, None] = {}
    for cls in type(obj).__mro__:
        if cls is base or cls.__module__.startswith(("torch.", "trainwright.")):
            continue
        own |= dict.fromkeys(name for name, value in vars(cls).items() if callable(value) and not name.startswith("_"))
    for name in own:
        if name in known or hasattr(base, name):
            continue
        if _calls(type(obj), name):  # the user's own method
            continue
        owner = type(obj).__name__
        if name in REMOVED_HOOKS:
            raise ConfigurationError(f"{owner}.{name} is never called: {REMOVED_HOOKS[name]}")
        renamed = RENAMED_HOOKS.get(name)
        looks_like_one = name.startswith("on_") or name.split("_")[0] in _FIRST_WORDS or "step" in name
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.86) if looks_like_one and renamed is None else []
        meant = renamed or next(iter(close), None)
        if meant is None:
            continue
        if renamed is not None or (meant not in own and _one_edit_apart(name, meant)):
            raise ConfigurationError(
                f"{owner}.{name} is never called: the hook is named {meant!r}. Rename the method (or give it a leading "
                "underscore if it is your own)."
            )
        if (type(obj), name) not in _warned:
            _warned.add((type(obj), name))
            warnings.warn(
                f"{owner}.{name} resembles the hook {meant!r}, and is not called as a hook. Rename it if it is meant "
                "to be that hook; otherwise give it a leading underscore.",
                TrainwrightWarning,
                stacklevel=2,
            )


def _calls(cls: type, name: str) -> bool:
    """Return whether another method of a class reads the attribute `name`."""
    methods = [value for base in cls.__mro__ for key, value in vars(base).items() if key != name]
    return any(name in method.__code__.co_names for method in methods if isinstance(method, FunctionType))


def _one_edit_apart(first: str, second: str) -> bool:
    """Return whether two names differ by one added, missing or wrong letter, or by two swapped neighbours."""
    short, long = sorted((first, second), key=len)
    same = next((i for i, (a, b) in enumerate(zip(short, long, strict=False)) if a != b), len(short))
    if len(long) - len(short) == 1:
        return short[same:] == long[same + 1 :]
    swapped = short[same : same + 2] == long[same : same + 2][::-1] and short[same + 2 :] == long[same + 2 :]
    return len(long) == len(short) and (short[same + 1 :] == long[same + 1 :] or swapped)


_warned: set[tuple[type, str]] = set()
_FIRST_WORDS = frozenset(
    {"configure", "config", "train", "training", "val", "validation", "test", "predict", "prepare"}
)


def _only_reads(listener: Listener) -> bool:
    owner = getattr(listener, "__self__", None)
    if not isinstance(owner, Callback):
        return False
    # The declaration is not inherited: a sub-class may override anything.
    said = vars(owner).get("reads_only", vars(type(owner)).get("reads_only", False))
    return bool(said)


def _without_run(hook: Callable[..., Any]) -> Listener:
    def listener(_run: object, _task: object, *args: object) -> Any:
        return hook(*args)

    vars(listener)["__self__"] = getattr(hook, "__self__", None)  # the task
    return listener
