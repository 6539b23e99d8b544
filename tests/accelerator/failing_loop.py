"""A user-written loop in which one rank fails: `failing_loop.py '{"kind": "raise", "phase": "forward"}'`.

With `serve` as its argument it reads such lines from its input, and forks the ranks of each, which go on as the script.
"""

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
from trainwright.processes import hang_detector
from trainwright.processes.launcher import free_port

torch.set_num_threads(1)


def serve() -> dict[str, Any]:
    """Fork the ranks of all lines. Write the exit codes and the seconds since the failure, or None without an end."""
    ranks: dict[int, tuple[int, int]] = {}
    cases = [json.loads(line) for line in sys.stdin]
    for number, options in enumerate(cases):
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        for rank in range(2):
            pid = os.fork()
            if pid == 0:
                os.environ.update(place, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2")
                os.chdir(options["folder"])
                log = os.open("log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
                os.dup2(log, 1)
                os.dup2(log, 2)
                return dict(options)
            ranks[pid] = number, rank
    results = [{"codes": [None, None], "ended_at": 0.0} for _ in cases]
    deadline = time.monotonic() + 60.0
    while ranks and time.monotonic() < deadline:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in ranks:
            number, rank = ranks.pop(pid)
            results[number]["codes"][rank] = os.waitstatus_to_exitcode(status)
            results[number]["ended_at"] = time.time()
        else:
            time.sleep(0.02)
    for pid in ranks:
        os.kill(pid, signal.SIGKILL)
    print(json.dumps(results))
    sys.exit()


OPTIONS = {"strategy": "ddp", "who": 1, "lost_s": 2.0}
OPTIONS |= serve() if sys.argv[1] == "serve" else json.loads(sys.argv[1])
IS_FAILING = int(os.environ["RANK"]) == OPTIONS["who"]
hang_detector._LOST_S = OPTIONS["lost_s"]


def at(phase: str) -> None:
    """End this process in the requested way if it is the one that fails, in the requested phase."""
    if not IS_FAILING or phase != OPTIONS["phase"]:
        return
    Path("failed-at").write_text(str(time.time()))
    if OPTIONS["kind"] == "raise":
        raise ValueError("the user's own")
    if OPTIONS["kind"] == "SIGKILL":
        os.kill(os.getpid(), signal.SIGKILL)
    elif OPTIONS["kind"] == "os._exit(3)":
        os._exit(3)
    sys.exit(0)


class Net(nn.Module):
    """A model that may fail in its forward or backward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64)])

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.layers[0](inputs)
        if STEP == 2:
            at("forward")
        hidden = self.layers[1](hidden)
        if STEP == 2 and hidden.requires_grad:
            hidden.register_hook(lambda gradient: at("backward"))
        found: torch.Tensor = hidden.square().mean()
        return found


STEP = 0
is_async = OPTIONS["phase"] == "async save"
strategy: Any = OPTIONS["strategy"]
if strategy == "deepspeed":
    from trainwright.strategies import DeepSpeedStrategy

    strategy = DeepSpeedStrategy(stage=2)
elif strategy == "pp":
    from trainwright.strategies import MegatronStrategy

    strategy = MegatronStrategy(pp=2, num_micro_batches=2)
accelerator = Accelerator(cpu=True, strategy=strategy, project_config=ProjectConfiguration(".", async_save=is_async))
if OPTIONS.get("reads_should_stop"):
    assert not accelerator.should_stop
net: nn.Module = Net()
if OPTIONS["strategy"] == "pp":
    from tests.strategies.megatron.test_own_pipeline import WithLoss, batches

    net = WithLoss()
at("prepare")
model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
for STEP in range(4):
    if OPTIONS["strategy"] == "pp":
        tokens = batches()[STEP]
        loss = model(tokens, labels=tokens)["loss"]
    else:
        loss = model(torch.randn(2, 64))
    accelerator.backward(loss)
    if STEP == 2:
        at("step")
    optimizer.step()
    optimizer.zero_grad()
if OPTIONS["phase"] == "alone":  # the other rank computes and saves for longer than a wait may take
    at("alone")
    start_s = time.monotonic()
    weight = torch.randn(600, 600, requires_grad=True)
    while time.monotonic() < start_s + 2 * OPTIONS["lost_s"]:
        weight.matrix_power(40).sum().backward()
    time.sleep(2 * OPTIONS["lost_s"])
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
