from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.callbacks.fake_run import FakeRun, logged_in_turn
from trainwright.callbacks.early_stopping import EarlyStopping, EarlyStoppingReason
from trainwright.core.errors import TrainwrightWarning

NAN, INF = float("nan"), float("inf")


def fit(callback: EarlyStopping, root: Path, values: Sequence[float]) -> FakeRun:
    """Train one step an epoch; each validation logs the next of `values` as `val_loss`."""
    run = FakeRun([callback], root, has_validation=True)
    run.fit(epochs=len(values), batches=1, on_validation=logged_in_turn("val_loss", values))
    return run


def test_the_end_of_the_epoch_can_be_chosen(tmp_path: Path) -> None:
    callback = EarlyStopping("train_loss", patience=1, check_on_train_epoch_end=True)
    run = FakeRun([callback], tmp_path, has_validation=True)
    run.fit(epochs=3, batches=4, val_every=2, on_epoch_end=logged_in_turn("train_loss", [1, 2, 3]))
    assert callback.stopped_epoch == 1


@pytest.mark.parametrize(
    ("options", "values", "epoch", "best", "reason"),
    [
        ({"patience": 3}, [6, 5, 5, 5, 5, 5], 4, 5, "PATIENCE_EXHAUSTED"),
        ({"min_delta": 0.5, "patience": 2}, [4, 3.5, 3.5, 3, 2], 2, 4, "PATIENCE_EXHAUSTED"),
        ({"mode": "max", "min_delta": 0.1, "patience": 1}, [1, 2, 2.05, 3], 2, 2, "PATIENCE_EXHAUSTED"),
        ({"stopping_threshold": 2}, [4, 2, 1, 0], 2, 2, "STOPPING_THRESHOLD"),
        ({"divergence_threshold": 10}, [4, 10, 11, 0], 2, 4, "DIVERGENCE_THRESHOLD"),
        ({}, [4, 3, INF, 2, 1], 2, 3, "NON_FINITE_METRIC"),
        ({}, [4, 3, NAN, 2, 1], 2, 3, "NON_FINITE_METRIC"),
    ],
    ids=str,
)
def test_it_stops_in_an_epoch_for_a_reason(
    options: dict[str, Any], values: list[float], epoch: int, best: float, reason: str, tmp_path: Path
) -> None:
    callback = EarlyStopping("val_loss", **options)
    run = fit(callback, tmp_path, values)
    assert (callback.stopped_epoch, run.state.epoch, callback.best_score) == (epoch, epoch + 1, best)
    assert callback.stopping_reason is EarlyStoppingReason[reason]


def test_when_not_strict_a_missing_metric_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(TrainwrightWarning, match="'val_acc'"):
        run = fit(EarlyStopping("val_acc", strict=False), tmp_path, [1])
    assert run.stops == []


@pytest.mark.parametrize(("how", "value"), [("sanity_checking", True), ("stage", "validate"), ("fast_dev_run", True)])
def test_it_looks_in_real_training_only(tmp_path: Path, how: str, value: object) -> None:
    callback = EarlyStopping("val_loss", patience=0)
    run = FakeRun([callback], tmp_path, has_validation=True)
    run.callback_metrics["val_loss"] = NAN
    setattr(run, how, value)
    callback.on_validation_end(run, run.task)  # type: ignore[arg-type]
    run.step_end()
    assert run.stops == []


def test_a_resumed_run_goes_on_waiting(tmp_path: Path) -> None:
    first = EarlyStopping("val_loss", patience=3)
    fit(first, tmp_path, [5, 6, 7])
    second = EarlyStopping("val_loss", patience=3)
    second.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    fit(second, tmp_path, [8, 9])
    assert (second.stopped_epoch, second.best_score) == (0, 5)
    assert second.wait_count == 3


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=30), st.integers(1, 5))
def test_it_stops_at_the_first_run_of_values_without_a_new_best(values: list[float], patience: int) -> None:
    callback = EarlyStopping("x", patience=patience)
    stopped = next(
        (i for i, v in enumerate(values) if callback.judge(v)[0] is not EarlyStoppingReason.NOT_STOPPED), None
    )
    best = [min(values[: i + 1]) for i in range(len(values))]
    expected = next((i for i in range(patience, len(values)) if best[i] == best[i - patience]), None)
    assert stopped == expected


def test_without_check_finite_a_nan_only_counts_as_no_improvement(tmp_path: Path) -> None:
    callback = EarlyStopping("val_loss", check_finite=False)
    run = fit(callback, tmp_path, [4, 3, NAN, 2, 1])
    assert (run.stops, callback.best_score) == ([], 1)


def test_a_state_without_a_reason_is_loaded() -> None:
    stopper = EarlyStopping("loss")
    stopper.load_state_dict({"wait_count": 2, "stopped_epoch": 0, "best_score": 0.5, "patience": 3})
    assert (stopper.wait_count, stopper.stopping_reason) == (2, EarlyStoppingReason.NOT_STOPPED)
