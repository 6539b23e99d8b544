"""How long a script of 100 small steps takes, from `python train.py` to its end, in fresh processes.

    python benchmarks/startup.py [--rounds 10] [--cold-rounds 2]

Every script trains the same network on the same batches. Processes are started in turn. A figure is the median over
rounds, a difference that of the same round. Warm: the bytecode of all packages is cached. Cold: each process compiles
all of it, as the first start after an installation does.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from measuring import Bars, describe_machine, interleave, median_difference, print_table

_FIRST_STEP = re.compile(r"^first step after (\S+) s$", re.MULTILINE)
_COMMON = """
import os, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def first_step():
    print(f"\\nfirst step after {time.time() - float(os.environ['STARTED'])} s", file=sys.stderr)

torch.manual_seed(0)
data = TensorDataset(torch.randn(400, 32), torch.randn(400, 2))
loader = DataLoader(data, batch_size=4)
net = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 2))
"""

_HAND_WRITTEN = """
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
for i, (x, y) in enumerate(loader):
    loss = nn.functional.mse_loss(net(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if i == 0:
        first_step()
"""

_TASK = """
class Task({base}):
    def __init__(self):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        if batch_idx == 1:
            first_step()
        x, y = batch
        return nn.functional.mse_loss(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)

Trainer(max_epochs=1{options}).fit(Task(), loader)
"""

_BARE = ", logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False"

_OWN_LOOP = """
accelerator = Accelerator()
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
net, optimizer, loader = accelerator.prepare(net, optimizer, loader)
for i, (x, y) in enumerate(loader):
    with accelerator.accumulate(net):
        loss = nn.functional.mse_loss(net(x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if i == 0:
        first_step()
"""

HAND_WRITTEN = "hand-written loop"
DEFAULTS = "Trainwright, defaults"
BARE = "Trainwright, bare"
OWN_LOOP = "Trainwright's Accelerator"
ACCELERATE = "Accelerate"


def scripts() -> dict[str, str]:
    """Return the source of each contender by its name."""
    ours = "from trainwright import TaskModule, Trainer\n"
    theirs = "from lightning import LightningModule, Trainer\n"
    found = {
        HAND_WRITTEN: _HAND_WRITTEN,
        DEFAULTS: ours + _TASK.format(base="TaskModule", options=""),
        BARE: ours + _TASK.format(base="TaskModule", options=_BARE),
        OWN_LOOP: "from trainwright import Accelerator\n" + _OWN_LOOP,
    }
    if find_spec("accelerate"):
        found[ACCELERATE] = "from accelerate import Accelerator\n" + _OWN_LOOP
    if find_spec("lightning"):
        found["Lightning, defaults"] = theirs + _TASK.format(base="LightningModule", options="")
        found["Lightning, bare"] = theirs + _TASK.format(base="LightningModule", options=_BARE)
    return {name: _COMMON + code for name, code in found.items()}


def run_script(code: str, first_steps: list[float], *, bytecode: str | None) -> float:
    """Run a script in a new folder.

    Args:
        code: the source of the script, which prints the time at which its first step ends.
        first_steps: the seconds from the start of the process to that time are appended.
        bytecode: folder of the cached bytecode. None: an empty one, so that the process compiles all packages.

    Returns:
        The seconds from the start of the process to its end.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(code, encoding="utf-8")
        variables = {**os.environ, "PYTHONPYCACHEPREFIX": bytecode or f"{folder}/bytecode"}
        start = time.time()
        variables["STARTED"] = repr(start)
        process = subprocess.run(
            [sys.executable, "train.py"], cwd=folder, env=variables, check=True, capture_output=True, text=True
        )
        seconds = time.time() - start
    first_steps.append(float(_FIRST_STEP.findall(process.stderr)[0]))
    return seconds


def measure(rounds: int, *, cold: bool) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Return by contender the seconds of each round's process, and those until the end of its first step."""
    first_steps: dict[str, list[float]] = {}
    runs: dict[str, Callable[[], float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        bytecode = None if cold else folder
        for name, code in scripts().items():
            first_steps[name] = []
            runs[name] = partial(run_script, code, first_steps[name], bytecode=bytecode)
        seconds = interleave(runs, rounds)
    return seconds, {name: found[1:] for name, found in first_steps.items()}  # without the discarded round


def print_rows(seconds: dict[str, list[float]], first_steps: dict[str, list[float]]) -> None:
    """Print a row for each contender."""
    hand_written = seconds[HAND_WRITTEN]
    rows = []
    for name, found in seconds.items():
        to_first_step = statistics.median(first_steps[name])
        difference = median_difference(found, hand_written)
        rows.append([name, f"{to_first_step:.3f}", f"{statistics.median(found):.3f}", f"{difference:+.3f}"])
    print_table(["script", "to the first step", "to the end", "over hand-written"], rows)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="The total time of a short script, in fresh processes.")
    parser.add_argument("--rounds", type=int, default=10, help="processes of each script with cached bytecode")
    parser.add_argument("--cold-rounds", type=int, default=2, help="processes of each script without cached bytecode")
    options = parser.parse_args()
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    print(f"\n{describe_machine(('torch', 'lightning', 'accelerate'))}")

    seconds, first_steps = measure(options.rounds, cold=False)
    print(f"{options.rounds} interleaved rounds of fresh processes, warm; seconds, medians\n")
    print_rows(seconds, first_steps)
    if options.cold_rounds:
        print(f"\n{options.cold_rounds} interleaved rounds of fresh processes, cold; seconds, medians\n")
        print_rows(*measure(options.cold_rounds, cold=True))

    bars = Bars()
    hand_written = seconds[HAND_WRITTEN]
    bars.add("a script of 100 steps, over hand-written", median_difference(seconds[DEFAULTS], hand_written), 0.3, "s")
    bars.add("… without logger, checkpoint and bar", median_difference(seconds[BARE], hand_written), 0.2, "s")
    if ACCELERATE in seconds:
        over_peer = median_difference(seconds[OWN_LOOP], seconds[ACCELERATE])
        bars.add("… as an own loop, over Accelerate", over_peer, 0.0, "s")
    bars.print()


if __name__ == "__main__":
    main()
