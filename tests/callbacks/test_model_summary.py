from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.callbacks.fake_run import FakeRun
from trainwright.callbacks.model_summary import ModelSummary, summarize
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule


class Net(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.BatchNorm1d(8))
        self.head = nn.Linear(8, 2)
        self.head.weight.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        noise = 0.01 * torch.rand(())  # draws in evaluation mode, too
        out: torch.Tensor = self.head(self.body(x if y is None else x + y)) + noise
        return out


def test_parameters_are_counted_by_layer_and_in_all() -> None:
    summary = summarize(Net())
    rows = {layer.name: (layer.kind, layer.num_params, layer.num_trainable) for layer in summary.layers}
    assert rows == {"body": ("Sequential", 56, 56), "head": ("Linear", 18, 2), "(own parameters)": ("Parameter", 3, 3)}
    assert (summary.num_params, summary.num_trainable, summary.param_bytes) == (77, 61, 308)
    assert summary.buffer_bytes == 8 * 4 * 2 + 8
    assert [layer.flops for layer in summary.layers] == [None, None, None]  # without an example input


@pytest.mark.parametrize(("depth", "count"), [(0, 0), (1, 3), (2, 6), (-1, 6)])
def test_the_depth_says_how_many_levels_are_listed(depth: int, count: int) -> None:
    assert len(summarize(Net(), max_depth=depth).layers) == count


def test_a_shared_parameter_counts_once() -> None:
    net = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    net[1].weight = net[0].weight
    assert summarize(net).num_params == 16


@pytest.mark.parametrize("how", ["tensor", "tuple", "dict"])
def test_an_example_gives_sizes_and_flops(how: str) -> None:
    net = Net()
    x = torch.ones(5, 4)
    net.example_input_array = {"tensor": x, "tuple": (x, x), "dict": {"x": x, "y": x}}[how]
    summary = summarize(net, max_depth=2)
    rows = {layer.name: (layer.in_size, layer.out_size, layer.flops) for layer in summary.layers}
    assert rows["body.0"] == ([5, 4], [5, 8], 2 * 5 * 4 * 8)
    assert rows["head"] == ([5, 8], [5, 2], 2 * 5 * 8 * 2)
    assert summary.flops == 2 * 5 * (4 * 8 + 8 * 2)


def test_lazy_parameters_are_said_to_be_unknown() -> None:
    summary = summarize(nn.Sequential(nn.LazyLinear(3)))
    assert summary.has_lazy
    assert "Lazy parameters" in str(summary)


def test_in_a_terminal_it_is_a_drawn_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    run = FakeRun([ModelSummary()], tmp_path)
    run.task.example_input_array = torch.ones(5, 4)
    run.fit(epochs=1, batches=1)
    assert "┃" in run.printed[0]
    assert "layer" in run.printed[0]


def test_columns_of_the_table_are_lists() -> None:
    net = Net()
    net.example_input_array = torch.ones(5, 4)
    summary = summarize(net)
    assert (summary.layer_names, summary.layer_types) == (["body", "head"], ["Sequential", "Linear"])
    assert (summary.param_nums, summary.total_parameters, summary.trainable_parameters) == ([56, 18], 77, 61)
    assert (summary.in_sizes, summary.out_sizes) == ([[5, 4], [5, 8]], [[5, 8], [5, 2]])
    assert (summary.model_size, summary.total_flops) == (308 / 1e6, summary.flops)
    assert summarize(Net()).in_sizes == ["?", "?"]
    assert summarize(Net()).total_flops == 0


@pytest.mark.filterwarnings("ignore:`torch.jit.script`:DeprecationWarning")
def test_scripted_layers_have_no_sizes() -> None:
    net = nn.Sequential(torch.jit.script(nn.Linear(5, 3)), nn.Linear(3, 2))
    net.example_input_array = torch.rand(2, 5)  # type: ignore[assignment]  # as a task has it
    assert summarize(net).in_sizes == ["?", [2, 3]]


def test_the_depth_is_a_number() -> None:
    with pytest.raises(ConfigurationError, match="max_depth='all'"):
        summarize(Net(), max_depth="all")  # type: ignore[arg-type]  # the mistake
