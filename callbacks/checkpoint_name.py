"""Names of checkpoints made from a template and the metrics of the moment."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainwright.core.errors import ConfigurationError

DEFAULT_TEMPLATE = "{epoch}-{step}"
_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")


def template_fields(template: str) -> list[str]:
    """Return the names of the metrics that `template` mentions, in order."""
    return [match.group(1) for match in _FIELD.finditer(template)]


def check_template(template: str, owner: str) -> None:
    """Refuse a template that cannot become one folder's name.

    Raises:
        ConfigurationError: it is empty, has a path separator outside of braces, or braces that do not match.
    """
    rest = _FIELD.sub("x", template)
    if not template or rest in (".", "..") or "/" in rest or "\\" in rest:
        raise ConfigurationError(
            f"{owner}(filename={template!r}): a checkpoint's name is one folder's name. Put the path before it into "
            "dirpath."
        )
    if "{" in rest or "}" in rest:
        raise ConfigurationError(
            f"{owner}(filename={template!r}): write fields as {{name}} or {{name:format}}, for example "
            "'{epoch}-{val_loss:.2f}'."
        )


def format_name(template: str, metrics: Mapping[str, Any], *, insert_names: bool) -> str:
    """Fill in `template`: `"{epoch}-{val_loss:.2f}"` becomes `"epoch=3-val_loss=0.12"`.

    Args:
        template: text with fields `{name}` or `{name:format}`.
        metrics: values of the fields, numbers on the host; one that is missing is written as `nan`.
        insert_names: write `name=` before each value. A `/` in a name becomes `_`: it would start another folder.

    Raises:
        ConfigurationError: a value does not fit its format.
    """

    def one(match: re.Match[str]) -> str:
        name, spec = match.group(1), match.group(2) or ""
        text = _format_value(metrics.get(name), spec, template)
        return f"{name.replace('/', '_')}={text}" if insert_names else text

    return _FIELD.sub(one, template)


def _format_value(value: Any, spec: str, template: str) -> str:
    if value is None:
        return "nan"
    if isinstance(value, float) and spec.endswith("d") and value.is_integer():
        value = int(value)  # a counter that was logged comes back as a float
    try:
        return format(value, spec)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"filename={template!r}: {value!r} cannot be written as {spec!r}: {error}.") from error
