"""User-written loops in which one rank fails: every process ends within seconds, and the first error is named first.

In the phase "alone" a rank ends without a failure, and the other one still works: that is not a failure.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_ROOT = Path(__file__).parents[2]
_SCRIPT = Path(__file__).with_name("failing_loop.py")
_LIMIT_S = 20.0
_KINDS = ("raise", "SIGKILL", "sys.exit(0)", "os._exit(3)")
_PHASES = (
    "prepare", "forward", "backward", "step", "save_state", "async save", "load_state", "get_state_dict",
    "wait_for_everyone", "exit",
)  # fmt: skip
_CODES = {"raise": 1, "SIGKILL": -9, "sys.exit(0)": 0, "os._exit(3)": 3}
_FIRST = {
    "raise": "ValueError: the user's own",
    "SIGKILL": "has ended without a traceback (killed, or crashed)",  # or its end is that of the store, see below
    "sys.exit(0)": "has left the run",
    "os._exit(3)": "has ended without a traceback (killed, or crashed)",
}

Case = tuple[str, str, str, int]  # kind, phase, strategy, failing rank
_FEW: list[Case] = [
    ("raise", "prepare", "ddp", 1),
    ("raise", "forward", "fsdp", 1),
    ("raise", "save_state", "fsdp", 0),
    ("SIGKILL", "get_state_dict", "fsdp", 1),
    ("SIGKILL", "async save", "fsdp", 0),
    ("sys.exit(0)", "load_state", "ddp", 0),
    ("sys.exit(0)", "save_state", "fsdp", 1),
    ("sys.exit(0)", "wait_for_everyone", "ddp", 1),
    ("os._exit(3)", "backward", "ddp", 1),
    ("os._exit(3)", "load_state", "ddp", 1),
    ("sys.exit(0)", "alone", "ddp", 0),
    ("sys.exit(0)", "alone", "ddp", 1),
]
_ALL: list[Case] = [
    (kind, phase, strategy, 1)
    for kind in _KINDS
    for phase in _PHASES
    for strategy in ("ddp", "fsdp", "deepspeed")
    if not (phase == "async save" and strategy == "deepspeed")
]
_ALL += [
    (kind, phase, "pp", who)
    for kind in _KINDS
    for phase, who in (("step", 1), ("save_state", 0), ("get_state_dict", 1), ("wait_for_everyone", 0))
]


def _variables() -> dict[str, str]:
    linux = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    return {**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}", "OMP_NUM_THREADS": "1", **linux}


def _by_hand(cases: Sequence[Case], folder: Path) -> list[dict[str, Any]]:
    """Run all cases at once, in processes that were started without a launcher."""
    lines = ""
    for number, (kind, phase, strategy, who) in enumerate(cases):
        (folder / str(number)).mkdir()
        options = {"kind": kind, "phase": phase, "strategy": strategy, "who": who, "folder": str(folder / str(number))}
        lines += json.dumps(options) + "\n"
    command = [sys.executable, str(_SCRIPT), "serve"]
    done = subprocess.run(command, input=lines, env=_variables(), stdout=subprocess.PIPE, text=True, check=True)
    return [dict(result) for result in json.loads(done.stdout)]


def _check(case: Case, codes: list[int | None], taken_s: float, log: str) -> None:
    kind, phase, _, who = case
    print(f"{case}: {codes}, {taken_s:.1f} s")
    assert None not in codes, log
    if phase == "alone":  # not a failure, which has a time limit
        assert codes == [0, 0], log
        return
    assert taken_s < _LIMIT_S, log
    assert codes[who] == _CODES[kind], log
    if phase == "exit":  # the other rank has done all its work
        return
    assert codes[1 - who] not in (0, None), log
    is_store_lost = kind == "SIGKILL" and who == 0
    assert ("its process, which served the store, has ended" if is_store_lost else _FIRST[kind]) in log, log
    if kind == "raise":
        assert log.index(_FIRST[kind]) < min(log.find(text) % 10**9 for text in ("ends after", "This followed")), log


@pytest.mark.parametrize(
    "cases",
    [_FEW, *(pytest.param(_ALL[i : i + 8], marks=pytest.mark.exhaustive) for i in range(0, len(_ALL), 8))],
    ids=lambda cases: f"{cases[0][0]}-{cases[0][1]}-{cases[0][2]}-{len(cases)}",
)
def test_every_process_ends_after_a_failure(cases: list[Case], tmp_path: Path) -> None:
    wrong = []
    for number, (case, result) in enumerate(zip(cases, _by_hand(cases, tmp_path), strict=True)):
        folder = tmp_path / str(number)
        taken_s = result["ended_at"] - float((folder / "failed-at").read_text())
        try:
            _check(case, result["codes"], taken_s, (folder / "log").read_text())
        except AssertionError as error:
            wrong.append(f"{case}: {result['codes']}, {taken_s:.1f} s\n{error}")
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.parametrize(
    ("kind", "phase"),
    [
        ("os._exit(3)", "save_state"),
        *(
            pytest.param(kind, phase, marks=pytest.mark.exhaustive)
            for kind in _KINDS
            for phase in ("prepare", "step", "save_state", "wait_for_everyone")
        ),
    ],
)
def test_every_process_of_the_launcher_ends(kind: str, phase: str, tmp_path: Path) -> None:
    options = json.dumps({"kind": kind, "phase": phase, "strategy": "fsdp", "reads_should_stop": True})
    command = [sys.executable, "-m", "trainwright", "launch", "--cpu", "--num_processes", "2", str(_SCRIPT), options]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=_variables(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )
    taken_s = time.time() - float((tmp_path / "failed-at").read_text())
    print(f"launch {kind} {phase}: {done.returncode}, {taken_s:.1f} s")
    assert done.returncode != 0, done.stdout
    assert taken_s < _LIMIT_S, done.stdout
    if kind != "sys.exit(0)":
        assert "rank 1 failed first" in done.stdout, done.stdout
