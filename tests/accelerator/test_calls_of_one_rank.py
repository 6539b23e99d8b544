"""Collective calls of an Accelerator that the main process makes alone."""

from __future__ import annotations

import contextlib
import io
import re
import time
import warnings
from pathlib import Path

import pytest
import torch

from tests.contracts.test_own_loop import Net, make_optimizer
from tests.helpers.distributed import RankError, run_distributed
from trainwright.accelerator.accelerator import Accelerator
from trainwright.checkpoint import read_checkpoint
from trainwright.processes import late_calls, meetings


def _gather_alone() -> str:
    """Gather on rank 0, and five seconds later on the other one."""
    late_calls._STUCK_S = 1.0
    accelerator = Accelerator(cpu=True)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        if not accelerator.is_main_process:
            time.sleep(5.0)
        accelerator.gather(torch.ones(1))
    accelerator.end_training()
    return said.getvalue()


@pytest.mark.distributed
@pytest.mark.slow
def test_any_collective_of_one_rank_alone_is_reported() -> None:
    first, second = run_distributed(_gather_alone, 2, init=False, timeout=120)
    assert re.search(r"trainwright: rank 0 has waited \d+ s in all_gather", first)
    program = Path(__file__).name
    assert re.search(rf"rank 0: .*{program}:\d+ in _gather_alone, waits in all_gather", first)
    assert re.search(rf"rank 1: .*{program}:\d+ in _gather_alone\n", first)
    assert second == ""


def _save_on_the_main_process(folder: str) -> tuple[list[str], str, list[float]]:
    """Train for four steps, save on rank 0 after the steps 1 and 2, on both after step 3; rank 1 is late in the end."""
    meetings._LATE_S, meetings._LATE_AGAIN_S, meetings._TOO_LATE_S = 1.0, 0.2, 1.5
    accelerator = Accelerator(cpu=True, strategy="ddp")
    net = Net()
    model, optimizer = accelerator.prepare(net, make_optimizer(net))
    saved = []

    def step() -> None:
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for count in range(2):
            step()
            if accelerator.is_main_process:
                saved.append(accelerator.save_state(f"{folder}/{count}"))
        step()
        accelerator.wait_for_everyone()
        saved.append(accelerator.save_state(f"{folder}/both"))
        step()
        if not accelerator.is_main_process:
            time.sleep(4.0)
        saved.append(accelerator.save_state(f"{folder}/late"))
    weights = [parameter.sum().item() for parameter in net.parameters()]
    accelerator.load_state(f"{folder}/late")
    assert saved[-1] == f"{folder}/late"
    assert weights == [parameter.sum().item() for parameter in net.parameters()]
    accelerator.wait_for_everyone()
    accelerator.end_training()
    return saved, " ".join(str(each.message) for each in caught), weights


@pytest.mark.distributed
@pytest.mark.slow
def test_replicated_weights_are_saved_by_the_main_process_alone(tmp_path: Path) -> None:
    main, other = run_distributed(_save_on_the_main_process, 2, str(tmp_path), init=False, timeout=120)
    assert main[0] == [str(tmp_path / name) for name in ("0", "1", "both", "late")]
    assert other[0] == [str(tmp_path / name) for name in ("both", "late")]
    assert "the main process writes the state without the other processes" in main[1]
    assert main[2] == other[2]
    num_generators = {name: len(read_checkpoint(tmp_path / name).rng) for name in ("0", "1", "both", "late")}
    assert num_generators == {"0": 1, "1": 1, "both": 2, "late": 1}


def _save_shards_on_the_main_process(folder: str) -> None:
    meetings._LATE_S = 0.5
    accelerator = Accelerator(strategy="fsdp")
    net = Net()
    model, _ = accelerator.prepare(net, make_optimizer(net))
    if accelerator.is_main_process:
        accelerator.save_state(folder)
    accelerator.backward(model(torch.ones(2, 4)).mean())


@pytest.mark.distributed
@pytest.mark.slow
def test_sharded_weights_are_not_saved_by_the_main_process_alone(tmp_path: Path) -> None:
    begun_s = time.monotonic()
    with pytest.raises(RankError, match=r"waits in accelerator\.save_state\(\) for rank 1") as caught:
        run_distributed(_save_shards_on_the_main_process, 2, str(tmp_path / "saved"), init=False, timeout=120)
    assert "Call it on every rank, not on the main one alone" in str(caught.value)
    assert time.monotonic() - begun_s < 60
