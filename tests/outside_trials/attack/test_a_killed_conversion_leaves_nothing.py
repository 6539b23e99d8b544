"""What a killed `convert` leaves hidden is deleted by the next one in the same folder."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainwright.checkpoint import verify
from trainwright.checkpoint.interop.convert import convert_checkpoint

_KILLED = """
import os, signal, sys
from trainwright.checkpoint import set_fault_hook
from trainwright.checkpoint.interop.convert import convert_checkpoint

set_fault_hook(lambda event, path: event == "write" and "model" in str(path) and os.kill(os.getpid(), signal.SIGKILL))
convert_checkpoint(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.skipif(os.name == "nt", reason="kills a process")
def test_the_next_conversion_cleans_up(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    (tmp_path / ".notes.tmp-0123456789abcdef").mkdir()
    (tmp_path / ".notes.tmp-0123456789abcdef" / "mine.txt").write_text("x")
    done = subprocess.run([sys.executable, "-c", _KILLED, tmp_path / "x.pt", tmp_path / "a"], timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert [name.startswith(".a.tmp-") for name in os.listdir(tmp_path)].count(True) == 1
    convert_checkpoint(tmp_path / "x.pt", tmp_path / "b")
    assert sorted(os.listdir(tmp_path)) == [".notes.tmp-0123456789abcdef", "b", "x.pt"]
    assert verify(tmp_path / "b") == []
