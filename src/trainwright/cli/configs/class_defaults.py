"""Default arguments of classes that a configuration names in the arguments of another class.

An argument of a task may have a default such as `lambda params: AdamW(params, lr=0.5)`. If a configuration replaces
AdamW by SGD, jsonargparse 4.53 also passes `lr=0.5` to SGD, because SGD has an argument of the same name and type. This
module writes the defaults of SGD into the configuration, because jsonargparse does not replace explicit arguments.
"""

from __future__ import annotations

import importlib
import inspect
import re
import types
import typing
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

from trainwright.cli.configs.overrides import find_spec

# Modules in which a bare name of an optimizer or a schedule is looked up.
_NAMESPACES = ("torch.optim", "torch.optim.lr_scheduler")


def fill_nested_defaults(config: dict[str, Any], keys: Sequence[str]) -> None:
    """Write the defaults of classes that are named in the arguments of other classes into the configuration, in place.

    `keys` are the top-level keys of the outer classes. Classes that cannot be found, and defaults that YAML cannot
    represent, are skipped.
    """
    for key in keys:
        spec = config.get(key)
        if isinstance(spec, dict) and "class_path" in spec:
            _fill_arguments(spec)


def place_classes(
    config: dict[str, Any], assignments: Sequence[tuple[str, str]], keys: Sequence[str]
) -> list[tuple[str, str]]:
    """Apply assignments (key, text) that give a class to a key without a value. Return the other assignments.

    The classes are written into the configuration, so that `fill_nested_defaults` adds their defaults. `keys` are the
    top-level keys that a class may be assigned to.
    """
    others: list[tuple[str, str]] = []
    for key, text in assignments:
        is_placed = _place_class(config, key.removesuffix(".class_path"), text, keys)
        if not is_placed:
            others.append((key, text))
    return others


def name_torch_classes(config: dict[str, Any], keys: Sequence[str]) -> None:
    """Replace bare names of torch's optimizers and schedules at these keys by paths.

    Other packages have classes with some of these names, so that a bare name may be ambiguous for the parser.
    """
    for key in keys:
        value = config.get(key)
        spec = value if isinstance(value, dict) else {"class_path": value}
        name = spec.get("class_path")
        if not isinstance(name, str) or not name.isidentifier():
            continue
        cls = find_class(name)
        if cls is not None:
            config[key] = {**spec, "class_path": _path_of(cls)}


def _place_class(config: dict[str, Any], key: str, text: str, keys: Sequence[str]) -> bool:
    """Write a class into the configuration. Return False if the assignment is not one of a class to an empty key."""
    if not re.fullmatch(r"[A-Za-z_][\w.]*", text) or text.endswith((".yaml", ".yml", ".json")):
        return False
    outer_key, _, name = key.rpartition(".")
    if key in keys:
        arguments = config
    else:
        outer = find_spec(config, outer_key.removesuffix(".init_args").split("."))
        # Before `find_class(text)`, because nothing is imported for a value that may be plain text.
        if outer is None or not _takes_a_class(outer["class_path"], name):
            return False
        arguments = outer.setdefault("init_args", {})
    if arguments.get(name) is not None or find_class(text) is None:
        return False
    arguments[name] = {"class_path": text}
    return True


def _takes_a_class(path: str, argument: str) -> bool:
    """Return whether a class annotates an argument with a type that admits no plain text or mapping.

    A mapping with `class_path` is then a class. Without an annotation, it may be a mapping of the user.
    """
    hint: Any = Any
    for base in getattr(find_class(path), "__mro__", ()):  # `**kwargs` may pass the argument on to a base class
        hints: dict[str, Any] = {}
        with suppress(NameError):  # an annotation that only a type checker can resolve
            hints = typing.get_type_hints(base.__init__)
        if argument in hints:
            hint = hints[argument]
            break
    return _is_class_hint(hint)


def _is_class_hint(hint: Any) -> bool:
    """Return whether a type is a class, a union of classes, or a container of them: `Optimizer`, `list[Callback]`."""
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return all(map(_is_class_hint, inner))
    if isinstance(origin, type) and issubclass(origin, Iterable):  # list[Callback], dict[str, Any]
        return _is_class_hint(inner[-1])
    return hint not in (Any, object, str, list, tuple, dict)


def _fill_below(node: object) -> None:
    """Write the defaults of the classes in an argument: a class, or a list or mapping of classes."""
    if isinstance(node, list):
        for item in node:
            _fill_below(item)
    elif isinstance(node, dict) and isinstance(node.get("class_path"), str):
        cls = find_class(node["class_path"])
        if cls is not None:
            node["class_path"] = _path_of(cls)
            node["init_args"] = _default_arguments(cls) | (node.get("init_args") or {})
        _fill_arguments(node)
    elif isinstance(node, dict):
        for item in node.values():
            _fill_below(item)


def _fill_arguments(spec: dict[str, Any]) -> None:
    """Write the defaults of the classes in a class's arguments, but not of the class itself."""
    for name, value in (spec.get("init_args") or {}).items():
        if _takes_a_class(spec["class_path"], name):
            _fill_below(value)


def _default_arguments(cls: type) -> dict[str, Any]:
    """Return the arguments of a class with defaults that YAML can represent."""
    defaults: dict[str, Any] = {}
    try:
        parameters = inspect.signature(cls).parameters.values()
    except ValueError:
        return {}  # a class in C, such as torch.device, may have no signature
    for parameter in parameters:
        # `_is_plain` is False for the marker of a parameter without default.
        if _is_plain(parameter.default):
            defaults[parameter.name] = _as_yaml(parameter.default)
    return defaults


def find_class(path: str) -> type | None:
    """Return the class at a path, or None. A bare name is searched in torch's optimizers and schedules."""
    module, _, name = path.rpartition(".")
    namespaces = (module,) if module else _NAMESPACES
    for namespace in namespaces:
        try:
            value = getattr(importlib.import_module(namespace), name, None)
        except ImportError:
            continue  # the parser reports the error, and its position
        if isinstance(value, type):
            return value
    return None


def _path_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _is_plain(value: object) -> bool:
    """Return whether YAML can represent a value."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _as_yaml(value: object) -> Any:
    if isinstance(value, (list, tuple)):  # YAML has no tuples
        return [_as_yaml(item) for item in value]
    return value
