"""A save takes no host memory but, from a thread, its own pieces once; an export and a load go tensor by tensor."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.checkpoint.disk.host_buffers import BLOCK_BYTES
from trainwright.core.run import SaveRequest
from trainwright.strategies.fsdp.strategy import FSDPStrategy

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

NUM_TENSORS, TENSOR_MB = 6, 16
STATE_MB = 2 * NUM_TENSORS * TENSOR_MB  # with the momentum
SHARD_MB = STATE_MB / 2
_M_MMAP_THRESHOLD = -3  # of malloc.h


def resident_mb(field: str) -> float:
    """Return this process's memory as the kernel counts it: `VmRSS` now, or `VmHWM` at its highest."""
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{field}:")[1].split()[0]) / 1024


class Large(RegressionTask):
    def __init__(self) -> None:
        super().__init__(momentum=0.9)
        shape = (TENSOR_MB * 2**18,)
        self.large = nn.ParameterList(nn.Parameter(torch.full(shape, 0.5)) for _ in range(NUM_TENSORS))

    def loss(self, batch: Any) -> torch.Tensor:
        return super().loss(batch) + sum(tensor[0] for tensor in self.large) * 0


class MeasuredSave(Callback):
    """Saves at once and then in a thread after the second step, and measures what the process takes for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.at_once: list[float] = []
        self.in_thread: list[float] = []
        self._stack = ExitStack()
        self._steps = 0
        self.buffers_mb = 0.0

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self._steps += 1
        if self._steps == 2:
            with measured() as self.at_once:
                trainer.save_checkpoint(self.folder / "at_once")
            self.in_thread = self._stack.enter_context(measured())
            trainer.request_save(SaveRequest(name="in_thread", folder=self.folder))

    def on_train_end(self, trainer: Any, task: Any) -> None:
        self._stack.close()
        self.buffers_mb = trainer.run.saves.writer.buffers.num_bytes / 2**20


@contextmanager
def measured() -> Iterator[list[float]]:
    """Give the MB of the peak within the block above what stood before, which the kernel keeps: nothing is missed."""
    peak = [0.0]
    Path("/proc/self/clear_refs").write_text("5")  # the highest so far is what stands now
    before = resident_mb("VmRSS")
    try:
        yield peak
    finally:
        peak[0] = resident_mb("VmHWM") - before


def save(folder: Path) -> tuple[float, float, float]:
    """Train two steps; return MB that a save at once took, and one in a thread, and of that one's buffers."""
    torch.set_num_threads(1)
    # Otherwise the C library keeps some of what is freed, now more and now less.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(2**20)
    assert ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 2**20)
    callback = MeasuredSave(folder)
    strategy = FSDPStrategy(state_dict_type="sharded")
    trainer = quiet_trainer(devices="auto", strategy=strategy, max_steps=2, callbacks=[callback])
    trainer.fit(Large(), regression_loader(8, 2))
    return callback.at_once[0], callback.in_thread[0], callback.buffers_mb


def test_a_sharded_save_gathers_nothing_and_in_a_thread_copies_the_own_pieces_once(tmp_path: Path) -> None:
    by_rank = run_distributed(save, 2, tmp_path, init=False, timeout=240)
    print(by_rank)
    for at_once, in_thread, buffers in by_rank:
        assert at_once < TENSOR_MB
        assert in_thread < SHARD_MB + BLOCK_BYTES / 2**20
        assert SHARD_MB <= buffers < SHARD_MB + BLOCK_BYTES / 2**20
    sizes = [file.stat().st_size / 2**20 for file in (tmp_path / "at_once").rglob("rank-*.safetensors")]
    assert sum(sizes) == pytest.approx(STATE_MB, abs=2)
    assert max(sizes) < SHARD_MB
