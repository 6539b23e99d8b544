"""One rank's failure ends all of them within 30 s, and its own traceback is the first that is printed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.selection import mostly_exhaustive

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).with_name("failing_run.py")
_LIMIT_S = 30.0
_START_S = 120.0
_WITHOUT_A_WORD = ("exit", "kill")
_RUNS = [("backward", "ddp"), ("exit", "ddp"), ("kill", "ddp"), ("save", "fsdp")]
_ECHOES = ("Connection closed by peer", "Connection reset by peer", "after the failure of rank")


def _run(commands: list[tuple[list[str], dict[str, str]]], folder: Path) -> tuple[list[int], str, float]:
    """Run commands side by side; returns exit codes, what all have printed, and the seconds since the failure."""
    linux = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    common = {**os.environ, "PYTHONPATH": str(_ROOT / "src"), "OMP_NUM_THREADS": "1", **linux}
    log = folder / "log"
    with log.open("ab") as out:
        started = [
            subprocess.Popen(command, env=common | variables, stdout=out, stderr=out, cwd=folder)
            for command, variables in commands
        ]
        ends: list[float] = []
        try:
            for process in started:
                process.wait(timeout=_START_S)
            ends.append(time.time())
        finally:
            for process in started:
                process.kill()
                process.wait()
    text = re.sub(r"^\[rank\d+\]: ", "", log.read_text(), flags=re.MULTILINE)  # torch puts it before a traceback
    assert (folder / "failed-at").exists(), text
    return [process.returncode for process in started], text, ends[0] - float((folder / "failed-at").read_text())


def _check(kind: str, codes: list[int], text: str, taken_s: float, folder: Path) -> None:
    assert all(codes), text
    assert taken_s < _LIMIT_S, text
    assert not list(folder.glob("done-*"))
    if kind not in _WITHOUT_A_WORD:
        own = text.index("ArithmeticError: seven is odd")
        first_echo = min((text.index(echo) for echo in _ECHOES if echo in text), default=len(text))
        assert own < first_echo, text
    _assert_nothing_left(folder)


def _assert_nothing_left(folder: Path) -> None:
    for process in Path("/proc").glob("[0-9]*") if Path("/proc").is_dir() else ():
        try:
            inside = os.readlink(process / "cwd") == str(folder)
        except OSError:
            continue
        assert not inside, (process / "cmdline").read_bytes()


@pytest.mark.parametrize(("kind", "strategy"), mostly_exhaustive(_RUNS, keep=[("kill", "ddp")]))
def test_the_trainers_own_processes_end_with_the_traceback_of_the_one_that_failed(
    kind: str, strategy: str, tmp_path: Path
) -> None:
    codes, text, taken_s = _run([([sys.executable, str(_SCRIPT), kind, str(tmp_path), "2", strategy], {})], tmp_path)
    _check(kind, codes, text, taken_s, tmp_path)
    *_, raised = text.partition("WorkerError")
    without_traceback = {"exit": "rank 1 ended with exit code 9", "kill": "rank 1 was killed by SIGKILL"}.get(kind)
    assert (without_traceback or "rank 1:\nTraceback") in raised
    # Nothing but the notes of an error in a step, whose lines say what it was about, stands after it.
    after = raised.rstrip().rpartition("ArithmeticError: seven is odd")[2]
    assert without_traceback or not after or after.startswith("\nin FailingTask."), raised
