"""Reading of YAML that others have written, with limits on its size and depth."""

from __future__ import annotations

from typing import Any

from trainwright.core.errors import ConfigurationError

# Limits of a file; usual ones have some hundred values and a depth of ten.
MAX_CHARACTERS = 2**22
_MAX_VALUES = 100_000
_MAX_DEPTH = 100


def parse_yaml(text: str, origin: str) -> Any:
    """Return the content of a YAML text.

    Args:
        text: the text.
        origin: name of its source, for the error.

    Raises:
        ConfigurationError: the text is not YAML, exceeds the limits, or contains an alias of itself. Ten lines of
            aliases can stand for a billion values, so values are counted as often as they are used.
    """
    import yaml  # `--help` does without it

    if len(text) > MAX_CHARACTERS:
        raise ConfigurationError(f"{origin} has more than {MAX_CHARACTERS} characters. Shorten it.")
    try:
        content = yaml.safe_load(text)
        _check_finite(content, origin)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{origin} is not YAML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{origin} is nested too deeply to be a configuration.") from None
    except (ValueError, OverflowError) as error:  # an invalid date, an integer of too many digits
        if isinstance(error, ConfigurationError):
            raise
        raise ConfigurationError(f"{origin} holds a value that cannot be read: {error}") from None
    return content


def _check_finite(content: object, origin: str) -> None:
    """Check that aliases form no loop, and that the content does not exceed the limits."""
    count = 0
    inside: set[int] = set()

    def visit(value: object) -> None:
        nonlocal count
        count += 1
        if count > _MAX_VALUES:
            raise ConfigurationError(f"{origin} has more than {_MAX_VALUES} values. Shorten it.")
        if not isinstance(value, (dict, list, set, tuple)):
            return
        if id(value) in inside:
            raise ConfigurationError(f"{origin}: an alias (*name) is used inside the value that it refers to.")
        if len(inside) >= _MAX_DEPTH:
            raise RecursionError
        inside.add(id(value))
        for item in (*value, *value.values()) if isinstance(value, dict) else value:
            visit(item)
        inside.remove(id(value))

    visit(content)
