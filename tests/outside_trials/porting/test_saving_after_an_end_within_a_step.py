"""P9, P24: an error or Ctrl-C within a step leaves a checkpoint of the step before it, unless weights were changing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
from trainwright.checkpoint import read_checkpoint, verify
from trainwright.core.errors import ConfigurationError, TrainwrightWarning

_STEPS = 8
_LATER = "was written within the step after step 3"


class _Fails(RegressionTask):
    """Raises in its fourth training step, after the forward pass."""

    def __init__(self, error: type[BaseException] | None) -> None:
        super().__init__()
        self.error = error

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch)
        if batch_idx == 3 and self.error is not None:
            raise self.error("the fourth step")
        return loss


class _FailsByHand(_Fails):
    """Steps two optimizers itself, and raises between them, or before the first."""

    def __init__(self, error: type[BaseException] | None, *, between: bool) -> None:
        super().__init__(error)
        self.automatic_optimization, self.between = False, between

    def training_step(self, batch: Batch, batch_idx: int) -> None:  # type: ignore[override]  # it returns nothing
        first, second = self.optimizers()
        fails = batch_idx == 3 and self.error is not None
        loss = self.loss(batch)
        self.manual_backward(loss)
        if fails and not self.between:
            raise self.error("the fourth step")  # type: ignore[misc]  # it is set
        first.step()
        if fails:
            raise self.error("the fourth step")  # type: ignore[misc]  # it is set
        second.step()
        first.zero_grad()
        second.zero_grad()

    def configure_optimizers(self) -> Any:
        weight, *others = self.parameters()
        return torch.optim.SGD([weight], lr=0.1), torch.optim.Adam(others)


def _whole(task: RegressionTask) -> dict[str, torch.Tensor]:
    quiet_trainer(max_epochs=1).fit(task, regression_loader(_STEPS))
    return weights_of(task)


def _resume(path: Path, task: RegressionTask) -> dict[str, torch.Tensor]:
    trainer = quiet_trainer(max_epochs=1)
    with pytest.warns(TrainwrightWarning, match=_LATER):
        trainer.fit(task, regression_loader(_STEPS), ckpt_path=path)
    assert trainer.global_step == _STEPS
    return weights_of(task)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_in_a_step_leaves_a_checkpoint_of_the_step_before(error: type[BaseException], tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path), default_root_dir=tmp_path)
    with pytest.raises(error):
        trainer.fit(_Fails(error), regression_loader(_STEPS))
    saved = tmp_path / "on_exception"
    assert verify(saved) == []
    assert read_checkpoint(saved).state["step"] == 3
    assert_equal_weights(_resume(saved, _Fails(None)), _whole(_Fails(None)))


def test_a_trainer_can_save_after_ctrl_c_in_a_step(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=1, on_interrupt="return")
    trainer.fit(_Fails(KeyboardInterrupt), regression_loader(_STEPS))
    saved = trainer.save_checkpoint(tmp_path / "mine")
    assert read_checkpoint(saved).state["step"] == 3
    assert_equal_weights(_resume(saved, _Fails(None)), _whole(_Fails(None)))


def test_a_checkpoint_of_a_step_boundary_is_not_marked(tmp_path: Path) -> None:
    trainer = quiet_trainer(max_steps=3)
    trainer.fit(_Fails(None), regression_loader(_STEPS))
    resumed = quiet_trainer(max_epochs=1)
    resumed.fit(_Fails(None), regression_loader(_STEPS), ckpt_path=trainer.save_checkpoint(tmp_path / "mine"))
    assert resumed.global_step == _STEPS


def test_nothing_is_saved_while_the_optimizer_steps(tmp_path: Path) -> None:
    class Breaks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            raise ArithmeticError("half-way")

    class Task(RegressionTask):
        def configure_optimizers(self) -> Any:
            return Breaks(self.parameters(), lr=0.1)

    trainer = quiet_trainer(max_epochs=1, callbacks=OnExceptionCheckpoint(tmp_path), default_root_dir=tmp_path)
    with (
        pytest.warns(TrainwrightWarning, match="it stopped while an optimizer was stepping"),
        pytest.raises(ArithmeticError),
    ):
        trainer.fit(Task(), regression_loader(_STEPS))
    with pytest.raises(ConfigurationError, match="the fit has ended while an optimizer was stepping"):
        trainer.save_checkpoint(tmp_path / "mine")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("between", [False, True])
def test_manual_optimization_is_saved_before_its_first_optimizer_only(between: bool, tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=1, on_interrupt="return")
    trainer.fit(_FailsByHand(KeyboardInterrupt, between=between), regression_loader(_STEPS))
    if between:
        with pytest.raises(ConfigurationError, match="an optimizer was stepping"):
            trainer.save_checkpoint(tmp_path / "mine")
        return
    saved = trainer.save_checkpoint(tmp_path / "mine")
    whole = _whole(_FailsByHand(None, between=False))
    assert_equal_weights(_resume(saved, _FailsByHand(None, between=False)), whole)


def test_a_loader_that_keeps_its_own_place_is_ahead(tmp_path: Path) -> None:
    data = [(torch.full((4,), index / 8), torch.zeros(1)) for index in range(2 * _STEPS)]

    class Stream(IterableDataset[Any]):
        def __init__(self) -> None:
            self.at = 0

        def __iter__(self) -> Any:
            while self.at < len(data):
                self.at += 1
                yield data[self.at - 1]

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]

    trainer = quiet_trainer(max_epochs=1, on_interrupt="return")
    trainer.fit(_Fails(KeyboardInterrupt), DataLoader(Stream(), batch_size=2))
    with pytest.raises(ConfigurationError, match="stateful loader had already read"):
        trainer.save_checkpoint(tmp_path / "mine")


def test_a_step_that_is_running_is_still_no_place_to_save(tmp_path: Path) -> None:
    class Saves(Callback):
        def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
            trainer.save_checkpoint(tmp_path / "mine")

    with pytest.raises(ConfigurationError, match="save_checkpoint must be called between two steps of a fit"):
        quiet_trainer(max_epochs=1, callbacks=Saves()).fit(RegressionTask(), regression_loader(4))
