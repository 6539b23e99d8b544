"""User-written loops in which one rank fails: reads a JSON list of them, runs them, and prints how they ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which an optimizer imports: not again in each forked process
import torch.distributed.fsdp
import torch.distributed.optim
from torch import nn

from trainwright import Accelerator, ProjectConfiguration
from trainwright.processes import loop_detector
from trainwright.processes.launcher import free_port

torch.set_num_threads(1)


def serve(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Run all loops in forked processes. In a forked rank, return its options, with which the script continues."""
    waiting = list(enumerate(cases))
    running: dict[int, tuple[int, int, float]] = {}  # case, rank and start of each process
    results = [{"codes": {}, "ended_at": 0.0} for _ in cases]
    while waiting or running:
        if waiting and len({number for number, _, _ in running.values()}) < cases[0]["num_at_once"]:
            number, case = waiting.pop(0)
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
            for rank in range(1 if case["starter"] == "launch" else case["num_ranks"]):
                pid = os.fork()
                if pid == 0:
                    return start(case, rank)
                running[pid] = number, rank, time.monotonic()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid:
            number, rank, _ = running.pop(pid)
            results[number]["codes"][rank] = os.waitstatus_to_exitcode(status)
            results[number]["ended_at"] = time.time()
        for pid, (_, _, started_at) in running.items():
            if time.monotonic() > started_at + 200.0:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    print(json.dumps(results))
    sys.exit()


def start(case: dict[str, Any], rank: int) -> dict[str, Any]:
    """Make this process a rank, or the launcher of all ranks."""
    os.chdir(case["folder"])
    log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if case["starter"] == "launch":
        command = [sys.executable, "-m", "trainwright", "launch", "--cpu", "--num_processes", "2", __file__]
        os.execv(sys.executable, [*command, json.dumps(case)])
    num_ranks = str(case["num_ranks"])
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=num_ranks, LOCAL_WORLD_SIZE=num_ranks)
    return case


def at(phase: str) -> None:
    """End this process in the requested way if it is the one that fails, in the requested phase."""
    if not is_failing or phase != OPTIONS["phase"]:
        return
    Path("failed-at").write_text(str(time.time()))
    if OPTIONS["kind"] == "raise":
        raise ValueError("the user's own")
    if OPTIONS["kind"] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    if OPTIONS["kind"] == "os._exit(3)":
        os._exit(3)
    if OPTIONS["kind"] == "pause":
        return time.sleep(OPTIONS["pause_s"])
    sys.exit(1 if OPTIONS["kind"] == "sys.exit(1)" else 0)


class Net(nn.Module):
    """A model that may fail in its forward or backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](inputs)
        if step == 2:
            at("forward")
        hidden = self.layers[1](hidden)
        if step == 2 and hidden.requires_grad:
            hidden.register_hook(lambda gradient: at("backward"))
        found: torch.Tensor = hidden.square().mean()
        return found


OPTIONS = json.loads(sys.argv[1]) if len(sys.argv) > 1 else serve(json.load(sys.stdin))
loop_detector._LOST_S = OPTIONS["lost_s"]
step = 0
net: nn.Module = Net()
batches: Any = torch.randn(4, 2, 64)
strategy: Any = OPTIONS["strategy"]
if strategy == "zero2":
    from trainwright.strategies import DeepSpeedStrategy

    strategy = DeepSpeedStrategy(stage=2)
elif strategy == "pp":
    from tests.strategies.megatron import test_own_pipeline
    from trainwright.strategies import MegatronStrategy

    strategy = MegatronStrategy(pp=2, num_micro_batches=2)
    net = test_own_pipeline.WithLoss()
    batches = test_own_pipeline.batches()
project = ProjectConfiguration(".", async_save=OPTIONS["phase"] == "async save")
accelerator = Accelerator(cpu=True, strategy=strategy, project_config=project)
is_failing = accelerator.process_index == OPTIONS["who"]
assert not accelerator.should_stop  # which sets handlers of signals
at("prepare")
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
for step in range(4):  # `forward` reads it
    batch = batches[step]
    loss = model(batch, labels=batch)["loss"] if OPTIONS["strategy"] == "pp" else model(batch)
    accelerator.backward(loss)
    if step == 2:
        at("step")
    optimizer.step()
    optimizer.zero_grad()
at("alone")
if OPTIONS["phase"] == "alone":  # evaluate and write for longer than a wait may take
    start_s = time.monotonic()
    weight = torch.randn(600, 600, requires_grad=True)
    while time.monotonic() < start_s + 3 * OPTIONS["lost_s"]:
        weight.matrix_power(40).sum().backward()
    if accelerator.is_main_process:
        accelerator.save_state("state")
    sys.exit(0)
at("save_state")
accelerator.save_state("state")
at("async save")
at("load_state")
accelerator.load_state("state")
at("get_state_dict")
accelerator.get_state_dict(model)
at("wait_for_everyone")
accelerator.wait_for_everyone()
at("exit")
accelerator.end_training()
