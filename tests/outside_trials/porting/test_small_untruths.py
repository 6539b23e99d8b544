"""What the Trainer announces, and what `dir` shows."""

from __future__ import annotations

import pytest

import trainwright
from trainwright.core.process import STARTED_BY_TRAINER, Topology, describe


def test_processes_that_the_trainer_has_started_are_announced_as_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    topology = Topology("torchrun", rank=0, world_size=2)
    assert "launcher torchrun" in describe(topology)
    monkeypatch.setenv(STARTED_BY_TRAINER, "x")
    assert describe(topology) == "rank 0 of 2, in processes that the Trainer has started"


def test_dir_shows_public_names_alone() -> None:
    for module in (trainwright, trainwright.callbacks, trainwright.loggers):
        shown = {name for name in dir(module) if not name.startswith("__")}
        assert shown == set(module.__all__) - {"__version__"}
