from __future__ import annotations

import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.callbacks.fake_run import FakeRun, logged_in_turn, pass_time
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from trainwright.callbacks.top_k import TopK
from trainwright.core.errors import ConfigurationError, TrainwrightWarning


def fit(callback: ModelCheckpoint, root: Path, values: Sequence[float] = (), epochs: int = 3) -> FakeRun:
    """Run epochs of 5 steps with a validation at each end that logs `val_loss`."""
    run = FakeRun([callback], root, has_validation=True)
    run.fit(epochs=epochs, batches=5, on_validation=logged_in_turn("val_loss", values or [0.0] * epochs))
    return run


def test_every_n_epochs_skips_the_others(tmp_path: Path) -> None:
    run = fit(ModelCheckpoint(save_top_k=-1, every_n_epochs=2), tmp_path, epochs=5)
    assert [step for step, _ in run.written] == [10, 20]


def test_the_best_two_are_kept_and_the_others_deleted_after_the_new_one_stands(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val_loss", save_top_k=2, filename="{epoch}")
    run = fit(callback, tmp_path, [3, 1, 2, 5], epochs=4)
    assert run.saved_names() == ["epoch=1", "epoch=2"]
    assert [(r.name, r.remove) for _, r in run.written] == [("epoch=0", []), ("epoch=1", []), ("epoch=2", ["epoch=0"])]
    assert {Path(path).name: score for path, score in callback.best_k_models.items()} == {"epoch=1": 1, "epoch=2": 2}
    assert callback.current_score == 5
    assert callback.kth_best_model_path.endswith("epoch=2")
    assert callback.kth_value == callback.best_k_models[callback.kth_best_model_path]


def test_a_step_interval_uses_the_numbers_of_a_validation_at_the_same_step(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run = FakeRun([callback], tmp_path, has_validation=True)
    run.fit(epochs=1, batches=4, val_every=2, on_validation=logged_in_turn("val_loss", [7.0, 6.0]))
    assert [(step, request.metrics["val_loss"]) for step, request in run.written] == [(2, 7.0), (4, 6.0)]


def test_a_step_that_is_due_twice_is_saved_once(tmp_path: Path) -> None:
    callback = ModelCheckpoint(monitor="val_loss", every_n_train_steps=2, save_top_k=-1, filename="{step}")
    run = FakeRun([callback], tmp_path, has_validation=True)
    with pytest.warns(TrainwrightWarning, match="Nothing is ranked until validation"):
        run.fit(epochs=1, batches=5, val_every=4, on_validation=logged_in_turn("val_loss", [7.0]))
    assert run.saved_names() == ["step=4"]


def test_a_time_interval_saves_when_it_has_passed(tmp_path: Path, now: list[float]) -> None:
    callback = ModelCheckpoint(train_time_interval=datetime.timedelta(seconds=10), save_top_k=-1, filename="{step}")
    run = FakeRun([callback], tmp_path)
    run.fit(epochs=1, batches=9, on_step=pass_time(now, 4))
    assert [step for step, _ in run.written] == [3, 6, 9]


def test_another_dirpath_forgets_the_index_and_deletes_nothing_of_equal_name(tmp_path: Path) -> None:
    first = ModelCheckpoint(monitor="val_loss")
    fit(first, tmp_path / "a", [3, 1, 2])
    (tmp_path / "b" / "checkpoints" / "epoch=1-step=10").mkdir(parents=True)
    second = ModelCheckpoint(monitor="val_loss")
    second.load_state_dict(first.state_dict())
    run = FakeRun([second], tmp_path / "b", has_validation=True)
    run.state.step, run.state.epoch = 15, 3
    with pytest.warns(TrainwrightWarning, match="epoch=1-step=10"):
        run.fit(epochs=5, batches=5, on_validation=logged_in_turn("val_loss", [9.0, 8.0]))
    assert run.saved_names() == ["epoch=1-step=10", "epoch=4-step=25"]


@pytest.mark.parametrize(("stage", "rank", "expected"), [("fit", 0, ["on_exception"]), ("fit", 1, []), ("test", 0, [])])
def test_an_exception_in_a_fit_asks_for_one_emergency_checkpoint(
    stage: Any, rank: int, expected: list[str], tmp_path: Path
) -> None:
    callback = OnExceptionCheckpoint(tmp_path / "rescue")
    run = FakeRun([callback], tmp_path, rank=rank, world_size=2, stage=stage, callback_metrics={"loss": 1.5})
    callback.on_exception(run, run.task, KeyboardInterrupt())  # type: ignore[arg-type]
    found = [(request.folder, request.name, request.metrics) for request in run.emergencies]
    assert found == [(tmp_path / "rescue", name, {"loss": 1.5}) for name in expected]
    assert callback.ckpt_path == str(tmp_path / "rescue" / "on_exception")


METRICS = {"epoch": 3, "step": 40, "val_loss": 0.123, "val/acc": 0.5, "count": 7.0}


@pytest.mark.parametrize(
    ("template", "options", "arguments", "name"),
    [
        (None, {}, {}, "epoch=3-step=40"),
        ("{epoch}-{val_loss:.2f}", {}, {}, "epoch=3-val_loss=0.12"),
        ("{count:02d}", {}, {}, "count=07"),
        ("{val/acc:.1f}", {}, {}, "val_acc=0.5"),
        ("{later:.2f}", {}, {}, "later=nan"),
        ("e{epoch:02d}-acc{val/acc:.2f}", {"auto_insert_metric_name": False}, {}, "e03-acc0.50"),
        ("{epoch}", {}, {"ver": 2, "prefix": "a"}, "a-epoch=3-v2"),
    ],
)
def test_fields_are_filled_in_with_their_names(
    template: str | None, options: dict[str, Any], arguments: dict[str, Any], name: str
) -> None:
    assert ModelCheckpoint(filename=template, **options).format_checkpoint_name(METRICS, **arguments) == name


def test_the_path_of_a_checkpoint_is_in_its_dirpath(tmp_path: Path) -> None:
    assert ModelCheckpoint(tmp_path).format_checkpoint_name(METRICS) == str(tmp_path / "epoch=3-step=40")


@pytest.mark.parametrize("filename", ["", "..", "a/b", "x" * 300, "index.json", "a\nb", "{epoch:zzz}", "{epoch"])
@pytest.mark.parametrize("make", [ModelCheckpoint, OnExceptionCheckpoint])
def test_invalid_checkpoint_filenames_are_errors_at_construction(make: Any, filename: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="filename="):
        make(tmp_path, filename=filename)


SCORES = st.lists(st.one_of(st.floats(-10, 10), st.just(math.nan)), max_size=30)
MODES = st.sampled_from(["min", "max"])


@pytest.mark.slow
@given(SCORES, st.integers(1, 6), MODES)
def test_what_stays_are_the_k_best_scores_and_others_leave_once(
    scores: list[float], k: int, mode: Literal["min", "max"]
) -> None:
    top, gone = TopK(k, mode), []
    for index, score in enumerate(scores):
        if top.accepts(score):
            left = top.add(str(index), score)
            gone += [left] if left is not None else []
    assert len(gone) == len(set(gone))
    assert not set(gone) & set(top.scores)
    comparable = [(math.inf if mode == "min" else -math.inf) if math.isnan(score) else score for score in scores]
    assert sorted(top.scores.values()) == sorted(sorted(comparable, reverse=mode == "max")[:k])


def test_a_value_that_does_not_fit_its_format_is_an_error_with_both() -> None:
    with pytest.raises(ConfigurationError, match=r"val_loss=0\.123 cannot be written as 'd'.*\{val_loss:\.2f\}"):
        ModelCheckpoint(filename="{val_loss:d}").format_checkpoint_name(METRICS)


def test_a_field_of_the_name_that_was_never_logged_is_a_warning(tmp_path: Path) -> None:
    with pytest.warns(TrainwrightWarning, match="'acc', which was not logged"):
        fit(ModelCheckpoint(filename="{epoch}-{acc:.2f}"), tmp_path)


def test_without_validation_the_error_comes_at_the_epoch_end(tmp_path: Path) -> None:
    run = FakeRun([ModelCheckpoint(monitor="loss")], tmp_path)
    with pytest.raises(ConfigurationError, match="Logged so far: none"):
        run.fit(epochs=1, batches=2)
    assert run.state.step == 2
