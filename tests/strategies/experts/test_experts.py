"""Experts that are divided over ranks train as in one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import SaveAtEnd, quiet_trainer
from tests.strategies.experts.mixtures import MixtureTask, train
from tests.strategies.fsdp.sharded import assert_trained_alike
from trainwright.core.errors import ConfigurationError
from trainwright.core.task import TaskModule
from trainwright.strategies.fsdp.strategy import FSDPStrategy

pytestmark = pytest.mark.distributed


def _assert_alike(by_rank: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    """Compare with one process; the norm that clipping uses too."""
    assert_trained_alike(by_rank, alone)
    for found in by_rank:
        torch.testing.assert_close(torch.tensor(found["reported"]), alone["norms"], rtol=0, atol=1e-6)


def test_two_ranks_train_a_mixture_as_one_process() -> None:
    def runs() -> dict[str, Any]:
        return {
            "plain": train(MixtureTask(), FSDPStrategy(ep=2), 2),
            "one expert": train(MixtureTask(only=3), FSDPStrategy(ep=2, sync_each_batch=True), 2),
        }

    by_rank = run_distributed(runs, 2, init=False, timeout=200)
    _assert_alike([found["plain"] for found in by_rank], train(MixtureTask()))
    _assert_alike([found["one expert"] for found in by_rank], train(MixtureTask(only=3)))
    assert [found["plain"]["computed"] for found in by_rank] == [[{2}, {2}]] * 2
    assert [found["one expert"]["computed"] for found in by_rank] == [[set(), set()], [{2}, {2}]]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*random number generators start from scratch:UserWarning")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [("single", "ep"), ("ep", "single"), pytest.param("ep", "ep of 4", marks=pytest.mark.exhaustive)],
)
def test_checkpoints_continue_under_other_strategies(writer: str, reader: str, tmp_path: Path) -> None:
    made: dict[str, tuple[Any, int]] = {
        "single": ("single", 1),
        "ep": (FSDPStrategy(ep=2), 2),
        "ep of 4": (FSDPStrategy(ep=2), 4),
    }

    def run(name: str, **arguments: Any) -> Any:
        strategy, processes = made[name]

        def one() -> Any:
            return train(MixtureTask(), strategy, processes, **arguments)

        return run_distributed(one, processes, init=False, timeout=200)

    path = tmp_path / "half"
    run(writer, max_epochs=2, callbacks=[SaveAtEnd(path)])
    alone = train(MixtureTask(), max_epochs=4)
    for found in run(reader, max_epochs=4, ckpt_path=path):
        torch.testing.assert_close(found["weights"], alone["weights"], rtol=0, atol=1e-5)
        assert float(found["val"]) == pytest.approx(float(alone["val"]), abs=1e-5)


def _refused(task: TaskModule, strategy: FSDPStrategy, devices: int = 2) -> str:
    with pytest.raises(ConfigurationError) as caught:
        quiet_trainer(strategy=strategy, devices=devices, max_steps=1).fit(task, [torch.zeros(2, 5)])
    return str(caught.value)


def test_what_cannot_be_divided_is_refused_before_a_process_starts() -> None:
    assert "3 experts, which are not divisible by ep=2. Use 1 or 3" in _refused(MixtureTask(3), FSDPStrategy(ep=2))
    assert "2 experts, which cannot be sharded over 4 ranks. Use sharding_strategy='HYBRID_SHARD' and device_mesh=" in (
        _refused(MixtureTask(2), FSDPStrategy(ep=2), 4)
    )
    assert "sharded over 3 ranks" in _refused(MixtureTask(), FSDPStrategy(ep=2), 3)
    task = MixtureTask()
    task.blocks = torch.nn.ModuleList()
    assert "MixtureTask has none" in _refused(task, FSDPStrategy(ep=2))
    assert "divided experts stay on the device" in _refused(MixtureTask(), FSDPStrategy(ep=2, cpu_offload=True))


_FOUR: dict[str, dict[str, Any]] = {
    "ep=2, shared": {"ep": 2},
    "ep=2, units of their own": {"ep": 2, "auto_wrap_policy": ["Experts"]},
    "ep=2, replicated": {"ep": 2, "sharding_strategy": "HYBRID_SHARD", "device_mesh": (2, 2)},
}


@pytest.mark.slow
def test_four_ranks_train_a_mixture_as_one_process() -> None:
    def runs() -> dict[str, Any]:
        found = {name: train(MixtureTask(), FSDPStrategy(**options), 4) for name, options in _FOUR.items()}
        return found | {"one expert": train(MixtureTask(only=0), FSDPStrategy(ep=2), 4)}

    by_rank = run_distributed(runs, 4, init=False, timeout=300)
    alone = train(MixtureTask())
    for name in _FOUR:
        _assert_alike([found[name] for found in by_rank], alone)
    _assert_alike([found["one expert"] for found in by_rank], train(MixtureTask(only=0)))
