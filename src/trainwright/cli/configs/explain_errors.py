"""One-line messages for errors in a setting, with the key, the most similar key, and the accepted type.

If a value does not fit a type, jsonargparse 4.53 reports every alternative of the type, nested by indentation. The line
is about the alternative that was parsed furthest. A message in an unknown form is not changed.
"""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from trainwright.cli.configs.class_defaults import find_class
from trainwright.core.errors import nearest

_KEY = re.compile(r'Parser key "(?P<key>[^"]*)":')
_CLASS = re.compile(r"Problem with given class_path '(?P<path>[^']*)':")
_UNION = re.compile(r"Subtypes: \[(?P<types>.*)\]")
_VALUE = re.compile(r"(?:Given value: |.*Got value: )(?P<value>.*)", re.DOTALL)
_NESTED = re.compile(r"NestedArg\(key='(?P<key>[^']*)', val=(?P<value>.*)\)")
_EXPECTED = re.compile(r"Expected an? (?P<type><class '[^']*'>|[\w.\[\], |]+?)(?:\. Got value.*)?")
# Lines around the reasons, which say nothing themselves.
_FILLING = ("Does not validate against any of the Union subtypes", "Errors:", "Given value type:", "Given value:")
_UNKNOWN = re.compile(r"Option '(?P<name>[^']*)' is not accepted")
_NO_NAME = re.compile(r"module '(?P<module>[^']*)' has no attribute '(?P<name>[^']*)'")
_NOT_A = re.compile(r"Import path (?P<path>\S+) does not correspond to a subclass of (?P<base>.+)")
_REQUIRED = re.compile(r"the following arguments are required: (?P<names>.*)")
_NOT_A_PATH = re.compile(r"Expected a dot import path string: (?P<name>.*)")


@dataclass(frozen=True)
class _Reason:
    """Reason given by the parser, with its position in the settings.

    Attributes:
        text: the parser's line.
        keys: keys from the outermost setting to the wrong one.
        class_path: class whose arguments are parsed. Empty outside of classes.
        types: accepted types of a union, as in the message. Empty for other types.
        value: value that was not accepted.
        depth: number of keys and classes that the parser entered.
    """

    text: str = ""
    keys: tuple[str, ...] = ()
    class_path: str = ""
    types: str = ""
    value: str = ""
    depth: int = 0


@dataclass
class _Line:
    text: str
    below: list[_Line] = field(default_factory=list)  # the lines that are indented below it


def explain(message: str, known_names: Callable[[str], Sequence[str]] = lambda key: ()) -> str:
    """Convert the parser's message to one line. A message in an unknown form is returned unchanged.

    Args:
        message: the parser's message.
        known_names: function that returns class names for a key, which the line lists. Default: no names.
    """
    reasons = [reason for reason in _reasons(_tree(message).below, _Reason()) if reason.keys]
    if not reasons:
        return message
    # `int | None` is also tried as None: "expected null" would hide the other type.
    informative = [each for each in reasons if not each.text.startswith("Expected a <class 'NoneType'>")]
    # The alternative that was parsed furthest. Of several, `max` returns the first.
    deepest = max(informative or reasons, key=lambda reason: reason.depth)
    return _sentence(deepest, known_names) or message


def _tree(message: str) -> _Line:
    """Return a message as a tree of lines. The children of a line are indented below it."""
    root = _Line("")
    open_lines = [(-1, root)]  # indentation and line: the line read last, below the lines that contain it
    for line in textwrap.dedent(message).splitlines():
        text = line.strip()
        if not text:
            continue
        indent = len(line) - len(line.lstrip())
        if text.startswith("- "):
            # A bullet is below a line with the same indentation, and the lines below it are indented like its text.
            indent += 1
            text = text[2:]
        while open_lines[-1][0] >= indent:
            open_lines.pop()
        entry = _Line(text)
        open_lines[-1][1].below.append(entry)
        open_lines.append((indent, entry))
    return root


def _reasons(lines: Sequence[_Line], place: _Reason) -> Iterator[_Reason]:
    """Yield every reason in the lines. `place` is the position of the lines in the settings."""
    for line in lines:  # statements about all alternatives are at the same level
        if match := _UNION.fullmatch(line.text):
            place = replace(place, types=match["types"])
        if line.text.startswith("Given value: "):
            value = line.text.removeprefix("Given value: ")
            nested = _NESTED.fullmatch(value)
            if nested is not None:
                value = _plain(nested["value"])
            place = replace(place, value=value)
    inner = replace(place, types="", depth=place.depth + 1)
    for line in lines:
        if match := _KEY.fullmatch(line.text):
            yield from _reasons(line.below, replace(inner, keys=(*place.keys, match["key"])))
        elif match := _CLASS.fullmatch(line.text):
            yield from _reasons(line.below, replace(inner, class_path=match["path"]))
        elif line.text.startswith(_FILLING):
            yield from _reasons(line.below, place)
        elif not _UNION.fullmatch(line.text):
            match = _VALUE.fullmatch(line.text)
            yield replace(place, text=line.text, value=place.value if match is None else match["value"])


def _sentence(reason: _Reason, known_names: Callable[[str], Sequence[str]]) -> str | None:
    """Return a reason as one line, or None for an unknown form."""
    key = ".".join(reason.keys)
    if match := _UNKNOWN.fullmatch(reason.text):
        names = _arguments_of(reason.class_path)
        close = nearest(match["name"], names) or _listed("Its arguments", names)
        return f"{key}.{match['name']}: {reason.class_path} has no argument {match['name']!r}.{close}"
    if match := _NO_NAME.fullmatch(reason.text):
        close = nearest(match["name"], _names_in(match["module"]))
        return f"{key}={reason.class_path}: the module {match['module']!r} has no {match['name']!r}.{close}"
    if match := _NOT_A.fullmatch(reason.text):
        return f"{key}={match['path']} is not a {match['base']}. Name a sub-class of {match['base']}."
    if reason.text.startswith("No module named") and reason.class_path:
        return f"{key}={reason.class_path} cannot be imported: {reason.text}."
    match = _REQUIRED.fullmatch(reason.text)
    if match is not None and reason.class_path:
        name = reason.class_path.rpartition(".")[2]
        first = match["names"].partition(",")[0]
        return (
            f"{key}={name}: its argument {match['names']} is required. Write it below the class: "
            f"init_args: {{…}} in a file, or a further option such as --{key}.{first}=…"
        )
    if match := _NOT_A_PATH.fullmatch(reason.text):
        known = known_names(key)
        close = nearest(match["name"], known) or _listed("Known here", known)
        return f"{key}={match['name']}: write the path of a class, such as module.Class.{close}"
    if match := _EXPECTED.fullmatch(reason.text):
        return f"{key}={reason.value}: expected {_types_text(reason.types or match['type'])}."
    return None


def _listed(title: str, names: Sequence[str]) -> str:
    return f" {title}: {', '.join(names)}." if names else ""


def _types_text(types: str) -> str:
    """Return `int or null` for `<class 'int'>, <class 'NoneType'>`."""
    names = re.sub(r"<class '(?:[\w.]*\.)?(\w+)'>", r"\1", types).replace("NoneType", "null")
    names = re.sub(r"\b(?:\w+\.)+(\w+)", r"\1", names)  # without modules: `collections.abc.Sequence[int]`
    parts = re.split(r",(?![^\[]*\])", names)  # at commas, but not at those within `dict[str, int]`
    return " or ".join(part.strip() for part in parts)


def _plain(value: str) -> str:
    """Return a value without the quotes of its `repr`."""
    try:
        return str(ast.literal_eval(value))
    except (ValueError, SyntaxError):
        return value


def _arguments_of(path: str) -> list[str]:
    from jsonargparse import ArgumentParser

    cls = find_class(path)
    if cls is None:
        return []
    # jsonargparse also finds the arguments behind `**kwargs`, which a signature does not show.
    names = ArgumentParser(exit_on_error=False).add_class_arguments(cls, "x", fail_untyped=False)
    return [name.rpartition(".")[2] for name in names]


def _names_in(module: str) -> list[str]:
    try:
        attributes = vars(importlib.import_module(module))
    except ImportError:
        return []
    return [name for name, value in attributes.items() if isinstance(value, type)]
