"""Signatures of users' hooks and steps, which are checked once before a run.

A hook is called with the positional arguments that its base class declares. If `dataloader_idx` is among these, it is
the last, and is passed only if there are several loaders or the hook requires it. A hook may omit `dataloader_idx`, and
a step also `batch_idx`.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, NamedTuple

from trainwright.core.errors import ConfigurationError

LOADER = "dataloader_idx"
_STEPS: dict[str, tuple[str, ...]] = {
    "training_step": ("batch", "batch_idx"),
    "validation_step": ("batch", "batch_idx", LOADER),
    "test_step": ("batch", "batch_idx", LOADER),
    "predict_step": ("batch", "batch_idx", LOADER),
}
# Hooks of tasks whose names may also be attributes of a user's model: only methods count.
_ONLY_METHODS = ("num_items", "num_tokens")


class Parameters(NamedTuple):
    """Parameters of a callable. Each parameter is a tuple of its name and whether it is required."""

    positional: tuple[tuple[str, bool], ...]
    takes_more: bool  # it has `*args`
    keyword_only: tuple[tuple[str, bool], ...]


def parameters_taken_by(function: Callable[..., Any]) -> Parameters:
    """Return the parameters of a callable. If a decorator's wrapper has `*args`, return those of the wrapped function
    (`functools.wraps`).
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)
        if any(p.kind is p.VAR_POSITIONAL for p in signature.parameters.values()):
            signature = inspect.signature(function)
    except (TypeError, ValueError):  # written in C, without a signature
        return Parameters((), True, ())
    parameters = list(signature.parameters.values())
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    return Parameters(
        tuple((p.name, p.default is p.empty) for p in positional),
        any(p.kind is p.VAR_POSITIONAL for p in parameters),
        tuple((p.name, p.default is p.empty) for p in keywords),
    )


def arguments_of(base: type, name: str) -> tuple[str, ...]:
    """Return the arguments of the base class's hook, without `self`."""
    if name in _STEPS:
        return _STEPS[name]
    return tuple(parameter for parameter, _ in parameters_taken_by(getattr(base, name)).positional[1:])


def _may_leave_out(name: str, names: Sequence[str]) -> Collection[str]:
    return [each for each in names if each == LOADER or (name in _STEPS and each == "batch_idx")]


def fits(function: Callable[..., Any], name: str, names: Sequence[str]) -> bool:
    """Return whether `function`, as the hook or step `name`, can be called with the arguments `names`."""
    taken, optional = parameters_taken_by(function), _may_leave_out(name, names)
    by_keyword = _by_keyword(taken, names)
    given = [each for each in names if each not in by_keyword]
    num_required = sum(required for _, required in taken.positional)
    num_needed = sum(each not in optional for each in given)
    return (
        all(not required or each in by_keyword for each, required in taken.keyword_only)
        and num_required <= len(given)
        and (taken.takes_more or len(taken.positional) >= num_needed)
        # A parameter without an argument cannot precede one with an argument.
        and all(parameter not in optional for parameter, _ in taken.positional[len(_places(taken, names, optional)) :])
    )


def bind(
    function: Callable[..., Any], name: str, names: Sequence[str], call: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function that accepts the arguments `names` and passes to `call` those that `function` declares."""
    called, taken, optional = call or function, parameters_taken_by(function), _may_leave_out(name, names)
    several = _picks(taken, names, len(names), optional)
    alone = _picks(taken, names, len(names) - 1, optional) if LOADER in names else several
    keywords = {each: names.index(each) for each in _by_keyword(taken, names)}
    if not keywords and several == list(range(len(names))) and alone == several[: len(names) - (LOADER in names)]:
        return called

    def adapted(*given: object) -> Any:
        picks = several if len(given) == len(names) else alone
        given = (*given, 0)  # if a single loader's index is required
        return called(*[given[i] for i in picks], **{each: given[i] for each, i in keywords.items()})

    vars(adapted)["__self__"] = getattr(function, "__self__", None)  # the owner: see HookTable.only_read
    return adapted


def _by_keyword(taken: Parameters, names: Sequence[str]) -> list[str]:
    """Return the arguments that a function accepts by keyword only."""
    return [each for each, _ in taken.keyword_only if each in names]


def _picks(taken: Parameters, names: Sequence[str], num_given: int, optional: Collection[str]) -> list[int]:
    """Return the indices in `names` of the arguments to pass by position, if the first `num_given` exist."""
    places = _places(taken, names, optional)
    found: list[int] = []
    for at, (place, (_, required)) in enumerate(zip(places, taken.positional, strict=False)):
        if place >= num_given and not required and at == len(places) - 1:
            return found
        found.append(place)
    if not taken.takes_more:
        return found
    by_keyword = _by_keyword(taken, names)
    left = [place for place, each in enumerate(names) if each not in by_keyword]
    return found + [place for place in left[len(found) :] if place < num_given]


def _places(taken: Parameters, names: Sequence[str], optional: Collection[str]) -> list[int]:
    """Return the indices in `names` of the positional parameters. Parameters in `optional` are matched by name."""
    by_keyword = _by_keyword(taken, names)
    named = [names.index(parameter) for parameter, _ in taken.positional if parameter in optional]
    free = iter([i for i, each in enumerate(names) if each not in by_keyword and i not in named])
    places = (names.index(p) if p in optional else next(free, None) for p, _ in taken.positional)
    return [place for place in itertools.takewhile(lambda place: place is not None, places) if place is not None]


def overrides(obj: object, name: str, base: type) -> bool:
    """Return whether `obj` has its own method `name`, in a sub-class of `base` or set on the instance.

    A hook that is set to None, for example with `task.val_dataloader = None`, counts as not defined.
    """
    found = getattr(obj, name, None)
    if found is None or (name in _ONLY_METHODS and not callable(found)):
        return False
    if name in vars(obj):
        # A wrapper of the default, as one that records calls, adds no counts.
        wrapped = getattr(inspect.unwrap(found), "__func__", None)
        return name not in _ONLY_METHODS or wrapped is not getattr(base, name)
    return getattr(type(obj), name, None) is not getattr(base, name)


def method_of(obj: object, name: str) -> Callable[..., Any]:
    """Return the method `name` of `obj`; if it is set to None, the base class's."""
    found = getattr(obj, name)
    classes = iter(type(obj).__mro__)
    while found is None:
        function = vars(next(classes)).get(name)
        found = None if function is None else function.__get__(obj)
    return found  # type: ignore[no-any-return]  # an attribute, found by its name


def own_hook(obj: object, name: str, base: type) -> Callable[..., Any] | None:
    """Return the hook of `obj`, adapted by `bind` to the arguments of `base`'s hook. None if it is not overridden."""
    return bind(getattr(obj, name), name, arguments_of(base, name)) if overrides(obj, name, base) else None


def check_signatures(obj: object, base: type, hooks: Iterable[str]) -> None:
    """Check that hooks of a task, callback or data module accept their arguments.

    Raises:
        ConfigurationError: a hook does not accept its arguments, is not a method, is async or is a generator.
    """
    for name in hooks:
        if not overrides(obj, name, base):
            continue
        owner, names, hook = type(obj).__name__, arguments_of(base, name), getattr(obj, name)
        if not callable(hook):
            raise ConfigurationError(
                f"{owner}.{name} is a {type(hook).__name__}, but {name} is a hook, which is called with "
                f"({', '.join(names)}). Rename your attribute."
            )
        kind = _runs_later(hook, name)
        if kind:
            raise ConfigurationError(
                f"{owner}.{name} is {kind}, which would never run: a call of it only creates an object. Write it as a "
                "plain function."
            )
        if not fits(hook, name, names):
            raise ConfigurationError(
                f"{owner}.{name} declares {_declared(hook)}, but the hook is called with ({', '.join(names)}). "
                f"Write: def {name}({', '.join(('self', *_line(names)))}), or rename the method if it is your own."
            )


def _runs_later(hook: Callable[..., Any], name: str) -> str | None:
    """Return the kind of a hook whose call does not run its body, else None. Hooks for loaders may be generators."""
    function = inspect.unwrap(hook)
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        return "an async function"
    return "a generator (it has a yield)" if inspect.isgeneratorfunction(function) and "loader" not in name else None


def _line(names: Sequence[str]) -> list[str]:
    return [f"{each}=0" if each == LOADER else each for each in names]


def _declared(function: Callable[..., Any]) -> str:
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))
