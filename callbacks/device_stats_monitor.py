"""Log memory statistics of the device and the host."""

from __future__ import annotations

from typing import Any

import torch

from trainwright.callbacks.callback import Callback, Order
from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.run import Run, Stage
from trainwright.core.state import StepResult
from trainwright.core.task import TaskModule

# Functions of backends without `memory_stats`, such as torch.mps.
_MEMORY_READINGS = ("current_allocated_memory", "driver_allocated_memory", "memory_allocated", "memory_reserved")


class DeviceStatsMonitor(Callback):
    """Callback that logs memory statistics of the main process every `log_every_n_steps` steps.

    Their names begin with `DeviceStatsMonitor/`. On an accelerator these are counters of the allocator, which are read
    without waiting for the device. On the CPU they come from psutil: `cpu_percent`, `cpu_vm_percent`,
    `cpu_swap_percent` (of the machine) and `process_rss_bytes`.

    Args:
        cpu_stats: log the host's statistics. Default: None, which logs them only if training runs on the CPU.

    Raises:
        ConfigurationError: in a run, the Trainer has no logger.
        MissingPackageError: the host's statistics are requested and psutil is not installed. Raised before training
            starts.
    """

    reads_only = True
    order = Order.LAST

    def __init__(self, cpu_stats: bool | None = None) -> None:
        self.cpu_stats = cpu_stats
        self._last_logged_step = 0  # completed steps at the latest log

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage != "fit":
            return
        if not trainer.loggers and not trainer.fast_dev_run:
            raise ConfigurationError(
                "DeviceStatsMonitor has nothing to log to: the Trainer has no logger. Pass Trainer(logger=...) or "
                "remove the callback."
            )
        if self._logs_host(trainer.device):
            _host_statistics()  # fails early without psutil; its first percentage is since this call

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        self._last_logged_step = trainer.state.step  # a new run passes the steps of an earlier one again

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        step = trainer.state.step
        if step % trainer.log_every_n_steps or not trainer.is_global_zero:
            return
        if step == self._last_logged_step:
            return  # a group whose loss was None does not count as a step
        self._last_logged_step = step
        statistics = memory_statistics(trainer.device)
        if self._logs_host(trainer.device):
            statistics |= _host_statistics()
        if statistics:
            trainer.log_now({f"DeviceStatsMonitor/{name}": value for name, value in statistics.items()})

    def _logs_host(self, device: torch.device) -> bool:
        if self.cpu_stats is not None:
            return self.cpu_stats
        return device.type == "cpu"


def memory_statistics(device: torch.device) -> dict[str, float]:
    """Return the counters of `device`'s memory allocator, in bytes or counts. Empty on the CPU. Never waits."""
    if device.type == "cpu":
        return {}
    backend = torch.get_device_module(device)
    if hasattr(backend, "memory_stats"):
        counters: dict[str, Any] = backend.memory_stats(device)
        return {name: float(value) for name, value in counters.items() if isinstance(value, (int, float))}
    return {name: float(getattr(backend, name)()) for name in _MEMORY_READINGS if hasattr(backend, name)}


def _host_statistics() -> dict[str, float]:
    psutil = require_package("psutil", purpose="DeviceStatsMonitor on the CPU")
    return {
        "cpu_percent": float(psutil.cpu_percent()),
        "cpu_vm_percent": float(psutil.virtual_memory().percent),
        "cpu_swap_percent": float(psutil.swap_memory().percent),
        "process_rss_bytes": float(psutil.Process().memory_info().rss),
    }
