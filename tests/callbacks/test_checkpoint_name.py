"""Names made from templates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwright.callbacks.checkpoint_name import template_fields
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from trainwright.core.errors import ConfigurationError

METRICS = {"epoch": 3, "step": 40, "val_loss": 0.123, "val/acc": 0.5, "count": 7.0}


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, "epoch=3-step=40"),
        ("{epoch}-{val_loss:.2f}", "epoch=3-val_loss=0.12"),
        ("run-{epoch:03d}", "run-epoch=003"),
        ("{count:02d}", "count=07"),
        ("{val/acc:.1f}", "val_acc=0.5"),
        ("plain", "plain"),
        ("{later:.2f}", "later=nan"),
        ("{epoch}{epoch}", "epoch=3epoch=3"),
    ],
)
def test_fields_are_filled_in_with_their_names(template: str | None, name: str) -> None:
    assert ModelCheckpoint(filename=template).format_checkpoint_name(METRICS) == name


def test_names_of_fields_can_be_left_out() -> None:
    callback = ModelCheckpoint(filename="e{epoch:02d}-acc{val/acc:.2f}", auto_insert_metric_name=False)
    assert callback.format_checkpoint_name(METRICS) == "e03-acc0.50"


def test_a_version_and_a_prefix_are_joined_with_hyphens() -> None:
    assert ModelCheckpoint(filename="{epoch}").format_checkpoint_name(METRICS, ver=2, prefix="a") == "a-epoch=3-v2"


def test_a_value_that_does_not_fit_its_format_is_an_error_with_both() -> None:
    with pytest.raises(ConfigurationError, match=r"0\.123 cannot be written as 'd'"):
        ModelCheckpoint(filename="{val_loss:d}").format_checkpoint_name(METRICS)


def test_the_fields_of_a_template_are_found_in_order() -> None:
    assert template_fields("{b:.2f}-x-{a}") == ["b", "a"]


@pytest.mark.parametrize(
    "filename",
    ["", ".", "..", ".hidden", "a/b", "../a", "a\\b", "a\0b", "a:b", "a\nb", "\ud800", "x" * 300, "index.json",
     "{epoch:zzz}", "{epoch:>99999999999}", "{epoch:>300}", "{a\\b}", "{", "{epoch"],
)  # fmt: skip
@pytest.mark.parametrize("make", [ModelCheckpoint, OnExceptionCheckpoint])
def test_invalid_checkpoint_filenames_are_errors_at_construction(make: Any, filename: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="filename="):
        make(tmp_path, filename=filename)


@pytest.mark.parametrize(
    "filename", ["{epoch}", "{epoch:02d}-{val/loss:.2f}", "best model {step:>4}", "é-{loss:.3e}", "{x:b}", "{x:,.1f}"]
)
def test_valid_checkpoint_filenames_are_accepted(filename: str, tmp_path: Path) -> None:
    ModelCheckpoint(tmp_path, filename=filename)
