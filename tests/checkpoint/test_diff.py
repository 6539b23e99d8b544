from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.cutting import write_in_pieces
from tests.checkpoint.snapshots import small_snapshot
from trainwright.checkpoint import Snapshot, write_checkpoint
from trainwright.checkpoint.interop.diff import CheckpointDifference, diff_checkpoints


def _diff(tmp_path: Path, left: dict[str, Any], right: dict[str, Any]) -> CheckpointDifference:
    base = small_snapshot(1)
    for name, changes in (("left", left), ("right", right)):
        write_checkpoint(tmp_path / name, Snapshot(**{**vars(base), **changes}))
    return diff_checkpoints(tmp_path / "left", tmp_path / "right")


_RNG = [{"torch": torch.get_rng_state()}]


@pytest.mark.parametrize(
    ("left", "right", "only_left", "only_right", "values"),
    [
        ({"model": {"a": torch.ones(1)}}, {"model": {"b": torch.ones(1)}}, ["model.a"], ["model.b"], []),
        ({}, {"kind": "weights"}, ["rng", "optimizer"], [], ["manifest.kind"]),
        ({"rng": _RNG}, {"rng": _RNG * 2, "world_size": 2}, [], ["rng[1]"], ["manifest.topology.world_size"]),
    ],
    ids=["names", "parts", "ranks"],
)
def test_what_only_one_side_has_is_listed(
    left: Any, right: Any, only_left: list[str], only_right: list[str], values: list[str], tmp_path: Path
) -> None:
    found = _diff(tmp_path, left, right)
    assert (found.only_left, found.only_right) == (only_left, only_right)
    assert [item.path for item in found.values] == values


def test_values_of_the_trainer_are_compared_by_path(tmp_path: Path) -> None:
    left: dict[str, Any] = {"callbacks": {"stop": {"wait": 1, "seen": [1, 2]}}, "array": np.ones(2), "tuple": (1, 2)}
    right: dict[str, Any] = {
        "callbacks": {"stop": {"wait": 2, "seen": [1, 2, 3]}},
        "array": np.zeros(2),
        "tuple": [1, 2],
    }
    left["ema"], right["ema"] = torch.zeros(2), torch.ones(2)
    found = _diff(tmp_path, {"trainer": left}, {"trainer": right})
    assert [(item.path, item.max_abs) for item in found.tensors] == [("trainer.ema", 1.0)]
    assert [(item.path, item.left, item.right) for item in found.values] == [
        ("trainer.callbacks.stop.wait", "1", "2"),
        ("trainer.array", "array([1., 1.])", "array([0., 0.])"),
        ("trainer.tuple", "(1, 2)", "[1, 2]"),
    ]
    assert found.only_right == ["trainer.callbacks.stop.seen[2]"]


def test_values_of_the_model_that_are_not_tensors_are_compared(tmp_path: Path) -> None:
    left = {"weight": torch.ones(1), "cache._extra_state": {"size": 1, "table": torch.zeros(1)}}
    right = {"weight": torch.ones(1), "cache._extra_state": {"size": 2, "table": torch.ones(1)}, "old": "v1"}
    found = _diff(tmp_path, {"model": left}, {"model": right})
    assert [(item.path, item.left, item.right) for item in found.values] == [
        ("model.cache._extra_state.size", "1", "2")
    ]
    assert [item.path for item in found.tensors] == ["model.cache._extra_state.table"]
    assert found.only_right == ["model.old"]


def test_values_of_a_sharded_model_that_are_not_tensors_are_compared(tmp_path: Path) -> None:
    for name, size in (("left", 1), ("right", 2)):
        model = {"weight": torch.ones(2), "cache._extra_state": {"size": size}}
        write_in_pieces(tmp_path / name, small_snapshot(1, model=model, optimizers=[]))
    found = diff_checkpoints(tmp_path / "left", tmp_path / "right")
    assert [(item.path, item.left, item.right) for item in found.values] == [
        ("model.cache._extra_state.size", "1", "2")
    ]
