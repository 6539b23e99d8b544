"""`notebook_launcher` and `debug_launcher` with real processes, from scripts and from a real Jupyter kernel."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.processes.test_launchers import environment
from trainwright import Accelerator, ConfigurationError, debug_launcher, notebook_launcher
from trainwright.core.errors import TrainwrightWarning, WorkerError
from trainwright.launch import notebook
from trainwright.processes.partial_state import PartialState

_PORTS = 27000 + os.getpid() % 1000


def _facts(word: str) -> tuple[object, ...]:
    accelerator = Accelerator(cpu=True)
    ranks = [int(rank) for rank in accelerator.gather(torch.tensor([accelerator.process_index]))]
    return word, accelerator.num_processes, ranks, accelerator.mixed_precision


def _fail(how: str) -> object:
    if Accelerator(cpu=True).process_index == 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("seven is odd")
    time.sleep(60)
    return None


def _fail_once(word: str) -> tuple[object, ...]:
    found = _facts(word)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        raise ArithmeticError("seven is odd")
    return found


@pytest.mark.slow
@pytest.mark.distributed
def test_the_processes_share_a_topology_start_again_after_a_failure_and_the_first_ones_result_returns() -> None:
    before, handlers = dict(os.environ), [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)]
    options = {"mixed_precision": "bf16", "use_port": str(_PORTS), "max_restarts": 1}
    assert notebook_launcher(_fail_once, ("w",), num_processes=2, **options) == ("w", 2, [0, 1], "bf16")
    assert dict(os.environ) == before
    assert [signal.getsignal(one) for one in (signal.SIGINT, signal.SIGTERM)] == handlers


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("raised", "rank 1:\n.*ArithmeticError: seven is odd"),
        pytest.param("killed", "rank 1 .*SIGKILL", marks=pytest.mark.exhaustive),
    ],
)
def test_an_error_is_raised_once_and_ends_the_others(how: str, told: str, capfd: pytest.CaptureFixture[str]) -> None:
    start_s = time.monotonic()
    with pytest.raises(WorkerError, match=f"(?s){told}") as caught:
        debug_launcher(_fail, (how,))
    assert time.monotonic() - start_s < 45
    assert str(caught.value).count("Traceback") == (how == "raised")
    assert "Traceback" not in capfd.readouterr().err


def test_what_this_process_has_initialized_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    Accelerator(cpu=True)
    with pytest.raises(
        ConfigurationError, match=r"(?s)has created an Accelerator.*test_notebook.py:\d+ .Accelerator\("
    ):
        notebook_launcher(_facts, ("w",), num_processes=2)
    PartialState._reset_state()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(notebook, "_cuda_users", [])
    notebook._record_cuda_user()
    with pytest.raises(
        ConfigurationError, match=r"initialized CUDA already, in .*test_notebook.py:\d+ .notebook\._rec"
    ):
        notebook_launcher(_facts, ("w",), num_processes=2)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ({"num_processes": 0}, "at least 1"),
        ({"num_processes": 2, "mixed_precision": "bf61"}, "bf16"),
        ({"num_processes": 2, "num_nodes": 2, "node_rank": 2}, "ranks are 0 to 1"),
        ({"num_processes": 2, "use_port": "http"}, "whole number"),
        ({"num_processes": 2, "args": ((_ for _ in ()),)}, "cannot be sent"),
    ],
)
def test_wrong_arguments_are_errors(arguments: dict[str, object], told: str) -> None:
    with pytest.raises(ConfigurationError, match=told):
        notebook_launcher(_facts, **arguments)  # type: ignore[arg-type]  # wrong on purpose


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize("backend", ["c10d", "static"])
def test_machines_that_do_not_meet_are_an_error(backend: str) -> None:
    with pytest.raises(WorkerError, match=r"machines did not meet at 127\.0\.0\.1:1, or lost contact"):
        notebook_launcher(
            _facts,
            ("w",),
            num_processes=1,
            num_nodes=2,
            node_rank=1,
            use_port=1,  # nothing listens there
            rdzv_backend=backend,
            rdzv_conf={"timeout": 2, "read_timeout": 2, "join_timeout": 2},
        )


# It has no `if __name__ == "__main__"`.
_SCRIPT = """
import os, sys, time
from trainwright import Accelerator
from trainwright.launchers import debug_launcher, notebook_launcher

class Own:
    pass

def function(seconds):
    found = Own()
    found.accelerator = Accelerator(cpu=True)
    found.accelerator.wait_for_everyone()
    print("pid", os.getpid(), flush=True)
    time.sleep(seconds)
    found.facts = [found.accelerator.process_index, found.accelerator.num_processes]
    del found.accelerator
    return found
"""


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(sys.platform != "linux", reason="processes are looked up in /proc")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_the_end_of_the_calling_process_ends_the_others(number: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT + "debug_launcher(function, (600,))\n")
    command = [sys.executable, str(script)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment(), text=True) as caller:
        pids = [int(caller.stdout.readline().split()[-1]) for _ in range(2)]
        caller.send_signal(number)
        caller.wait(30)
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _lock() -> object:
    import threading

    return threading.Lock()


@pytest.mark.slow
@pytest.mark.distributed
def test_a_result_that_cannot_be_sent_is_none_with_a_warning() -> None:
    with pytest.warns(TrainwrightWarning, match="result of _lock cannot be sent"):
        assert debug_launcher(_lock, num_processes=1) is None


_CELLS = [
    "from trainwright import Accelerator, notebook_launcher\nclass Own:\n    scale = 2",
    """
def function(value, word):
    accelerator = Accelerator()
    print(word, accelerator.process_index, flush=True)
    if word == "fail" and accelerator.process_index == 1:
        raise ArithmeticError("seven is odd")
    accelerator.wait_for_everyone()
    value.facts = accelerator.num_processes, accelerator.mixed_precision, value.scale
    return value
""",
    'found = notebook_launcher(function, (Own(), "hello"), num_processes=2, mixed_precision="bf16")',
    "print(isinstance(found, Own), *found.facts)",
    'notebook_launcher(function, (Own(), "fail"), num_processes=2)',
    "accelerator = Accelerator()",
    'notebook_launcher(function, (Own(), "hello"), num_processes=2)',
]


@pytest.mark.engines
@pytest.mark.distributed
@pytest.mark.requires("nbclient", "a notebook is executed for real")
@pytest.mark.requires("ipykernel", "by a real kernel")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # sockets of the notebook's client
def test_a_notebook_launches_its_own_function(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import nbclient
    import nbformat

    for name, value in environment(JUPYTER_PLATFORM_DIRS="1", ACCELERATE_USE_CPU="true").items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it, a kernel does not show the output of other processes
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in _CELLS])
    client = nbclient.NotebookClient(
        book, timeout=120, kernel_name="python3", allow_errors=True, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()
    outputs = [cell.outputs for cell in book.cells]
    shown = "".join(one.get("text", "") for one in outputs[2])
    assert sorted(shown.splitlines()) == ["[rank 1] hello 1", "hello 0"]
    assert [one["text"] for one in outputs[3]] == ["True 2 bf16 2\n"]
    (error,) = (one for one in outputs[4] if one["output_type"] == "error")
    assert error["ename"] == "WorkerError"
    assert error["evalue"].count("ArithmeticError: seven is odd") == 1
    (error,) = (one for one in outputs[6] if one["output_type"] == "error")
    assert "has created an Accelerator or PartialState already" in error["evalue"]
    assert "(accelerator = Accelerator())" in error["evalue"]
