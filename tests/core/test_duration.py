from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.core.duration import Duration, Interval
from trainwright.core.errors import ConfigurationError
from trainwright.core.state import TrainState


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("500 steps", 500, "steps"),
        ("0.25 epoch", 0.25, "epochs"),
        ("7 batches", 7, "batches"),
        ("2M samples", 2e6, "samples"),
        ("2B tokens", 2e9, "tokens"),
        ("1_000_000 tokens", 1e6, "tokens"),
        ("10 min", 600, "seconds"),
        ("90s", 90, "seconds"),
        (".5h", 1800, "seconds"),
        ("2.min", 120, "seconds"),
        ("2 days", 172800, "seconds"),
        ("00:12:00:00", 43200, "seconds"),
        ("1:00:00:01", 86401, "seconds"),
        ("5 Epochs", 5, "epochs"),
    ],
)
def test_text_is_read_with_its_unit(text: str, value: float, unit: str) -> None:
    found = Duration(text)
    assert (found.value, found.unit) == (value, unit)


@pytest.mark.parametrize(
    ("value", "unit", "says"),
    [
        (500, None, "has no unit"),
        ("500", None, "not a length"),
        ("-3 steps", None, "not a length"),
        ("1.2.3s", None, "not a length"),
        ("..min", None, "not a length"),
        ("3 stepps", None, "Did you mean 'steps'"),
        (3, "epocs", "Did you mean 'epochs'"),
        (-1, "steps", "negative"),
        (float("nan"), "steps", "NaN"),
        (True, "steps", "not from bool"),
    ],
)
def test_what_names_no_length_is_an_error(value: Any, unit: str | None, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        Duration(value, unit)


_FIELDS = {
    "steps": "step", "batches": "batches", "epochs": "epoch", "samples": "samples", "tokens": "tokens",
    "seconds": "seconds",
}  # fmt: skip


@pytest.mark.parametrize("unit", _FIELDS)
def test_each_unit_reads_its_own_count_and_no_other(unit: str) -> None:
    state = TrainState(**{field: 10 * (i + 1) for i, field in enumerate(_FIELDS.values())})
    wanted = 10 * (list(_FIELDS).index(unit) + 1)
    assert Duration(1, unit).elapsed(state) == wanted
    assert Duration(wanted, unit).reached(state)
    assert not Duration(wanted + 1, unit).reached(state)


@given(st.integers(1, 20), st.lists(st.integers(1, 15), min_size=1, max_size=40), st.integers(0, 50))
def test_an_interval_is_due_once_for_each_multiple_or_run_of_multiples_passed(
    every: int, advances: list[int], start: int
) -> None:
    state = TrainState(samples=start)
    interval = Interval(Duration(every, "samples"))
    interval.align(state)
    for advance in advances:
        before = state.samples
        state.samples += advance
        assert interval.due(state) == (state.samples // every > before // every)
        assert not interval.due(state)  # asking twice is not another interval
