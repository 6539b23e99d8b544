from __future__ import annotations

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.utilities import grad_norm, measure_flops, move_data_to_device, rank_zero_deprecation, rank_zero_warn


@pytest.fixture
def linear() -> nn.Linear:
    """Return a layer whose gradients are ones; the third parameter has none."""
    layer = nn.Linear(2, 1)
    layer(torch.ones(1, 2)).sum().backward()
    layer.register_parameter("unused", nn.Parameter(torch.ones(1)))
    return layer


@pytest.mark.parametrize(
    ("norm_type", "weight", "total"), [(2, 2**0.5, 3**0.5), ("inf", 1.0, 1.0), (1, 2.0, 3.0)], ids=str
)
def test_norms_of_gradients_have_names_to_be_logged_by(
    linear: nn.Linear, norm_type: float | str, weight: float, total: float
) -> None:
    name = f"grad_{float(norm_type)}_norm"
    found = {key: value.item() for key, value in grad_norm(linear, norm_type).items()}
    assert found == pytest.approx({f"{name}/weight": weight, f"{name}/bias": 1.0, f"{name}_total": total})
    assert f"{name}-bias" in grad_norm(linear, norm_type, group_separator="-")
    assert grad_norm(nn.Linear(1, 1), 2) == {}


def test_a_norm_needs_a_number_above_0(linear: nn.Linear) -> None:
    with pytest.raises(ConfigurationError, match="norm_type=0"):
        grad_norm(linear, 0)


def test_operations_of_forward_and_backward_are_counted() -> None:
    layer, inputs = nn.Linear(2, 1), torch.ones(4, 2)
    assert measure_flops(layer, lambda: layer(inputs)) == 16
    assert measure_flops(layer, lambda: layer(inputs), torch.sum) == 32


def test_a_batch_is_moved() -> None:
    moved = move_data_to_device({"x": [torch.ones(1)], "name": "a"}, "meta")
    assert moved["x"][0].device.type == "meta"
    assert moved["name"] == "a"


def test_warnings_of_the_main_process_point_at_the_caller() -> None:
    with pytest.warns(UserWarning, match="look") as caught:
        rank_zero_warn("look")
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match="old") as caught:
        rank_zero_deprecation("old")
    assert caught[0].filename == __file__
