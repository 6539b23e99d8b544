from __future__ import annotations

import collections
import sys

import pytest

from trainwright.core.errors import ConfigurationError
from trainwright.core.registry import Registry


def test_an_entry_by_text_is_imported_at_the_first_look_up_only() -> None:
    sys.modules.pop("this", None)
    registry: Registry[object] = Registry("toy", {"dict": "collections:OrderedDict", "far": "no_such_module:thing"})
    assert list(registry) == ["dict", "far"]  # nothing was imported to list it
    assert registry.get("dict") is collections.OrderedDict
    assert registry.get("dict") is collections.OrderedDict


def test_a_name_that_is_taken_needs_overwrite() -> None:
    registry = Registry("logger", {"csv": 1})
    with pytest.raises(ConfigurationError, match="'csv' is already registered"):
        registry.register("csv", 2)
    assert registry.get("csv") == 1
    registry.register("csv", 2, overwrite=True)
    assert registry.get("csv") == 2
