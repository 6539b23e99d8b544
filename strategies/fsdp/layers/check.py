"""A plan compared with the task that it is for, where no process has been started yet."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from trainwright.strategies.fsdp.layers.plan import Plan, SplitLayers
from trainwright.strategies.fsdp.layers.ready import find_plan


class PlannedMesh:
    """What a `DeviceMesh` that does not exist yet will say of its sizes."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self.mesh_dim_names = tuple(lengths)
        self.shape = tuple(lengths.values())
        self.ndim = len(lengths)

    def __getitem__(self, name: str) -> PlannedMesh:
        """Return one axis."""
        return PlannedMesh({name: self.shape[self.mesh_dim_names.index(name)]})

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks, or that along one axis."""
        found = 1
        for length in self.shape if mesh_dim is None else self.shape[mesh_dim : mesh_dim + 1]:
            found *= length
        return found


def check_plan(task: nn.Module, given: Plan | None, lengths: Mapping[str, int]) -> None:
    """Check that there is a plan, that it names modules of the task, and that what it splits is divisible.

    Not collective, and nothing is touched. A plan that asks its mesh for more than sizes is checked once there is one.
    """
    mesh: Any = PlannedMesh(lengths)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when layers are split
            plan = find_plan(task, given, mesh)
    except AttributeError as error:
        if isinstance(error.obj, PlannedMesh):
            return
        raise
    SplitLayers(task, plan, mesh["tp"])
