"""The hook table: who is called, in which order, and that misspelt hooks are found."""

from __future__ import annotations

import pytest

from tests.callbacks.fake_run import Task
from trainwright.callbacks.hook_table import HookTable


def test_an_event_that_does_not_exist_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="on_train_epoch_ends"):
        _ = HookTable([], Task()).on_train_epoch_ends
