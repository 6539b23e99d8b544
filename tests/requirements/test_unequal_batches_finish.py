"""Ranks with 3 and 5 batches finish under DDP, by a declared policy and with the right weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError

_COUNTS = (3, 5)


def _batches(rank: int) -> list[Any]:
    """Return a rank's own batches of 2: the first three of sixteen, or the next five."""
    everything: list[Any] = [tuple(batch) for batch in regression_loader(32, 2)]  # lists in a list would be loaders
    return everything[:3] if rank == 0 else everything[3:8]


class _Stream(IterableDataset[Batch]):
    """Batches without a length."""

    is_sharded = True

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


def _fit(policy: str, accumulate: int, sized: bool, num_items: bool) -> Any:
    class Counting(RegressionTask):
        def num_items(self, batch: Batch) -> int:
            return len(batch[0])

    options = {"uneven_batches": policy, "accumulate_grad_batches": accumulate, "use_distributed_sampler": False}
    trainer = quiet_trainer(devices="auto", max_epochs=2, **options)
    rank = trainer.settings.selection.topology.rank
    task = Counting() if num_items else RegressionTask()
    data: Any = _batches(rank) if sized else torch.utils.data.DataLoader(_Stream(_batches(rank)), batch_size=None)
    trainer.fit(task, data)
    return trainer.global_step, weights_of(task)


# (policy, micro-batches a step, loader with a length, task with num_items)
_CASES = [("pad", 1, True, False), ("pad", 2, False, True), ("stop", 1, False, True), ("stop", 2, True, False)]


def _by_hand(policy: str, accumulate: int) -> tuple[int, dict[str, torch.Tensor]]:
    """Train with the mean over the real micro-batches of both ranks in each step."""
    task = RegressionTask()
    optimizer = task.configure_optimizers()
    rounds = min(_COUNTS) if policy == "stop" else max(_COUNTS)
    steps = 0
    for _ in range(2):
        for start in range(0, rounds, accumulate):
            stop = min(start + accumulate, rounds)
            real = [batch for rank in (0, 1) for batch in _batches(rank)[start:stop]]
            optimizer.zero_grad()
            for batch in real:
                (task.loss(batch) / len(real)).backward()
            optimizer.step()
            steps += 1
    return steps, weights_of(task)


def _fit_all_on_rank() -> list[Any]:
    return [_fit(*case) for case in _CASES]


@pytest.mark.distributed
def test_padding_and_stopping_train_on_the_mean_of_the_real_batches() -> None:
    by_rank = run_distributed(_fit_all_on_rank, 2, timeout=90)
    for case, *of_ranks in zip(_CASES, *by_rank, strict=True):
        policy, accumulate, _, _ = case
        steps, weights = _by_hand(policy, accumulate)
        for found_steps, found in of_ranks:
            assert found_steps == steps, case
            torch.testing.assert_close(found, weights, rtol=0, atol=1e-6)


def _logged_on_rank() -> dict[str, Any]:
    class Logging(RegressionTask):
        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            self.log("mean", batch[0].sum(), on_step=False, on_epoch=True)
            self.log("count", float(len(batch[0])), on_step=False, on_epoch=True, reduce_fx="sum")
            return super().training_step(batch, batch_idx)

    trainer = quiet_trainer(devices="auto", max_epochs=1, use_distributed_sampler=False)
    trainer.fit(Logging(), _batches(trainer.settings.selection.topology.rank))
    return {name: float(trainer.callback_metrics[name]) for name in ("mean", "count")}


@pytest.mark.distributed
def test_metrics_of_an_epoch_do_not_count_padding() -> None:
    sums = [float(batch[0].sum()) for rank in (0, 1) for batch in _batches(rank)]
    for found in run_distributed(_logged_on_rank, 2, timeout=90):
        assert found == {"mean": pytest.approx(sum(sums) / len(sums)), "count": 16.0}


def _refused_on_rank() -> list[str]:
    messages = []
    for sized in (True, False):
        with pytest.raises(ConfigurationError) as caught:
            _fit("error", 1, sized, num_items=False)
        messages.append(str(caught.value))
    return messages


@pytest.mark.distributed
def test_the_error_policy_refuses_on_every_rank_and_names_the_numbers() -> None:
    for sized, unsized in run_distributed(_refused_on_rank, 2, timeout=60):
        assert "[3, 5]" in sized
        assert "different numbers of batches" in unsized


class _Validating(RegressionTask):
    """Has loaders of its own, because an empty loader that is passed is refused as a mistake."""

    def __init__(self, train: Any, val: Any) -> None:
        super().__init__()
        self.train_dataloader = lambda: train
        self.val_dataloader = lambda: val

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch))
        self.log("val_count", float(len(batch[0])), reduce_fx="sum")


def _own_loader(kind: str, batches: list[Any]) -> Any:
    """Return a loader of one rank's own batches, which may be none."""
    if kind == "list":
        return batches
    if kind == "map-style":
        return torch.utils.data.DataLoader(batches, batch_size=None)  # type: ignore[arg-type]  # torch accepts a list
    return torch.utils.data.DataLoader(_Stream(batches), batch_size=None)


def _one_rank_has_none(strategy: str) -> list[Any]:
    found = []
    for kind in ("list", "map-style", "iterable"):
        for empty in (0, 1):
            trainer = quiet_trainer(
                devices="auto", strategy=strategy, max_epochs=1, use_distributed_sampler=False, num_sanity_val_steps=0
            )
            own = _batches(1) if trainer.settings.selection.topology.rank != empty else []
            train = _batches(0) if kind == "iterable" else _own_loader(kind, own)
            task = _Validating(train, _own_loader(kind, own))
            trainer.fit(task)
            found.append((trainer.global_step, dict(trainer.callback_metrics), weights_of(task)))
    return found


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.exhaustive)])
def test_a_rank_may_have_no_data_at_all(strategy: str) -> None:
    first, second = run_distributed(lambda: _one_rank_has_none(strategy), 2, timeout=90)
    for i, ((steps, metrics, weights), (_, others, other_weights)) in enumerate(zip(first, second, strict=True)):
        assert metrics["val_count"] == others["val_count"] == 10
        assert metrics["val_loss"] == others["val_loss"]
        torch.testing.assert_close(weights, other_weights, rtol=0, atol=0)
        assert steps == (3 if i > 3 else 5)
        if i < 4:  # only one rank has training data
            task = RegressionTask()
            optimizer = task.configure_optimizers()
            for batch in _batches(1):
                optimizer.zero_grad()
                task.loss(batch).backward()
                optimizer.step()
            torch.testing.assert_close(weights, weights_of(task), rtol=0, atol=1e-6)
