"""Loops on two processes with different numbers of batches, and backwards that synchronize late."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from tests.helpers.distributed import run_distributed
from trainwright import DataLoaderConfiguration
from trainwright.accelerator.accelerator import Accelerator
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.data import shard_info
from trainwright.strategies import FSDPStrategy


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))


def _batches(num: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(dist.get_rank())
    return [torch.randn(3, 4, generator=generator) for _ in range(num)]


def _weights(net: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in net.parameters()]


def _uneven() -> dict[str, Any]:
    accelerator = Accelerator()
    net = _net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    with accelerator.join_uneven_inputs([model]):
        for batch in _batches(2 + 3 * dist.get_rank()):
            accelerator.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()

    hand = _net()
    replica = DistributedDataParallel(hand, gradient_as_bucket_view=True)
    by_hand = torch.optim.SGD(hand.parameters(), lr=0.1)
    with Join([replica]):
        for batch in _batches(2 + 3 * dist.get_rank()):
            replica(batch).square().mean().backward()
            by_hand.step()
            by_hand.zero_grad()
    return {"ours": _weights(net), "by hand": _weights(hand)}


@pytest.mark.distributed
@pytest.mark.slow
def test_a_process_without_batches_takes_part_in_the_averages_of_the_others() -> None:
    for found in run_distributed(_uneven, 2, init=False, timeout=240):
        torch.testing.assert_close(found["ours"], found["by hand"], rtol=0, atol=0)


def test_joining_on_one_process_warns_and_does_nothing() -> None:
    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare(_net())
    with (
        pytest.warns(TrainwrightWarning, match="join_uneven_inputs.. has no effect") as caught,
        accelerator.join_uneven_inputs([model], even_batches=True),
    ):
        model(torch.ones(1, 4))
    assert caught[0].filename == __file__


def _own_batches() -> dict[str, Any]:
    found: dict[str, Any] = {}
    config = DataLoaderConfiguration(even_batches=False)
    for name, accelerator in {"even": Accelerator(), "uneven": Accelerator(dataloader_config=config)}.items():
        loader, other = accelerator.prepare(
            DataLoader(range(6), batch_size=2),  # type: ignore[arg-type]
            DataLoader(_Stream(), batch_size=2),
        )
        net = _net()
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        read: dict[bool | None, Any] = {}
        for even in (None, False, True):
            with accelerator.join_uneven_inputs([model], even_batches=even):
                read[even] = [len(loader), []]
                for batch in loader:
                    read[even][1].append(batch.tolist())
                    if even is False:
                        accelerator.backward(model(_batches(1)[0]).square().mean())
                        optimizer.step()
                        optimizer.zero_grad()
        found[name] = read
        found[f"{name} stream"] = len(list(other))
        found[f"{name} weights"] = [value.detach() for value in net.parameters()]
        accelerator.even_batches = "pad" if name == "uneven" else False
        later = accelerator.prepare(DataLoader(range(6), batch_size=2))  # type: ignore[arg-type]
        found[f"{name}, then changed"] = [batch.tolist() for batch in later]
        dropping = accelerator.prepare(DataLoader(range(6), batch_sampler=BatchSampler(range(6), 2, drop_last=True)))  # type: ignore[arg-type]
        with accelerator.join_uneven_inputs([model], even_batches=False):
            found[f"{name}, dropping"] = [batch.tolist() for batch in dropping]
    with pytest.raises(ConfigurationError, match="expected True, False or 'pad'"):
        accelerator.even_batches = "all"
    return found


class _Stream(IterableDataset[int]):
    is_sharded = True

    def __iter__(self) -> Iterator[int]:
        rank, world = shard_info()
        return iter(range(rank, 5, world))


@pytest.mark.distributed
def test_processes_get_only_their_own_batches() -> None:
    ranks = run_distributed(_own_batches, 2, init=False, timeout=60)
    own = [[2, [[0, 1], [4, 5]]], [1, [[2, 3]]]]
    completed = [[2, [[0, 1], [4, 5]]], [2, [[2, 3], [0, 1]]]]
    for rank, found in enumerate(ranks):
        assert found["even"] == {None: completed[rank], False: own[rank], True: completed[rank]}
        assert found["uneven"] == {None: own[rank], False: own[rank], True: completed[rank]}
        assert found["even, then changed"] == own[rank][1]
        assert found["uneven, then changed"] == ([[2, 3], [2, 3]] if rank else own[0][1])
        assert found["even, dropping"] == found["uneven, dropping"] == own[rank][1][:1]
        assert (found["even stream"], found["uneven stream"]) == (2, 2 - rank)
        for name in ("even weights", "uneven weights"):
            torch.testing.assert_close(found[name], ranks[0][name], rtol=0, atol=0)


def _late(kind: str) -> dict[str, Any]:
    accelerator = Accelerator(strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}) if kind == "fsdp" else kind)
    net = _net()
    model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    for first, second in zip(_batches(4)[::2], _batches(4)[1::2], strict=True):
        with accelerator.no_sync(model):
            losses = [model(first).square().mean(), model(second).square().mean()]
        accelerator.backward(losses[0])
        with accelerator.trigger_sync_in_backward(model):
            accelerator.backward(losses[1])
        optimizer.step()
        optimizer.zero_grad()

    hand = _net()
    by_hand = torch.optim.SGD(hand.parameters(), lr=0.1)
    for first, second in zip(_batches(4)[::2], _batches(4)[1::2], strict=True):
        for batch in (first, second):
            hand(batch).square().mean().backward()
        for parameter in hand.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= 2  # type: ignore[operator]
        by_hand.step()
        by_hand.zero_grad()
    ours = accelerator.get_state_dict(model)
    return {"ours": [value.clone() for value in ours.values()], "by hand": _weights(hand)}


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp", "fsdp"])
def test_a_backward_averages_although_its_forward_did_not_synchronize(kind: str) -> None:
    found = run_distributed(_late, 2, kind, init=False, timeout=240)
    for each in found if kind == "ddp" else found[:1]:
        torch.testing.assert_close(each["ours"], each["by hand"], rtol=1e-6, atol=1e-7)
