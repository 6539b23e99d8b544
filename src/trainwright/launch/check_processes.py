"""The parts of `trainwright check`. Each process runs this module with a run's folder and a folder for its results."""

from __future__ import annotations

import copy
import json
import os
import platform
import shutil
import signal
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from trainwright.accelerator.accelerator import Accelerator
from trainwright.core.names.version import __version__
from trainwright.core.process import detect
from trainwright.launch.check import FAIL, PARTS, PASS, SKIPPED, STOPPED, Finding, failed

LIMIT_S = 45.0
_DELAY_S = 3.0
_LOOK_S = 0.2
_WIDTH = 16
_BATCH = 4
_STEPS = 20
_TOLERANCE = {"no": 1e-4, "fp16": 2e-2, "bf16": 5e-2, "fp8": 2e-1}
_MAX_SKEW_S = 1.0
_MIN_FREE = 2**30
_WRITTEN = 2**25

Facts = tuple[str, str]  # result and found


class _ProblemError(Exception):
    """A check that failed."""


class _NotNeeded(Exception):
    """A check that does not apply."""


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise _ProblemError(problem)


class Watch:
    """Watchdog that ends this machine's processes if a part takes longer than `LIMIT_S`, or waits for a failed rank."""

    def __init__(self, results: Path) -> None:
        self.store: Any = None
        self._here, self._rows = detect(), results / f"{os.getpid()}.jsonl"
        self._rows.touch()
        self._lock = threading.Lock()
        self.begin("processes")
        threading.Thread(target=self._run, daemon=True).start()

    def begin(self, part: str) -> None:
        """Start the time limit of a part."""
        with self._lock:
            self._part = part
            self._end_s = time.monotonic() + LIMIT_S

    def finish(self, row: Finding) -> None:
        """End the time limit of a part and append its row to this process's file."""
        with self._lock:
            self._end_s = float("inf")
            self._write(row)

    def _write(self, row: Finding) -> None:
        with self._rows.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def _run(self) -> None:
        while True:
            time.sleep(_LOOK_S)
            with self._lock:
                now_s = time.monotonic()
                try:
                    if (
                        self.store is not None
                        and self._end_s < float("inf")
                        and self.store.check([_failure(self._part)])
                    ):
                        self._end_s = min(self._end_s, now_s + _DELAY_S)  # others may finish, or fail too
                    reasons = self._reasons() if now_s > self._end_s else []
                except RuntimeError as error:  # the store has ended, with the machine of rank 0
                    reasons = [f"the connection to rank 0 is lost: {error}"]
                if reasons:
                    self._end(reasons)

    def _end(self, reasons: list[str]) -> None:
        self._write(failed(self._part, f"{STOPPED}{'; '.join(reasons)}"))
        # torch's agent would wait 30 s for a process that is stopped.
        for file in set(self._rows.parent.glob("*.jsonl")) - {self._rows}:
            with suppress(OSError):
                os.kill(int(file.stem), signal.SIGKILL)
        os._exit(1)

    def _reasons(self) -> list[str]:
        """Return the errors of all ranks in the current part, including ranks that did not finish it."""
        part = self._part
        text = f"did not finish within {LIMIT_S:.0f} s, or when another rank failed"
        if self.store is None:
            return [f"rank {self._here.rank} {text}"]
        self.store.set(f"late/{self._here.rank}", "")
        # One process of a machine writes the row. Ranks that still run have set their keys then.
        time.sleep(2 * _DELAY_S if self._here.local_rank else _DELAY_S)
        done = [rank for rank in range(self._here.world_size) if self.store.check([f"{part}/{rank}"])]
        missing = [rank for rank in range(self._here.world_size) if rank not in done]
        facts = {rank: json.loads(self.store.get(f"{part}/{rank}")) for rank in done}
        problems = [f"rank {rank}: {found}" for rank, (result, found) in facts.items() if result == FAIL]
        silent = [f"rank {rank} does not respond" for rank in missing if not self.store.check([f"late/{rank}"])]
        return [*problems, f"rank {', '.join(map(str, missing))} {text}", *silent]


def _failure(part: str) -> str:
    return f"{part} failed"  # the key that the first failing rank sets


class Check:
    """State of a check: Accelerator, folder of the run, which does not exist yet, and exchange between ranks."""

    def __init__(self, accelerator: Accelerator, folder: Path) -> None:
        self.accelerator = accelerator
        self.folder = folder
        self.rank = accelerator.process_index
        self.world_size = accelerator.num_processes
        self.failed: set[str] = set()
        self._store = accelerator.state.processes.own_store("check")
        self._num_exchanges = 0

    def exchange(self, value: object, key: str = "") -> list[Any]:
        """Return the JSON `value` of every rank, by rank. Collective.

        Values are exchanged through a torch.distributed store, which works even if NCCL or gloo fail.
        """
        if self._store is None:
            return [value]
        self._num_exchanges += 1
        name = key or f"exchange {self._num_exchanges}"
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(value))
        while not self._store.check(keys):
            time.sleep(0.002)
        return [json.loads(self._store.get(one)) for one in keys]

    def run(self, part: str, work: Callable[[Check], str]) -> Finding:
        """Run one part. Return its row, which is the same on every rank. Collective."""
        facts: Facts
        try:
            facts = PASS, work(self)
        except _NotNeeded as reason:
            facts = SKIPPED, str(reason)
        except _ProblemError as problem:
            facts = FAIL, str(problem)
        except Exception as error:  # noqa: BLE001  # a part that raises is a failure, and the next ones run
            facts = FAIL, " ".join(f"{type(error).__name__}: {error}".split())[:500]
        if self._store is not None and facts[0] == FAIL:
            self._store.set(_failure(part), "")
        row = combined(part, [(result, found) for result, found in self.exchange(facts, part)])
        if row.result == FAIL:
            self.failed.add(part)
        return row


def combined(part: str, facts: list[Facts]) -> Finding:
    """Return the row of a part from the results of all ranks. The part fails if it fails on any rank."""
    problems = {rank: found for rank, (result, found) in enumerate(facts) if result == FAIL}
    if not problems:
        return Finding(part, *facts[0])
    if len(set(problems.values())) == 1 and len(problems) == len(facts):
        return failed(part, facts[0][1])
    return failed(part, "; ".join(f"rank {rank}: {found}" for rank, found in problems.items()))


def processes(check: Check) -> str:
    """Describe the processes."""
    kind = check.accelerator.distributed_type.name
    backend = check.accelerator.state.backend
    return f"{check.world_size} ({kind}, {backend or 'no communication'})"


def devices(check: Check) -> str:
    """Compare the devices of all ranks."""
    device = check.accelerator.device
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else platform.machine()
    facts = check.exchange([device.type, name, socket.gethostname(), str(device)])
    kinds, names, hosts, _ = (sorted(set(values)) for values in zip(*facts, strict=True))
    _expect(len(kinds) == 1, f"ranks have different kinds of device: {', '.join(kinds)}")
    own = {(host, place) for *_, host, place in facts}
    _expect(device.type == "cpu" or len(own) == len(facts), f"{len(facts)} processes have {len(own)} devices")
    return f"{len(facts)} x {kinds[0]} ({', '.join(names)}) on {len(hosts)} machine(s)"


def versions(check: Check) -> str:
    """Compare the versions of all ranks."""
    mine = {"python": platform.python_version(), "torch": torch.__version__, "trainwright": __version__}
    every = check.exchange(mine)
    other = [f"rank {rank} has {facts}" for rank, facts in enumerate(every) if facts != every[0]]
    _expect(not other, f"rank 0 has {every[0]}; {'; '.join(other[:3])}")
    return ", ".join(f"{name} {version}" for name, version in mine.items())


def clocks(check: Check) -> str:
    """Compare the clocks of all ranks after common barriers."""
    if check.world_size == 1:
        raise _NotNeeded("one process")
    times = []
    for _ in range(7):
        check.accelerator.wait_for_everyone()
        times.append(time.time())
    every = check.exchange(times)
    offsets = [statistics.median(map(float.__sub__, one, every[0])) for one in every]
    skew = max(offsets) - min(offsets)
    ranks = f"{offsets.index(min(offsets))} and {offsets.index(max(offsets))}"
    _expect(skew <= _MAX_SKEW_S, f"{skew:.1f} s between ranks {ranks}")
    return f"{skew * 1e3:.1f} ms between ranks"


def collectives(check: Check) -> str:
    """Compare the results of collective operations with known values, and measure all_reduce."""
    n = check.world_size
    rank = check.rank
    device = check.accelerator.device
    if n == 1:
        raise _NotNeeded("one process")

    def filled(value: float) -> torch.Tensor:
        return torch.full((1000,), float(value), device=device)

    one = filled(rank + 1)
    last = filled(rank + 1)
    mine = filled(0)
    every = [filled(0) for _ in range(n)]
    dist.all_reduce(one)
    dist.broadcast(last, src=n - 1)
    dist.all_gather(every, filled(rank + 1))
    dist.reduce_scatter(mine, [filled((rank + 1) * (other + 1)) for other in range(n)])
    total = n * (n + 1) / 2
    results = [("all_reduce", one, total), ("broadcast", last, n), ("reduce_scatter", mine, total * (rank + 1))]
    results += [(f"all_gather of rank {other}", tensor, other + 1) for other, tensor in enumerate(every)]
    for name, tensor, value in results:
        _expect(torch.equal(tensor, filled(value)), f"{name} returned {tensor[0].item()}, expected {value}")
    size = 2**24 if device.type == "cpu" else 2**28
    small = torch.ones(1, device=device)
    big = torch.ones(size // 4, device=device)
    latency_s = _seconds(small, 20)
    seconds = _seconds(big, 3)
    speed = 2 * (n - 1) / n * size / seconds / 1e9
    return f"results are right; all_reduce {latency_s * 1e6:.0f} µs, {speed:.2f} GB/s at {size >> 20} MiB"


def _seconds(tensor: torch.Tensor, repetitions: int) -> float:
    """Return the time of one all_reduce."""
    found = []
    for _ in range(repetitions + 1):
        start_s = time.perf_counter()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)
        float(tensor[0])  # waits for the device
        found.append(time.perf_counter() - start_s)
    return statistics.median(found[1:])


def data(check: Check) -> str:
    """Compare the samples that all ranks receive with the data set."""
    number = 8 * check.world_size + 3
    seen = []
    check.accelerator.free_memory()
    loader = check.accelerator.prepare(DataLoader(TensorDataset(torch.arange(number)), batch_size=2, shuffle=True))
    for (batch,) in loader:
        seen += check.accelerator.gather_for_metrics(batch).tolist()
    missing = sorted(set(range(number)) - set(seen))
    repeated = len(seen) - len(set(seen))
    _expect(not missing and not repeated, f"of {number} samples {missing} are missing, and {repeated} are repeated")
    return f"each of {number} samples once"


class _Block(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, _WIDTH))


class _CheckedModel(nn.Sequential):
    def tensor_parallel_plan(self, mesh: object) -> dict[str, str]:
        return {
            f"{i}.{layer}": kind for i in range(len(self) - 1) for layer, kind in (("0", "colwise"), ("2", "rowwise"))
        }


class Training:
    """A small training run with the Accelerator. Objects that it prepared before are released. Collective."""

    def __init__(self, check: Check, seed: int) -> None:
        self.accelerator = accelerator = check.accelerator
        accelerator.free_memory()
        self.num_batches = _STEPS * accelerator.gradient_accumulation_steps
        torch.manual_seed(seed)
        fsdp = accelerator.state.fsdp_plugin
        if fsdp is not None and fsdp.transformer_cls_names_to_wrap:
            fsdp.transformer_cls_names_to_wrap = ["_Block"]  # in place of the user's classes
        model = _CheckedModel(_Block(), _Block(), nn.Linear(_WIDTH, 1))
        self.plain = copy.deepcopy(model)
        self.x = torch.randn(check.world_size * _BATCH * self.num_batches, _WIDTH, generator=torch.Generator())
        self.y = torch.sin(self.x.sum(1, keepdim=True))
        loader = DataLoader(TensorDataset(torch.arange(len(self.x)), self.x, self.y), batch_size=_BATCH, shuffle=True)
        self.model, self.optimizer, self.loader = accelerator.prepare(model, _optimizer(model), loader)

    def batches(self) -> Iterator[tuple[list[int], float, bool]]:
        """Train. Yield sample indices, mean loss, and whether the step was skipped, for each global micro-batch."""
        for index, x, y in self.loader:
            with self.accelerator.accumulate(self.model):
                loss = nn.functional.mse_loss(self.model(x).float(), y.float())
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            mean = float(self.accelerator.reduce(loss.detach(), "mean"))
            yield self.accelerator.gather(index).tolist(), mean, self.accelerator.optimizer_step_was_skipped

    def weights(self) -> dict[str, torch.Tensor]:
        """Return the full weights on the main process. Collective."""
        found = self.accelerator.get_state_dict(self.model)
        return {name: tensor.detach().float().cpu() for name, tensor in found.items()}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # small gradients do not decide the result


def plain_training(training: Training, batches: list[tuple[list[int], float, bool]]) -> list[float]:
    """Train `training.plain` on the same global batches with plain PyTorch in this process. Return the losses."""
    accelerator = training.accelerator
    model = training.plain
    losses = []
    optimizer = _optimizer(model)
    size = accelerator.gradient_accumulation_steps
    deepspeed = accelerator.deepspeed_plugin
    clip = None if deepspeed is None else deepspeed.gradient_clipping
    for number, (index, _, skipped) in enumerate(batches, 1):
        loss = nn.functional.mse_loss(model(training.x[index]), training.y[index])
        torch.autograd.backward(loss / size)
        losses.append(loss.item())
        if number % size == 0:
            if isinstance(clip, float) and clip > 0:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            if not skipped:
                optimizer.step()
            optimizer.zero_grad()
    return losses


def parity(check: Check) -> str:
    """Compare a training in all processes with a training on the same global batches in one process."""
    training = Training(check, seed=0)
    done = list(islice(training.batches(), training.num_batches))
    weights = training.weights()
    losses = plain_training(training, done)
    scale = statistics.mean(losses)
    differences = [abs(loss - one) / scale for (_, loss, _), one in zip(done, losses, strict=True)]
    plain = training.plain.state_dict()
    if check.accelerator.is_main_process:
        differences += [float((weights[name] - one).norm() / one.norm()) for name, one in plain.items()]
    largest = max(differences, key=lambda one: one if one == one else float("inf"))  # NaN is the largest
    tolerance = _TOLERANCE[check.accelerator.mixed_precision]
    bound = f"tolerance {tolerance:.0e}, precision {check.accelerator.mixed_precision}"
    text = f"{_STEPS} steps: largest relative difference {largest:.1e} ({bound})"
    _expect(largest <= tolerance, text)
    return text


def run_folder(check: Check) -> str:
    """Write to the run folder, and compare its content between ranks."""
    check.folder = Path(check.exchange(str(check.folder))[0])
    problem = ""
    seconds = 1.0
    if check.rank == 0:
        try:
            check.folder.mkdir()
            start_s = time.perf_counter()
            with (check.folder / "written").open("wb") as file:
                file.write(os.urandom(2**20) * (_WRITTEN >> 20))
                file.flush()
                os.fsync(file.fileno())
            seconds = time.perf_counter() - start_s
        except OSError as error:
            problem = str(error)
    problem = check.exchange(problem)[0]
    _expect(not problem, problem)
    shared = (check.folder / "written").is_file()
    _expect(shared, f"{check.folder.parent} does not show the file of rank 0: it is not shared")
    (check.folder / f"written by rank {check.rank}").write_text("")
    free = shutil.disk_usage(check.folder).free
    text = f"{free / 1e9:.1f} GB free, {_WRITTEN / seconds / 1e6:.0f} MB/s written"
    _expect(free >= _MIN_FREE, f"{text}; at least {_MIN_FREE / 1e9:.1f} GB are needed")
    return text


def resume(check: Check) -> str:
    """Compare a training that was saved and loaded with one that was not interrupted."""
    if "run folder" in check.failed:
        raise _NotNeeded("the run folder cannot be used")
    state = check.folder / "state"
    half = _STEPS // 2 * check.accelerator.gradient_accumulation_steps
    training = Training(check, seed=0)
    batches = training.batches()
    for _ in range(half):
        next(batches)
    check.accelerator.save_state(state)
    losses = [next(batches) for _ in range(half)]
    weights = training.weights()
    del batches
    again = Training(check, seed=1)
    check.accelerator.load_state(state)
    repeated = list(islice(again.batches(), half))
    _expect(repeated == losses, "batches or losses after load_state differ from those of the run that continued")
    found = again.weights()
    other = [name for name, one in weights.items() if not torch.equal(one, found[name])]
    _expect(not other, f"weights after load_state and {_STEPS // 2} steps differ: {', '.join(other)}")
    return f"{_STEPS // 2} steps after load_state are bit-equal to the run that continued"


_WORK = (processes, devices, versions, clocks, collectives, data, parity, run_folder, resume)


def main(folder: Path, results: Path) -> None:
    """Run all parts in this process. Write a row for each part."""
    os.dup2(2, 1)  # the output of `trainwright check` is its rows
    watch = Watch(results)
    try:
        check = Check(Accelerator(), folder)
    except Exception as error:
        watch.finish(failed("processes", f"{STOPPED}{type(error).__name__}: {error}"))
        raise
    watch.store = check.accelerator.state.processes.own_store("check")
    for part, work in zip(PARTS, _WORK, strict=True):
        if part != "processes":
            watch.begin(part)
        watch.finish(check.run(part, work))
    check.accelerator.end_training()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
