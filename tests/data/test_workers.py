from __future__ import annotations

import os
import signal
import tempfile
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError
from trainwright.data import LoaderOptions, prepare_loader
from trainwright.data.workers import Workers

_LONGEST = 75  # of what Linux takes, 32 bytes less


def _fit(folder: Path) -> None:
    loader = DataLoader(regression_loader(8, 2).dataset, batch_size=2, num_workers=1)
    quiet_trainer(max_epochs=1, default_root_dir=folder).fit(RegressionTask(), loader)


@pytest.mark.parametrize("too_many", [0, 1])
def test_a_temporary_folder_with_too_long_a_path_is_told_and_the_longest_that_fits_works(
    too_many: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if torch.multiprocessing.get_sharing_strategy() != "file_descriptor":
        pytest.skip("workers use no sockets here")
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        folder = Path(short) / ("x" * (_LONGEST + too_many - len(short) - 1))
        folder.mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(folder))
        if too_many:
            with pytest.raises(ConfigurationError, match=r"1 bytes too long.*Set TMPDIR"):
                _fit(tmp_path)
        else:
            _fit(tmp_path)


class _SignalsTheGroupTwice(Dataset[int]):
    """Has its worker sent signals as by a machine that tells a group of processes twice."""

    def __init__(self, gap_s: float) -> None:
        self.gap_s = gap_s

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            for gap_s in (0.0, self.gap_s):
                time.sleep(gap_s)
                os.kill(os.getpid(), signal.SIGTERM)
        return index


@pytest.mark.slow
def test_signals_that_come_together_end_no_worker_and_a_later_one_does() -> None:
    def read(gap_s: float) -> list[int]:
        workers = Workers()
        loader = prepare_loader(
            DataLoader(_SignalsTheGroupTwice(gap_s), batch_size=None, num_workers=1), LoaderOptions(workers=workers)
        )
        try:
            return list(loader.iterate())
        finally:
            workers.close()

    assert read(0.001) == [0, 1, 2, 3]
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        read(1.3)


class _Stuck(Dataset[int]):
    """Is stuck in its second sample, with a file; it may be code that no Ctrl-C ends."""

    def __init__(self, folder: Path, ignores: bool) -> None:
        self.folder, self.ignores = folder, ignores

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        if index == 1:
            if self.ignores:
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            with tempfile.NamedTemporaryFile(dir=self.folder):
                time.sleep(5)
        return index


@pytest.mark.parametrize("ignores", [False, True])
def test_a_worker_that_is_stuck_is_interrupted_and_then_ended(
    ignores: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainwright.data.workers._wait_for.__defaults__", (0.05,))
    monkeypatch.setattr("trainwright.data.workers._POLL_S", 0.05 if ignores else 5.0)
    looks, is_alive = [], BaseProcess.is_alive
    workers = Workers()
    batches = workers.keep(iter(DataLoader(_Stuck(tmp_path, ignores), batch_size=None, num_workers=1)))
    assert next(batches) == 0
    while not any(tmp_path.iterdir()):
        time.sleep(0.01)
    started_s = time.monotonic()
    with monkeypatch.context() as patch:
        patch.setattr(BaseProcess, "is_alive", lambda worker: looks.append(worker) or is_alive(worker))
        patch.setattr(batches, "_shutdown_workers", lambda: pytest.fail("waits for a lock that a killed worker holds"))
        workers.close()
    assert time.monotonic() - started_s < 2
    assert len(looks) < 20 or not ignores  # it waits instead of looking again and again
    assert not batches._workers[0].is_alive()
    assert any(tmp_path.iterdir()) == ignores
    assert batches._shutdown
    batches._shutdown_workers()  # as torch does when it frees the iterator: it finds nothing left to end
