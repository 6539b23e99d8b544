"""CPU affinity: run a process on the cores of one NUMA node, under the names of Hugging Face Accelerate."""

from __future__ import annotations

import contextlib
import logging
import os
import re
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from trainwright.core.names.kwargs_handler import as_flag, read_variable
from trainwright.core.process import Topology, detect

_SYSTEM = Path("/sys")
_TASKS = Path("/proc/self/task")  # one entry for each thread of this process


def get_cpu_distributed_information() -> Topology:
    """Return this process's `rank`, `world_size`, `local_rank` and `local_world_size` from the launcher's variables."""
    return detect()


def override_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Run this process on the cores of one NUMA node.

    A process with a GPU gets the GPU's node. Otherwise, the processes of the machine are divided over all nodes. No
    effect on systems other than Linux, on a machine with one node, or if the process may not use any core of its node.

    Args:
        local_process_index: index of this process, and of its GPU, on the machine.
        verbose: log the cores. Default: None, the value of the environment variable `ACCELERATE_DEBUG_MODE`.
    """
    if not hasattr(os, "sched_setaffinity"):  # Linux has it
        return
    nodes = sorted((_SYSTEM / "devices/system/node").glob("node[0-9]*/cpulist"), key=_number)
    if len(nodes) < 2:
        return
    core_list = _core_list_near_gpu(local_process_index)
    if core_list is None:
        # For example 4 processes on 2 nodes: processes 0 and 1 get node 0, and processes 2 and 3 get node 1.
        num_processes = max(detect().local_world_size, local_process_index + 1)
        core_list = nodes[local_process_index * len(nodes) // num_processes]
    cores = _cores(core_list) & os.sched_getaffinity(0)
    if not cores:
        return
    for task in _TASKS.iterdir():  # also the threads that torch has started
        with contextlib.suppress(ProcessLookupError):  # the thread has ended
            os.sched_setaffinity(int(task.name), cores)
    if verbose is None:
        verbose = read_variable("ACCELERATE_DEBUG_MODE", as_flag)
    if verbose:
        # A warning, because Python's default configuration of logging does not show less severe messages.
        logging.getLogger(__name__).warning("process %d runs on the cores %s", local_process_index, sorted(cores))


@lru_cache
def set_numa_affinity(local_process_index: int, verbose: bool | None = None) -> None:
    """Call `override_numa_affinity`. Later calls with the same arguments have no effect."""
    override_numa_affinity(local_process_index, verbose)


def _core_list_near_gpu(index: int) -> Path | None:
    """Return the system file that lists the cores near GPU `index`. None if the GPU or the file does not exist."""
    if not torch.cuda.is_available() or index >= torch.cuda.device_count():
        return None
    gpu: Any = torch.cuda.get_device_properties(index)
    numbers: list[Any] = [getattr(gpu, f"pci_{name}_id", None) for name in ("domain", "bus", "device")]
    if None in numbers:
        return None
    address = "{:04x}:{:02x}:{:02x}.0".format(*numbers)
    file = _SYSTEM / "bus/pci/devices" / address / "local_cpulist"
    return file if file.is_file() else None


def _cores(file: Path) -> set[int]:
    """Return the cores in a list such as `0-3,8`."""
    cores: set[int] = set()
    for part in file.read_text().strip().split(","):
        if part:  # a node without cores has an empty list
            first, _, last = part.partition("-")
            cores.update(range(int(first), int(last or first) + 1))
    return cores


def _number(file: Path) -> int:
    """Return the number of a NUMA node: `…/node10/cpulist` → 10."""
    return int(re.sub(r"\D", "", file.parent.name))
