"""Later fits of a process reuse the memory of gradients."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

_FITS = """
import json, resource, sys
import torch
from torch import nn
from trainwright import TaskModule, Trainer

class Task(TaskModule):
    def __init__(self):
        super().__init__()
        self.layers, self.faults = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(20)]), []
    def training_step(self, batch, batch_idx):
        return self.layers(batch).square().mean()
    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())

medians = []
for _ in range(3):
    task = Task()
    trainer = Trainer(max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False,
                      enable_progress_bar=False, enable_model_summary=False)
    trainer.fit(task, torch.randn(9, 2, 1024))
    medians.append(sorted(b - a for a, b in zip(task.faults[3:], task.faults[4:]))[2])
print(json.dumps(medians))
"""


@pytest.mark.exhaustive
@pytest.mark.skipif(sys.platform != "linux", reason="counts page faults of glibc's allocator")
def test_later_fits_fault_no_pages_of_gradients_in_again() -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _FITS], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    gradient_pages = 20 * 1024 * 1025 * 4 // 4096
    assert max(json.loads(done.stdout.splitlines()[-1])) < gradient_pages // 4
