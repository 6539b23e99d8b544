"""Checkpoints of fits that share a folder, over starts, resumes, failures and damage, against a plain list."""

from __future__ import annotations

import tempfile
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from torch import nn

from tests.helpers.runs import quiet_trainer
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import read_manifest
from trainwright.checkpoint.format import writer
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.task import TaskModule


class _Counter(TaskModule):
    """A task whose only weight is the number of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.count = nn.Parameter(torch.zeros(()))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return -self.count

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


@dataclass
class _State:
    """What the model of the test knows about a checkpoint on the disk."""

    step: int
    run: int
    is_valid: bool = True


class _Fits(RuleBasedStateMachine):
    """Processes that train in one folder, one after the other, and save after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp())
        self.states: dict[str, _State] = {}  # by name, in the order of writing
        self.num_runs = 0

    def newest_valid(self) -> _State | None:
        return next((state for state in reversed(self.states.values()) if state.is_valid), None)

    @property
    def folder(self) -> Path:
        return self.root / "checkpoints"

    def _train(self, task: _Counter, num_steps: int, resumes: bool, **options: Any) -> None:
        """Train until `num_steps` steps are made, as a process of its own would."""
        keeps_all = options.pop("keeps_all")
        saver = ModelCheckpoint(self.folder, every_n_train_steps=1, save_top_k=-1 if keeps_all else 1)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", TrainwrightWarning)
            trainer = quiet_trainer(
                max_steps=num_steps, callbacks=[saver], default_root_dir=self.root, on_save_error="raise", **options
            )
            trainer.fit(task, torch.zeros(100, 1), ckpt_path="last" if resumes else None)

    @rule(num_steps=st.integers(1, 3), resumes=st.booleans(), keeps_all=st.booleans(), async_save=st.booleans())
    def fit(self, num_steps: int, resumes: bool, keeps_all: bool, async_save: bool) -> None:
        resumes = resumes and self._can_resume()
        origin = self.newest_valid() if resumes else None
        if origin is None:
            self.num_runs += 1
        run = self.num_runs if origin is None else origin.run
        end = num_steps if origin is None else origin.step + num_steps
        task = _Counter()
        self._train(task, end, resumes, keeps_all=keeps_all, async_save=async_save)
        assert task.count.item() == end
        found = self._found()
        new = sorted(found - set(self.states), key=self._step_of)
        assert new, "nothing was saved"
        assert self._step_of(new[-1]) == end
        assert len(new) == (num_steps if keeps_all else 1)
        for name in set(self.states) - found:
            assert self.states[name].run == run, "a state of another run was deleted"
            del self.states[name]
        for name in new:
            self.states[name] = _State(self._step_of(name), run)

    @rule(resumes=st.booleans(), async_save=st.booleans())
    def fit_on_a_full_disk(self, resumes: bool, async_save: bool) -> None:
        def full(*_: object, **__: object) -> None:
            raise OSError(28, "No space left on device")

        resumes = resumes and self._can_resume()
        origin = self.newest_valid() if resumes else None
        end = 2 if origin is None else origin.step + 2
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(writer.Draft, "write", full)
            with pytest.raises((CheckpointError, OSError), match="No space left"):
                self._train(_Counter(), end, resumes, keeps_all=True, async_save=async_save)

    @precondition(lambda self: self.newest_valid() is not None)
    @rule()
    def damage_the_newest(self) -> None:
        name = next(name for name, state in reversed(self.states.items()) if state.is_valid)
        (self.folder / name / "trainer.json").write_text("{")
        self.states[name].is_valid = False

    @invariant()
    def the_folder_holds_the_states_of_the_model(self) -> None:
        assert self._found() == set(self.states)

    def _can_resume(self) -> bool:
        """Return False if there are damaged checkpoints only, which is an error for `ckpt_path="last"`."""
        return not self.states or self.newest_valid() is not None

    def _found(self) -> set[str]:
        return {path.parent.name for path in self.folder.glob("*/manifest.json") if not path.parent.is_symlink()}

    def _step_of(self, name: str) -> int:
        return read_manifest(self.folder / name).step


@pytest.mark.slow
def test_a_fit_deletes_states_of_its_own_run_and_resumes_from_the_newest() -> None:
    limits = settings(max_examples=12, stateful_step_count=8, deadline=None, suppress_health_check=list(HealthCheck))
    run_state_machine_as_test(_Fits, settings=limits)
