"""Automatically named states: numbers, the limit and the newest state over starts, failures, kills and damage."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from torch import nn

from trainwright.accelerator.accelerator import Accelerator
from trainwright.accelerator.project import ProjectConfiguration
from trainwright.checkpoint.format import writer
from trainwright.core.errors import CheckpointError, TrainwrightWarning

pytestmark = pytest.mark.usefixtures("fresh_state")


@dataclass
class _State:
    value: float
    run: int
    is_valid: bool = True


class _SavedStates(RuleBasedStateMachine):
    """Processes that share a folder, one after the other, against a plain list of what they have written."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.states: dict[str, _State] = {}  # by name, in the order of writing
        self.num_values, self.num_runs = 0, 0

    @property
    def folder(self) -> Path:
        return self.root / "checkpoints"

    def newest_valid(self) -> _State | None:
        return next((state for state in reversed(self.states.values()) if state.is_valid), None)

    @initialize()
    def first_start(self) -> None:
        self.start(limit=None, async_save=False)

    @rule(limit=st.sampled_from([None, 1, 2]), async_save=st.booleans())
    def start(self, limit: int | None, async_save: bool) -> None:
        """Start a new process. The one before it has been killed."""
        configuration = ProjectConfiguration(
            str(self.root), automatic_checkpoint_naming=True, total_limit=limit, async_save=async_save
        )
        self.accelerator = Accelerator(cpu=True, project_config=configuration)
        self.net = nn.Linear(1, 1)
        self.accelerator.prepare(self.net)
        self.limit, self.num_runs = limit, self.num_runs + 1
        self.run = self.num_runs

    @precondition(lambda self: self.newest_valid() is not None)
    @rule()
    def load(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "skipping the damaged", TrainwrightWarning)
            self.accelerator.load_state()
        newest = self.newest_valid()
        assert self.net.bias.item() == newest.value
        self.run = newest.run

    @precondition(lambda self: self.newest_valid() is None)
    @rule()
    def load_nothing(self) -> None:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "skipping the damaged", TrainwrightWarning)
            with pytest.raises(FileNotFoundError, match="no valid state"):
                self.accelerator.load_state()

    def _save(self) -> Path:
        self.num_values += 1
        nn.init.constant_(self.net.bias, float(self.num_values))
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", ".*which this process has not written", TrainwrightWarning)
            path = Path(self.accelerator.save_state())
        self.accelerator._checkpoints.wait()
        return path

    @rule()
    def save(self) -> None:
        path = self._save()
        assert path.is_dir()
        assert path.name not in self.states
        self.states[path.name] = _State(float(self.num_values), self.run)
        own = [name for name, state in self.states.items() if state.run == self.run]
        if self.limit is not None:
            for name in own[: -self.limit]:
                del self.states[name]

    @rule()
    def save_on_a_full_disk(self) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer.Draft, "write", full)
            with pytest.raises((CheckpointError, OSError), match="No space left"):
                self._save()

    @precondition(lambda self: self.states)
    @rule()
    def damage_the_newest(self) -> None:
        name, state = list(self.states.items())[-1]
        (self.folder / name / "trainer.json").write_text("{")
        state.is_valid = False

    @rule(number=st.integers(0, 12))
    def put_a_stray_folder(self, number: int) -> None:
        name = f"checkpoint_{number}"
        if name not in self.states:
            (self.folder / name).mkdir(parents=True, exist_ok=True)

    @invariant()
    def the_folder_holds_the_states_of_the_model(self) -> None:
        found = {path.parent.name for path in self.folder.glob("checkpoint_*/manifest.json")}
        assert found == set(self.states)

    def teardown(self) -> None:
        self.accelerator.end_training()


@pytest.mark.slow
def test_states_are_never_overwritten_or_deleted_too_early() -> None:
    limits = settings(max_examples=8, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(_SavedStates, settings=limits)
