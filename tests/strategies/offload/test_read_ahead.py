"""What lies on the disk is read for the next unit's optimizer step while the present unit's computes."""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.strategies.offload.test_training import DEPTH, Tiny, train
from trainwright import OffloadStrategy
from trainwright.strategies.offload import step as step_module
from trainwright.strategies.offload.advice import read_ahead

NUM_BYTES = 4 * 2**20


def pages_in_memory(tensor: torch.Tensor) -> int:
    """Return how many pages of a mapped tensor the system has in memory."""
    count = tensor.nbytes // mmap.PAGESIZE
    found = (ctypes.c_ubyte * count)()
    address, length = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
    assert ctypes.CDLL(None, use_errno=True).mincore(address, length, found) == 0
    return sum(page & 1 for page in found)


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel which pages it has")
def test_a_file_that_nobody_has_read_is_in_memory_soon_after(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    path.write_bytes(os.urandom(NUM_BYTES))
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    tensor = torch.from_file(str(path), shared=True, size=NUM_BYTES, dtype=torch.uint8)
    before = pages_in_memory(tensor)
    if before:
        pytest.skip(f"the file system keeps {before} pages in memory whatever it is told")
    read_ahead([tensor[100:]])
    until = time.monotonic() + 30
    while pages_in_memory(tensor) < NUM_BYTES // mmap.PAGESIZE and time.monotonic() < until:
        time.sleep(0.01)
    assert pages_in_memory(tensor) == NUM_BYTES // mmap.PAGESIZE
    assert tensor.numpy().tobytes() == path.read_bytes()


def test_it_takes_whatever_tensors_there_are() -> None:
    read_ahead([torch.empty(0), torch.ones(()), torch.ones(3, 5).t(), torch.empty(4, device="meta")])


def test_each_unit_is_read_before_the_one_in_front_of_it_is_stepped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, set[int]]] = []
    stepped: set[int] = set()

    def note(tensors: Iterable[torch.Tensor]) -> None:
        events.append(("read", {tensor.data_ptr() for tensor in tensors}))

    plain_step: Any = torch.optim.AdamW.step

    @functools.wraps(plain_step)  # no hook of torch's, before whose eyes a step would not be split
    def step_and_note(optimizer: torch.optim.Optimizer, closure: Any = None) -> Any:
        parameters = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
        states = [v for p in parameters for v in optimizer.state.get(p, {}).values() if v.dim()]
        events.append(("step", {tensor.data_ptr() for tensor in [*(p.data for p in parameters), *states]}))
        return plain_step(optimizer, closure)

    monkeypatch.setattr(step_module, "read_ahead", note)
    monkeypatch.setattr(torch.optim.AdamW, "step", step_and_note)
    train(Tiny(), OffloadStrategy("disk", "disk", stream=True, offload_folder=tmp_path))
    assert [kind for kind, _ in events] == ["read", "step"] * (len(events) // 2)
    per_step = DEPTH + 1  # units, and what lies in none
    assert len(events) % (2 * per_step) == 0
    for first in range(0, len(events), 2 * per_step):
        group = [touched for _, touched in events[first : first + 2 * per_step]]
        for read, step in zip(group[0:-2:2], group[3::2], strict=True):  # what comes between is the step in front
            assert step <= read
            stepped |= step
    assert stepped
