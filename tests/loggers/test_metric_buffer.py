from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from trainwright.core.errors import ConfigurationError, LoggedValueError, LogPlaceError, TaskError
from trainwright.loggers.evaluation_rows import EvaluationRows
from trainwright.loggers.metric_buffer import EpochStage, MetricBuffer
from trainwright.loggers.metric_slot import FOLD_EVERY


def evaluating(stage: EpochStage = "validate", num_dataloaders: int = 1) -> MetricBuffer:
    buffer = MetricBuffer()
    buffer.begin(stage, num_dataloaders=num_dataloaders)
    buffer.in_step = True
    buffer.batch = torch.zeros(4, 2)
    return buffer


# When and under which names


def test_in_a_training_step_the_latest_value_is_logged_and_no_aggregate() -> None:
    buffer = evaluating("train")
    buffer.log("loss", 1.0)
    buffer.log("loss", torch.tensor(2.0), on_step=True, on_epoch=False)  # the defaults, written out
    assert buffer.flush_step().logged == {"loss": 2.0}
    assert buffer.flush_step().callback == {}
    assert buffer.flush_epoch().callback == {}


def test_logged_on_step_and_epoch_a_metric_has_both_endings_and_its_plain_name_for_callbacks() -> None:
    buffer = evaluating("train")
    for value in (1.0, 3.0):
        buffer.log("loss", torch.tensor(value), on_step=True, on_epoch=True, prog_bar=True)
    step = buffer.flush_step()
    epoch = buffer.flush_epoch()
    assert step.logged == step.prog_bar == {"loss_step": 3.0}
    assert step.callback == {"loss": 3.0, "loss_step": 3.0}
    assert epoch.logged == epoch.prog_bar == {"loss_epoch": 2.0}
    assert epoch.callback == {"loss": 2.0, "loss_epoch": 2.0}


def test_several_loaders_have_keys_of_their_own() -> None:
    buffer = evaluating(num_dataloaders=2)
    for index, value in ((0, 1.0), (0, 3.0), (1, 10.0)):
        buffer.dataloader_idx = index
        buffer.log("acc", value)
    assert buffer.flush_epoch().logged == {"acc/dataloader_idx_0": 2.0, "acc/dataloader_idx_1": 10.0}


def test_a_validation_inside_an_epoch_leaves_the_training_metrics_alone() -> None:
    buffer = evaluating("train")
    buffer.log("loss", 1.0, on_step=True, on_epoch=True)
    buffer.begin("validate")
    buffer.log("loss", 100.0)
    assert buffer.flush_epoch().logged == {"loss": 100.0}
    buffer.switch("train")
    buffer.log("loss", 3.0, on_step=True, on_epoch=True)
    assert buffer.flush_epoch().logged == {"loss_epoch": 2.0}


def test_peek_shows_waiting_values_and_leaves_them() -> None:
    buffer = evaluating("train")
    buffer.log("loss", torch.tensor(7.0))
    assert buffer.peek().callback == buffer.peek().callback == {"loss": 7.0}
    assert buffer.peek_new().callback == {}  # it has been looked at
    assert buffer.flush_step().logged == {"loss": 7.0}


@pytest.mark.parametrize(("reduce_fx", "batch_size"), [(torch.median, None), ("mean", 0)])
def test_peek_new_returns_an_aggregate_after_any_number_of_values(reduce_fx: Any, batch_size: int | None) -> None:
    buffer = evaluating("train")
    buffer.in_step = False
    for _ in range(2):  # after each pass, no value is pending, and a reduction of the user's own has no weight
        for number in range(FOLD_EVERY):
            buffer.log("a", float(number), on_step=False, on_epoch=True, reduce_fx=reduce_fx, batch_size=batch_size)
        assert list(buffer.peek_new().callback) == ["a"]
        assert buffer.peek_new().callback == {}


# Aggregates

VALUES = st.lists(
    st.tuples(st.floats(-1e6, 1e6), st.integers(1, 50), st.sampled_from(["host", "np", "f32", "f64", "bf16", "int"])),
    min_size=1,
    max_size=3 * FOLD_EVERY,
)


def as_logged(value: float, form: str) -> Any:
    if form == "host":
        return value
    if form == "np":
        return np.array(value)
    dtype = {"f32": torch.float32, "f64": torch.float64, "bf16": torch.bfloat16, "int": torch.int64}[form]
    return torch.tensor(value).to(dtype)


@settings(max_examples=40)
@given(VALUES)
def test_a_mean_is_weighted_by_batch_size_whatever_the_forms_of_its_values(
    values: list[tuple[float, int, str]],
) -> None:
    buffer = evaluating()
    logged = [(as_logged(value, form), size) for value, size, form in values]
    for value, size in logged:
        buffer.log("m", value, batch_size=size)
    expected = sum(float(value) * size for value, size in logged) / sum(size for _, size in logged)
    assert buffer.flush_epoch().logged["m"] == pytest.approx(expected, rel=1e-9, abs=1e-3)


def test_the_weight_is_the_length_of_the_batch_unless_told() -> None:
    buffer = evaluating()
    for length, value in ((1, 0.0), (3, 4.0)):
        buffer.batch = {"x": torch.zeros(length, 5)}
        buffer.log("m", torch.tensor(value))
    assert buffer.flush_epoch().logged == {"m": 3.0}


def test_a_reduction_of_the_users_own_sees_all_values_in_order() -> None:
    buffer = evaluating()
    seen: list[list[float]] = []

    def last(values: torch.Tensor) -> torch.Tensor:
        seen.append(values.tolist())
        return values[-1]

    logged = [float(n) if n % 7 == 0 else torch.tensor(float(n)) for n in range(150)]
    for value in logged:
        buffer.log("m", value, reduce_fx=last)
    assert buffer.flush_epoch().logged == {"m": 149.0}
    assert seen == [[float(n) for n in range(150)]]


@pytest.mark.parametrize("reduce_fx", ["mean", "max", torch.median])
def test_a_state_of_an_earlier_version_has_values(reduce_fx: Any) -> None:
    buffer = evaluating("train")
    for number in range(FOLD_EVERY):
        buffer.log("a", float(number), on_step=False, on_epoch=True, reduce_fx=reduce_fx)
    states = buffer.state_dict()
    for state in states.values():
        del state["num_folded"]
        state["host_extreme"] = 63.0  # for every reduction
    resumed = evaluating("train")
    resumed.load_state_dict(states, torch.device("cpu"))
    if callable(reduce_fx):  # a checkpoint does not contain the function
        resumed.log("a", 31.0, on_step=False, on_epoch=True, reduce_fx=reduce_fx)
    assert resumed.flush_epoch().logged["a"] == {"mean": 31.5, "max": 63.0}.get(reduce_fx, 31.0)


# Refusals


def test_another_option_for_the_same_key_in_one_epoch_is_an_error() -> None:
    buffer = evaluating("train")
    buffer.log("loss", 1.0)
    with pytest.raises(ConfigurationError, match=r"'loss'.*other options.*prog_bar=False before, True now"):
        buffer.log("loss", 1.0, prog_bar=True)


def test_on_step_outside_a_step_is_refused() -> None:
    buffer = evaluating("train")
    buffer.in_step = False
    with pytest.raises(ConfigurationError, match="outside a step"):
        buffer.log("loss", 1.0, on_step=True)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (torch.zeros(2), "'loss'"),
        (np.zeros(3), "'loss'"),
        ({"a": 1.0}, "log_dict"),
        (torch.tensor(1j), "complex"),
        ("low", "got a str"),
        (np.array(1j), "got a ndarray"),
        (np.str_("low"), "got a str_"),
    ],
)
def test_a_value_that_is_not_one_number_is_refused(value: Any, text: str) -> None:
    with pytest.raises(LoggedValueError, match=text):
        evaluating("train").log("loss", value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"name": 5}, "name"),
        ({"batch_size": -1}, "batch_size"),
        ({"batch_size": torch.tensor([4, 5])}, "batch_size"),
        ({"reduce_fx": "median"}, "reduce_fx"),
        ({"on_step": False, "on_epoch": False}, "would have no effect"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        evaluating().log(**{"name": "m", "value": 1.0, **options})


def test_a_reduction_that_gives_no_number_is_named() -> None:
    buffer = evaluating()
    buffer.log("m", 1.0, reduce_fx=lambda values: values.repeat(2))
    with pytest.raises(TaskError, match=r"'m'.*reduce_fx returned"):
        buffer.flush_epoch()


def test_logging_before_an_epoch_has_begun_is_refused() -> None:
    with pytest.raises(LogPlaceError, match="no epoch has begun"):
        MetricBuffer().log("m", 1.0)


# Cost


def test_the_state_of_many_metrics_is_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = evaluating("train")
    for step in range(FOLD_EVERY + 3):
        for name in ("a", "b", "c"):
            buffer.log(name, torch.tensor(float(step)), on_step=True, on_epoch=True)
        buffer.log("d", torch.tensor(float(step)), on_epoch=True, reduce_fx=torch.median)
    reads: list[str] = []
    for name in ("tolist", "item", "__float__"):
        plain = getattr(torch.Tensor, name)
        monkeypatch.setattr(torch.Tensor, name, lambda self, plain=plain, name=name: reads.append(name) or plain(self))
    state = buffer.state_dict()
    assert reads == ["tolist"]  # of all values together
    resumed = evaluating("train")
    resumed.load_state_dict(state, torch.device("cpu"))
    resumed.log("d", torch.tensor(1.0), on_epoch=True, reduce_fx=torch.median)
    buffer.log("d", torch.tensor(1.0), on_epoch=True, reduce_fx=torch.median)
    assert resumed.flush_epoch().logged == buffer.flush_epoch().logged
    resumed.load_state_dict(state, torch.device("cpu"))
    resumed.log("a", 2.0, on_step=True, on_epoch=True, reduce_fx="sum")
    assert resumed.flush_epoch().logged["a_epoch"] == 2.0  # the earlier mean is not added to the sum


def test_a_value_of_an_epochs_hook_replaces_those_of_its_steps_that_wait() -> None:
    buffer = evaluating("train")
    buffer.log("loss", 1.0, on_step=True)
    buffer.in_step = False
    buffer.log("loss", 4.0)
    assert buffer.flush_epoch().callback == {"loss": 4.0}
    assert buffer.flush_step().callback == {}


def test_logger_false_keeps_a_metric_from_the_loggers_only() -> None:
    buffer = evaluating("train")
    buffer.log("a", 1.0, logger=False, prog_bar=True)
    flushed = buffer.flush_step()
    assert (flushed.logged, flushed.callback, flushed.prog_bar) == ({}, {"a": 1.0}, {"a": 1.0})


def test_a_key_without_the_loader_s_index_belongs_to_one_loader() -> None:
    buffer = evaluating(num_dataloaders=2)
    for index, value in ((0, 1.0), (0, 3.0)):
        buffer.dataloader_idx = index
        buffer.log("acc", value, add_dataloader_idx=False)
    buffer.dataloader_idx = 1
    with pytest.raises(ConfigurationError, match="dataloaders 0 and 1, whose values would mix"):
        buffer.log("acc", 3.0, add_dataloader_idx=False)
    flushed = buffer.flush_epoch()
    assert (flushed.logged, flushed.loaders) == ({"acc": 2.0}, {"acc": 0})


def test_rows_of_an_evaluation_are_exchanged_once() -> None:
    rows = EvaluationRows()
    rows._synced, rows._steps = {(0, 0): {}}, {(0, 0): 0}
    assert rows.combine([rows.payload()]) == {0: {}}
    assert rows.payload() == {}


def test_values_that_are_not_numbers_are_value_errors() -> None:
    assert issubclass(LoggedValueError, ValueError)
    assert issubclass(LoggedValueError, TaskError)
    assert issubclass(LogPlaceError, ConfigurationError)
