"""Data parallelism: its options reach torch and do what they say, and gradients cross ranks once per step."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.helpers.distributed import RankError, run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from tests.helpers.selection import mostly_exhaustive
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from tests.strategies.fsdp.sharded import Blocks, assert_trained_alike, batches, train
from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule
from trainwright.strategies import DDPStrategy, EngineSettings
from trainwright.strategies.precision_names import parse_precision
from trainwright.trainer.trainer import Trainer


def fit(
    strategy: DDPStrategy, task: RegressionTask | None = None, num_samples: int = 16, **arguments: Any
) -> tuple[Trainer, dict[str, torch.Tensor]]:
    """Train one epoch on this rank, one sample a micro-batch."""
    task = task or RegressionTask()
    trainer = quiet_trainer(devices="auto", strategy=strategy, max_epochs=1, **arguments)
    trainer.fit(task, regression_loader(num_samples))
    return trainer, weights_of(task)


_SAME = [
    DDPStrategy,
    lambda: DDPStrategy(static_graph=True),
    lambda: DDPStrategy(bucket_cap_mb=0.0001, gradient_as_bucket_view=False, broadcast_buffers=False),
    lambda: DDPStrategy(timeout="1 min", process_group_backend="gloo"),
]


def _fit_with_each() -> list[dict[str, torch.Tensor]]:
    return [fit(make(), accumulate_grad_batches=3)[1] for make in _SAME]


@pytest.mark.distributed
def test_no_option_changes_what_is_learned() -> None:
    for of_rank in run_distributed(_fit_with_each, 2, init=False, timeout=90):
        for weights in of_rank[1:]:
            torch.testing.assert_close(weights, of_rank[0], rtol=0, atol=1e-7)


class PartlyUsedTask(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(9)
            sizes = (4, 4, 4, 4, 1)
            self.heads = nn.ModuleList(nn.Sequential(*(nn.Linear(4, size) for size in sizes)) for _ in range(2))

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        output = self(batch[0]) + self.heads[batch_idx % 2](batch[0])
        return nn.functional.mse_loss(output, batch[1])


@pytest.mark.distributed
def test_parameters_that_a_step_does_not_use_are_found_if_asked() -> None:
    first, second = run_distributed(lambda: fit(DDPStrategy(find_unused_parameters=True), PartlyUsedTask())[1], 2)
    torch.testing.assert_close(first, second, rtol=0, atol=0)
    assert not torch.equal(first["heads.1.0.weight"], weights_of(PartlyUsedTask())["heads.1.0.weight"])


class DifferentTask(RegressionTask):
    def __init__(self, rank: int) -> None:
        super().__init__(seed=rank)
        self.register_buffer("mark", torch.tensor(float(rank)))

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self(batch[0])


def _start_on_rank() -> list[dict[str, torch.Tensor]]:
    found = []
    for stage in ("fit", "validate"):
        trainer = quiet_trainer(devices="auto", max_epochs=1, limit_train_batches=1)
        task = DifferentTask(trainer.settings.selection.topology.rank)
        if stage == "fit":
            task.lr = 0.0
        options = {} if stage == "fit" else {"verbose": False}
        getattr(trainer, stage)(task, regression_loader(4), **options)
        found.append(weights_of(task))
    return found


@pytest.mark.distributed
def test_every_rank_starts_from_rank_zeros_weights_and_buffers() -> None:
    expected = weights_of(DifferentTask(0))
    for of_rank in run_distributed(_start_on_rank, 2):
        for weights in of_rank:
            torch.testing.assert_close(weights, expected, rtol=0, atol=0)


class SeesBuffers(RegressionTask):
    """Moves a buffer in training by its rank, and notes it when it evaluates."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mark", torch.zeros(1))
        self.seen: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.mark.add_(1 + self.trainer.global_rank)
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.seen.append(float(self.mark))


class SteppedByHand(SeesBuffers):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Batch, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


def _buffers_on_rank() -> list[list[float]]:
    found = []
    for task in (SeesBuffers(), SteppedByHand()):
        trainer = quiet_trainer(devices="auto", strategy="ddp", max_epochs=2, num_sanity_val_steps=0)
        trainer.fit(task, regression_loader(4), regression_loader(2))
        found.append(task.seen)
    return found


@pytest.mark.distributed
def test_every_rank_evaluates_with_rank_zeros_buffers() -> None:
    for found in run_distributed(_buffers_on_rank, 2, init=False):
        assert found == [[2.0, 4.0], [2.0, 4.0]]


def _groups_left(strategy: str) -> list[bool]:
    gc.disable()
    groups: list[weakref.ref[Any]] = []
    for _ in range(3):
        trainer = quiet_trainer(devices="auto", strategy=strategy, max_epochs=1, callbacks=[GroupWatcher(groups)])
        trainer.fit(RegressionTask(), regression_loader(4))
    return [group() is not None for group in groups]


class GroupWatcher(Callback):
    def __init__(self, groups: list[weakref.ref[Any]]) -> None:
        self.groups = groups

    def on_fit_start(self, trainer: Any, task: Any) -> None:
        self.groups.append(weakref.ref(dist.group.WORLD))


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", mostly_exhaustive(["ddp", "fsdp", "deepspeed_stage_3"], keep=["ddp"]))
def test_a_process_group_ends_with_its_stage_and_is_not_left_to_the_collector(strategy: str) -> None:
    # The collector may run in a loader's forked worker, where freeing a gloo group waits for threads that are not
    # there. torch.distributed.nn keeps the first group of a process for good, as a default argument.
    for alive in run_distributed(_groups_left, 2, strategy, init=False):
        assert alive[1:] == [False, False]


class Contrastive(RegressionTask):
    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        outputs = self.all_gather(self(batch[0]), sync_grads=True)
        assert type(outputs) is torch.Tensor
        return torch.logsumexp(outputs.flatten(), 0)


def _fit_contrastive() -> dict[str, torch.Tensor]:
    task, world = Contrastive(), dist.get_world_size() if dist.is_initialized() else 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quiet_trainer(devices="auto", max_epochs=1).fit(task, regression_loader(batch_size=8 // world))
    return weights_of(task)


@pytest.mark.distributed
def test_gradients_pass_through_gathered_values() -> None:
    alone = _fit_contrastive()
    for of_rank in run_distributed(_fit_contrastive, 2):
        torch.testing.assert_close(of_rank, alone, rtol=0, atol=1e-6)


def test_layers_that_configure_model_builds_are_synchronized_too() -> None:
    class Late(RegressionTask):
        def configure_model(self) -> None:
            self.late = nn.BatchNorm1d(4)

    task = Late()
    engine = DDPStrategy(sync_batchnorm=True).engine(EngineSettings("cuda", [0], 1, parse_precision("32-true")))
    engine._build(task)
    engine._place(task)
    assert isinstance(task.late, nn.SyncBatchNorm)


class Thawing(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.blocks[1].requires_grad_(self.current_epoch == 1)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class ThawingLater(Thawing):
    """The block is unfrozen between two micro-batches of one step."""

    def on_train_epoch_start(self) -> None:
        """Leave it as it is."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Unfreeze before the last micro-batch of an epoch, which is this one's on any number of ranks."""
        if torch.equal(batch, batches()[-1]) or torch.equal(batch, batches()[-2]):
            self.blocks[1].requires_grad_(True)


class ThawingAll(Thawing):
    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.requires_grad_(True)


_TASKS: dict[str, type[TaskModule]] = {"step": ThawingLater, "all": ThawingAll}


def _train_all() -> dict[str, Any]:
    return {name: train(DDPStrategy(), 2, task()) for name, task in _TASKS.items()}


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_distributed(_train_all, 2, timeout=120, init=False)


@pytest.mark.distributed
@pytest.mark.parametrize("name", list(_TASKS))
def test_replicas_average_what_is_unfrozen_during_a_fit(name: str, trained: list[dict[str, Any]]) -> None:
    assert_trained_alike([found[name] for found in trained], train("single", 1, _TASKS[name]()))


@pytest.mark.distributed
def test_parameters_that_a_step_does_not_use_are_named_by_the_error_otherwise() -> None:
    named = r"some of its parameters: heads\.1\.0\.weight, .*, heads\.1\.4\.bias\. .*find_unused_parameters=True"
    with pytest.raises(RankError, match=named):  # all ten
        run_distributed(lambda: fit(DDPStrategy(), PartlyUsedTask()), 2, timeout=40)
