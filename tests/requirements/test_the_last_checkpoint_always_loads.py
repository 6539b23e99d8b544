"""A process that is killed while it writes leaves a checkpoint from which the training goes on exactly.

`tests/checkpoint/test_crash.py` does the same to the writer alone, power failures included, and `tests/torture` to
trainings of several processes.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from tests.torture.runs import KillAt, fork_rank, preload
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import newest_valid, set_fault_hook

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

STEPS = 2


def train(folder: Path, keep: str, *, ckpt_path: str | None = None, seed: int = 7) -> dict[str, torch.Tensor]:
    policy: dict[str, Any] = {"newest": {"save_top_k": 1}, "replaced": {"save_top_k": 0, "save_last": True}}[keep]
    torch.manual_seed(seed)
    task = RegressionTask(momentum=0.9, dropout=0.5)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, **policy)
    trainer = quiet_trainer(max_steps=STEPS, callbacks=[saver], seed=1, async_save=False)
    # Nothing that a crash leaves is damaged under a visible name, so that there is nothing to fall back from.
    trainer.fit(task, regression_loader(8, 2, shuffle=True), ckpt_path=ckpt_path, on_damaged="error")
    return weights_of(task)


@pytest.mark.parametrize("keep", ["newest", "replaced"])
@pytest.mark.exhaustive
def test_last_loads_after_a_kill_at_every_write_point(
    tmp_path: Path, keep: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda handle: None)  # a kill, unlike a power failure, loses nothing unsynced
    preload()
    expected = train(tmp_path / "whole", keep)
    resumed = begun_anew = 0
    for at in range(1000):
        folder = tmp_path / str(at)

        def killed(folder: Path = folder, at: int = at) -> None:
            set_fault_hook(KillAt(at))
            train(folder, keep)

        _, status = os.waitpid(fork_rank(killed, tmp_path / f"{at}.log", {}), 0)
        was_killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        assert was_killed or os.WEXITSTATUS(status) == 0, (tmp_path / f"{at}.log").read_text()
        if newest_valid(folder) is None:  # killed before the first one stood
            assert was_killed
            assert not resumed
            begun_anew += 1
            continue
        resumed += 1
        assert_equal_weights(train(folder, keep, ckpt_path="last", seed=100 + at), expected)
        if not was_killed:
            break
    assert begun_anew > 10
    assert resumed > 50
