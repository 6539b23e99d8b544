"""Signatures of users' hooks and steps, which are checked once before a run.

A hook is called with the positional arguments that its base class declares. If `dataloader_idx` is among these, it is
the last, and is passed only if there are several loaders or the hook requires it. A hook may omit `dataloader_idx`, and
a step also `batch_idx`: `validation_step(self, batch)` is valid.

In this module, `name` is the name of a hook or step, `names` are the arguments of its calls, and parameters are those
that the user's function declares.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
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
    """Parameters of a callable. Each parameter is a tuple of its name and True if it is required (has no default)."""

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
    """Return the arguments of the base class's hook, without `self`. Steps declare `*args`; see `_STEPS`."""
    if name in _STEPS:
        return _STEPS[name]
    declared = parameters_taken_by(getattr(base, name)).positional
    return tuple(parameter for parameter, _ in declared[1:])


def fits(function: Callable[..., Any], name: str, names: Sequence[str]) -> bool:
    """Return whether `function`, as the hook or step `name`, can be called with the arguments `names`."""
    taken = parameters_taken_by(function)
    optional = _optional_arguments(name, names)
    match = _match(taken, names, optional)
    for parameter, required in taken.positional[len(match.positional) :]:
        # An optional argument, such as `dataloader_idx`, gets a value only if all parameters before it get one.
        if required or parameter in optional:
            return False
    for parameter, required in taken.keyword_only:
        if required and parameter not in match.by_keyword:
            return False
    return taken.takes_more or all(names[index] in optional for index in match.left_over)


def bind(
    function: Callable[..., Any], name: str, names: Sequence[str], call: Callable[..., Any] | None = None
) -> Callable[..., Any]:
    """Return a function that accepts the arguments `names` and passes those that `function` declares.

    Args:
        function: the hook or step.
        name: its name.
        names: the arguments of every call, in order. A call may omit `dataloader_idx`, the last one.
        call: called instead of `function`, with the same arguments.
    """
    called = call or function
    taken = parameters_taken_by(function)
    match = _match(taken, names, _optional_arguments(name, names))
    # Indices in `names` of the values for the positional parameters: in a call with all arguments, and in a call that
    # omits `dataloader_idx`.
    positional = match.positional
    if taken.takes_more:
        positional = positional + match.left_over
    without_loader = _without_loader(positional, taken, names)

    passes_all = positional == list(range(len(names)))
    passes_all_others = without_loader == [index for index in positional if names[index] != LOADER]
    if passes_all and passes_all_others and not match.by_keyword:
        return called  # no adapter: it would cost a call in every step

    def adapted(*arguments: object) -> Any:
        indices = positional if len(arguments) == len(names) else without_loader
        values = (*arguments, 0)  # if `dataloader_idx` is omitted, 0 takes its place: the index of a single loader
        keywords = {parameter: values[index] for parameter, index in match.by_keyword.items()}
        return called(*[values[index] for index in indices], **keywords)

    # As of a bound method: the task or callback. `HookTable.only_read` reads it.
    vars(adapted)["__self__"] = getattr(function, "__self__", None)
    return adapted


def _optional_arguments(name: str, names: Sequence[str]) -> list[str]:
    """Return the arguments that a hook may omit. A positional parameter of such a name receives the argument of this
    name. Other positional parameters receive the other arguments in order, whatever their names are.
    """
    optional = (LOADER, "batch_idx") if name in _STEPS else (LOADER,)
    return [argument for argument in names if argument in optional]


@dataclass(frozen=True)
class _Match:
    """Assignment of arguments to the parameters of a function. Arguments are indices in a list of names.

    For example the parameters `(self, loss, dataloader_idx, *, batch)` and the arguments `("loss", "batch",
    "batch_idx", "dataloader_idx")` match as `positional=[0, 3]`, `by_keyword={"batch": 1}`, `left_over=[2]`.
    """

    positional: list[int]  # one for each of the first positional parameters; further ones get no argument
    by_keyword: dict[str, int]  # by the names of keyword-only parameters
    left_over: list[int]  # arguments for which no parameter is declared; only `*args` receives them


def _match(taken: Parameters, names: Sequence[str], optional: Collection[str]) -> _Match:
    by_keyword = {parameter: names.index(parameter) for parameter, _ in taken.keyword_only if parameter in names}
    by_name = {parameter: names.index(parameter) for parameter, _ in taken.positional if parameter in optional}
    in_order = [index for index, argument in enumerate(names) if argument not in by_keyword and argument not in by_name]
    positional: list[int] = []
    for parameter, _ in taken.positional:
        if parameter in by_name:
            positional.append(by_name[parameter])
        elif in_order:
            positional.append(in_order.pop(0))
        else:
            break
    return _Match(positional, by_keyword, in_order)


def _without_loader(positional: list[int], taken: Parameters, names: Sequence[str]) -> list[int]:
    """Return the indices of the arguments for a call that omits `dataloader_idx`."""
    if LOADER not in names or names.index(LOADER) not in positional:
        return positional
    place = positional.index(names.index(LOADER))
    is_declared = place < len(taken.positional)  # otherwise `*args` receives it
    is_required = is_declared and taken.positional[place][1]
    is_last = place == len(positional) - 1
    # A parameter that is required, or that other arguments follow, cannot be omitted. It gets 0; see `bind`.
    return positional[:-1] if is_last and not is_required else positional


def overrides(obj: object, name: str, base: type) -> bool:
    """Return whether `obj` has its own method `name`, in a sub-class of `base` or set on the instance.

    A hook that is set to None, for example with `task.val_dataloader = None`, counts as not defined.
    """
    hook = getattr(obj, name, None)
    if hook is None or (name in _ONLY_METHODS and not callable(hook)):
        return False
    if name not in vars(obj):
        return getattr(type(obj), name, None) is not getattr(base, name)
    # Set on the instance. A wrapper of the default `num_items` or `num_tokens`, for example to record calls, does not
    # count as an override, because the default provides no count.
    wrapped = getattr(inspect.unwrap(hook), "__func__", None)
    return name not in _ONLY_METHODS or wrapped is not getattr(base, name)


def method_of(obj: object, name: str) -> Callable[..., Any]:
    """Return the method `name` of `obj`; if it is set to None, the method of its class or of a base class."""
    method = getattr(obj, name)
    if method is not None:
        return method  # type: ignore[no-any-return]  # an attribute, found by its name
    for cls in type(obj).__mro__:
        function = vars(cls).get(name)
        if function is not None:
            return function.__get__(obj)  # type: ignore[no-any-return]
    raise AttributeError(name)


def own_hook(obj: object, name: str, base: type) -> Callable[..., Any] | None:
    """Return the hook of `obj`, adapted by `bind` to the arguments of `base`'s hook. None if it is not overridden."""
    if not overrides(obj, name, base):
        return None
    return bind(getattr(obj, name), name, arguments_of(base, name))


def check_signatures(obj: object, base: type, hooks: Iterable[str]) -> None:
    """Check that hooks of a task, callback or data module accept their arguments.

    Raises:
        ConfigurationError: a hook does not accept its arguments or is not a method.
    """
    for name in hooks:
        if not overrides(obj, name, base):
            continue
        owner = type(obj).__name__
        names = arguments_of(base, name)
        hook = getattr(obj, name)
        if not callable(hook):
            raise ConfigurationError(
                f"{owner}.{name} is a {type(hook).__name__}, but {name} is a hook, which is called with "
                f"({', '.join(names)}). Rename your attribute."
            )
        if not fits(hook, name, names):
            raise ConfigurationError(
                f"{owner}.{name} declares {_declared(hook)}, but the hook is called with ({', '.join(names)}). "
                f"Write: def {name}({_declaration(names)}), or rename the method if it is your own."
            )


def _declaration(names: Sequence[str]) -> str:
    """Return the parameters of a hook that is called with the arguments `names`, as source text."""
    return ", ".join(["self", *(f"{name}=0" if name == LOADER else name for name in names)])


def _declared(function: Callable[..., Any]) -> str:
    """Return a function's parameters as text, without annotations."""
    parameters = inspect.signature(function).parameters.values()
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare))
