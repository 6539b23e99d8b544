"""User-written loops in which one rank fails: every process ends within seconds, and the first error is named first."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = [pytest.mark.distributed, pytest.mark.slow]

_ROOT = Path(__file__).parents[2]
_LIMIT_S = 40.0  # 20 on a quiet machine; without an exchange of failures it takes minutes
_PHASES = (
    "prepare", "forward", "backward", "step", "save_state", "async save", "load_state", "get_state_dict",
    "wait_for_everyone", "exit",
)  # fmt: skip
_CODES = {"raise": 1, "SIGKILL": -9, "sys.exit(0)": 0, "os._exit(3)": 3}
_KILLED = "has ended without a traceback (killed, or crashed)"
_MESSAGES = {
    "raise": "ValueError: the user's own",
    "SIGKILL": _KILLED,
    "sys.exit(0)": "has left the run",
    "os._exit(3)": _KILLED,
}


class Case(NamedTuple):
    """A loop in which rank `who` ends."""

    kind: str
    phase: str
    strategy: str
    who: int = 1
    starter: str = "by hand"
    num_ranks: int = 2


_FEW = [
    Case("raise", "backward", "fsdp"),
    Case("SIGKILL", "save_state", "fsdp"),
    Case("sys.exit(0)", "wait_for_everyone", "ddp"),
    Case("raise", "async save", "fsdp"),
    Case("raise", "save_state", "fsdp", starter="launch"),
    Case("sys.exit(0)", "wait_for_everyone", "ddp", who=0, num_ranks=3),
    Case("sys.exit(0)", "alone", "ddp"),  # rank 0 has more to do, which is not a failure
]
_PLAIN = {name: [Case(kind, phase, name) for phase in _PHASES for kind in _CODES] for name in ("ddp", "fsdp")}
_OTHERS = [
    Case(kind, phase, strategy, who)
    for strategy in ("zero2", "pp")
    for phase, who in (("step", 1), ("save_state", 0))
    for kind in ("raise", "SIGKILL")
]
_OTHERS += [Case(kind, phase, "fsdp", starter="launch") for phase in ("step", "save_state") for kind in _CODES]
_OTHERS += [Case("sys.exit(0)", "alone", "ddp", who=0), Case("raise", "save_state", "fsdp", who=0)]
_EXHAUSTIVE = [pytest.mark.exhaustive, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "cases",
    [
        pytest.param(_FEW, id="few"),
        pytest.param(_PLAIN["ddp"], id="ddp", marks=_EXHAUSTIVE),
        pytest.param(_PLAIN["fsdp"], id="fsdp", marks=_EXHAUSTIVE),
        pytest.param(_OTHERS, id="others", marks=_EXHAUSTIVE),
    ],
)
def test_every_process_ends_after_a_failure(cases: list[Case], tmp_path: Path) -> None:
    folders = [tmp_path / str(number) for number in range(len(cases))]
    options = []
    for case, folder in zip(cases, folders, strict=True):
        folder.mkdir()
        limits = {"lost_s": 2.0, "num_at_once": 6} if cases is _FEW else {"lost_s": 8.0, "num_at_once": 3}
        options.append({**case._asdict(), **limits, "folder": str(folder)})
    linux = {"GLOO_SOCKET_IFNAME": "lo"} if sys.platform == "linux" else {}
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("failing_loop.py"))],
        input=json.dumps(options),
        env={**os.environ, "PYTHONPATH": f"{_ROOT / 'src'}:{_ROOT}", "OMP_NUM_THREADS": "1", **linux},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    wrong = []
    for case, folder, result in zip(cases, folders, json.loads(done.stdout), strict=True):
        log = (folder / "log").read_text()
        taken_s = result["ended_at"] - float((folder / "failed-at").read_text())
        found = f"{case}: exit codes {result['codes']}, {taken_s:.1f} s"
        print(found)
        if not _is_as_expected(case, result["codes"], taken_s, log):
            wrong.append(f"{found}\n{log}")
    assert not wrong, "\n\n".join(wrong)


def _is_as_expected(case: Case, codes: dict[str, int], taken_s: float, log: str) -> bool:
    if case.starter == "launch":
        is_named = case.kind == "sys.exit(0)" or "rank 1 failed first" in log
        return codes["0"] > 0 and taken_s < _LIMIT_S and is_named and explains(case, log)
    failed = codes.pop(str(case.who))
    others = set(codes.values())
    if case.phase == "alone":
        return {failed} == others == {0}
    is_ended = failed == _CODES[case.kind] and taken_s < _LIMIT_S
    if case.phase == "exit":  # the other rank has done its work
        return is_ended
    return is_ended and others == {1} and explains(case, log)


def explains(case: Case, log: str) -> bool:
    """Return whether the other rank says why it ends, and the first error is printed before."""
    if case.kind == "SIGKILL" and case.who == 0:
        return "its process, which served the store, has ended" in log
    consequences = [log.find(text) for text in ("ends after", "This followed") if text in log]
    is_first = case.kind != "raise" or (bool(consequences) and log.find(_MESSAGES["raise"]) < min(consequences))
    return is_first and _MESSAGES[case.kind] in log
