"""What every test may rely on: it starts from the same state, and whatever it changes in the process is put back."""

from __future__ import annotations

import gc
import importlib.metadata
import importlib.util
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from packaging.version import Version

from trainwright.core import unraised

_SEED = 20260101
_SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2]
_THREAD_GRACE_S = 2.0
_RECURSION_LIMIT = 1000  # Python's default
_TESTS = Path(__file__).parent
_WHOLE_PROGRAMS = {"ported", "requirements"}
_LAUNCHER_VARIABLES = re.compile(
    r"^(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT"
    r"|(SLURM|PMI|PMIX|OMPI|TORCHELASTIC|TRAINWRIGHT|WANDB)_.*)$"
)

torch.set_num_threads(1)
settings.register_profile("no clock", deadline=None)  # how long an example takes depends on what runs beside it
settings.load_profile("no clock")
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as shells hand it to what a script starts in the background
    signal.signal(signal.SIGINT, signal.default_int_handler)
# What DeepSpeed compiles is kept with the environment: a test's HOME, where it would go, is a temporary one.
os.environ.setdefault("TORCH_EXTENSIONS_DIR", os.path.join(sys.prefix, "torch_extensions"))
os.environ["PATH"] = os.pathsep.join([os.path.join(sys.prefix, "bin"), os.environ["PATH"]])  # ninja


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark whole programs as slow, and run the slow tests first, so that no worker ends long before the other.

    Tests that are given by name keep the given order.
    """
    for item in items:
        if item.path.is_relative_to(_TESTS) and item.path.relative_to(_TESTS).parts[0] in _WHOLE_PROGRAMS:
            item.add_marker(pytest.mark.slow)
    if not any("::" in argument for argument in config.args):
        items.sort(key=lambda item: not any(item.iter_markers("slow")) and not any(item.iter_markers("distributed")))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip a test whose `requires(what, reason)` mark names hardware or a package that this machine lacks."""
    for mark in item.iter_markers("requires"):
        what, reason = _requirement(*mark.args, **mark.kwargs)
        if not is_present(what):
            pytest.skip(f"needs {what}: {reason}")


def _requirement(what: str, reason: str) -> tuple[str, str]:
    return what, reason


def is_present(what: str) -> bool:
    """Say whether this machine has `what`: "cuda", "cuda:2" (so many devices), "torch>=2.10", "program:chromium", or a
    package that can be imported."""
    package, _, oldest = what.partition(">=")
    if oldest:
        return Version(importlib.metadata.version(package)).release >= Version(oldest).release
    kind, _, number = what.partition(":")
    if kind == "program":
        return shutil.which(number) is not None
    if kind == "cuda":
        return torch.cuda.is_available() and torch.cuda.device_count() >= int(number or 1)
    return importlib.util.find_spec(what) is not None


@pytest.fixture(scope="module", autouse=True)
def _small_heap() -> None:
    """Exclude what earlier tests have imported from garbage collections: the code under test collects after a stage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def _a_home_of_our_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the tests away from the user's home and from the launcher that may have started pytest itself.

    One home for the session, not one a test: matplotlib and others fill caches there, which takes them seconds.
    """
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        for name in list(os.environ):
            if _LAUNCHER_VARIABLES.match(name) or name.startswith("XDG_"):
                patch.delenv(name)
        patch.setenv("HOME", str(home))
        patch.setenv("USERPROFILE", str(home))
        yield


@pytest.fixture(autouse=True)
def _environment_restored() -> Iterator[None]:
    """Put the environment variables and the working folder back."""
    before = dict(os.environ)
    folder = os.getcwd()
    yield
    os.chdir(folder)
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def _rng_restored() -> Iterator[None]:
    """Start every test from one seed, in whatever order tests run, and put the generators back."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(_SEED)
    np.random.seed(_SEED)
    torch.manual_seed(_SEED)
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


@pytest.fixture(autouse=True)
def _torch_settings_restored() -> Iterator[None]:
    """Put torch's process-wide switches back."""
    dtype = torch.get_default_dtype()
    deterministic = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch 2.9 warns when its own older setting is read
        precision = torch.get_float32_matmul_precision()
    cudnn = torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic
    yield
    torch.set_default_dtype(dtype)
    torch.set_num_threads(1)
    torch.set_grad_enabled(True)
    if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports the compiler: 1.4 s
        torch.use_deterministic_algorithms(deterministic, warn_only=warn_only)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # likewise
        torch.set_float32_matmul_precision(precision)
    torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic = cudnn
    torch.autograd.set_detect_anomaly(False)


@pytest.fixture(autouse=True)
def _recursion_limit_restored() -> Iterator[None]:
    """Restore Python's recursion limit, which libraries raise: tests of deep nesting depend on it."""
    sys.setrecursionlimit(_RECURSION_LIMIT)
    yield
    sys.setrecursionlimit(_RECURSION_LIMIT)


@pytest.fixture(autouse=True)
def _signal_handlers_restored() -> Iterator[None]:
    """Put the handlers of the signals that a training run may take over back."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    yield
    for number, handler in before.items():
        if handler is not None and signal.getsignal(number) is not handler:
            signal.signal(number, handler)


@pytest.fixture(autouse=True)
def _process_group_destroyed() -> Iterator[None]:
    """Destroy a process group that a test has left initialised in this process, and forget a script's state of it."""
    yield
    partial_state = sys.modules.get("trainwright.processes.partial_state")
    if partial_state is not None:
        partial_state.PartialState._reset_state()
    settings = sys.modules.get("trainwright.accelerator.settings")
    if settings is not None:
        # Otherwise, an Accelerator that is not yet collected would cause a warning in the next test.
        settings._precision_of_accelerators.clear()
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture
def fresh_state() -> Iterator[None]:
    """For tests of own loops: each finds a process that has not joined others."""
    from trainwright.processes.partial_state import PartialState

    PartialState._reset_state()
    yield
    PartialState._reset_state()


@pytest.fixture(autouse=True)
def _no_thread_left_over() -> Iterator[None]:
    """Fail a test that leaves a thread running which would keep the interpreter from ending, or an unraised error."""
    before = set(threading.enumerate())
    yield
    leaked = wait_for_threads(before, grace_s=_THREAD_GRACE_S)
    if leaked:
        pytest.fail(f"threads left running: {[thread.name for thread in leaked]}. Join them before the test ends.")
    if left := unraised.take():
        pytest.fail(f"errors that no call has raised: {left}")


def wait_for_threads(before: set[threading.Thread], *, grace_s: float) -> list[threading.Thread]:
    """Return the non-daemon threads that are not in `before` and still run after `grace_s` seconds."""
    deadline_s = time.monotonic() + grace_s
    started = [thread for thread in threading.enumerate() if thread not in before and not thread.daemon]
    for thread in started:
        thread.join(max(0.0, deadline_s - time.monotonic()))
    return [thread for thread in started if thread.is_alive()]
