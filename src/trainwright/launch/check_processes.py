"""The parts of `trainwright check`. Each process runs this module with a run's folder and a folder for its results."""

from __future__ import annotations

import copy
import json
import math
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
_DELAY_S = 3.0  # from the first failure of a rank to the end of the others, so that they can report errors too
_POLL_S = 0.2
_WIDTH = 16
_BATCH_SIZE = 4  # of a process
_STEPS = 20  # optimizer steps of each training
# Largest relative difference from plain PyTorch in float32, by mixed precision.
_TOLERANCE = {"no": 1e-4, "fp16": 2e-2, "bf16": 5e-2, "fp8": 2e-1}
_MAX_SKEW_S = 1.0  # between the clocks of two ranks
_MIN_FREE_BYTES = 2**30  # in the run folder
_WRITTEN_BYTES = 2**25  # to measure the speed of the run folder

Facts = tuple[str, str]  # `Finding.result` and `Finding.found` of one rank


class _ProblemError(Exception):
    """Failure of a part. The message is the row's `found`."""


class _NotNeeded(Exception):
    """A part does not apply. The message is the reason."""


def _expect(condition: bool, problem: str) -> None:
    if not condition:
        raise _ProblemError(problem)


class Watch:
    """Watchdog that ends this machine's processes if a part takes longer than `LIMIT_S`, or waits for a failed rank.

    Attributes:
        store: connection to the store of the process group, for this thread. None until the processes have met.
        _part: the current part, or the last one between two parts.
        _end_s: time at which the part has taken too long. Infinite between two parts.
        _lock: held while a row is written, so that a part that has just ended is not reported as stopped.
    """

    def __init__(self, results: Path) -> None:
        self.store: Any = None
        self._process = detect()
        # The name is the process ID, by which `_end` finds the other processes of this machine.
        self._rows_file = results / f"{os.getpid()}.jsonl"
        self._rows_file.touch()
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
        with self._rows_file.open("a") as file:
            file.write(json.dumps(asdict(row)) + "\n")

    def _run(self) -> None:
        while True:
            time.sleep(_POLL_S)
            with self._lock:
                reasons = self._reasons_to_end()
                if reasons:
                    self._end(reasons)

    def _reasons_to_end(self) -> list[str]:
        """Return why the current part must end, or an empty list if it may continue."""
        if self._end_s == float("inf"):
            return []  # between two parts
        now_s = time.monotonic()
        try:
            if self.store is not None and self.store.check([_failure_key(self._part)]):
                # Other ranks may still finish the part, or fail with an error of their own.
                # `min` keeps the time of the first check that sees the failure.
                self._end_s = min(self._end_s, now_s + _DELAY_S)
            if now_s <= self._end_s:
                return []
            return self._problems()
        except RuntimeError as error:
            # The store is in a process of rank 0's machine. It ends with that machine.
            return [f"the connection to rank 0 is lost: {error}"]

    def _end(self, reasons: list[str]) -> None:
        """Write the row of the current part, and end all processes of this machine."""
        self._write(failed(self._part, f"{STOPPED}{'; '.join(reasons)}"))
        # torch's agent would wait 30 s for a process that is stopped.
        for file in self._rows_file.parent.glob("*.jsonl"):
            if file == self._rows_file:
                continue
            with suppress(OSError):
                os.kill(int(file.stem), signal.SIGKILL)
        os._exit(1)

    def _problems(self) -> list[str]:
        """Return the errors of all ranks in the current part, including ranks that did not finish it."""
        text = f"did not finish within {LIMIT_S:.0f} s, or when another rank failed"
        if self.store is None:
            return [f"rank {self._process.rank} {text}"]
        self.store.set(f"late/{self._process.rank}", "")
        # Wait until all ranks that still run have set this key. The first process of a machine waits for a shorter
        # time, so that it alone writes the row and then kills the others.
        time.sleep(2 * _DELAY_S if self._process.local_rank else _DELAY_S)
        errors = []
        unfinished = []
        silent = []
        for rank in range(self._process.world_size):
            key = f"{self._part}/{rank}"  # set by `Check.run` at the end of a part
            if self.store.check([key]):
                result, found = json.loads(self.store.get(key))
                if result == FAIL:
                    errors.append(f"rank {rank}: {found}")
                continue
            unfinished.append(str(rank))
            if not self.store.check([f"late/{rank}"]):
                silent.append(f"rank {rank} does not respond")
        return [*errors, f"rank {', '.join(unfinished)} {text}", *silent]


def _failure_key(part: str) -> str:
    """Return the key that each failing rank sets."""
    return f"{part} failed"


class Check:
    """State of a check, and exchange between its ranks.

    Args:
        accelerator: the Accelerator that all parts use.
        folder: folder for the files of this check, which the part "run folder" creates.

    Attributes:
        failed: the parts that have failed so far, the same on every rank.
    """

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
        # Every rank makes the same exchanges in the same order, so the count is a name for them on all ranks.
        self._num_exchanges += 1
        name = key or f"exchange {self._num_exchanges}"
        keys = [f"{name}/{rank}" for rank in range(self.world_size)]
        self._store.set(keys[self.rank], json.dumps(value))
        while not self._store.check(keys):
            time.sleep(0.002)
        return [json.loads(self._store.get(rank_key)) for rank_key in keys]

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
            # Before the exchange, which ranks that wait for this one inside the part never reach: their watchdogs end
            # them by this key.
            self._store.set(_failure_key(part), "")
        row = combined(part, [(result, found) for result, found in self.exchange(facts, part)])
        if row.result == FAIL:
            self.failed.add(part)
        return row


def combined(part: str, facts: list[Facts]) -> Finding:
    """Return the row of a part from the results of all ranks.

    The part fails if it fails on any rank. Otherwise, the row is that of rank 0.
    """
    problems = {rank: found for rank, (result, found) in enumerate(facts) if result == FAIL}
    if not problems:
        return Finding(part, *facts[0])
    every_rank_failed = len(problems) == len(facts)
    if every_rank_failed and len(set(problems.values())) == 1:
        return failed(part, problems[0])
    return failed(part, "; ".join(f"rank {rank}: {found}" for rank, found in problems.items()))


def processes(check: Check) -> str:
    """Describe the processes."""
    kind = check.accelerator.distributed_type.name
    backend = check.accelerator.state.backend
    return f"{check.world_size} ({kind}, {backend or 'no communication'})"


def devices(check: Check) -> str:
    """Compare the devices of all ranks."""
    device = check.accelerator.device
    name = platform.machine()
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
    rows = check.exchange({"kind": device.type, "name": name, "host": socket.gethostname(), "device": str(device)})
    kinds = sorted({row["kind"] for row in rows})
    names = sorted({row["name"] for row in rows})
    hosts = {row["host"] for row in rows}
    _expect(len(kinds) == 1, f"ranks have different kinds of device: {', '.join(kinds)}")
    distinct = {(row["host"], row["device"]) for row in rows}
    # Any number of processes may share a CPU. NCCL needs one device per process.
    has_own_device = device.type == "cpu" or len(distinct) == len(rows)
    _expect(has_own_device, f"{len(rows)} processes have {len(distinct)} devices")
    return f"{len(rows)} x {kinds[0]} ({', '.join(names)}) on {len(hosts)} machine(s)"


def versions(check: Check) -> str:
    """Compare the versions of all ranks."""
    installed = {"python": platform.python_version(), "torch": torch.__version__, "trainwright": __version__}
    by_rank = check.exchange(installed)
    different = [f"rank {rank} has {facts}" for rank, facts in enumerate(by_rank) if facts != by_rank[0]]
    _expect(not different, f"rank 0 has {by_rank[0]}; {'; '.join(different[:3])}")
    return ", ".join(f"{name} {version}" for name, version in installed.items())


def clocks(check: Check) -> str:
    """Compare the clocks of all ranks after common barriers."""
    if check.world_size == 1:
        raise _NotNeeded("one process")
    times = []
    for _ in range(7):
        check.accelerator.wait_for_everyone()
        times.append(time.time())
    by_rank = check.exchange(times)
    # A rank may leave one barrier late, which the median of seven barriers ignores.
    offsets_s = []
    for rank_times in by_rank:
        differences = [time_s - time_0_s for time_s, time_0_s in zip(rank_times, by_rank[0], strict=True)]
        offsets_s.append(statistics.median(differences))
    skew_s = max(offsets_s) - min(offsets_s)
    ranks = f"{offsets_s.index(min(offsets_s))} and {offsets_s.index(max(offsets_s))}"
    _expect(skew_s <= _MAX_SKEW_S, f"{skew_s:.1f} s between ranks {ranks}")
    return f"{skew_s * 1e3:.1f} ms between ranks"


def collectives(check: Check) -> str:
    """Compare the results of collective operations with known values, and measure all_reduce."""
    n = check.world_size
    rank = check.rank
    device = check.accelerator.device
    if n == 1:
        raise _NotNeeded("one process")

    def filled(value: float) -> torch.Tensor:
        return torch.full((1000,), float(value), device=device)

    def expect(name: str, tensor: torch.Tensor, value: float) -> None:
        _expect(torch.equal(tensor, filled(value)), f"{name} returned {tensor[0].item()}, expected {value}")

    # Rank r has r + 1, so the sum over ranks is 1 + 2 + … + n.
    total = n * (n + 1) / 2
    reduced = filled(rank + 1)
    broadcast = filled(rank + 1)
    scattered = filled(0)
    gathered = [filled(0) for _ in range(n)]
    # All of them run before the first comparison: a rank that left early would let the others wait.
    dist.all_reduce(reduced)
    dist.broadcast(broadcast, src=n - 1)
    dist.all_gather(gathered, filled(rank + 1))
    # Rank r sends (r + 1) * (other + 1) to rank `other`.
    dist.reduce_scatter(scattered, [filled((rank + 1) * (other + 1)) for other in range(n)])
    expect("all_reduce", reduced, total)
    expect("broadcast", broadcast, n)
    expect("reduce_scatter", scattered, total * (rank + 1))
    for other, tensor in enumerate(gathered):
        expect(f"all_gather of rank {other}", tensor, other + 1)
    size_bytes = 2**24 if device.type == "cpu" else 2**28
    small = torch.ones(1, device=device)
    big = torch.ones(size_bytes // 4, device=device)
    latency_s = _all_reduce_seconds(small, 20)
    seconds = _all_reduce_seconds(big, 3)
    # A ring sends 2 * (n - 1) / n of the tensor through each link.
    speed = 2 * (n - 1) / n * size_bytes / seconds / 1e9
    return f"results are right; all_reduce {latency_s * 1e6:.0f} µs, {speed:.2f} GB/s at {size_bytes >> 20} MiB"


def _all_reduce_seconds(tensor: torch.Tensor, repetitions: int) -> float:
    """Return the median time of one all_reduce."""
    times_s = []
    for _ in range(repetitions + 1):
        start_s = time.perf_counter()
        dist.all_reduce(tensor, op=dist.ReduceOp.MAX)  # the values stay the same
        float(tensor[0])  # waits for the device
        times_s.append(time.perf_counter() - start_s)
    return statistics.median(times_s[1:])  # the first one opens connections


def data(check: Check) -> str:
    """Compare the samples that all ranks receive with the data set."""
    number = 8 * check.world_size + 3  # odd, so that the last global batch is never full
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
        plan = {}
        for i in range(len(self) - 1):  # the last layer is not a block
            plan[f"{i}.0"] = "colwise"
            plan[f"{i}.2"] = "rowwise"
        return plan


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
        num_samples = check.world_size * _BATCH_SIZE * self.num_batches
        # A generator of its own has the default seed: the data do not depend on `seed`, unlike the weights.
        self.x = torch.randn(num_samples, _WIDTH, generator=torch.Generator())
        self.y = torch.sin(self.x.sum(1, keepdim=True))
        samples = TensorDataset(torch.arange(num_samples), self.x, self.y)
        loader = DataLoader(samples, batch_size=_BATCH_SIZE, shuffle=True)
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
        state = self.accelerator.get_state_dict(self.model)
        return {name: tensor.detach().float().cpu() for name, tensor in state.items()}


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)  # small gradients do not decide the result


def plain_training(training: Training, batches: list[tuple[list[int], float, bool]]) -> list[float]:
    """Train `training.plain` on the same global batches with plain PyTorch in this process. Return the losses."""
    accelerator = training.accelerator
    model = training.plain
    losses = []
    optimizer = _optimizer(model)
    accumulation_steps = accelerator.gradient_accumulation_steps
    # DeepSpeed clips by its own configuration. "auto" stands for no clipping.
    deepspeed = accelerator.deepspeed_plugin
    clip = None if deepspeed is None else deepspeed.gradient_clipping
    for number, (index, _, was_skipped) in enumerate(batches, 1):
        loss = nn.functional.mse_loss(model(training.x[index]), training.y[index])
        torch.autograd.backward(loss / accumulation_steps)
        losses.append(loss.item())
        if number % accumulation_steps != 0:
            continue
        if isinstance(clip, float) and clip > 0:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        if not was_skipped:  # the loss scale of fp16 skips steps
            optimizer.step()
        optimizer.zero_grad()
    return losses


def parity(check: Check) -> str:
    """Compare a training in all processes with a training on the same global batches in one process."""
    training = Training(check, seed=0)
    batches = list(islice(training.batches(), training.num_batches))
    weights = training.weights()
    plain_losses = plain_training(training, batches)
    # Relative to the mean: the loss of a single batch may be nearly zero.
    scale = statistics.mean(plain_losses)
    differences = []
    for (_, loss, _), plain_loss in zip(batches, plain_losses, strict=True):
        differences.append(abs(loss - plain_loss) / scale)
    if check.accelerator.is_main_process:  # the other ranks have no full weights
        for name, plain_weight in training.plain.state_dict().items():
            differences.append(float((weights[name] - plain_weight).norm() / plain_weight.norm()))
    largest = max(differences)
    if any(map(math.isnan, differences)):
        largest = math.nan  # max ignores NaN, unless it comes first
    tolerance = _TOLERANCE[check.accelerator.mixed_precision]
    bound = f"tolerance {tolerance:.0e}, precision {check.accelerator.mixed_precision}"
    text = f"{_STEPS} steps: largest relative difference {largest:.1e} ({bound})"
    _expect(largest <= tolerance, text)
    return text


def run_folder(check: Check) -> str:
    """Write to the run folder, and compare its content between ranks."""
    # The launcher of each machine has chosen a random name. All ranks use that of rank 0.
    check.folder = Path(check.exchange(str(check.folder))[0])
    problem = ""
    seconds = 1.0  # of the write, on rank 0: the row of a part that passes is that of rank 0
    if check.rank == 0:
        try:
            check.folder.mkdir()
            start_s = time.perf_counter()
            with (check.folder / "written").open("wb") as file:
                file.write(os.urandom(2**20) * (_WRITTEN_BYTES >> 20))
                file.flush()
                os.fsync(file.fileno())  # otherwise the speed is that of the memory
            seconds = time.perf_counter() - start_s
        except OSError as error:
            problem = str(error)
    problem = check.exchange(problem)[0]
    _expect(not problem, problem)
    shared = (check.folder / "written").is_file()
    _expect(shared, f"{check.folder.parent} does not show the file of rank 0: it is not shared")
    (check.folder / f"written by rank {check.rank}").write_text("")
    free_bytes = shutil.disk_usage(check.folder).free
    text = f"{free_bytes / 1e9:.1f} GB free, {_WRITTEN_BYTES / seconds / 1e6:.0f} MB/s written"
    _expect(free_bytes >= _MIN_FREE_BYTES, f"{text}; at least {_MIN_FREE_BYTES / 1e9:.1f} GB are needed")
    return text


def resume(check: Check) -> str:
    """Compare a training that was saved and loaded with one that was not interrupted."""
    if "run folder" in check.failed:
        raise _NotNeeded("the run folder cannot be used")
    state = check.folder / "state"
    half = _STEPS // 2 * check.accelerator.gradient_accumulation_steps  # micro-batches
    training = Training(check, seed=0)
    batches = training.batches()
    for _ in range(half):
        next(batches)
    check.accelerator.save_state(state)
    losses = [next(batches) for _ in range(half)]
    weights = training.weights()
    del batches  # closes the generator, and with it the iterator of the loader
    resumed = Training(check, seed=1)  # other weights, which `load_state` must replace
    check.accelerator.load_state(state)
    resumed_losses = list(islice(resumed.batches(), half))
    _expect(resumed_losses == losses, "batches or losses after load_state differ from those of the run that continued")
    resumed_weights = resumed.weights()
    # Only the main process has full weights. On other ranks, this compares nothing.
    different = [name for name, weight in weights.items() if not torch.equal(weight, resumed_weights[name])]
    _expect(not different, f"weights after load_state and {_STEPS // 2} steps differ: {', '.join(different)}")
    return f"{_STEPS // 2} steps after load_state are bit-equal to the run that continued"


_WORK = (processes, devices, versions, clocks, collectives, data, parity, run_folder, resume)


def main(folder: Path, results: Path) -> None:
    """Run all parts in this process. Write a row for each part."""
    os.dup2(2, 1)  # stdout becomes stderr: the output of `trainwright check` is its rows
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
