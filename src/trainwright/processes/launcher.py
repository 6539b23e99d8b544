"""Start of the other processes of a run. No other module writes environment variables.

The process that called the Trainer becomes rank 0 and returns the results. Other ranks are new interpreters, which
receive the work through cloudpickle. The calling script is not run again. It needs no `__main__` guard, and may be a
notebook that defines classes.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import pickle
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any

from trainwright.core.errors import ConfigurationError, Preempted, WorkerError
from trainwright.core.host.folders import is_in_use, mark_in_use
from trainwright.core.names.replacement import active_replacements
from trainwright.core.process import STARTED_BY_TRAINER, environment, variable

_GRACE_S = 10.0  # for the other processes to end after one has failed, or when all end together
_GRACE_AFTER_ERROR_S = 0.5  # after an error of this process only: the others may wait for it in a collective
_JUST_CREATED_S = 30.0  # the process of a folder this new may not have marked it as in use yet
_PREFIX = "trainwright-work-"
_FIRST_PORT = 15_000  # ports up to 28,999: Linux uses 32,768 and up for outgoing connections
_NUM_PORTS = 14_000
_EFFICIENT_LOADING = "FSDP_CPU_RAM_EFFICIENT_LOADING"
_started: list[_Children] = []  # one for each running call of `run_in_processes`


def set_variable(name: str, value: str) -> bool:
    """Set an environment variable of this process if it is not set. Return False if it was set before."""
    is_new = variable(name) is None
    os.environ.setdefault(name, value)
    return is_new


def unset_variable(name: str) -> None:
    """Remove one variable of this process's environment."""
    os.environ.pop(name, None)


def set_variables(values: Mapping[str, str]) -> None:
    """Set variables of this process's environment, which started programs inherit."""
    os.environ.update(values)


def run_in_processes(
    work: Callable[[], Any],
    num_processes: int,
    by_value: Iterable[object] = (),
    *,
    before: Callable[[], None] | None = None,
) -> Any:
    """Run `work()` in this process as rank 0 and in `num_processes - 1` new processes. Return rank 0's result.

    Args:
        work: function that cloudpickle can pickle. It reads its rank from the same variables as under torchrun.
        num_processes: processes on this node, ≥ 2.
        by_value: objects whose classes may be in modules that a new interpreter cannot import. Default: `()`.
        before: picklable function that is called first in the new processes. Default: None.

    Raises:
        ConfigurationError: an object cannot be pickled, or no port is free. No process has been started.
        WorkerError: a new process has failed. The error contains its traceback.
    """
    payload = serialize((before, work, sys.argv), by_value)
    common = {
        "WORLD_SIZE": str(num_processes),
        "LOCAL_WORLD_SIZE": str(num_processes),
        "GROUP_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        STARTED_BY_TRAINER: secrets.token_hex(8),
    }
    with work_folder() as folder:
        file = folder / "work.pkl"
        file.write_bytes(payload)
        children = _Children(folder)
        _started.append(children)
        grace_s = _GRACE_S
        try:
            for rank in range(1, num_processes):
                children.start(rank, file, {**common, "RANK": str(rank), "LOCAL_RANK": str(rank)})
            with _variables({**common, "RANK": "0", "LOCAL_RANK": "0"}):
                try:
                    result = work()
                except BaseException as error:
                    children.raise_cause(error)
                    if not isinstance(error, (WorkerError, Preempted)):
                        grace_s = _GRACE_AFTER_ERROR_S
                    raise
            children.wait()
            return result
        finally:
            _started.remove(children)
            children.stop(grace_s)


@contextlib.contextmanager
def work_folder() -> Iterator[Path]:
    """Context manager that yields a temporary folder for the files of started processes."""
    _remove_left_over()
    with tempfile.TemporaryDirectory(prefix=_PREFIX, ignore_cleanup_errors=True) as folder, mark_in_use(Path(folder)):
        yield Path(folder)


def _remove_left_over() -> None:
    """Remove folders of this user's earlier calls whose processes were all killed, and so removed no folder."""
    for folder in Path(tempfile.gettempdir()).glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):  # another process removes it too
            status = folder.lstat()  # not `stat`: another user may have created a link of this name
            is_of_this_user = not hasattr(os, "getuid") or status.st_uid == os.getuid()
            if not stat.S_ISDIR(status.st_mode) or not is_of_this_user:
                continue
            is_old = time.time() - status.st_mtime > _JUST_CREATED_S
            if is_old and not is_in_use(folder):
                shutil.rmtree(folder)


def run_module(module: str, arguments: list[str]) -> int:
    """Run `python -m module` in a separate process with the same import path, and return the exit code.

    The output is written to this process's stderr. Blocks until the module has ended.
    """
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(command, env=_with_own_path({}), stdout=2, check=False).returncode  # 2: stderr


def _with_own_path(variables: dict[str, str]) -> dict[str, str]:
    """Return this process's variables with additions, and with its import path as PYTHONPATH."""
    return {**environment(), **variables, "PYTHONPATH": import_path()}


def import_path() -> str:
    """Return this process's import path as a value of PYTHONPATH."""
    return os.pathsep.join(path or os.getcwd() for path in sys.path)


def failure_of_started() -> str | None:
    """Return the traceback of a failed process that this process has started, or None if none has failed."""
    for children in _started:
        failure = children.failure()
        if failure is not None:
            return failure
    return None


def first_error(folder: Path) -> str | None:
    """Return the first traceback that a started process has written into the work folder, or None."""
    files = sorted(folder.glob("error-*.txt"), key=lambda file: file.stat().st_mtime_ns)
    return files[0].read_text() if files else None


class _Children:
    """Started processes of one call of `run_in_processes`, and their failures."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder  # in which processes write their tracebacks
        self._started: dict[int, subprocess.Popen[bytes]] = {}  # by rank

    def start(self, rank: int, file: Path, variables: dict[str, str]) -> None:
        command = [sys.executable, "-m", "trainwright.processes.worker", str(file), str(os.getpid())]
        self._started[rank] = subprocess.Popen(command, env=_with_own_path(variables))

    def failure(self) -> str | None:
        """Return the first failure, or None: a SIGKILL, else the first traceback, else an exit code."""
        for rank, process in self._started.items():
            # Nothing here sends SIGKILL before the failure is known. Errors of other ranks are its consequences.
            if process.poll() == -signal.SIGKILL:
                return f"rank {rank} was killed by SIGKILL, perhaps because the memory was full, and left no traceback"
        traceback = first_error(self._folder)
        if traceback is not None:
            return traceback
        for rank, process in self._started.items():
            if process.poll() not in (None, 0):
                return f"rank {rank} ended with exit code {process.returncode} and left no traceback"
        return None

    def raise_cause(self, error: BaseException) -> None:
        """Raise a WorkerError if `error` is a RuntimeError, such as a broken connection, and a process has failed."""
        if not isinstance(error, RuntimeError):
            return
        deadline = time.monotonic() + _GRACE_S
        while time.monotonic() < deadline:
            failure = self.failure()
            if failure is not None:
                # Not chained: the cause must be printed first.
                raise WorkerError(f"a process that the Trainer started has failed:\n{failure}") from None
            # A connection breaks before the failed process has written its traceback, so wait. gloo writes
            # "Connection" and "connection".
            if "onnection" not in str(error):
                return
            time.sleep(0.05)

    def wait(self) -> None:
        """Wait until all processes have ended. Raise the error of a failed process."""
        for process in self._started.values():
            process.wait()
        failure = self.failure()
        if failure is not None:
            raise WorkerError(f"a process that the Trainer started has failed:\n{failure}")

    def stop(self, grace_s: float) -> None:
        """Send SIGTERM to running processes. Kill processes that still run after `grace_s` seconds."""
        running = [process for process in self._started.values() if process.poll() is None]
        for process in running:
            process.terminate()
        deadline = time.monotonic() + grace_s
        for process in running:
            try:
                process.wait(timeout=max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def _variables(values: dict[str, str]) -> Iterator[None]:
    """Context manager that sets variables during a `with` block."""
    before = {name: variable(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def enable_fsdp_ram_efficient_loading() -> None:
    """Let FSDP plugins that are created from now on load weights on rank 0 only; see `FSDPStrategy`."""
    os.environ[_EFFICIENT_LOADING] = "True"


def disable_fsdp_ram_efficient_loading() -> None:
    """Let FSDP plugins that are created from now on load weights on every rank."""
    os.environ[_EFFICIENT_LOADING] = "False"


@contextlib.contextmanager
def patch_environment(**variables: object) -> Iterator[None]:
    """Set environment variables during a `with` block. Names are written in capitals, values as text."""
    with _variables({name.upper(): str(value) for name, value in variables.items()}):
        yield


@contextlib.contextmanager
def clear_environment() -> Iterator[None]:
    """Remove all environment variables during a `with` block. Changes within the block are discarded."""
    before = environment()
    os.environ.clear()
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextlib.contextmanager
def _keep_accelerate_variables() -> Iterator[None]:
    """Give variables whose names begin with `ACCELERATE_` their earlier values at the end of a `with` block."""
    before = {name: value for name, value in environment().items() if name.startswith("ACCELERATE_")}
    try:
        yield
    finally:
        for name in environment():
            if name.startswith("ACCELERATE_") and name not in before:
                del os.environ[name]
        os.environ.update(before)


def purge_accelerate_environment(function_or_class: Any) -> Any:
    """Decorate a function so that changes of variables `ACCELERATE_…` within it are undone when it returns.

    transformers' `TrainingArguments`, for example, sets such variables, which later `Accelerator`s read. For a class,
    methods whose names begin with "test" are decorated, also those of its sub-classes.
    """
    if not isinstance(function_or_class, type):
        return _keep_accelerate_variables()(function_or_class)
    _purge_tests(function_or_class)
    function_or_class.__init_subclass__ = classmethod(_purge_tests)  # type: ignore[assignment, arg-type]
    return function_or_class


def _purge_tests(owner: type, **_: object) -> None:
    for name, value in list(vars(owner).items()):
        if name.startswith("test") and isinstance(value, FunctionType):
            setattr(owner, name, _keep_accelerate_variables()(value))


def serialize(work: tuple[object, ...], by_value: Iterable[object]) -> bytes:
    """Return three pickles for `trainwright.processes.worker`: replaced libraries, the work, and its definitions.

    The worker replaces the libraries first, because modules that the work needs may import them. The definitions are
    classes and functions that a new interpreter cannot import. The worker adds them to modules.

    Args:
        work: `(before, work, sys.argv)`, which `worker.main` unpickles.
        by_value: functions, classes, or objects whose classes may be in such modules.

    Raises:
        ConfigurationError: An object cannot be pickled.
    """
    import cloudpickle

    definitions: list[type | FunctionType] = []

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # cloudpickle has no annotations
        def reducer_override(self, obj: object) -> object:
            if isinstance(obj, (type, FunctionType)) and obj.__module__ in by_value_modules:
                definitions.append(obj)
            return super().reducer_override(obj)

    registered_modules = []
    by_value_modules = {"__main__"}
    for obj in by_value:
        owner = obj if isinstance(obj, (type, FunctionType)) else type(obj)
        module = sys.modules.get(owner.__module__)
        if module is not None and not _is_importable(module.__name__):
            cloudpickle.register_pickle_by_value(module)
            registered_modules.append(module)
            by_value_modules.add(module.__name__)
    file = io.BytesIO()
    try:
        pickler = Pickler(file)
        pickler.dump(active_replacements())
        pickler.dump(work)
        pickler.dump(definitions)
        return file.getvalue()
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        raise ConfigurationError(
            f"objects that other processes need cannot be sent to them: {error}. Create open files, locks and "
            "connections in setup() instead, or start the script with torchrun."
        ) from error
    finally:
        for module in registered_modules:
            cloudpickle.unregister_pickle_by_value(module)


def _is_importable(module: str) -> bool:
    if module == "__main__":
        return True  # cloudpickle sends it by value anyway
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):
        return False


def free_port() -> int:
    """Return a free port below the range of outgoing connections, so that no connection takes it before its use.

    Raises:
        ConfigurationError: 100 random ports are in use.
    """
    for _ in range(100):
        port = _FIRST_PORT + secrets.randbelow(_NUM_PORTS)
        with socket.socket() as server, contextlib.suppress(OSError):
            server.bind(("127.0.0.1", port))
            return port
    last = _FIRST_PORT + _NUM_PORTS - 1
    raise ConfigurationError(f"no port from {_FIRST_PORT} to {last} is free. End programs that use these ports.")
