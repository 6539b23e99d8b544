"""Configuration dataclasses with the names of Hugging Face Accelerate, whose defaults may be environment variables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar

from trainwright.core.errors import ConfigurationError
from trainwright.core.process import variable

_UNSET_WORDS = ("", "none", "default")  # values of a variable that mean the same as no variable
FLAG_WORDS = {
    **dict.fromkeys(("true", "1", "yes", "y", "t", "on"), True),
    **dict.fromkeys(("false", "0", "no", "n", "f", "off"), False),
}


def as_flag(text: str) -> bool:
    """Return the truth value of a text, or raise a ValueError."""
    if text.lower() not in FLAG_WORDS:
        raise ValueError("expected true or false")
    return FLAG_WORDS[text.lower()]


def str_to_bool(value: str, to_bool: bool = False) -> int | bool:
    """Return 1 for a true text (`"true"`, `"yes"`, `"on"`, `"1"`, …) and 0 for a false one, or a bool with `to_bool`.

    Raises:
        ValueError: the text is neither.
    """
    flag = as_flag(value)
    return flag if to_bool else int(flag)


def parse_flag_from_env(key: str, default: bool = False) -> bool:
    """Return the truth value of an environment variable, or `default` if it is not set, empty, `none` or `default`.

    Raises:
        ConfigurationError: the variable has another value.
    """
    flag = read_variable(key, as_flag)
    return default if flag is None else bool(flag)


def parse_choice_from_env(key: str, default: str = "no") -> str:
    """Return an environment variable, or `default` if it is not set."""
    text = variable(key)
    return default if text is None else text


def from_variable(name: str, read: Callable[[str], Any] = str, **more: object) -> Any:
    """Return a dataclass field whose default is the value of an environment variable; see `read_variable`.

    Args:
        name: name of the variable.
        read: converts the variable's text. It raises a ValueError for an invalid text. Default: `str`.
        more: further metadata of the field.
    """
    return field(default=None, metadata={"variable": name, "read": read, **more})


@dataclass
class KwargsHandler:
    """Base class of configuration dataclasses. A field that is None takes the value of its environment variable."""

    _elsewhere: ClassVar[Mapping[str, str]] = {}  # missing attribute of Accelerate's class → sentence with advice

    def __getattr__(self, name: str) -> Any:
        if hasattr(type(self), name):
            # Python calls this method also if a property raises an AttributeError. Raise that error again.
            return object.__getattribute__(self, name)
        text = f"{type(self).__name__} has no attribute {name!r}."
        if name in self._elsewhere:
            text += f" {self._elsewhere[name]}"
        raise AttributeError(text)

    def __post_init__(self) -> None:
        for one in fields(self):
            if "variable" in one.metadata and getattr(self, one.name) is None:
                setattr(self, one.name, read_variable(one.metadata["variable"], one.metadata["read"]))

    def to_dict(self) -> dict[str, Any]:
        """Return all fields by their names."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the fields whose values differ from their defaults, by name. Values of variables are included."""
        kwargs: dict[str, Any] = {}
        for one in fields(self):
            default = one.default if one.default_factory is MISSING else one.default_factory()
            value = getattr(self, one.name)
            if value != default:
                kwargs[one.name] = value
        return kwargs

    def overridden(self, origin: str) -> Iterator[str]:
        """Yield a text for each variable that this object, passed as `origin`, overrides with another value."""
        for one in fields(self):
            if "variable" not in one.metadata:
                continue
            name = one.metadata["variable"]
            in_environment = read_variable(name, one.metadata["read"])
            passed = getattr(self, one.name)
            are_set = in_environment is not None and passed is not None
            if are_set and _text(in_environment) != _text(passed):
                yield f"{name}={variable(name)} is overridden by {origin}, which has {one.name}={passed!r}."


def read_variable(name: str, read: Callable[[str], Any]) -> Any:
    """Return an environment variable's value, converted by `read`. None if it is unset, empty, `none` or `default`."""
    text = (variable(name) or "").strip()
    if text.lower() in _UNSET_WORDS:
        return None
    try:
        return read(text)
    except ValueError as error:
        raise ConfigurationError(f"{name}={text!r}: {error}.") from None


def _text(value: object) -> str:
    """Return a value as text for comparison: variables contain names of enumeration members, in any case."""
    return str(value.name if isinstance(value, Enum) else value).lower()
