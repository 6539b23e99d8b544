"""Replicas that die and rejoin: the others continue, and all end with the same weights."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from tests.strategies.torchft.replica_run import NUM_VALIDATED, Task, train
from trainwright import Accelerator
from trainwright.core.errors import ConfigurationError
from trainwright.core.process import Topology
from trainwright.processes.process_group import Processes
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.torchft.replica import Replica
from trainwright.strategies.torchft.strategy import TorchFTStrategy

_NEEDS = pytest.mark.requires("torchft", reason="it detects dead replicas")


class Replicas:
    """Processes of replicas with a lighthouse. A sharded replica is a launcher with two processes."""

    def __init__(self, folder: Path, num: int, num_steps: int, step_s: float, *, sharded: bool = False) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._address = f"127.0.0.1:{probe.getsockname()[1]}"
        options = {"min_replicas": 2, "join_timeout_ms": 2000, "heartbeat_timeout_ms": 1000}
        command = ["torchft_lighthouse", "--bind", self._address, *(f"--{k}={v}" for k, v in options.items())]
        self._lighthouse = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._folder, self._num, self._arguments = folder, num, [str(num_steps), str(step_s), str(folder)]
        self._sharded = sharded
        self._logs: list[list[Path]] = [[] for _ in range(num)]
        self._processes = [self._start(number) for number in range(num)]

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        log = self._folder / f"log_{number}_{len(self._logs[number])}.txt"
        self._logs[number].append(log)
        own = {"REPLICA_GROUP_ID": str(number), "NUM_REPLICA_GROUPS": str(self._num)}
        command = ["-m", "tests.strategies.torchft.replica_run", *self._arguments, str(number)]
        if self._sharded:
            command = ["-m", "trainwright", "launch", "--cpu", "--num_processes", "2", *command, "fsdp"]
        with log.open("w") as output, log.with_suffix(".err").open("w") as errors:
            environment = {**os.environ, **own, "TORCHFT_LIGHTHOUSE": f"http://{self._address}"}
            return subprocess.Popen([sys.executable, *command], env=environment, stdout=output, stderr=errors)

    def step_numbers(self, number: int) -> list[int]:
        """Return the numbers of the steps of the last attempt of a replica. It may start after the others."""
        return [step for step, *_ in self.steps(number)]

    def steps(self, number: int) -> list[list[int]]:
        lines = self._logs[number][-1].read_text().splitlines()
        return [[int(word) for word in line.split()[1:]] for line in lines if line.startswith("step ")]

    def num_validated(self, number: int) -> int:
        """Return the number of validation samples of a replica's first process, whose output the launcher shows."""
        lines = self._logs[number][-1].read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("validated "))

    def wait_for_step(self, number: int, step: int) -> None:
        """Wait until the last attempt of a replica has completed a step."""
        end_s = time.monotonic() + 120
        while not (steps := self.steps(number)) or steps[-1][0] < step:
            assert time.monotonic() < end_s, self._errors(number)
            assert self._processes[number].poll() is None, self._errors(number)
            time.sleep(0.05)

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    def restart(self, number: int) -> None:
        self._processes[number] = self._start(number)

    def weights(self) -> list[dict[str, torch.Tensor]]:
        for number, process in enumerate(self._processes):
            assert process.wait(timeout=200) == 0, self._errors(number)
        return [torch.load(self._folder / f"weights_{number}.pt") for number in range(self._num)]

    def _errors(self, number: int) -> str:
        return self._logs[number][-1].with_suffix(".err").read_text()[-3000:]

    def close(self) -> None:
        for process in (*self._processes, self._lighthouse):
            process.kill()
            process.wait()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Any]:
    started = []

    def start(**arguments: Any) -> Replicas:
        started.append(Replicas(tmp_path, **arguments))
        return started[-1]

    yield start
    for replicas in started:
        replicas.close()


def _train_with_ddp() -> dict[str, torch.Tensor]:
    task = Task()
    train(task, 12, strategy="ddp", devices="auto")
    return task.state_dict()


@pytest.mark.engines
@_NEEDS
@pytest.mark.parametrize("sharded", [False, True])
def test_replicas_that_stay_alive_train_like_ddp(sharded: bool, start: Any) -> None:
    replicas = start(num=2, num_steps=12, step_s=0.0, sharded=sharded)
    expected = run_distributed(_train_with_ddp, 4 if sharded else 2, init=False)[0]
    for weights in replicas.weights():
        torch.testing.assert_close(weights, expected)
    of_first_process = NUM_VALIDATED // 2 if sharded else NUM_VALIDATED
    assert [replicas.num_validated(number) for number in range(2)] == [of_first_process, of_first_process]


@pytest.mark.engines
@_NEEDS
def test_a_killed_replica_rejoins_at_the_step_of_the_others(start: Any, tmp_path: Path) -> None:
    replicas = start(num=3, num_steps=150, step_s=0.05, sharded=True)
    replicas.wait_for_step(1, 10)
    replicas.kill(1)
    replicas.wait_for_step(0, replicas.steps(1)[-1][0] + 5)  # the others continue
    replicas.restart(1)
    first, second, third = replicas.weights()
    assert_equal_weights(first, second)
    assert_equal_weights(first, third)
    assert replicas.step_numbers(0) == list(range(replicas.step_numbers(0)[0], 151))
    rejoined = replicas.steps(1)
    assert rejoined[0][0] > 10
    assert rejoined == replicas.steps(0)[-len(rejoined) :]  # also the position in the data
    (saved,) = (tmp_path / "checkpoints").glob("epoch*")
    assert saved.name.endswith("-step=150")


@pytest.mark.parametrize(
    ("options", "arguments", "problem"),
    [
        ({"replica": None}, {}, "replica=None.*REPLICA_GROUP_ID"),
        ({"lighthouse": None}, {}, "has no lighthouse.*TORCHFT_LIGHTHOUSE"),
        ({"replica": 3}, {}, "replica=3, max_replicas=3"),
        ({"min_replicas": 4}, {}, "min_replicas=4"),
        ({}, {"precision": "16-mixed"}, "16-mixed.*bf16-mixed"),
        ({}, {"devices": 2}, r"runs one process.*within='fsdp'"),
        ({"within": "ddp"}, {}, "within='ddp'.*supports 'fsdp'"),
        ({"within": FSDPStrategy(tp=2)}, {}, "without tp"),
    ],
)
def test_options_that_cannot_work_are_refused(options: dict[str, Any], arguments: dict[str, Any], problem: str) -> None:
    given = {"replica": 0, "max_replicas": 3, "lighthouse": "http://nowhere:1", **options}
    with pytest.raises(ConfigurationError, match=problem):
        quiet_trainer(strategy=TorchFTStrategy(**given), **arguments).fit(RegressionTask(), regression_loader())


@_NEEDS
def test_an_evaluation_reads_all_data() -> None:
    strategy = TorchFTStrategy(replica=1, max_replicas=3, lighthouse="http://nowhere:1")
    trainer = quiet_trainer(strategy=strategy)
    expected = quiet_trainer().validate(RegressionTask(), regression_loader(8), verbose=False)
    assert trainer.validate(RegressionTask(), regression_loader(8), verbose=False) == expected


@_NEEDS
def test_a_user_written_loop_is_refused() -> None:
    accelerator = Accelerator(
        cpu=True, strategy=TorchFTStrategy(replica=0, max_replicas=3, lighthouse="http://nowhere:1")
    )
    with pytest.raises(ConfigurationError, match="not supported in user-written training loops"):
        accelerator.prepare(torch.nn.Linear(1, 1))


def test_collectives_of_a_sharded_replica_take_its_values_for_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda value, **_: value.mul_(2))  # both ranks hold the value
    monkeypatch.setattr(torch.distributed, "all_gather", lambda found, own, **_: [one.copy_(own) for one in found])
    strategy = TorchFTStrategy(replica=1, max_replicas=3, lighthouse="http://nowhere:1")
    ranks = Replica(strategy.replica_settings()).data_ranks(DataRanks.of(Processes(Topology("torchrun", world_size=2))))
    assert ranks.sum(torch.tensor(0.0)).item() == 0
    assert ranks.sum(torch.tensor(1.0)).item() == ranks.size == 6
    own = torch.ones(1, requires_grad=True)
    gathered = ranks.all_gather(own, sync_grads=True)
    gathered.sum().backward()
    assert gathered.shape == (2, 1)
    assert own.grad.item() == 2
