from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.checkpoint.snapshots import names_of
from trainwright.checkpoint import AsyncWriter, Snapshot, named_optimizer_state, read_checkpoint, write_checkpoint
from trainwright.checkpoint.disk.host_copies import LaterCopy
from trainwright.core.errors import CheckpointError

WIDTH = 256  # a weight is more than what is copied at once


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Hold the writer's thread back from copying until the event is set; other threads copy as they like."""
    opened, finish = threading.Event(), LaterCopy.finish

    def finish_later(copy: LaterCopy) -> bool:
        if threading.current_thread().name == "trainwright-checkpoint":
            assert opened.wait(30)
        return finish(copy)

    monkeypatch.setattr(LaterCopy, "finish", finish_later)
    yield opened
    opened.set()


def trained() -> tuple[nn.Module, torch.optim.Optimizer]:
    net = nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    step(net, optimizer)
    return net, optimizer


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    net(torch.ones(1, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def snapshot_of(net: nn.Module, optimizer: torch.optim.Optimizer, *, overlaps: bool = True) -> Snapshot:
    return Snapshot(
        state={"step": 1, "epoch": 0},
        model=net.state_dict(),
        optimizers=[named_optimizer_state(optimizer, names_of(net))],
        rng=[{}],
        state_rests=overlaps,
    )


def state_of(path: Path) -> dict[str, torch.Tensor]:
    tree = read_checkpoint(path).optimizers[0]["state"]
    return {f"{name}.{key}": value for name, state in tree.items() for key, value in state.items()}


def test_a_step_waits_for_the_copy_and_the_checkpoint_is_that_of_the_submit(
    tmp_path: Path, writer: AsyncWriter, held: threading.Event
) -> None:
    net, optimizer = trained()
    write_checkpoint(tmp_path / "at_once", snapshot_of(net, optimizer))
    writer.optimizers = [optimizer]
    writer.submit(tmp_path / "later", snapshot_of(net, optimizer))
    step(net, optimizer)  # the thread has copied nothing: the step does so itself
    after = named_optimizer_state(optimizer, names_of(net))["state"]["weight"]
    held.set()
    writer.wait()
    expected, found = state_of(tmp_path / "at_once"), state_of(tmp_path / "later")
    assert expected.keys() == found.keys()
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert any(not torch.equal(found[f"weight.{key}"], value) for key, value in after.items())
    weights = [dict(read_checkpoint(tmp_path / name).model or {})["weight"] for name in ("at_once", "later")]
    assert torch.equal(*weights)


def test_state_that_is_changed_by_hand_meanwhile_is_an_error_and_no_checkpoint(
    tmp_path: Path, writer: AsyncWriter, held: threading.Event
) -> None:
    net, optimizer = trained()
    path = writer.submit(tmp_path / "a", snapshot_of(net, optimizer))
    optimizer.state[net.weight]["exp_avg"].zero_()
    held.set()
    with pytest.raises(CheckpointError, match=r"changed between two of its steps(.|\n)*async_save=False"):
        writer.wait()
    assert not path.exists()


def test_a_thread_waits_for_the_copies_that_another_one_makes() -> None:
    opened = threading.Event()
    later = LaterCopy(filter(lambda copy: opened.wait(5), [(0, 0, 0)]), [])  # type: ignore[arg-type]  # only iterated
    with ThreadPoolExecutor(2) as pool:
        threads = [pool.submit(later.finish) for _ in range(2)]
        assert not wait(threads, 0.1).done
        opened.set()
    assert [thread.result() for thread in threads] == [True, True]
