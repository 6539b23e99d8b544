"""All processes of a run exit within seconds, however the run ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).with_name("ending_run.py")
_START_S = 120.0
_LIMIT_S = 15.0  # on an idle machine it takes less than 5 seconds
_OF_TORCH = "Traceback"  # torch's words depend on what the worker was doing
_OWN = "ValueError: the user's own"

ALONE: list[tuple[dict[str, Any], int, str]] = [
    ({"way": "step"}, 1, _OWN),
    ({"way": "step", "grace": None}, 1, _OWN),
    ({"way": "busy workers"}, 1, _OWN),
    ({"way": "validation step"}, 1, _OWN),
    ({"way": "data set"}, 1, _OWN),
    ({"way": "data set without workers"}, 1, _OWN),
    ({"way": "killed worker"}, 1, _OF_TORCH),
    ({"way": "interrupt"}, -signal.SIGINT, "KeyboardInterrupt"),
    ({"way": "term"}, 143, "rank 0 received SIGTERM"),
    ({"way": "term", "grace": None}, -signal.SIGTERM, ""),
    ({"way": "kill"}, -signal.SIGKILL, ""),
    ({"way": "exit"}, 7, ""),
    ({"way": "own loop"}, 1, _OWN),
]


def _marks(options: dict[str, Any]) -> list[pytest.MarkDecorator]:
    """Mark all but an error, a worker that dies, and signals."""
    kept = len(options) == 1 and options["way"] in ("step", "killed worker", "interrupt", "term")
    return [] if kept else [pytest.mark.exhaustive]


@pytest.fixture(scope="module")
def server() -> Iterator[subprocess.Popen[str]]:
    """Start the script once, with everything imported, to be forked for each way."""
    linux = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    variables = {**os.environ, "PYTHONPATH": str(_ROOT / "src"), "OMP_NUM_THREADS": "1", **linux}
    process = subprocess.Popen(
        [sys.executable, str(_SCRIPT), "serve"], env=variables, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:  # closes its pipes, at which it ends
        yield process


@pytest.fixture
def temporary() -> Iterator[Path]:
    """Make a run's temporary folder: pytest's own is so deep that no worker's socket fits in it."""
    with tempfile.TemporaryDirectory(prefix="run-") as folder:
        yield Path(folder)


def processes_in(folder: Path) -> list[int]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if os.readlink(process / "cwd") == str(folder) and "Z" not in (process / "stat").read_text().split()[2:3]:
                found.append(int(process.name))
        except OSError:  # it has ended, or is somebody else's
            continue
    return found


def wait_for_end(folder: Path) -> float:
    """Wait until no process runs in the folder any more; returns the seconds since the script has noted the moment."""
    noted, begun = folder / "ended-at", time.time()
    while not (noted.exists() and noted.read_text().strip()) and time.time() - begun < _START_S:  # empty at first
        time.sleep(0.02)
    ended_at = float(noted.read_text().split()[0])
    while (left := processes_in(folder)) and time.time() - ended_at < _LIMIT_S:
        time.sleep(0.02)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    assert not left, (folder / "log").read_text()
    return time.time() - ended_at


def check(folder: Path, temporary: Path, code: int, expected: int, text: str, way: str) -> None:
    log = (folder / "log").read_text()
    assert code == expected, log
    assert text in log
    assert not (folder / "went-on").exists()
    # Nobody can take away what a process that was killed had open, and torch's launcher and compiler keep theirs. Where
    # a worker has died, torch's loader opens ten files `tmp…` to see whether too many are open: a rank may end there.
    kept = ("torchelastic_", "torchinductor_", *(["pymp-", "tmp"] if way.endswith("worker") else []))
    assert not [path for path in temporary.iterdir() if not path.name.startswith(kept)]
    assert {path.name for path in folder.rglob(".*")} <= {".index.json"}


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [pytest.param(*case, marks=_marks(case[0])) for case in ALONE],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_every_process_exits(
    options: dict[str, Any], code: int, text: str, server: subprocess.Popen[str], tmp_path: Path, temporary: Path
) -> None:
    server.stdin.write(json.dumps({**options, "folder": str(tmp_path), "tmp": str(temporary)}) + "\n")
    server.stdin.flush()
    taken_s = wait_for_end(tmp_path)
    print(f"{options}: {taken_s:.2f} s")
    check(tmp_path, temporary, int(server.stdout.readline()), code, text, options["way"])
