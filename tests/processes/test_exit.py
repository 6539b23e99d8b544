"""A program of two processes that has finished ends with exit code 0: gloo's threads do not abort it."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from trainwright.processes.process_group import _wait_for_gloo_threads

_ROOT = Path(__file__).parents[2]
_OWN_LOOP = """
import torch
from trainwright import Accelerator

accelerator = Accelerator(cpu=True)
model = torch.nn.Linear(4, 1)
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
slow_gloo()
for _ in range(3):
    accelerator.backward(model(torch.randn(3, 4)).sum())
    optimizer.step()
    optimizer.zero_grad()
    accelerator.gather(torch.randn(3))
    accelerator.wait_for_everyone()
"""
# A thread that waits for the interpreter's lock never gets it while the main thread computes.
_SLOW_GLOO = """
import os, sys
from pathlib import Path

def slow_gloo():
    if len(sys.argv) > 1:
        sys.setswitchinterval(60)
        os.sched_setaffinity(0, {0})
        for thread in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(thread.name), {0})
            if (thread / "comm").read_text().strip() == "pt_gloo_runloop":
                os.setpriority(os.PRIO_PROCESS, int(thread.name), 19)
"""


def _code_of(program: str, folder: Path, *arguments: str) -> int:
    script = folder / "script.py"
    script.write_text(_SLOW_GLOO + program)
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script), *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}", "OMP_NUM_THREADS": "1"},
        timeout=180,
        check=False,
    ).returncode


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="holds gloo's threads back by the means of Linux")
def test_a_finished_program_ends_with_0_while_gloos_threads_are_held_back(tmp_path: Path) -> None:
    assert _code_of(_OWN_LOOP, tmp_path, "slow") == 0


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="only Linux shows which threads are running")
def test_the_end_of_a_group_waits_for_a_running_thread_of_gloo() -> None:
    done: list[bool] = []

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("pt_gloo_runloop")
        started.set()
        end_s = time.monotonic() + 0.1
        while time.monotonic() < end_s:
            pass
        done.append(True)

    started = threading.Event()
    thread = threading.Thread(target=run)
    thread.start()
    started.wait()
    _wait_for_gloo_threads()
    assert done
    thread.join()
