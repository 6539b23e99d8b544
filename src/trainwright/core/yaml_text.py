"""Reading of YAML files that users write."""

from __future__ import annotations

from typing import Any

from trainwright.core.errors import ConfigurationError


def parse_yaml(text: str, origin: str) -> Any:
    """Return the content of a YAML text, which may contain plain values only, no tags that create objects.

    Args:
        text: the text.
        origin: name of its source, for the error.

    Raises:
        ConfigurationError: the text is not YAML, or a value cannot be read.
    """
    import yaml  # here, because `--help` does not need it and starts faster

    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigurationError(f"{origin} is not YAML: {error}") from None
    except RecursionError:
        raise ConfigurationError(f"{origin} is nested too deeply to be a configuration.") from None
    except (ValueError, OverflowError) as error:  # an invalid date, an integer of too many digits
        raise ConfigurationError(f"{origin} holds a value that cannot be read: {error}") from None
