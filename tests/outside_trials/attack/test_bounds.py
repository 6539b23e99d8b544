"""A11: groups are not skipped for ever, a second signal changes no exit code, a missing address is an error at once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError, NonFiniteError, Preempted, TrainwrightWarning
from trainwright.core.process import check_address, detect
from trainwright.processes.partial_state import PartialState


class _Spoilt(RegressionTask):
    """Its loss is NaN in the given steps, counted from the first."""

    def __init__(self, bad: range) -> None:
        super().__init__()
        self.bad, self.seen = bad, 0

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.seen += 1
        return self.loss(batch) * (float("nan") if self.seen - 1 in self.bad else 1.0)


def test_a_run_in_which_everything_is_nan_ends() -> None:
    task = _Spoilt(range(10**6))
    trainer = quiet_trainer(max_steps=1000, on_nonfinite="skip", max_skipped=6)
    with (
        pytest.warns(TrainwrightWarning, match="it is skipped"),
        pytest.raises(NonFiniteError, match=r"The 6 steps before it were skipped .* max_skipped=6.*max_skipped=None"),
    ):
        trainer.fit(task, regression_loader(4))  # epochs are shorter than that
    assert task.seen == 7
    assert trainer.global_step == 0


def test_what_is_skipped_here_and_there_does_not_add_up() -> None:
    class Often(_Spoilt):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            self.bad = range(self.seen, self.seen + (self.seen % 3 < 2))  # two of three
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(max_epochs=3, on_nonfinite="skip", max_skipped=2)
    with pytest.warns(TrainwrightWarning, match="it is skipped"):
        trainer.fit(Often(range(0)), regression_loader(6))
    assert trainer.global_step == 6


def test_without_a_bound_it_goes_on() -> None:
    task = _Spoilt(range(10**6))
    with pytest.warns(TrainwrightWarning, match="it is skipped"):
        quiet_trainer(max_epochs=30, on_nonfinite="skip", max_skipped=None).fit(task, regression_loader(4))
    assert task.seen == 120


@pytest.mark.parametrize("wrong", [0, -1, 1.5, "many"])
def test_a_bound_that_is_no_number_is_refused(wrong: Any) -> None:
    with pytest.raises(ConfigurationError, match="max_skipped"):
        quiet_trainer(max_skipped=wrong)


class _SignalsAgain(Callback):
    """Sends a signal in a step, and others while the run is torn down."""

    def __init__(self, number: int) -> None:
        self.number = number

    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    def teardown(self, trainer: Any, task: Any, stage: Any) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_second_signal_while_the_process_leaves_changes_nothing(number: int, tmp_path: Path) -> None:
    trainer = quiet_trainer(max_epochs=2, callbacks=_SignalsAgain(number), default_root_dir=tmp_path)
    with pytest.raises(Preempted) as end:
        trainer.fit(RegressionTask(), regression_loader(4))
    assert end.value.code == 143
    os.kill(os.getpid(), number)  # and while the interpreter ends


def test_after_the_grace_a_signal_does_what_it_did_before(tmp_path: Path) -> None:
    came: list[int] = []
    trainer = quiet_trainer(
        max_epochs=2, callbacks=_SignalsAgain(signal.SIGTERM), default_root_dir=tmp_path, preemption_grace=0.3
    )
    with pytest.raises(Preempted):
        trainer.fit(RegressionTask(), regression_loader(4))
    leaving = signal.getsignal(signal.SIGTERM)
    leaving._before[signal.SIGTERM] = lambda number, frame: came.append(number)  # type: ignore[union-attr]
    leaving._deadline = 0.0  # type: ignore[union-attr]
    os.kill(os.getpid(), signal.SIGTERM)
    assert came == [signal.SIGTERM]


def test_a_forked_process_dies_of_a_signal_that_the_run_notes(tmp_path: Path) -> None:
    """Whoever has forked it ends it so, and waits for it: the workers of a pool, for example."""
    codes: list[int] = []

    class Forks(Callback):
        def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx:
                return
            pid = os.fork()
            if pid == 0:
                os.kill(os.getpid(), signal.SIGTERM)
                os._exit(0)
            codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    quiet_trainer(max_epochs=1, callbacks=Forks(), default_root_dir=tmp_path).fit(
        RegressionTask(), regression_loader(2)
    )
    assert codes == [-signal.SIGTERM]


def test_a_missing_address_is_an_error_that_names_the_variable() -> None:
    with pytest.raises(ConfigurationError, match="the variable MASTER_ADDR is not set"):
        check_address(detect("auto", {"RANK": "0", "WORLD_SIZE": "2"}))
    check_address(detect("auto", {"RANK": "0", "WORLD_SIZE": "1"}))
    check_address(detect("auto", {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a"}))
    place = {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
    check_address(detect("auto", place))  # one machine
    with pytest.raises(ConfigurationError, match="the variable MASTER_ADDR is not set"):
        check_address(detect("auto", {**place, "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "0"}))


def test_the_trainer_says_so_before_it_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        quiet_trainer(devices="auto")
    with pytest.raises(ConfigurationError, match="MASTER_ADDR"):
        PartialState(cpu=True)
