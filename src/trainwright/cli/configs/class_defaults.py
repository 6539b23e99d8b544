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

    `keys` are those of the outer classes. Classes that cannot be found, and defaults that YAML lacks, are skipped.
    """
    for key in keys:
        spec = config.get(key)
        if isinstance(spec, dict) and "class_path" in spec:
            _fill_arguments(spec)


def place_classes(
    config: dict[str, Any], assignments: Sequence[tuple[str, str]], keys: Sequence[str]
) -> list[tuple[str, str]]:
    """Apply assignments (key, text) that give a class to a key without a value. Return the other assignments.

    The classes are written into the configuration, so that `fill_nested_defaults` adds their defaults.
    """
    return [(key, text) for key, text in assignments if not _place(config, key.removesuffix(".class_path"), text, keys)]


def name_torch_classes(config: dict[str, Any], keys: Sequence[str]) -> None:
    """Replace bare names of torch's optimizers and schedules by paths. Other packages use some of these names, too."""
    for key in keys:
        spec = config.get(key)
        name = spec.get("class_path") if isinstance(spec, dict) else spec
        found = find_class(name) if isinstance(name, str) and name.isidentifier() else None
        if found is not None:
            path = f"{found.__module__}.{found.__qualname__}"
            config[key] = {**spec, "class_path": path} if isinstance(spec, dict) else {"class_path": path}


def _place(config: dict[str, Any], key: str, text: str, keys: Sequence[str]) -> bool:
    if not re.fullmatch(r"[A-Za-z_][\w.]*", text) or text.endswith((".yaml", ".yml", ".json")):
        return False
    above, _, name = key.rpartition(".")
    if key in keys:
        place = config
    else:
        parent = find_spec(config, above.removesuffix(".init_args").split("."))
        # Do not import anything for a value that may be plain text.
        if parent is None or not _takes_a_class(parent["class_path"], name):
            return False
        place = parent.setdefault("init_args", {})
    if place.get(name) is not None or find_class(text) is None:
        return False
    place[name] = {"class_path": text}
    return True


def _takes_a_class(path: str, argument: str) -> bool:
    """Return whether an argument of a class is annotated with the type of an object."""
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
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return all(map(_is_class_hint, inner))
    if isinstance(origin, type) and issubclass(origin, Iterable):  # list[Callback], dict[str, Any]
        return _is_class_hint(inner[-1])
    return hint not in (Any, object, str, list, tuple, dict)


def _fill_below(node: object) -> None:
    for item in node if isinstance(node, list) else ():
        _fill_below(item)
    if not isinstance(node, dict):
        return
    if isinstance(node.get("class_path"), str):
        found = find_class(node["class_path"])
        if found is not None:
            node["class_path"] = f"{found.__module__}.{found.__qualname__}"
            node["init_args"] = own_defaults(found) | (node.get("init_args") or {})
        _fill_arguments(node)
        return
    for item in node.values():
        _fill_below(item)


def _fill_arguments(spec: dict[str, Any]) -> None:
    for name, value in (spec.get("init_args") or {}).items():
        if _takes_a_class(spec["class_path"], name):
            _fill_below(value)


def own_defaults(found: type) -> dict[str, Any]:
    """Return the arguments of a class with defaults that YAML can represent."""
    parameters = inspect.signature(found).parameters.values()
    return {p.name: _as_yaml(p.default) for p in parameters if p.default is not p.empty and _is_plain(p.default)}


def find_class(path: str) -> type | None:
    """Return the class at a path, or None. A bare name is searched in torch's optimizers and schedules."""
    module, _, name = path.rpartition(".")
    for namespace in (module,) if module else _NAMESPACES:
        try:
            found = getattr(importlib.import_module(namespace), name, None)
        except ImportError:
            continue  # the parser reports the error, and its position
        if isinstance(found, type):
            return found
    return None


def _is_plain(value: object) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (bool, int, float, str))


def _as_yaml(value: object) -> Any:
    return [_as_yaml(item) for item in value] if isinstance(value, (list, tuple)) else value
