"""What `trainwright predict` writes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from trainwright.cli.fit import write_predictions
from trainwright.core.errors import TaskError


def test_tensors_of_all_batches_are_joined_in_order(tmp_path: Path) -> None:
    path = tmp_path / "out" / "p.safetensors"
    shapes = write_predictions([torch.tensor([1, 2]), torch.tensor([3])], path)
    assert shapes == {"predictions": (3,)}
    assert load_file(path)["predictions"].tolist() == [1, 2, 3]
    assert [found.name for found in path.parent.iterdir()] == ["p.safetensors"]


def test_mappings_are_joined_name_by_name(tmp_path: Path) -> None:
    path = tmp_path / "p.safetensors"
    write_predictions([{"label": torch.ones(2), "logits": torch.zeros(2, 3)}] * 2, path)
    assert {name: tuple(tensor.shape) for name, tensor in load_file(path).items()} == {"label": (4,), "logits": (4, 3)}


@pytest.mark.parametrize("output", ["text", torch.tensor(1.0), {"a": [1, 2]}, {1: torch.ones(2)}])
def test_what_cannot_be_joined_is_refused_and_nothing_is_written(tmp_path: Path, output: Any) -> None:
    with pytest.raises(TaskError, match="--output none"):
        write_predictions([output], tmp_path / "p.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_batches_with_different_names_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match="different names"):
        write_predictions([{"a": torch.ones(1)}, {"b": torch.ones(1)}], tmp_path / "p.safetensors")
