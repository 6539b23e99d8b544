"""Loops of one's own with `Accelerator`, on two processes: uneven data, gathered results, schedules."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import trainwright
from tests.helpers.distributed import run_distributed
from trainwright.accelerator.accelerator import Accelerator
from trainwright.core.errors import ConfigurationError, TrainwrightWarning

pytestmark = pytest.mark.distributed


def _gather_everything() -> dict[str, Any]:
    accelerator = Accelerator(cpu=True)
    found: dict[Any, Any] = {}
    for num in (1, 2, 3, 5, 8):
        loader = accelerator.prepare(DataLoader(torch.arange(num), batch_size=2))  # type: ignore[arg-type]
        rows: list[int] = []
        objects: list[str] = []
        for batch in loader:
            got = accelerator.gather_for_metrics({"rows": batch, "twice": 2 * batch[:, None]})
            assert got["twice"].tolist() == [[2 * row] for row in got["rows"].tolist()]
            rows += got["rows"].tolist()
            objects += accelerator.gather_for_metrics([f"row {row}" for row in batch.tolist()], use_gather_object=True)
        found[num] = (rows, objects)
    wrong = torch.ones(1, 2 + accelerator.process_index)
    with pytest.raises(ConfigurationError, match="pad_across_processes"):
        accelerator.gather_for_metrics(wrong)
    found["padded"] = accelerator.gather_for_metrics(accelerator.pad_across_processes(wrong, dim=1)).tolist()
    if accelerator.process_index == 1:
        accelerator.set_trigger()
    found["trigger"] = (accelerator.check_trigger(), accelerator.check_trigger())
    found["sum"] = accelerator.reduce(torch.tensor([1.0 + accelerator.process_index]), "sum").tolist()
    found["all"] = accelerator.gather(torch.tensor([accelerator.process_index])).tolist()
    return found


def test_results_are_gathered_once_each_and_in_the_order_of_the_data() -> None:
    for found in run_distributed(_gather_everything, 2, init=False, timeout=120):
        for num in (1, 2, 3, 5, 8):
            assert found[num] == (list(range(num)), [f"row {row}" for row in range(num)])
        assert found["padded"] == [[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]]
        assert found["trigger"] == (True, False)
        assert found["sum"] == [3.0]
        assert found["all"] == [0, 1]


def _rates(schedule_steps: Any, split: bool, as_accelerate: bool) -> tuple[list[tuple[float, int]], list[str]]:
    """Return the rate of a schedule and the count of another one after each of four steps, and the warnings."""
    context = trainwright.as_accelerate() if as_accelerate else nullcontext()
    with context, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", TrainwrightWarning)
        accelerator = Accelerator(cpu=True, schedule_steps=schedule_steps, split_batches=split)
        nets = [nn.Linear(1, 1) for _ in range(2)]
        optimizers = [torch.optim.SGD(net.parameters(), lr=1.0) for net in nets]
        halving = torch.optim.lr_scheduler.StepLR(optimizers[0], step_size=1, gamma=0.5)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizers[1], max_lr=1.0, total_steps=7)
        *_, halving, cycle = accelerator.prepare(*nets, *optimizers, halving, cycle)
        rates = []
        for _ in range(4):
            for schedule in (halving, cycle):
                schedule.step()
            rates.append((halving.get_last_lr()[0], cycle.scheduler.last_epoch))
        accelerator.end_training()
    return rates, [str(one.message) for one in caught if "a schedule advances" in str(one.message)]


# (schedule_steps, split_batches, as accelerate) → advances of a step, whether it warns
_SCHEDULES = {
    ("once", False, False): (1, False),
    ("per_process", False, False): (2, False),
    (None, True, False): (1, False),
    (None, False, True): (2, False),
    ("once", False, True): (1, False),
    (None, False, False): (1, True),
}


def test_a_schedule_advances_once_or_for_each_process() -> None:
    ranks = run_distributed(lambda: [_rates(*case) for case in _SCHEDULES], 2)
    for number, (case, (per_step, warns)) in enumerate(_SCHEDULES.items()):
        found = [of_rank[number] for of_rank in ranks]
        advances = [per_step * step for step in range(1, 5)]
        expected = [(0.5**count, min(count, 7)) for count in advances]  # the cycle has 7 steps
        assert [rates for rates, _ in found] == [expected] * 2, case
        assert [len(texts) for _, texts in found] == [int(warns), 0], case
