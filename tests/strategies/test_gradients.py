"""Clipping, the loss that a step returned, and counts that are exact on the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.strategies.steps.gradients import (
    GradientClip,
    HostGradients,
    clip_gradients,
    loss_of,
    parameters_of,
    stack_counts,
)


@pytest.mark.parametrize(
    ("value", "algorithm", "clip"),
    [
        (None, None, None),
        (0, None, None),
        (None, "norm", None),
        (1, None, GradientClip(1.0, "norm")),
        (0.5, "norm", GradientClip(0.5, "norm")),
        (0.5, "value", GradientClip(0.5, "value")),
    ],
)
def test_clipping_is_read_from_a_value_and_an_algorithm(value: Any, algorithm: Any, clip: GradientClip | None) -> None:
    assert GradientClip.parse(value, algorithm) == clip


@pytest.mark.parametrize(
    ("value", "algorithm", "says"),
    [
        (-1, None, "gradient_clip_val=-1"),
        ("1.0", None, "gradient_clip_val='1.0'"),
        (True, None, "gradient_clip_val=True"),
        (float("nan"), None, "gradient_clip_val=nan"),
        (1.0, "nrom", "Did you mean 'norm'"),
        (None, "vlue", "Did you mean 'value'"),
    ],
)
def test_what_cannot_clip_is_an_error(value: Any, algorithm: Any, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        GradientClip.parse(value, algorithm)


def _with_gradients(*values: list[float]) -> list[nn.Parameter]:
    parameters = [nn.Parameter(torch.zeros(len(value))) for value in values]
    for parameter, value in zip(parameters, values, strict=True):
        parameter.grad = torch.tensor(value)
    return parameters


def test_clipping_by_norm_scales_all_gradients_alike_and_returns_the_norm_before() -> None:
    parameters = _with_gradients([3.0, 0.0], [4.0])
    norm = clip_gradients(parameters, GradientClip(0.05))
    assert norm == 5.0
    total = torch.cat([p.grad for p in parameters if p.grad is not None])
    torch.testing.assert_close(total, torch.tensor([0.03, 0.0, 0.04]))


def test_clipping_by_value_cuts_each_element_and_has_no_norm() -> None:
    parameters = _with_gradients([3.0, -0.5], [-4.0])
    assert clip_gradients(parameters, GradientClip(1.0, "value")) is None
    assert [p.grad.tolist() for p in parameters if p.grad is not None] == [[1.0, -0.5], [-1.0]]


def test_parameters_of_several_optimizers_come_once_each_and_in_order() -> None:
    first, second, third = (nn.Parameter(torch.zeros(1)) for _ in range(3))
    optimizers = [
        torch.optim.SGD([{"params": [first]}, {"params": [second]}], lr=1),
        torch.optim.SGD([third, first], lr=1),
    ]
    assert [id(p) for p in parameters_of(optimizers)] == [id(first), id(second), id(third)]


@pytest.mark.parametrize(
    "wrap", [lambda loss: loss, lambda loss: {"loss": loss, "more": 1}, lambda loss: loss.reshape(1)]
)
def test_the_loss_is_taken_out_of_what_a_step_returns(wrap: Any) -> None:
    found = loss_of(wrap(torch.tensor(2.0, requires_grad=True) * 1), "Task")
    assert found is not None
    assert (found.item(), found.dim()) == (2.0, 0)


def test_none_skips_the_batch() -> None:
    assert loss_of(None, "Task") is None


@pytest.mark.parametrize(
    ("output", "says"),
    [
        (torch.ones(2, requires_grad=True), r"shape \(2,\); it must be a scalar"),
        (torch.ones(1, 1, requires_grad=True), r"shape \(1, 1\)"),
        (torch.tensor(1.0), "without a graph"),
        ({"los": 1}, "dict without a loss tensor"),
        ({"loss": 1.0}, "dict without a loss tensor"),
        (1.0, "returned float"),
        ("loss", "returned str"),
    ],
    ids=str,
)
def test_what_cannot_be_trained_on_is_an_error_that_names_the_task(output: Any, says: str) -> None:
    with pytest.raises(TaskError, match=f"OwnTask.training_step returned .*{says}|OwnTask.*{says}"):
        loss_of(output, "OwnTask")


@given(st.lists(st.integers(0, 2**52), min_size=1, max_size=6))
def test_counts_are_exact_whether_numbers_or_tensors(counts: list[int]) -> None:
    mixed = [torch.tensor(count) if index % 2 else count for index, count in enumerate(counts)]
    stacked = stack_counts(mixed, torch.device("cpu"))
    assert stacked.dtype is torch.float64
    assert [int(count) for count in stacked.tolist()] == counts


def test_counts_on_a_device_are_not_read() -> None:
    # A meta tensor has no value: reading it would raise.
    stacked = stack_counts([torch.empty((), device="meta"), 3], torch.device("meta"))
    assert (stacked.shape, stacked.device.type) == ((2,), "meta")


@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("value", [1e-3, 1e9, float("nan")])
def test_gradients_on_the_host_are_clipped_as_by_torch(
    norm_type: float, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    generator, clip = torch.Generator().manual_seed(0), GradientClip(1.0, "norm", norm_type)
    ours, theirs = ([nn.Parameter(torch.zeros(2**20 + i)) for i in range(4)] for _ in range(2))
    for one, other in zip(ours[:3], theirs[:3], strict=True):  # the last one has no gradient
        one.grad = torch.randn(one.shape, generator=generator) * min(value, 1e3)
        if value == 1e9:
            one.grad *= 1e-9  # is not clipped
        other.grad = one.grad.clone()
    norm = HostGradients(torch.device("cpu")).clip(ours, clip)
    expected = nn.utils.clip_grad_norm_(theirs, 1.0, norm_type)
    assert norm is not None
    torch.testing.assert_close(norm, expected, rtol=0, atol=0, equal_nan=True)
    for one, other in zip(ours[:3], theirs[:3], strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=0, atol=0, equal_nan=True)
