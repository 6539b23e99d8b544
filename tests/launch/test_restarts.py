"""Restarts of `trainwright launch`: a script whose processes are killed resumes from its newest state."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

# In its first two attempts a random rank kills itself at a random step.
_SCRIPT = """
import os, random, signal, sys
from pathlib import Path
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainwright import Accelerator
from trainwright.utils import ProjectConfiguration, broadcast_object_list, set_seed

torch.set_num_threads(1)
folder, kills = Path(sys.argv[1]), sys.argv[2] == "kill"
accelerator = Accelerator(cpu=True, seed=0, project_config=ProjectConfiguration(
    project_dir=str(folder), automatic_checkpoint_naming=True, total_limit=2))
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
inputs = torch.arange(160.0).reshape(40, 4) / 160
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=2, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)


class Progress:
    epoch = step = 0

    def state_dict(self):
        return {"epoch": self.epoch, "step": self.step}

    def load_state_dict(self, state):
        self.epoch, self.step = state["epoch"], state["step"]


progress = Progress()
accelerator.register_for_checkpointing(progress)
if any((folder / "checkpoints").glob("checkpoint_*")):
    accelerator.load_state()
generator = random.Random(os.urandom(8) if kills else 0)
attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
chosen = attempt < 2 and kills
if chosen:
    choice = [(generator.randrange(2), progress.step + generator.randrange(12))]
    broadcast_object_list(choice)
    victim, at = choice[0]
while progress.epoch < 3:
    for x, y in loader:
        if chosen and accelerator.process_index == victim and progress.step == at:
            os.kill(os.getpid(), signal.SIGKILL)
        loss = torch.nn.functional.mse_loss(model(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        if progress.step % 3 == 0:
            accelerator.save_state()
    progress.epoch += 1
if accelerator.is_main_process:
    torch.save(accelerator.get_state_dict(model), folder / "last.pt")
    print("steps", progress.step, "attempt", attempt)
"""


def _train(script: Path, folder: Path, mode: str) -> tuple[dict[str, torch.Tensor], str]:
    folder.mkdir()
    command = [sys.executable, "-m", "trainwright", "launch", "--cpu", "--num_processes", "2", "--max_restarts", "2"]
    environment = {**os.environ, "XDG_CACHE_HOME": "/nonexistent"}
    done = subprocess.run(
        [*command, str(script), str(folder), mode], capture_output=True, text=True, timeout=240, env=environment
    )
    assert done.returncode == 0, done.stderr
    return torch.load(folder / "last.pt"), done.stdout


def test_a_run_whose_ranks_are_killed_ends_bit_equal_to_an_undisturbed_one(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    (expected, _), (found, output) = (_train(script, tmp_path / mode, mode) for mode in ("plain", "kill"))
    assert "steps 30 attempt 2" in output
    assert all(torch.equal(found[name], value) for name, value in expected.items())
