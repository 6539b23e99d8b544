"""What goes wrong in loops by accident: each is right with `Accelerator`, or an error that says what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, TensorDataset

from tests.helpers.distributed import run_distributed
from trainwright.accelerator.accelerator import Accelerator
from trainwright.core.errors import ConfigurationError, TrainwrightWarning


def _net() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(4, 1)


def _loader(num: int = 8, **options: Any) -> Any:
    return DataLoader(TensorDataset(torch.ones(num, 4)), **options)


class Scores(nn.Module):
    """A model with a loss of its own."""

    hf_device_map = {"": "cpu"}  # noqa: RUF012  # transformers sets it also where all is in one place

    def __init__(self) -> None:
        super().__init__()
        self.layer = _net()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)

    def compute_loss(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss, past whatever wraps the model."""
        return self(x).sum()


def _pass_by() -> list[str]:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(Scores())
    x = torch.ones(2, 4)
    with torch.no_grad():
        net.compute_loss(x)
    net.eval().compute_loss(x)
    net.train()
    accelerator.backward(net(x).sum())
    with pytest.raises(ConfigurationError, match="not through the model"):
        net.compute_loss(x)
    later = Accelerator(cpu=True)
    again = later.prepare(net)
    again(x).sum().backward()
    joined = [type(again).__name__, "" if again.prepared.call is net.prepared.call else "joined twice"]
    later.free_memory()
    again.compute_loss(x).backward()
    return joined


@pytest.mark.distributed
def test_a_method_that_runs_past_the_replica_is_an_error() -> None:
    assert run_distributed(_pass_by, 2, init=False) == [["AcceleratedModel", ""]] * 2


class Stream(IterableDataset[int]):
    def __iter__(self) -> Any:
        return iter(range(6))


def test_an_iterable_is_gone_through_where_batches_are_skipped(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=1))
    for i, _ in enumerate(loader):
        if i == 2:
            accelerator.save_state(tmp_path / "state")
    again = Accelerator(cpu=True)
    loader = again.prepare(DataLoader(Stream(), batch_size=1))
    with pytest.warns(TrainwrightWarning, match=r"skip_first_batches\(loader, 3\)"):
        again.load_state(tmp_path / "state")
    assert [int(batch) for batch in again.skip_first_batches(loader, 3)] == [3, 4, 5]


def test_a_step_without_any_item_is_warned_of_once() -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    net, optimizer, loader = accelerator.prepare(net := _net(), torch.optim.SGD(net.parameters(), lr=0.1), _loader())

    def loop(counts: list[int]) -> None:
        for (x,), num_items in zip(loader, counts, strict=True):
            with accelerator.accumulate(net):
                accelerator.backward(net(x).mean(), num_items=num_items)
                optimizer.step()
                optimizer.zero_grad()

    loop([0, 1, 1, 0] * 2)
    with pytest.warns(TrainwrightWarning, match="num_items=0 in every micro-batch") as told:
        loop([0, 0, 0, 0] * 2)
    assert len(told) == 1


def test_an_optimizer_of_another_model_is_warned_of() -> None:
    net, other = _net(), _net()
    with pytest.warns(TrainwrightWarning, match="SGD holds no parameter of a prepared model"):
        Accelerator(cpu=True).prepare(net, torch.optim.SGD(other.parameters(), lr=0.1))
    net.requires_grad_(False)
    Accelerator(cpu=True).prepare(net, torch.optim.SGD(other.parameters(), lr=0.1))


def test_a_prepared_loader_is_a_data_loader_with_accelerate_s_attributes() -> None:
    accelerator = Accelerator(cpu=True)
    loader: Any = accelerator.prepare(_loader(11, batch_size=4))
    assert isinstance(accelerator.skip_first_batches(loader, 1), DataLoader)
    assert (loader.total_batch_size, loader.total_dataset_length, loader.remainder) == (4, 11, 3)
    assert not loader.end_of_dataloader
    assert [loader.end_of_dataloader for _ in loader] == [False, False, True]
    assert loader.end_of_dataloader
    next(iter(loader))
    assert not loader.end_of_dataloader
    assert isinstance(loader, DataLoader)
    assert accelerator.prepare(_loader(11, batch_size=4, drop_last=True)).remainder == -1
    assert accelerator.prepare_data_loader([torch.ones(2)]).remainder == -1


class _OwnBatchSampler(BatchSampler):
    pass


@pytest.mark.parametrize("drop_last", [False, True])
def test_a_batch_sampler_of_the_user_has_a_short_last_batch(drop_last: bool) -> None:
    accelerator = Accelerator(cpu=True)
    batches = _OwnBatchSampler(range(11), 4, drop_last)
    loader: Any = accelerator.prepare(_loader(11, batch_sampler=batches))
    assert (loader.total_batch_size, loader.remainder) == (4, -1 if drop_last else 3)
    counts = [len(accelerator.gather_for_metrics(torch.ones(()).repeat(4))) for _ in loader]
    assert counts == ([4, 4] if drop_last else [4, 4, 3])


def test_a_state_is_not_saved_with_gradients_of_a_group_that_was_left(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    net, optimizer, loader = accelerator.prepare(net := _net(), torch.optim.SGD(net.parameters(), lr=0.1), _loader())
    for (x,) in loader:
        with accelerator.accumulate(net):
            accelerator.backward(net(x).sum())
        break
    with pytest.raises(ConfigurationError, match=r"optimizer\.step\(\).*optimizer\.zero_grad\(\)"):
        accelerator.save_state(tmp_path / "state")
    assert accelerator.sync_gradients  # the group does not hold back what follows
    optimizer.step()
    assert optimizer.num_steps == 1
    optimizer.zero_grad()
    accelerator.save_state(tmp_path / "state")


def _read_ahead(loader: Any) -> Any:
    iter(loader)  # never read
    return loader


def test_an_iterator_that_is_not_read_begins_no_pass(tmp_path: Path) -> None:
    def prepared() -> tuple[Accelerator, Any]:
        accelerator = Accelerator(cpu=True)
        data = DataLoader(TensorDataset(torch.arange(10.0)), batch_size=1, shuffle=True)
        return accelerator, accelerator.prepare_data_loader(data)

    torch.manual_seed(0)
    accelerator, loader = prepared()
    passes = [[int(batch[0]) for batch in loader] for _ in range(2)]
    torch.manual_seed(0)
    accelerator, loader = prepared()
    assert [int(batch[0]) for batch in _read_ahead(loader)] == passes[0]
    for number, _ in enumerate(_read_ahead(loader), start=1):
        if number == 4:
            accelerator.save_state(tmp_path / "state")
            break
    accelerator, loader = prepared()
    accelerator.load_state(tmp_path / "state")
    assert [int(batch[0]) for batch in _read_ahead(loader)] == passes[1][4:]
