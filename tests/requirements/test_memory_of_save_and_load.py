"""A save and a load take little memory beside what is saved and loaded; an export goes tensor by tensor."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.skipif(sys.platform != "linux", reason="reads /proc"),
]

NUM_TENSORS, TENSOR_MB = 12, 16
TOTAL_MB = NUM_TENSORS * TENSOR_MB

# Anonymous memory alone: pages of files that are mapped or cached belong to the system, which may take them back.
_PROGRAM = """
import sys, threading, time
from pathlib import Path
import torch
from torch import nn
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks.callback import Callback
from trainwright.checkpoint import read_checkpoint
from trainwright.checkpoint.interop.export import export_weights
from trainwright.checkpoint.load_task import load_task_from_checkpoint

what, folder = sys.argv[1], Path(sys.argv[2])
status = open("/proc/self/status", "rb", buffering=0)

def anonymous_mb():
    status.seek(0)
    text = status.read()
    return int(text.split(b"RssAnon:")[1].split()[0]) / 1024

class Large(RegressionTask):
    def __init__(self):
        super().__init__(momentum=0.9)
        self.large = nn.ParameterList(nn.Parameter(torch.empty(MB * 2**18).fill_(0.5)) for _ in range(NUM))

    def loss(self, batch):
        return super().loss(batch) + sum(tensor[0] for tensor in self.large) * 0

peak, ends = 0.0, False

def watch():
    global peak
    while not ends:
        peak = max(peak, anonymous_mb())
        time.sleep(0.0005)

def measure(work, held=()):
    global ends
    before = anonymous_mb()
    thread = threading.Thread(target=watch)
    thread.start()
    kept = work()
    ends = True
    thread.join()
    after = anonymous_mb()
    print("measured:", peak - before, peak - (held[0] if held else after))
    return kept

torch.set_num_threads(1)
task = Large() if what not in ("export", "load_task", "read") else None
trainer = quiet_trainer(max_epochs=1, default_root_dir=folder)
if what == "prepare":
    trainer.fit(task, regression_loader(4, 2))
    trainer.save_checkpoint(folder / "saved")
elif what == "save":
    trainer.fit(task, regression_loader(4, 2))
    measure(lambda: trainer.save_checkpoint(folder / "again"))
elif what == "resume":
    class Begin(Callback):  # restored, and no step done: a step has gradients of its own
        def on_train_start(self, trainer, task):
            held.append(anonymous_mb())
            task.trainer.should_stop = True

    quiet_trainer(max_steps=1).fit(RegressionTask(), regression_loader(2, 2))  # what a first fit imports
    held = []
    resumed = quiet_trainer(max_epochs=2, callbacks=[Begin()], default_root_dir=folder)
    measure(lambda: resumed.fit(task, regression_loader(4, 2), ckpt_path=folder / "saved"), held)
elif what == "load_task":
    kept = measure(lambda: load_task_from_checkpoint(Large, folder / "saved"))
elif what == "export":
    measure(lambda: export_weights(folder / "saved", folder / "exported.safetensors", dtype="bf16"))
elif what == "read":
    kept = measure(lambda: read_checkpoint(folder / "saved", parts=["model"]))
"""


def run(what: str, folder: Path) -> tuple[float, float]:
    """Run one measurement; returns MB of the peak above what stood before, and above what stands afterwards."""
    program = _PROGRAM.replace("MB *", f"{TENSOR_MB} *").replace("range(NUM)", f"range({NUM_TENSORS})")
    done = subprocess.run(
        [sys.executable, "-c", program, what, str(folder)],
        capture_output=True, text=True, timeout=300, check=False,
        # Otherwise the C library keeps some of what is freed, now more and now less.
        env={**os.environ, "MALLOC_MMAP_THRESHOLD_": str(2**20)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    measured = [line for line in done.stdout.splitlines() if line.startswith("measured:")]
    numbers = [float(word) for line in measured for word in line.split()[1:]]
    print(what, numbers)
    return (numbers[0], numbers[1]) if numbers else (0.0, 0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of some large tensors and their momentum."""
    path = tmp_path_factory.mktemp("large")
    run("prepare", path)
    return path


@pytest.mark.exhaustive
def test_a_save_takes_no_copy_of_the_state(folder: Path) -> None:
    above_before, _ = run("save", folder)
    assert above_before < TENSOR_MB


@pytest.mark.exhaustive
def test_a_resume_takes_what_the_run_holds_and_a_tensor(folder: Path) -> None:
    above_before, above_after = run("resume", folder)
    assert 0.9 * TOTAL_MB < above_before < TOTAL_MB + TENSOR_MB  # the momentum
    assert above_after < TENSOR_MB


@pytest.mark.exhaustive
def test_the_measure_notices_a_copy(folder: Path) -> None:
    above_before, _ = run("read", folder)
    assert above_before > 0.9 * TOTAL_MB
