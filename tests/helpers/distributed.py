"""Run a function on several ranks, each a process of its own, and bring results and failures home.

The processes come from a fork server that has imported torch once, so that starting a rank costs some tens of
milliseconds instead of seconds. A function travels by its module's name (or by value, for lambdas and closures), and a
result comes back by pickle.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import functools
import gc
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import cloudpickle

from trainwright.processes.launcher import free_port

# Modules that each rank would import for seconds. An optimizer's first step imports dynamo; deepspeed, inductor.
_PRELOAD = [
    "cloudpickle", "hypothesis", "numpy", "pytest",
    "torch._dynamo", "torch._inductor.compile_fx", "torch.distributed.fsdp", "torch.distributed.optim",
    "torch.utils.cpp_extension", "deepspeed", "torchmetrics",
    "trainwright.trainer.trainer", "trainwright.strategies.fsdp.tensor_parallel", __name__,
]  # fmt: skip
_GRACE_AFTER_FAILURE_S = 3.0
"""How long the other ranks may go on once one has failed: a peer may be about to report the true cause."""


class RankError(AssertionError):
    """A rank raised, died or was late; the message holds its own traceback and what it printed.

    Attributes:
        rank: the rank that failed first.
        exception: the very exception that it raised; None when it died, was late, or the exception does not pickle.
    """

    def __init__(self, message: str, *, rank: int, exception: BaseException | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.exception = exception


@dataclass
class _Report:
    """What one rank leaves in its file: a result, or the traceback of what it raised and when."""

    result: Any = None
    traceback: str | None = None
    exception: BaseException | None = None
    at_s: float = 0.0


@dataclass(frozen=True)
class _RankPlan:
    """All that a rank must know before it can unpickle its function."""

    rank: int
    folder: Path
    environment: dict[str, str]
    cwd: str
    call: bytes
    world_size: int
    init: bool
    timeout_s: float
    deadline_s: float
    """By the monotonic clock."""


def run_distributed(
    fn: Callable[..., Any],
    world_size: int = 2,
    *args: Any,
    timeout: float = 60.0,
    init: bool = True,
    env: Mapping[str, str] | None = None,
) -> list[Any]:
    """Call `fn(*args)` once on each of `world_size` ranks and return their results, in the order of the ranks.

    Each rank finds the environment that torchrun would give it (`RANK`, `WORLD_SIZE`, `LOCAL_RANK`, `MASTER_ADDR`, …)
    and runs torch on one thread. Blocks until every rank has ended; no process outlives the call.

    Args:
        fn: a function of a test module, a lambda or a closure.
        world_size: the number of ranks.
        args: handed to `fn`; they must pickle.
        timeout: seconds for the whole call, the ranks' start included.
        init: whether a gloo process group (over a file) is made before `fn` and destroyed after it.
        env: environment variables that override the ones above, the same for every rank.

    Raises:
        RankError: a rank raised (chained to the original exception), died, or was not done in time.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        call = cloudpickle.dumps((fn, args))
        port = free_port()
        context = _fork_server()
        processes: list[BaseProcess] = []
        deadline = time.monotonic() + timeout
        try:
            for rank in range(world_size):
                environment = {**os.environ, **torchrun_environment(rank, world_size, port), **(env or {})}
                plan = _RankPlan(rank, folder, environment, os.getcwd(), call, world_size, init, timeout, deadline)
                process = context.Process(target=_rank_main, args=(plan,), name=f"rank-{rank}")
                process.start()
                processes.append(process)
            late = _wait(processes, folder, deadline)
        finally:
            _end(processes)
        for rank in range(world_size):
            print(_output(folder, rank), end="")
        return _collect(processes, folder, late, timeout)


@functools.cache
def _fork_server() -> ForkServerContext:
    """Return the context whose server has imported all it should: a loaded machine's first call does not pay for it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    first = context.Process(target=int)
    first.start()
    first.join()
    return context


def torchrun_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "GROUP_RANK": "0",
        "ROLE_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_WORLD_SIZE": "1",
        "ROLE_WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "test",
        "OMP_NUM_THREADS": "1",
        # gloo looks its address up by the host's name otherwise, which fails where that name does not resolve.
        **({"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}),
    }


def _rank_main(plan: _RankPlan) -> None:
    """Run one rank: the body of the child process."""
    gc.freeze()  # collections skip what the fork server has imported, and do not copy its pages
    os.setsid()  # a group of its own, so that whatever this rank starts can be ended with it
    log = (plan.folder / f"rank-{plan.rank}.log").open("w", buffering=1)
    os.dup2(log.fileno(), 1)
    os.dup2(log.fileno(), 2)
    sys.stdout = sys.stderr = log
    faulthandler.enable(log)
    # Says where a late rank was, before that rank is ended.
    faulthandler.dump_traceback_later(max(0.1, plan.deadline_s - time.monotonic() - 0.5), file=log)
    # The fork server keeps the environment and the folder of the moment when it was started.
    os.environ.clear()
    os.environ.update(plan.environment)
    os.chdir(plan.cwd)
    measured = _measure_lines()
    try:
        report = _Report(result=_call(plan))
    except BaseException as error:  # noqa: BLE001 -- SystemExit and KeyboardInterrupt are reported like any other end
        report = _Report(traceback=traceback.format_exc(), exception=_picklable(error), at_s=time.monotonic())
    faulthandler.cancel_dump_traceback_later()
    if measured is not None:
        measured.stop()
        measured.save()
    _write_report(plan, report)
    if report.traceback is not None:
        log.flush()
        os._exit(1)  # a failed rank must not wait for its peers in a process group's destructor


def _measure_lines() -> Any:
    """Start a measurement of this rank's lines if pytest is measured; its data would else be those of the fork server.

    The context is the test that pytest runs (tests/mutants/record.py).
    """
    configuration = os.environ.get("COVERAGE_PROCESS_START")
    if configuration is None:
        return None
    import coverage

    inherited = coverage.Coverage.current()
    if inherited is not None:
        inherited.stop()
    measured = coverage.Coverage(config_file=configuration, data_suffix=True)
    measured.start()
    return measured


def _call(plan: _RankPlan) -> Any:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if plan.init:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{plan.folder}/store",
            rank=plan.rank,
            world_size=plan.world_size,
            timeout=datetime.timedelta(seconds=plan.timeout_s),
        )
        dist.barrier()  # a rank that leaves before another has connected to it would fail that one
    fn, args = pickle.loads(plan.call)
    result = fn(*args)
    if dist.is_initialized():
        dist.destroy_process_group()
    return result


def _picklable(error: BaseException) -> BaseException | None:
    try:
        copy = pickle.loads(cloudpickle.dumps(error))
    except Exception:  # noqa: BLE001 -- a __reduce__ may raise anything; the traceback still travels as text
        return None
    return copy if isinstance(copy, BaseException) else None


def _write_report(plan: _RankPlan, report: _Report) -> None:
    path = plan.folder / f"rank-{plan.rank}.report"
    try:
        data = cloudpickle.dumps(report)
    except Exception:  # noqa: BLE001 -- a result that does not pickle: the test is told which rank and why
        data = cloudpickle.dumps(_Report(traceback=traceback.format_exc(), at_s=time.monotonic()))
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.rename(path)


def _wait(processes: list[BaseProcess], folder: Path, deadline: float) -> list[int]:
    """Wait until all have ended, one has failed (and a little longer) or time is up; return the ranks still alive."""
    failing = False
    while True:
        alive = [process for process in processes if process.exitcode is None]
        if not alive:
            return []
        if not failing and any(process.exitcode not in (None, 0) for process in processes):
            failing = True
            deadline = min(deadline, time.monotonic() + _GRACE_AFTER_FAILURE_S)
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0:
            return [rank for rank, process in enumerate(processes) if process.exitcode is None]
        multiprocessing.connection.wait([process.sentinel for process in alive], timeout=remaining_s)


def _end(processes: list[BaseProcess]) -> None:
    """Kill what still runs, with all that it has started, and reap it."""
    for process in processes:
        if process.exitcode is None and process.pid is not None:
            time.sleep(0.2)  # lets faulthandler finish saying where a late rank is
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()  # for a rank that was not yet the leader of its group
    for process in processes:
        process.join()


def _output(folder: Path, rank: int) -> str:
    path = folder / f"rank-{rank}.log"
    text = path.read_text(errors="replace") if path.exists() else ""
    return "".join(f"[rank {rank}] {line}\n" for line in text.splitlines())


def _collect(processes: list[BaseProcess], folder: Path, late: list[int], timeout_s: float) -> list[Any]:
    """Return the ranks' results, or raise for the rank that failed first."""
    reports: list[_Report | None] = []
    for rank in range(len(processes)):
        path = folder / f"rank-{rank}.report"
        reports.append(pickle.loads(path.read_bytes()) if path.exists() else None)
    raised = [(report.at_s, rank) for rank, report in enumerate(reports) if report and report.traceback is not None]
    world_size = len(processes)
    if raised:
        rank = min(raised)[1]
        report = reports[rank]
        message = f"rank {rank} of {world_size} failed:\n{report.traceback}{_output(folder, rank)}"
        raise RankError(message, rank=rank, exception=report.exception) from report.exception
    for rank, process in enumerate(processes):
        if reports[rank] is None and rank not in late:
            message = f"rank {rank} of {world_size} died with exit code {process.exitcode}:\n{_output(folder, rank)}"
            raise RankError(message, rank=rank)
    if late:
        where = "".join(_output(folder, rank) for rank in late)
        raise RankError(f"ranks {late} of {world_size} were not done after {timeout_s:g} s:\n{where}", rank=late[0])
    return [report.result for report in reports if report is not None]
