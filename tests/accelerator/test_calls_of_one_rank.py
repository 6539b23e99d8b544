"""Collective calls of an Accelerator that the main process makes alone."""

from __future__ import annotations

import contextlib
import io
import re
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.contracts.test_own_loop import Net, make_optimizer
from tests.helpers.distributed import run_distributed
from trainwright.accelerator.accelerator import Accelerator
from trainwright.processes import process_group


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
