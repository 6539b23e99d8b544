"""Loops of one's own with `Accelerator`, on two processes: uneven data, gathered results, schedules."""

from __future__ import annotations

import itertools
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainwright
from tests.helpers.distributed import run_distributed
from trainwright import DataLoaderConfiguration
from trainwright.accelerator.accelerator import Accelerator
from trainwright.core.errors import ConfigurationError, TrainwrightWarning

pytestmark = pytest.mark.distributed


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def _data(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(num, 4, generator=generator), torch.randn(num, 2, generator=generator))


def _weights(net: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in net.parameters()])


def _train_on_seven(strategy: str, even_batches: Any, fetches_first: bool) -> dict[str, torch.Tensor]:
    """Train on seven micro-batches of two ranks: the second one lacks the last."""
    config = DataLoaderConfiguration(even_batches=even_batches)
    accelerator = Accelerator(cpu=True, strategy=strategy, gradient_accumulation_steps=2, dataloader_config=config)
    net = _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    ours, optimizer, loader = accelerator.prepare(net, optimizer, DataLoader(_data(7)))  # type: ignore[assignment]
    iterator = iter(loader)
    for _ in range(2):
        batches = [next(iterator) for _ in range(2)] if fetches_first else itertools.islice(iterator, 2)
        for x, y in batches:
            with accelerator.accumulate(ours):
                accelerator.backward(nn.functional.mse_loss(ours(x), y))
                optimizer.step()
                optimizer.zero_grad()
    return {name: value.clone() for name, value in accelerator.get_state_dict(ours).items()}


@pytest.mark.parametrize(
    ("strategy", "even_batches", "fetches_first"),
    [
        ("ddp", "pad", True),
        ("ddp", True, False),
        ("fsdp", "pad", True),
        pytest.param("ddp", "pad", False, marks=pytest.mark.exhaustive),
        pytest.param("deepspeed_stage_2", "pad", True, marks=pytest.mark.exhaustive),
    ],
)
def test_a_rank_that_has_run_out_of_data_adds_nothing_or_samples_from_the_beginning(
    strategy: str, even_batches: Any, fetches_first: bool
) -> None:
    data, net = _data(7), _net()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
    for group in ((0, 1, 2, 3), (4, 5, 6) if even_batches == "pad" else (4, 5, 6, 0)):
        for i in group:
            x, y = data[i : i + 1]
            (nn.functional.mse_loss(net(x), y) / len(group)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    found, _ = run_distributed(_train_on_seven, 2, strategy, even_batches, fetches_first, init=False, timeout=120)
    torch.testing.assert_close(found, dict(net.state_dict()), rtol=1e-4, atol=1e-5)


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
