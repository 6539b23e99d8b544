"""`notebook_launcher` and `debug_launcher`: call a function in several processes, from a notebook or a script."""

from __future__ import annotations

import contextlib
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, WorkerError
from trainwright.core.process import variable
from trainwright.launch.launch import PREFIX, check_options, is_busy, run_agent
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import LaunchCommand, known_options
from trainwright.processes.devices import device_type
from trainwright.processes.launcher import first_error, import_path, patch_environment, serialize, work_folder
from trainwright.processes.partial_state import PartialState
from trainwright.processes.rank_position import user_line

_DEFAULT_PORT = 29500
_SIGNALS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT")
_GRACE_S = 10  # how long processes may take to end after one has failed
# The line that has initialized CUDA, for an error. Empty if CUDA is not initialized, or was before this module.
_cuda_users: list[str] = []


def _record_cuda_user() -> None:
    _cuda_users.append(f", in {user_line()}")


def _cuda_is_initialized() -> bool:
    return bool(torch.cuda.is_initialized())  # type: ignore[no-untyped-call]  # torch has no types here


if not _cuda_is_initialized():
    torch.cuda._lazy_call(_record_cuda_user)  # type: ignore[no-untyped-call]  # torch has no public hook for this


def notebook_launcher(
    function: Callable[..., Any],
    args: tuple[Any, ...] = (),
    num_processes: int | None = None,
    mixed_precision: str = "no",
    use_port: str | int = "29500",
    master_addr: str = "127.0.0.1",
    node_rank: int = 0,
    num_nodes: int = 1,
    rdzv_backend: str = "static",
    rdzv_endpoint: str = "",
    rdzv_conf: Mapping[str, object] | None = None,
    rdzv_id: str = "none",
    max_restarts: int = 0,
    monitor_interval: float = 0.1,
    log_line_prefix_template: str | None = None,
) -> Any:
    """Call `function(*args)` in several new processes, from a notebook or a script, and wait for them.

    `Accelerator()` in the function uses these processes and `mixed_precision`. Functions and classes of the notebook
    may be used. They are sent with cloudpickle. A script needs no `__main__` guard. With one process, the function is
    called in the calling process. Main thread only.

    Args:
        function: Function that each process calls. It must create the `Accelerator`.
        args: Positional arguments of the function. Default: `()`.
        num_processes: Number of processes on this machine. Without accelerators, they run on the CPU. Default: None,
            which is one process for each accelerator, or one process without accelerators and on a TPU.
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`. Default: `"no"`.
        use_port: Port of the first machine. On one machine, the default uses any free port, and another port is chosen
            if the port is in use. With several machines, a port in use is an error. Default: `"29500"`.
        master_addr: Address of the first machine. Default: `"127.0.0.1"`.
        node_rank: Index of this machine. Default: 0.
        num_nodes: Number of machines. Call `notebook_launcher` on each machine. Default: 1.
        rdzv_backend: Backend of torch's rendezvous: `"static"`, or `"c10d"`, which needs no `node_rank`. Default:
            `"static"`.
        rdzv_endpoint: `"host:port"`, instead of `master_addr` and `use_port`. Default: `""`.
        rdzv_conf: Further options of torch's rendezvous. Default: None.
        rdzv_id: Name of the job, equal on all machines. Default: `"none"`.
        max_restarts: Maximum number of restarts of all processes after failures. Default: 0.
        monitor_interval: Seconds between two checks of the processes. Default: 0.1.
        log_line_prefix_template: Prefix of output lines of all processes except the first. Default: None, which is
            `"[rank ${rank}] "`.

    Returns:
        The function's result on the first process of this machine. Results of other processes are discarded. If the
        result cannot be pickled, a warning is raised and None is returned.

    Raises:
        ConfigurationError: An argument is not valid, or this process has already created an Accelerator or used CUDA.
        KeyboardInterrupt: This process received a signal, such as that of a notebook's stop button.
        WorkerError: A process has failed, or the machines did not meet or lost contact. The error contains the
            traceback of the process. All other processes have ended.
    """
    accelerators = torch.accelerator.device_count()
    local = num_processes
    if local is None:
        local = accelerators or 1
    has_too_many = accelerators > 0 and local > accelerators
    if local < 1 or has_too_many:
        advice = " debug_launcher uses the CPU." if accelerators else " Pass at least 1."
        raise ConfigurationError(
            f"notebook_launcher(num_processes={num_processes}), but this machine has {accelerators} accelerators."
            + advice
        )
    host = rdzv_endpoint or master_addr
    port = ""
    if ":" in rdzv_endpoint:
        host, _, port = rdzv_endpoint.rpartition(":")
    kind = device_type("auto")
    config = _config(
        cpu=True if kind == "cpu" else None,
        tpu=True if kind == "xla" else None,
        num_processes=local * num_nodes,
        num_machines=num_nodes,
        machine_rank=node_rank,
        main_process_ip=host,
        main_process_port=port or use_port,
        mixed_precision=mixed_precision,
        rdzv_backend=rdzv_backend,
        rdzv_conf=",".join(f"{key}={value}" for key, value in (rdzv_conf or {}).items()) or None,
        rdzv_id=rdzv_id,
        max_restarts=max_restarts,
        monitor_interval=monitor_interval,
    )
    if local * num_nodes == 1:
        with patch_environment(**config.environment()):
            return function(*args)
    _check_unused()
    return _launch(function, args, config, local, log_line_prefix_template)


def debug_launcher(function: Callable[..., Any], args: tuple[Any, ...] = (), num_processes: int = 2) -> Any:
    """Call `function(*args)` in several new processes on the CPU, for tests of distributed code. Main thread only.

    For arguments, result and errors, see `notebook_launcher`. `num_processes` is 2 by default. The calling process may
    have an `Accelerator`.
    """
    config = _config(cpu=True, num_processes=num_processes, mixed_precision="no", main_process_port=0)
    return _launch(function, args, config, num_processes, None)


def _config(**values: object) -> LaunchConfig:
    """Return the options with these values. Raise ConfigurationError if they are not valid."""
    options = known_options()
    config = LaunchConfig(**{name: options[name].parse(value, "the launcher") for name, value in values.items()})
    check_options(config)
    return config


def _check_unused() -> None:
    """Check that this process has not created an Accelerator or used CUDA."""
    created_at = PartialState._shared_state.get("_created")
    if created_at is not None:
        problem = f"created an Accelerator or PartialState already, in {created_at}"
    elif _cuda_is_initialized():
        problem = f"initialized CUDA already{''.join(_cuda_users[:1])}"
    else:
        return
    raise ConfigurationError(
        f"notebook_launcher: this process has {problem}. Do it inside the function that is launched only, and restart "
        "the notebook's kernel."
    )


def _save(result: object, file: Path) -> None:
    """Save the tuple (result, ""). If the result cannot be pickled, save (None, reason)."""
    import cloudpickle

    try:
        content = cloudpickle.dumps((result, ""))
    except Exception as error:  # noqa: BLE001  # a user's object may raise anything
        content = pickle.dumps((None, f"{type(error).__name__}: {error}"))
    file.write_bytes(content)


def _launch(
    function: Callable[..., Any], args: tuple[Any, ...], config: LaunchConfig, local: int, prefix: str | None
) -> Any:
    """Call the function in `local` new processes. Return the result of the first process of this machine.

    `prefix` is `log_line_prefix_template` of `notebook_launcher`.
    """
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError(
            "processes can be launched only from the main thread, which receives the signals that end them. Call the "
            "launcher there."
        )
    port = config.main_process_port
    has_one_machine = (config.num_machines or 1) == 1
    # On one machine, any free port does. Other machines know the port that was passed.
    if has_one_machine and (port == _DEFAULT_PORT or is_busy(port)):
        config = replace(config, main_process_port=None)
    with work_folder() as folder:
        file = folder / "work.pkl"
        result = folder / "result.pkl"

        def work() -> None:
            value = function(*args)
            if variable("LOCAL_RANK") == "0":
                _save(value, result)

        file.write_bytes(serialize((None, work, sys.argv), (function, *args)))
        command = LaunchCommand(config, "trainwright.processes.worker", [str(file), str(os.getpid())], "module", [])
        threads = max(1, (os.cpu_count() or 1) // local)
        settings: dict[str, object] = {
            **config.environment(),
            PREFIX: prefix or variable(PREFIX, "[rank ${rank}] "),
            "OMP_NUM_THREADS": variable("OMP_NUM_THREADS", str(threads)),
            "PYTHONPATH": import_path(),
            "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": _GRACE_S,
            # torch sets this variable, too. Here, `patch_environment` removes it at the end.
            "TORCHELASTIC_SIGNALS_TO_HANDLE": ",".join(_SIGNALS),
        }
        from torch.distributed.elastic.rendezvous import RendezvousError  # importing it takes seconds

        try:
            with patch_environment(**settings), _kept_signal_handlers():
                first = run_agent(command, local, str(folder / "logs"))
        except (DistError, RendezvousError) as error:
            kind = type(error).__name__
            raise WorkerError(
                f"the machines did not meet at {config.main_process_ip}:{config.main_process_port}, or lost contact "
                f"({kind}: {error}). Check that notebook_launcher is called on all of them."
            ) from error
        except SystemExit as error:  # a signal, such as the one of a notebook's stop button
            raise KeyboardInterrupt from error
        if first is not None:
            text = None
            # A process that was killed has no traceback: the errors of others are its consequences.
            if not first.how.startswith("signal"):
                text = first_error(folder)
            if not text:
                text = f"rank {first.rank} was ended by {first.how} and left no traceback"
            raise WorkerError(f"a launched process has failed:\n{text}")
        value, problem = pickle.loads(result.read_bytes())
    if problem:
        warnings.warn(
            f"the result of {getattr(function, '__name__', function)} cannot be sent to this process, and is None "
            f"here: {problem}",
            TrainwrightWarning,
            stacklevel=3,
        )
    return value


@contextlib.contextmanager
def _kept_signal_handlers() -> Iterator[None]:
    """Context manager that restores the handlers that torch's agent replaces."""
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    handlers = {number: signal.getsignal(number) for number in numbers}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
