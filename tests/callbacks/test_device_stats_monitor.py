from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.callbacks.fake_run import FakeRun
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.device_stats_monitor import DeviceStatsMonitor, memory_statistics
from trainwright.core.errors import ConfigurationError

pytest.importorskip("psutil")


def test_on_the_cpu_the_host_is_read_at_log_steps(tmp_path: Path) -> None:
    run = FakeRun([DeviceStatsMonitor()], tmp_path, log_every_n_steps=3)
    run.fit(epochs=1, batches=7)
    assert [step for step, _ in run.logged] == [3, 6]
    assert set(run.logged[0][1]) == {
        f"DeviceStatsMonitor/{name}"
        for name in ("cpu_percent", "cpu_vm_percent", "cpu_swap_percent", "process_rss_bytes")
    }
    assert run.logged[0][1]["DeviceStatsMonitor/process_rss_bytes"] > 1e6


def test_a_second_fit_logs_at_the_step_at_which_the_first_has_logged_last(tmp_path: Path) -> None:
    callback = DeviceStatsMonitor()
    for _ in range(2):
        run = FakeRun([callback], tmp_path, log_every_n_steps=3)
        run.fit(epochs=1, batches=3)
        assert [step for step, _ in run.logged] == [3]


@pytest.mark.parametrize(
    ("backend", "found"),
    [
        ({"memory_stats": lambda device: {"allocated": 5, "name": "x"}}, {"allocated": 5.0}),
        ({"driver_allocated_memory": lambda: 7}, {"driver_allocated_memory": 7.0}),
    ],
    ids=["counters that are numbers", "a backend without counters"],
)
def test_an_accelerator_s_memory_is_read(
    backend: dict[str, Any], found: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(**backend))
    assert memory_statistics(torch.device("meta")) == found


def test_without_a_logger_it_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="DeviceStatsMonitor has nothing to log to"):
        quiet_trainer(max_epochs=1, callbacks=DeviceStatsMonitor()).fit(RegressionTask(), regression_loader(4))
