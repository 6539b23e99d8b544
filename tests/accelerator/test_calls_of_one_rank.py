"""Collective calls of an Accelerator that the main process makes alone."""

from __future__ import annotations

import contextlib
import io
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.test_own_loop import Net, make_optimizer
from tests.helpers.distributed import run_distributed
from trainwright.accelerator.accelerator import Accelerator
from trainwright.processes import late_calls, process_group


def _elsewhere() -> None:
    time.sleep(2.0)


def _call(call: str, folder: str) -> str:
    """Make a call on rank 0, and two seconds later on the other one."""
    process_group._LATE_S = 0.1
    accelerator = Accelerator(strategy="fsdp")
    net = Net()
    model, optimizer = accelerator.prepare(net, make_optimizer(net))
    accelerator.backward(model(torch.ones(2, 4)).mean())
    calls: dict[str, Any] = {
        "save_state": lambda: accelerator.save_state(folder),
        "get_state_dict": lambda: accelerator.get_state_dict(model),
        "save_model": lambda: accelerator.save_model(model, folder),
        "clip_grad_norm_": lambda: accelerator.clip_grad_norm_(model.parameters(), 1.0),
    }
    if not accelerator.is_main_process:
        _elsewhere()
    with contextlib.redirect_stderr(io.StringIO()) as said:
        calls[call]()
    optimizer.zero_grad()
    accelerator.end_training()
    return said.getvalue()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("call", ["save_state", "get_state_dict", "save_model", "clip_grad_norm_"])
def test_the_ranks_that_do_not_make_it_are_named(call: str, tmp_path: Path) -> None:
    first, second = run_distributed(_call, 2, call, str(tmp_path / "saved"), init=False, timeout=120)
    assert f"rank 0 waits in accelerator.{call}() for rank 1" in first
    assert "Call it on every rank" in first
    program = Path(__file__).name
    assert re.search(rf"rank 0: .*{program}:\d+ in ", first)
    assert re.search(rf"rank 1: .*{program}:\d+ in _elsewhere", first)
    assert call not in second


def _gather_alone(together: bool) -> str:
    """Gather on rank 0, and eight seconds later, or in another call, on the other one."""
    late_calls._STUCK_S = 1.0
    accelerator = Accelerator(cpu=True)
    with contextlib.redirect_stderr(io.StringIO()) as said:
        if not accelerator.is_main_process and not together:
            time.sleep(8.0)
        accelerator.gather(torch.ones(1))
        if together:
            time.sleep(2.0)
    accelerator.end_training()
    return said.getvalue()


@pytest.mark.distributed
@pytest.mark.slow
def test_any_collective_of_one_rank_alone_is_reported() -> None:
    first, second = run_distributed(_gather_alone, 2, False, init=False, timeout=120)
    assert re.search(r"trainwright: rank 0 has waited \d+ s in all_gather", first)
    program = Path(__file__).name
    assert re.search(rf"rank 0: .*{program}:\d+ in _gather_alone, waits in all_gather", first)
    assert re.search(rf"rank 1: .*{program}:\d+ in _gather_alone\n", first)
    assert second == ""
    assert run_distributed(_gather_alone, 2, True, init=False, timeout=120) == ["", ""]


def _wait_two_seconds(file: str) -> None:
    """Save on rank 0 two seconds before rank 1; write the standard error of rank 0, C++ logs included, to a file."""
    accelerator = Accelerator(strategy="fsdp")
    net = Net()
    accelerator.prepare(net, make_optimizer(net))
    if not accelerator.is_main_process:
        time.sleep(2.5)
        accelerator.save_state(f"{file}-state")
    else:
        with open(file, "w") as log:
            usual = os.dup(2)
            os.dup2(log.fileno(), 2)
            try:
                accelerator.save_state(f"{file}-state")
            finally:
                os.dup2(usual, 2)
    accelerator.end_training()


@pytest.mark.distributed
@pytest.mark.slow
def test_waiting_writes_no_warnings_of_torchs_store(tmp_path: Path) -> None:
    run_distributed(_wait_two_seconds, 2, str(tmp_path / "log"), init=False, timeout=120)
    assert "waitForInput" not in (tmp_path / "log").read_text()
