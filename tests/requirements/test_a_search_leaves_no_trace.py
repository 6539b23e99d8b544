"""A search for a batch size or a learning rate changes only the attribute, frees all that it used, never hangs."""

from __future__ import annotations

import hashlib
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import StepRecorder, quiet_trainer
from tests.helpers.tasks import Batch, RecordingCallback, RegressionTask, regression_data
from trainwright.callbacks import BatchSizeFinder, LearningRateFinder, ModelCheckpoint
from trainwright.core.rng import seed_everything
from trainwright.loggers import CSVLogger
from trainwright.trainer.search.tuner import Tuner

DEVICE_MESSAGE = "CUDA out of memory. Tried to allocate 2.00 GiB."
HOST_MESSAGE = "[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class _Busy(RegressionTask):
    """Has something of everything that a step may change; memory runs out above `fits` samples, at a `place`."""

    def __init__(
        self, fits: int = 10**9, *, place: str = "forward", host: bool = False, ranks: list[int] | None = None
    ) -> None:
        super().__init__(momentum=0.9, dropout=0.3)
        self.batch_size, self.fits, self.place, self.host, self.ranks = 3, fits, place, host, ranks
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("seen", torch.zeros(()), persistent=False)
        self.history: dict[str, list[float]] = {"losses": []}
        self.calls = 0
        self.generator = torch.Generator().manual_seed(3)
        self.numpy = np.random.default_rng(3)
        self.moving = torch.zeros(2)

    def _maybe_run_out(self, place: str, batch: Batch) -> None:
        mine = self.ranks is None or self.global_rank in self.ranks
        if mine and place == self.place and len(batch[0]) > self.fits:
            raise RuntimeError(HOST_MESSAGE) if self.host else torch.OutOfMemoryError(DEVICE_MESSAGE)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(self.norm(inputs))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.batch = batch
        self._maybe_run_out("forward", batch)
        noise = random.random() + np.random.rand() + float(self.numpy.random())
        noise += float(torch.rand((), generator=self.generator))
        loss = self.loss(batch) + 0.01 * noise * self(batch[0]).square().mean()
        self.calls += 1
        self.seen += 1
        self.moving += loss.detach()
        self.history["losses"].append(float(loss.detach()))
        self.log("train_loss", loss)
        return loss

    def on_after_backward(self) -> None:
        self._maybe_run_out("backward", self.batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self._maybe_run_out("step", self.batch)

    def on_train_epoch_end(self) -> None:
        self.history["ends"] = [self.trainer.global_step]
        self.trainer.save_checkpoint("of_the_task")
        self.logger.log_metrics({"mine": 1.0}, 0) if self.logger else None

    def train_dataloader(self) -> Any:
        return DataLoader(regression_data(48), batch_size=self.batch_size, shuffle=True)

    def val_dataloader(self) -> Any:
        return DataLoader(regression_data(16), batch_size=self.batch_size)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def _files(folder: Path) -> dict[str, str]:
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "folder"
        for path in sorted(folder.rglob("*"))
    }


def _state_of(task: _Busy, trainer: Any, folder: Path) -> dict[str, Any]:
    """Return everything that a search must not change; what has no order of its own is sorted."""
    tensors = {**dict(task.named_parameters()), **dict(task.named_buffers()), "moving": task.moving}
    of_optimizers = [pickle.dumps(_plain(optimizer.state_dict())) for optimizer in trainer.optimizers]
    return {
        "tensors": {name: hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for name, t in tensors.items()},
        "gradients": [None if p.grad is None else p.grad.tolist() for p in task.parameters()],
        "needs": [p.requires_grad for p in task.parameters()],
        "modes": [module.training for module in task.modules()],
        "optimizers": of_optimizers,
        "schedulers": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
        "attributes": (task.history, task.calls, task.lr, sorted(vars(task))),
        "generators": (task.generator.get_state().tolist(), task.numpy.bit_generator.state),
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False)["state"]["key"].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "clock": trainer.state.to_dict(),
        "callbacks": [callback.state_dict() for callback in trainer.callbacks],
        "loggers": [logger.state_dict() for logger in trainer.loggers],
        "metrics": (dict(trainer.callback_metrics), dict(trainer.logged_metrics), dict(trainer.progress_bar_metrics)),
        "files": _files(folder),
    }


def _plain(tree: Any) -> Any:
    if isinstance(tree, torch.Tensor):
        return tree.tolist()
    if isinstance(tree, dict):
        return {key: _plain(value) for key, value in tree.items()}
    return [_plain(value) for value in tree] if isinstance(tree, list) else tree


def _expect_same(before: dict[str, Any], after: dict[str, Any]) -> None:
    assert {name: (before[name], after[name]) for name in before if before[name] != after[name]} == {}


class _Compares(BatchSizeFinder):
    """Searches at the second epoch's start, when everything has a state, and compares what was with what is."""

    def __init__(self, folder: Path, find: Any) -> None:
        super().__init__()
        self.folder, self.find = folder, find
        self.compared = 0

    def on_fit_start(self, *args: Any) -> None:
        pass

    def on_train_epoch_start(self, trainer: Any, task: Any) -> None:
        if trainer.current_epoch == 1:
            before = _state_of(task, trainer, self.folder)
            before = pickle.loads(pickle.dumps(before))
            self.find(trainer, task)
            _expect_same(before, _state_of(task, trainer, self.folder))
            self.compared += 1


def _search_sizes(trainer: Any, task: Any) -> None:
    BatchSizeFinder(steps_per_trial=2, mode="binsearch").scale_batch_size(trainer, task)
    assert task.batch_size in (10, 11)


def _search_rates(trainer: Any, task: Any) -> None:
    finder = LearningRateFinder(num_training_steps=20, update_attr=False)
    finder.lr_find(trainer, task)
    assert len(finder.optimal_lr.results["loss"]) == 20


@pytest.mark.slow
@pytest.mark.parametrize(("find", "place"), [(_search_sizes, "step"), (_search_rates, "forward")])
def test_everything_is_as_before_a_search_in_the_middle_of_a_fit(find: Any, place: str, tmp_path: Path) -> None:
    seed_everything(1)
    compares = _Compares(tmp_path, find)
    events = RecordingCallback("on_train_batch_end", "on_validation_end", "on_save_checkpoint")
    trainer = quiet_trainer(
        max_epochs=2,
        callbacks=[compares, events, ModelCheckpoint()],
        logger=CSVLogger(),
        log_every_n_steps=1,
        default_root_dir=tmp_path,
        async_save=False,
    )
    task = _Busy(11, place=place)
    trainer.fit(task)
    assert compares.compared == 1
    assert events.events.count("on_train_batch_end") == 16 + -(-48 // task.batch_size)


def test_a_loss_scale_is_as_before() -> None:
    class Scaled(BatchSizeFinder):
        def on_fit_start(self, trainer: Any, task: Any) -> None:
            before = trainer.strategy.state_dict()
            self.scale_batch_size(trainer, task)
            assert trainer.strategy.state_dict() == before

    class Task(_Busy):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=self.lr)

    task = Task(11, place="step")
    quiet_trainer(callbacks=Scaled(), precision="16-mixed", max_steps=2, limit_val_batches=0).fit(task)
    assert task.batch_size == 8


def _on_rank(place: str, host: bool, ranks: list[int], search_in_fit: bool) -> tuple[int, list[float], list[str]]:
    seed_everything(1)
    task = _Busy(9, place=place, host=host, ranks=ranks)
    recorder = StepRecorder()
    if search_in_fit:
        trainer = quiet_trainer(devices="auto", max_epochs=1, callbacks=[BatchSizeFinder(mode="binsearch"), recorder])
    else:
        trainer = quiet_trainer(devices="auto", max_epochs=1, callbacks=recorder)
        Tuner(trainer).scale_batch_size(task, mode="binsearch")
    trainer.fit(task)
    digest = [hashlib.sha256(t.detach().numpy().tobytes()).hexdigest() for t in task.parameters()]
    return task.batch_size, recorder.norms, digest


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("rank", "place", "host", "search_in_fit"),
    [(0, "backward", False, True), pytest.param(1, "forward", True, False, marks=pytest.mark.exhaustive)],
)
def test_what_is_too_much_for_one_rank_is_too_much_for_all(
    rank: int, place: str, host: bool, search_in_fit: bool
) -> None:
    first, second = run_distributed(_on_rank, 2, place, host, [rank], search_in_fit, init=False)
    assert first[0] == second[0] == 8  # nine, less the margin
    assert first[1] == second[1]  # gradients cross the ranks again afterwards
    assert first[2] == second[2]
