"""A user's script that ends in the way that is asked for: `ending_run.py '{"way": "step", "workers": 2}'`.

With `serve` as its argument it reads such lines from its input, and forks for each of them a process that goes on as
the script: whole to its last line and through the interpreter's end, without having to import torch first.
"""

from __future__ import annotations

import atexit
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo.utils
from torch import nn
from torch.utils.data import DataLoader, Dataset

from trainwright import Accelerator, TaskModule, Trainer

torch.set_num_threads(1)
# At exit it imports tabulate where that is installed, whose dataclass runs a string: Python then forgets that a
# KeyboardInterrupt ended the program (it exits with 1 in place of SIGINT), as it does in any program with torch.
atexit.unregister(torch._dynamo.utils.dump_compile_times)


def serve() -> dict[str, Any]:
    """Fork for each line and tell the exit code; returns in the new processes."""
    for line in sys.stdin:
        options: dict[str, Any] = json.loads(line)
        pid = os.fork()
        if pid == 0:
            os.setsid()
            os.chdir(options["folder"])
            os.environ["TMPDIR"] = options["tmp"]
            log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(log, 1)
            os.dup2(log, 2)
            Path("pid").write_text(str(os.getpid()))
            return options
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
    sys.exit()


OPTIONS = {"way": "step", "workers": 2, "persistent": False, "grace": 30.0}
OPTIONS |= serve() if sys.argv[1] == "serve" else json.loads(sys.argv[1])
WAY = str(OPTIONS["way"])


def end() -> None:
    with open("ended-at", "a") as file:
        file.write(f"{time.time()}\n")
    if WAY in ("killed worker", "kill"):
        os.kill(os.getpid(), signal.SIGKILL)
    elif WAY == "interrupt":
        signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored in what a shell has started
        os.kill(os.getpid(), signal.SIGINT)
    elif WAY == "term":
        os.kill(os.getpid(), signal.SIGTERM)
    elif WAY == "exit":
        sys.exit(7)
    else:
        raise ValueError("the user's own")


class Samples(Dataset[torch.Tensor]):
    """Sixty-four samples, of which one ends the run, or the later ones take an hour each."""

    def __init__(self, bad: int | None = None, slow_from: int = 64) -> None:
        self.bad, self.slow_from = bad, slow_from

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.bad:
            end()
        if index >= self.slow_from:
            time.sleep(3600)
        return torch.full((4,), index / 64)


class EndingTask(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3 and WAY in ("step", "busy workers", "interrupt", "term", "kill", "exit"):
            end()
        return self.net(batch).square().mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        if batch_idx == 3 and WAY == "validation step":
            end()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader(samples: Samples, workers: int) -> DataLoader[torch.Tensor]:
    return DataLoader(samples, batch_size=2, num_workers=workers, persistent_workers=OPTIONS["persistent"] and workers)


in_worker = WAY in ("data set", "killed worker")
train = loader(Samples(20 if in_worker else None, slow_from=8 if WAY == "busy workers" else 64), OPTIONS["workers"])
if WAY == "own loop":
    for number, _ in enumerate(Accelerator(cpu=True).prepare(train)):
        if number == 3:
            end()
validation = loader(Samples(20 if WAY == "data set without workers" else None), 0 if "without" in WAY else 2)
trainer = Trainer(
    accelerator="cpu", devices=1, max_epochs=2, logger=False, preemption_grace=OPTIONS["grace"],
    num_sanity_val_steps=0, enable_progress_bar=False, enable_model_summary=False, default_root_dir=".",
)  # fmt: skip
trainer.fit(EndingTask(), train, validation)
Path("went-on").touch()
