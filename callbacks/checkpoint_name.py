"""Names of checkpoints, from a template and the current metrics."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.replacement import is_replaced

DEFAULT_TEMPLATE = "{epoch}-{step}"
_RUN_INDEX = "index.json"  # next to the checkpoints
_INTEGER_FORMATS = ("b", "c", "d", "o", "x", "X")
# File systems allow 255; while a checkpoint is written its name is longer, and a version may be appended.
_MAX_NAME_BYTES = 220
_FIELD = re.compile(r"\{([^{}:]+)(?::([^{}]*))?\}")  # "{val_loss:.2f}": the name, and the format or None


class FileExtension:
    """File extension of checkpoints, which are folders: none, or Lightning's under `as_lightning()`."""

    def __get__(self, owner: object, kind: type | None = None) -> str:
        return ".ckpt" if is_replaced("lightning") else ""


def template_fields(template: str) -> list[str]:
    """Return the names of the metrics that `template` mentions, in order."""
    return [match.group(1) for match in _FIELD.finditer(template)]


def check_template(template: str, owner: str) -> None:
    """Check that a template gives a valid folder name. If not, raise a ConfigurationError that names `owner`."""
    rest = _FIELD.sub("x", template)
    if not template or rest in (".", "..") or "/" in rest or "\\" in rest:
        raise ConfigurationError(
            f"{owner}(filename={template!r}): the name of a checkpoint is a single folder name. Put its parent folders "
            "into dirpath."
        )
    if "{" in rest or "}" in rest:
        raise ConfigurationError(
            f"{owner}(filename={template!r}): write fields as {{name}} or {{name:format}}, for example "
            "'{epoch}-{val_loss:.2f}'."
        )
    for match in _FIELD.finditer(template):
        _check_spec(match.group(2) or "", template, owner)
    _check_folder_name(format_name(template, {}, insert_names=True), template, owner)


def _check_spec(spec: str, template: str, owner: str) -> None:
    try:
        example = 1 if spec.endswith(_INTEGER_FORMATS) else 0.5
        format(example, spec)
    except ValueError as error:
        raise ConfigurationError(
            f"{owner}(filename={template!r}): {spec!r} is not a format of a number: {error}."
        ) from None


def _check_folder_name(example: str, template: str, owner: str) -> None:
    """Check the name that a template gives with unknown values. `example` is this name."""
    forbidden = [char for char in example if char in ":\\/" or not char.isprintable()]
    if example.startswith("."):
        problem = "begins with a dot; hidden folders are checkpoints that are being written"
    elif example == _RUN_INDEX:
        problem = "is the name of the run's index"
    elif forbidden:
        problem = f"has the character {forbidden[0]!r}, which is not allowed in a checkpoint's name"
    elif len(example.encode("utf-8", "replace")) > _MAX_NAME_BYTES:
        problem = f"is longer than {_MAX_NAME_BYTES} bytes"
    else:
        return
    raise ConfigurationError(
        f"{owner}(filename={template!r}): the name {example[:80]!r} {problem}. Choose another one."
    )


def format_name(template: str, metrics: Mapping[str, Any], *, insert_names: bool, equals: str = "=") -> str:
    """Fill in `template`: `"{epoch}-{val_loss:.2f}"` becomes `"epoch=3-val_loss=0.12"`.

    Without `insert_names` it becomes `"3-0.12"`. `equals` is the text between a name and its value. The value of a
    missing metric is `nan`. A slash in a name becomes an underscore.

    Raises:
        ConfigurationError: a value does not fit its format.
    """

    def fill(match: re.Match[str]) -> str:
        name = match.group(1)
        spec = match.group(2) or ""
        text = _format_value(name, metrics.get(name), spec, template)
        return f"{name.replace('/', '_')}{equals}{text}" if insert_names else text

    return _FIELD.sub(fill, template)


def _format_value(name: str, value: object, spec: str, template: str) -> str:
    if value is None:
        return "nan"
    if isinstance(value, float) and spec.endswith("d") and value.is_integer():
        value = int(value)  # a logged counter is a float
    try:
        return format(value, spec)
    except (ValueError, TypeError) as error:
        raise ConfigurationError(
            f"filename={template!r}: {name}={value!r} cannot be written as {spec!r} ({error}). Use another format, "
            f"such as {{{name}:.2f}}."
        ) from error
