"""Conversion of configuration files and a command line to typed settings, for `trainwright fit` and `CLI`."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from trainwright.cli.configs.class_defaults import fill_nested_defaults, name_torch_classes, place_classes
from trainwright.cli.configs.class_names import (
    class_names,
    expand_assignments,
    expand_config,
    expand_help,
    short_names,
    translate_config,
)
from trainwright.cli.configs.explain_errors import explain
from trainwright.cli.configs.overrides import CommandLine, swap_classes
from trainwright.core.errors import ConfigurationError, nearest, nearest_name

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

_CLASS_KEYS = ("task", "model", "data", "optimizer", "lr_scheduler")
_GROUP = re.compile(r"Group '(?P<group>[^']*)' does not accept option '(?P<name>[^']*)'")
_NO_CLASS = re.compile(
    r"(?P<option>--(trainer\.)?(?P<key>\w+)\.help): Expected a dot import path string: (?P<name>\w+)"
)
_MODEL_KEYS = {"task": "model", "model": "task"}  # names of the same setting in this project and in Lightning


def parse(
    parser: ArgumentParser,
    config: dict[str, Any],
    line: CommandLine,
    *,
    known: Sequence[str],
    classes: Mapping[str, type] | None = None,
) -> Any:
    """Return the typed settings of files and a command line. `build` converts them to objects.

    Prints a note for each class that the command line replaces, with its discarded arguments.

    Args:
        parser: parser of jsonargparse.
        config: settings of the files. Changed in place.
        line: command line with overrides. This function does not read its files.
        known: the allowed top-level keys. Others raise ConfigurationError.
        classes: classes by key, for keys with arguments of one class directly below them (`model.lr`). Default: None.

    Raises:
        ConfigurationError: a key is unknown, or a value is not valid.
    """
    import argparse

    import yaml

    # First, because all following steps look for the model under this command's name for it.
    assignments = _use_own_model_key(config, line.assignments, known)
    _check_top_level(config, known)
    # Assignments of classes are compared with the classes of the files, and import them. Both need full paths.
    translate_config(config)
    expand_config(config)
    assignments = _assign_classes(config, expand_assignments(assignments), known, classes or {})
    try:
        # One call for defaults, files and words: the parser applies links and required arguments to all of them.
        arguments = [f"--config={yaml.safe_dump(config)}"] if config else []
        arguments += expand_help(line.flags)
        arguments += [f"--{key}={value}" for key, value in assignments]
        settings = parser.parse_args(arguments)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"the configuration has a value that YAML cannot represent: {error}") from None
    except argparse.ArgumentError as error:
        raise ConfigurationError(_explained(parser, str(error), known)) from None
    settings.pop("config", None)
    return settings


def _assign_classes(
    config: dict[str, Any],
    assignments: Sequence[tuple[str, str]],
    known: Sequence[str],
    classes: Mapping[str, type],
) -> list[tuple[str, str]]:
    """Apply the assignments of classes to `config`, in place, and add defaults. Return the other assignments.

    jsonargparse 4.53 would pass the arguments of a replaced class to the new class, if it has arguments of the same
    names.
    """
    # Another value, such as a text, is left for the parser, which reports it.
    fixed_classes = {key: cls for key, cls in classes.items() if isinstance(config.get(key, {}), dict)}
    keys_without_fixed_class = [key for key in _CLASS_KEYS if key in known and key not in classes]
    # The following functions handle classes only in the form of `class_path` and `init_args`.
    _wrap(config, fixed_classes)
    assignments, notes = swap_classes(config, assignments)
    for note in notes:
        print(f"trainwright: note: {note}", file=sys.stderr)
    # After the swap, which has used the assignments to keys that have a class. The others may be to empty keys.
    assignments = place_classes(config, assignments, keys=keys_without_fixed_class)
    # After both, because it adds the defaults of the classes that are now in the configuration.
    fill_nested_defaults(config, keys=known)
    # The parser expects the arguments of a fixed class directly below its key.
    _unwrap(config, fixed_classes)
    # After `place_classes`, which may have added a bare name.
    name_torch_classes(config, keys_without_fixed_class)
    return assignments


def _use_own_model_key(
    config: dict[str, Any], assignments: Sequence[tuple[str, str]], known: Sequence[str]
) -> list[tuple[str, str]]:
    """Rename the key `model` to `task`, or vice versa, if the command uses the other name.

    Renames it in `config`, in place, and returns the renamed assignments.
    """
    own_key = "task" if "task" in known else "model"
    other_key = _MODEL_KEYS[own_key]
    if other_key in config:
        if own_key in config:
            raise ConfigurationError(
                f"the configuration has {own_key!r} and {other_key!r}, which mean the same. Keep {own_key!r}."
            )
        config[own_key] = config.pop(other_key)
    renamed: list[tuple[str, str]] = []
    for key, text in assignments:
        if key.partition(".")[0] == other_key:
            key = own_key + key.removeprefix(other_key)
        renamed.append((key, text))
    return renamed


def _wrap(config: dict[str, Any], classes: Mapping[str, type]) -> None:
    """Write a fixed class as `class_path` with `init_args`, like the classes that a configuration names."""
    for key, cls in classes.items():
        config[key] = {"class_path": f"{cls.__module__}.{cls.__qualname__}", "init_args": config.get(key) or {}}


def _unwrap(config: dict[str, Any], classes: Mapping[str, type]) -> None:
    """Undo `_wrap`. Keys without arguments are removed."""
    for key in classes:
        arguments = config.pop(key).get("init_args")
        if arguments:
            config[key] = arguments


def _check_top_level(config: dict[str, Any], known: Sequence[str]) -> None:
    for key in config:
        if key not in known:
            raise ConfigurationError(
                f"the configuration has a key {key!r}.{nearest(str(key), known)} Known: {', '.join(known)}."
            )


def _explained(parser: ArgumentParser, message: str, known: Sequence[str]) -> str:
    """Return a parser's message as one line, with the most similar key."""
    match = _NO_CLASS.match(message)
    if match is not None:
        close = nearest(match["name"], class_names(match["key"]))
        return f"{match['option']} {match['name']}: no such class is known.{close} Write a path such as module.Class."
    options: set[str] = set()
    for action in parser._actions:
        options |= set(action.option_strings)
    # "Unrecognized arguments: --trainer.max_epoch=3" → `--trainer.max_epoch`
    words = [word.partition("=")[0].strip("'\",") for word in message.split()]
    unknown = [word for word in words if word.startswith("--") and word not in options]
    group = _GROUP.fullmatch(message.strip())
    if group is not None:
        key = f"{group['group']}.{group['name']}"
        unknown = [f"--{key}"]
        message = f"{key}: {group['group']!r} has no argument {group['name']!r}."
    if not unknown:
        return explain(message, short_names)
    message = message.rstrip(".") + "."
    top_key, dot, rest = unknown[0].removeprefix("--").partition(".")
    if dot and top_key not in known:
        # `--trainr.max_epochs`: only the first part is misspelled, so that only this part is compared.
        near_key = nearest_name(top_key, known)
        return message if near_key is None else f"{message} Did you mean '{near_key}.{rest}'?"
    close = nearest(unknown[0], [option for option in options if not option.endswith(".help")])
    if group is not None:  # a key of a file, which has no dashes
        close = close.replace("--", "")
    return message + close


class _Failure(BaseException):
    """Exception that carries a constructor's error through jsonargparse, which would convert the error to text.

    It is not an Exception, because jsonargparse catches those.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class _Constructor:
    """Callable that constructs objects. While `carries` is True, their errors are raised as `_Failure`.

    A factory of optimizers keeps this callable and calls it during training, when `carries` is False.
    """

    def __init__(self) -> None:
        self.carries = True

    def __call__(self, cls: type[Any], *args: object, **kwargs: object) -> Any:
        try:
            return cls(*args, **{name: plain(value) for name, value in kwargs.items()})
        except Exception as error:
            if not self.carries:
                raise
            raise _Failure(error) from None


def accept_strategies() -> None:
    """Allow sub-classes of Strategy in a configuration.

    Strategy is a dataclass, and jsonargparse accepts only a dataclass itself by default, and no sub-classes.
    """
    from jsonargparse import set_parsing_settings

    from trainwright.strategies.strategy import Strategy

    set_parsing_settings(subclasses_enabled=[Strategy])


def build(parser: ArgumentParser, settings: Namespace) -> Any:
    """Return the settings with objects instead of class paths. Errors of constructors are raised unchanged.

    Only arguments whose type is a class receive objects. With other types (`Any`, `object`, none), a mapping with
    `class_path` stays a mapping.
    """
    from jsonargparse import set_parsing_settings

    # An argument without a class as its type could otherwise construct any class: subprocess.Popen, for example.
    # jsonargparse has this option only for all parsers of the process, so that it stays set.
    set_parsing_settings(instantiate_subclass_spec_in_any=False)
    construct = _Constructor()
    error: Exception | None = None
    try:
        # For `object` and all its sub-classes (True), which is every class.
        built = parser.instantiate(settings, instantiators=[(construct, object, True)])
    except _Failure as failure:
        error = failure.error
    finally:
        construct.carries = False
    if error is not None:  # outside of `except`, so that the error keeps its own cause and context
        raise error
    return built


def plain(value: object) -> Any:
    """Return a value with dicts instead of jsonargparse's namespaces, also in dicts and lists."""
    if hasattr(value, "as_dict") and type(value).__module__.startswith("jsonargparse"):
        value = value.as_dict()
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    if type(value) is list:
        return [plain(item) for item in value]
    return value


def listed(value: object) -> list[Any]:
    """Return a setting as a list. The setting is one object, a list or None."""
    if value is None:
        return []
    if isinstance(value, (list, tuple)):
        return list(value)
    return [value]
