"""Hyper-parameters in forms for log files."""

from __future__ import annotations

import dataclasses
import enum
import math
from argparse import Namespace
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from trainwright.core.hyperparameters import config_as_data


def plain(value: object) -> Any:
    """Return `value` as nested dicts, lists, numbers, text and None.

    Mappings, namespaces and dataclass instances become dicts with text keys. Tuples and sets become lists. Arrays, and
    tensors of at most 64 elements, become nested lists, which waits for the device. Larger tensors, sparse tensors and
    tensors on the meta device become a text with their shape and dtype. Enum members become their names. Classes and
    functions become their qualified names. Other objects become `str(value)`. Containers of OmegaConf are resolved.
    """
    if isinstance(value, enum.Enum):  # first, because members of an IntEnum are also ints
        return value.name
    data = config_as_data(value)
    if data is not None:
        return plain(data)
    if value is None or isinstance(value, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)  # yaml.safe_dump rejects subclasses, such as numpy.float64
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, Namespace):
        return plain(vars(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=str)
    if isinstance(value, (np.generic, np.ndarray)):
        return _plain_array(value)
    if isinstance(value, torch.Tensor):
        return _plain_tensor(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    return str(value)


def _plain_array(value: Any) -> Any:
    # `tolist` of a longdouble or a clongdouble returns the same object again.
    if isinstance(value, np.longdouble):
        return float(value)
    if isinstance(value, np.clongdouble):
        return str(value)
    return plain(value.tolist())


def _plain_tensor(value: torch.Tensor) -> Any:
    has_list = value.layout == torch.strided and not value.is_meta  # `tolist` raises an error for others
    if value.numel() <= 64 and has_list:
        return plain(value.tolist())
    return f"tensor of shape {tuple(value.shape)}, {value.dtype}"


def flatten(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return `plain(params)` without nesting: `{"optimizer": {"lr": 0.1}}` → `{"optimizer/lr": 0.1}`.

    A list that contains a dict or list gets one key per entry. Other lists become one string. An empty dict becomes
    the string `"{}"`.
    """
    flat: dict[str, Any] = {}
    for key, value in plain(params).items():
        if isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
            value = {str(index): item for index, item in enumerate(value)}
        if isinstance(value, dict) and value:
            for name, item in flatten(value).items():
                flat[f"{key}/{name}"] = item
        elif isinstance(value, (dict, list)):
            flat[key] = str(value)
        else:
            flat[key] = value
    return flat


def json_safe(value: object) -> Any:
    """Return `value`, a result of `plain`, with NaN and infinities as the text `"NaN"`, `"Infinity"`, `"-Infinity"`.

    JSON has no such numbers, and most parsers reject a file with them. Python's `float` accepts the texts.
    """
    if isinstance(value, float) and math.isnan(value):
        return "NaN"
    if isinstance(value, float) and math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, dict):
        return {key: json_safe(item) for key, item in value.items()}
    if isinstance(value, list):
        return [json_safe(item) for item in value]
    return value
