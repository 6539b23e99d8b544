"""The process that `trainwright launch` names after a failure of several."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from trainwright.launch.failures import first_failure

_OWN = "[rank1]: Traceback (most recent call last):\n[rank1]:   File 'a.py'\n[rank1]: ValueError: bad luck\n"
_LOST = "Traceback (most recent call last):\n  File 'a.py'\nRuntimeError: Connection closed by peer [127.0.0.1]:1\n"


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [
        ({1: (1, 5, _LOST), 2: (1, 9, _OWN)}, "2: [rank1]: ValueError: bad luck"),
        ({1: (1, 9, _OWN), 2: (1, 8, _OWN)}, "2: [rank1]: ValueError: bad luck"),
        ({0: (-9, 39, ""), 1: (1, 9, _OWN)}, "1: [rank1]: ValueError: bad luck"),
        ({0: (-9, 39, None), 1: (7, 9, None)}, "1: "),
        ({0: (-15, 5, None), 1: (1, 5, _LOST)}, "1: RuntimeError: Connection closed by peer [127.0.0.1]:1"),
        ({0: (1, 5, None), 1: (1, 9, _OWN)}, "1: [rank1]: ValueError: bad luck"),
        ({0: (1, 20, None), 1: (-15, 9, _OWN)}, "1: [rank1]: ValueError: bad luck"),
        ({0: (-15, 9, None), 1: (1, 9, "trainwright: rank 1 ends after the failure of rank 0. its end\n")}, "0: "),
        ({1: (1, 5, "no traceback\n")}, "1: no traceback"),
        ({0: (1, 5, "trainwright: rank 0 ends after the failure of rank 1. its end\n"), 1: (3, 9, "")}, "1: "),
    ],
)
def test_it_is_the_first_whose_error_another_one_did_not_cause(
    ranks: dict[int, tuple[int, int, str | None]], expected: str, tmp_path: Path
) -> None:
    failures = {}
    for rank, (code, seconds, text) in ranks.items():
        failures[rank] = SimpleNamespace(
            local_rank=rank, pid=7, exitcode=code, timestamp=seconds, signal_name=lambda: "SIGKILL"
        )
        if text is not None:
            file = tmp_path / f"run/attempt_0/{rank}/stderr.log"
            file.parent.mkdir(parents=True)
            file.write_text(text)
            os.utime(file, (seconds, seconds))
    found = first_failure(SimpleNamespace(failures=failures), tmp_path)
    assert f"{found.rank}: {found.line}" == expected
