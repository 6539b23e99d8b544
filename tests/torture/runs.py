"""A small training whose every step is written down, run in forked processes that may be killed at any moment."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from tests.helpers.distributed import torchrun_environment
from tests.helpers.runs import quiet_trainer
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import set_fault_hook
from trainwright.core.task import TaskModule
from trainwright.processes.launcher import free_port

SAMPLES, GLOBAL_BATCH, EPOCHS, SAVE_EVERY = 24, 4, 4, 2
STEPS_PER_EPOCH = SAMPLES // GLOBAL_BATCH
_ATTEMPT_LIMIT_S = 90.0
_POLL_S = 0.002


@dataclass(frozen=True)
class Case:
    """What all attempts at one training have in common."""

    world: int = 1
    workers: int = 0
    accumulate: int = 1  # micro-batches in a step; the global batch stays the same
    keep: Literal["newest", "all", "replaced"] = "newest"  # "all" with a link to the newest; "replaced": one, `last`
    async_save: bool = True
    strategy: str = "auto"

    def __str__(self) -> str:
        saving = "async" if self.async_save else "sync"
        return f"{self.world}x-{self.workers}workers-{self.accumulate}acc-{self.keep}-{saving}-{self.strategy}"


@dataclass(frozen=True)
class Kill:
    """When a SIGKILL comes and to whom: at a write point of the first of `ranks`, or after so many seconds."""

    at_event: int | None = None
    after_s: float = 0.0
    ranks: tuple[int, ...] = (0,)
    grace_s: float = 0.0  # after which the other ranks die, as under a launcher

    @classmethod
    def at_random(cls, source: random.Random, longest_s: float, world: int) -> Kill:
        """Return a kill within `longest_s` of one rank or of all."""
        ranks = source.choice([(rank,) for rank in range(world)] + [tuple(range(world))])
        return cls(None, source.uniform(0.0, longest_s), ranks, source.uniform(0.0, 0.2))


class NotedSamples(Dataset[tuple[int, torch.Tensor]]):
    """(index, input), with noise drawn where it is fetched; every index that is asked for is noted in a file."""

    def __init__(self, note: Path) -> None:
        self.note = note

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        append(self.note, f"{index}")
        return index, torch.full((4,), index / SAMPLES) + 0.1 * torch.randn(4)


class NotedTask(TaskModule):
    """Uses whatever a resume could forget, and notes the samples and the loss of every micro-batch in a file."""

    def __init__(self, note: Path) -> None:
        super().__init__()
        self.note = note
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.net = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(0.4), nn.Linear(16, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        ids, inputs = batch
        loss = nn.functional.mse_loss(self.net(inputs), inputs.sum(1, keepdim=True))
        append(self.note, f"{ids.tolist()} {loss.item().hex()}")
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.05, total_steps=EPOCHS * STEPS_PER_EPOCH)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def append(path: Path, line: str) -> None:
    """Add a line in one system call, so that a kill leaves all of it or nothing."""
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(handle, f"{line}\n".encode())
    finally:
        os.close(handle)


def preload() -> None:
    """Import in this process what a training would import in each fork: optimizers and sharding bring 800 modules."""
    import torch._dynamo
    import torch.distributed.fsdp

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.optim.Adam([nn.Parameter(torch.zeros(1))])


def lines_of(path: Path) -> list[str]:
    """Return the lines of a file; none if it is not there."""
    return path.read_text().splitlines() if path.exists() else []


@dataclass(frozen=True)
class Attempt:
    folder: Path
    number: int

    def steps(self, rank: int) -> Path:
        """Samples and loss of every micro-batch."""
        return self.folder / f"{self.number:03d}-rank{rank}.steps"

    def fetched(self, rank: int) -> Path:
        return self.folder / f"{self.number:03d}-rank{rank}.fetched"

    @property
    def write_points(self) -> Path:
        """Every write point of the main rank, of an attempt that nobody kills."""
        return self.folder / f"{self.number:03d}.write_points"

    @property
    def weights(self) -> Path:
        return self.folder / f"{self.number:03d}.weights"


def train(case: Case, attempt: Attempt, checkpoints: Path, rank: int, *, resume: bool) -> None:
    # Each resume starts with other generators, so their state must come from the checkpoint.
    torch.manual_seed(1000 + attempt.number if resume else 77)
    task = NotedTask(attempt.steps(rank))
    policy: dict[str, Any] = {
        "newest": {"save_top_k": 1},
        "all": {"save_top_k": -1, "save_last": "link"},
        "replaced": {"save_top_k": 0, "save_last": True},
    }[case.keep]
    trainer = quiet_trainer(
        devices="auto",
        max_epochs=EPOCHS,
        accumulate_grad_batches=case.accumulate,
        async_save=case.async_save,
        strategy=case.strategy,
        callbacks=[ModelCheckpoint(checkpoints, filename="{step}", every_n_train_steps=SAVE_EVERY, **policy)],
    )
    workers: Any = {"num_workers": case.workers, "multiprocessing_context": "fork"} if case.workers else {}
    batch_size = GLOBAL_BATCH // case.world // case.accumulate
    loader = DataLoader(NotedSamples(attempt.fetched(rank)), batch_size=batch_size, shuffle=True, **workers)
    trainer.fit(task, loader, ckpt_path="last" if resume else None)
    if rank == 0:
        digest = hashlib.sha256()
        for name, tensor in sorted(task.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        append(attempt.weights, digest.hexdigest())


class KillAt:
    """A fault hook that ends its process with SIGKILL at the n-th event."""

    def __init__(self, at: int) -> None:
        self.left = at

    def __call__(self, event: str, path: Path) -> None:
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self.left -= 1


def fork_rank(work: Callable[[], None], log: Path, environment: dict[str, str]) -> int:
    """Start `work` in a fork of this process, which has imported everything already; returns its process id."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: fork in a process with threads
        child = os.fork()
    if child != 0:
        return child
    status = 1
    try:
        os.setsid()
        file = log.open("w", buffering=1)
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        sys.stdout = sys.stderr = file
        os.environ.update(environment)
        torch.set_num_threads(1)
        work()
        status = 0
    except BaseException:  # noqa: BLE001  # the parent shows it
        traceback.print_exc()
    finally:
        os._exit(status)


def rank_environment(rank: int, world: int, port: int) -> dict[str, str]:
    """Return torchrun's variables; none for a single process."""
    return torchrun_environment(rank, world, port) if world > 1 else {}


class Ranks:
    """The processes of one attempt."""

    def __init__(self, works: list[Callable[[], None]], logs: list[Path]) -> None:
        port = free_port()
        self.logs = logs
        self.statuses: dict[int, int] = {}  # of those that have ended, by rank; negative: the signal
        self.failed: bool | None = None  # whether one had ended with an error before any was killed
        self._pids = [
            fork_rank(work, log, rank_environment(rank, len(works), port))
            for rank, (work, log) in enumerate(zip(works, logs, strict=True))
        ]

    def poll(self) -> bool:
        """Reap who has ended; tell whether all have."""
        for rank, pid in enumerate(self._pids):
            if rank not in self.statuses:
                ended, status = os.waitpid(pid, os.WNOHANG)
                if ended:
                    self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return len(self.statuses) == len(self._pids)

    def wait(self, until_s: float, *, all_of_them: bool = True) -> bool:
        """Wait until `until_s` on the monotonic clock for all to end, or for any failure; tell whether that came."""
        while not self.poll():
            if not all_of_them and any(self.statuses.values()):
                return True
            if time.monotonic() >= until_s:
                return False
            time.sleep(_POLL_S)
        return True

    def _look_for_failures(self) -> None:
        if self.failed is None:
            self.poll()
            if any(self.statuses.values()) and -signal.SIGKILL not in self.statuses.values():
                # A rank whose peer was killed fails too, and may be reaped before it: sockets close first.
                time.sleep(0.5)
                self.poll()
            statuses = self.statuses.values()
            self.failed = any(status != 0 for status in statuses) and -signal.SIGKILL not in statuses

    def kill(self, ranks: tuple[int, ...]) -> None:
        """Kill some ranks, if they still run. Their loader workers are left to find out, as after a real kill."""
        self._look_for_failures()
        for rank in ranks:
            if rank not in self.statuses:
                os.kill(self._pids[rank], signal.SIGKILL)

    def end(self) -> None:
        """Kill and reap whatever is left, loader workers too."""
        self._look_for_failures()
        for rank, pid in enumerate(self._pids):
            if rank not in self.statuses:
                os.kill(pid, signal.SIGKILL)
                _, status = os.waitpid(pid, 0)
                self.statuses[rank] = os.waitstatus_to_exitcode(status)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(pid, signal.SIGKILL)

    def output(self) -> str:
        return "\n".join(f"[{log.stem}: exit {self.statuses.get(r)}]\n{log.read_text()}" for r, log in
                         enumerate(self.logs) if log.exists())  # fmt: skip


def run_attempt(case: Case, attempt: Attempt, checkpoints: Path, *, resume: bool, kill: Kill | None = None) -> bool:
    """Run one attempt, and kill it if told; returns whether a rank was killed before all came to their end."""

    def work(rank: int) -> Callable[[], None]:
        def main() -> None:
            if rank == 0 and kill is None:
                set_fault_hook(lambda event, path: append(attempt.write_points, f"{event} {path}"))
            elif kill is not None and kill.at_event is not None and rank == kill.ranks[0]:
                set_fault_hook(KillAt(kill.at_event))
            train(case, attempt, checkpoints, rank, resume=resume)

        return main

    begun_s = time.monotonic()
    logs = [attempt.folder / f"{attempt.number:03d}-rank{rank}.log" for rank in range(case.world)]
    ranks = Ranks([work(rank) for rank in range(case.world)], logs)
    try:
        if kill is not None and kill.at_event is None:
            if not ranks.wait(begun_s + kill.after_s, all_of_them=False):
                ranks.kill(kill.ranks)
                ranks.wait(time.monotonic() + kill.grace_s)
                ranks.end()
        else:
            done = ranks.wait(begun_s + _ATTEMPT_LIMIT_S, all_of_them=False)
            assert done, f"{case}: not done after {_ATTEMPT_LIMIT_S:g} s\n{ranks.output()}"
    finally:
        ranks.end()
    assert not ranks.failed, f"{case}, attempt {attempt.number}:\n{ranks.output()}"
    return -signal.SIGKILL in ranks.statuses.values()
