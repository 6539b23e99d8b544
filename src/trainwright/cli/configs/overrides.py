"""Reading and merging of configuration files and of the command line.

The result is one dict and a list of `--key=value` for the parser. Classes of the run are not imported.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.yaml_text import parse_yaml

_ASSIGNMENT = re.compile(r"(?:--)?(?P<key>[A-Za-z_][\w.]*\+?)=(?P<value>.*)", re.DOTALL)
_OPTION = re.compile(r"--(?P<key>[A-Za-z_][\w.]*\+?)")
SUFFIXES = (".yaml", ".yml")  # of configuration files
_CONFIG_OPTIONS = ("--config", "-c")
# Options without a value. All other options take one.
_FLAGS = re.compile(r"-h|--help|--print_config(=.*)?|--[\w.]+\.help(=.*)?")
_CLASS_PATH = re.compile(r"[A-Za-z_][\w.]*")
_SPEC_KEYS = ("class_path", "init_args", "dict_kwargs")


@dataclass(slots=True)
class CommandLine:
    """The command line of `trainwright fit`, divided into files, overrides of settings, and flags."""

    configs: list[Path] = field(default_factory=list)  # later ones win
    assignments: list[tuple[str, str]] = field(default_factory=list)  # dotted key, text
    flags: list[str] = field(default_factory=list)  # options without a value, such as `--print_config`


def read_command_line(arguments: Sequence[str]) -> CommandLine:
    """Divide the arguments into files, assignments and flags. A word that ends in `.yaml` or `.yml` is a file.

        ["config.yaml", "--trainer.max_epochs", "3", "task.lr=0.1", "--print_config"]
        CommandLine([Path("config.yaml")], [("trainer.max_epochs", "3"), ("task.lr", "0.1")], ["--print_config"])

    Raises:
        ConfigurationError: a word has no known form, or an option has no value.
    """
    line = CommandLine()
    words = list(arguments)
    while words:
        word = words.pop(0)
        if _FLAGS.fullmatch(word):
            # `--model.help project.Net` describes the arguments of a class.
            if word.endswith(".help") and words and _is_class_path(words[0]):
                word = f"{word}={words.pop(0)}"
            line.flags.append(word)
            continue
        if word.endswith(SUFFIXES) and not word.startswith("-") and "=" not in word:
            line.configs.append(Path(word))
            continue
        if word in _CONFIG_OPTIONS:
            line.configs.append(Path(_value_of(word, words)))
            continue
        assignment = _ASSIGNMENT.fullmatch(word)
        option = _OPTION.fullmatch(word)
        if assignment is not None:
            key = assignment["key"]
            value = assignment["value"]
        elif option is not None:
            key = option["key"]
            value = _value_of(word, words)
        else:
            raise ConfigurationError(
                f"cannot read the argument {word!r}. Write key=value or --key value: trainer.max_epochs=3."
            )
        if key == "config":
            line.configs.append(Path(value))
        else:
            line.assignments.append((key, value))
    return line


def _is_class_path(word: str) -> bool:
    return _CLASS_PATH.fullmatch(word) is not None and not word.endswith(SUFFIXES)


def _value_of(option: str, words: list[str]) -> str:
    """Remove the next word from `words` and return it as an option's value.

    A negative number is a value, but another option is not.
    """
    if not words or words[0].startswith("--"):
        raise ConfigurationError(f"{option} has no value. Write {option} VALUE.")
    return words.pop(0)


def read_configs(paths: Sequence[Path]) -> dict[str, Any]:
    """Read YAML files and merge them. Later files override earlier ones.

    Mappings are merged key by key, and other values are replaced. If a later file changes the `class_path` of a class
    specification, its arguments are replaced, too, because arguments of the old class do not apply to the new class.

    Raises:
        ConfigurationError: a file cannot be read, is not valid YAML, or does not contain a mapping.
    """
    merged: dict[str, Any] = {}
    for path in paths:
        content = parse_yaml(_read_text(path), f"--config {path}")
        if content is not None and not isinstance(content, dict):
            raise ConfigurationError(
                f"--config {path} holds a {type(content).__name__}, expected a mapping such as "
                "trainer: {max_epochs: 3}."
            )
        merged = _merge(merged, content or {})
    return merged


def _read_text(path: Path) -> str:
    try:
        is_readable = path.is_file() or path.is_fifo()  # a shell passes output as a fifo: <(command)
        if path.exists() and not is_readable:
            raise ConfigurationError(f"--config {path} is not a file. Pass a YAML file.")
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise ConfigurationError(f"--config {path}: cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"--config {path} is not text in UTF-8: {error}.") from None


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    if _changes_class(old, new):
        return dict(new)
    merged = dict(old)
    for key, value in new.items():
        old_value = merged.get(key)
        if isinstance(old_value, dict) and isinstance(value, dict):
            merged[key] = _merge(old_value, value)
        else:
            merged[key] = value
    return merged


def _changes_class(old: Mapping[str, Any], new: Mapping[str, Any]) -> bool:
    if "class_path" not in old or "class_path" not in new:  # without one, only arguments are changed
        return False
    return not _same_class(old["class_path"], new["class_path"])


def _same_class(old: object, new: object) -> bool:
    """Return whether two class paths name the same class. A bare name matches a class of this name in any module."""
    if not isinstance(old, str) or not isinstance(new, str):
        return old == new
    return old == new or ("." not in new and old.rpartition(".")[2] == new)


def swap_classes(
    config: dict[str, Any], assignments: Sequence[tuple[str, str]]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Apply the assignments that replace the class of a specification (a mapping with `class_path`) in `config`.

    Arguments of the old class are discarded. Otherwise, the new class would receive arguments of the same name, such as
    a learning rate for Adam. An assignment of the same class is dropped, and its arguments stay.

    Returns:
        The other assignments, and a message for each set of discarded arguments.
    """
    others: list[tuple[str, str]] = []
    notes: list[str] = []
    for key, value in assignments:
        spec = find_spec(config, key.removesuffix(".class_path").split("."))
        names_class = _CLASS_PATH.fullmatch(value) and value not in ("null", "true", "false")  # values of YAML
        if spec is None or not names_class:
            others.append((key, value))
            continue
        if _same_class(spec["class_path"], value):
            continue
        discarded = spec.get("init_args") or {}
        if discarded:
            text = ", ".join(f"{name}={argument!r}" for name, argument in discarded.items())
            notes.append(f"{key}: {spec['class_path']} became {value}, and its arguments were discarded ({text}).")
        spec.clear()
        spec["class_path"] = value
    return others, notes


def find_spec(config: object, parts: Sequence[str]) -> dict[str, Any] | None:
    """Return the mapping with `class_path` at a dotted key, or None. The key may omit `init_args`.

    `task.optimizer` finds {"task": {"class_path": …, "init_args": {"optimizer": {"class_path": …}}}}, too.
    """
    node = config
    for part in parts:
        if not isinstance(node, dict):
            return None
        if "class_path" in node and part not in _SPEC_KEYS:
            node = node.get("init_args") or {}
        node = node.get(part)
    if isinstance(node, dict) and "class_path" in node:
        return node
    return None
