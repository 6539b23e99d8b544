"""Reports of the positions of ranks in a user-written loop."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.processes import late_calls
from trainwright.processes.late_calls import LateCalls


def test_a_wait_that_ends_before_its_report_is_not_reported_as_the_next_wait(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = SimpleNamespace(now_s=0.0)
    monkeypatch.setattr(
        late_calls, "time", SimpleNamespace(monotonic=lambda: clock.now_s, process_time=time.process_time)
    )
    monkeypatch.setattr(late_calls, "_is_marked", lambda frames: False)
    monkeypatch.setattr(late_calls, "_wait_of", lambda frames: "all_reduce")
    calls = LateCalls(HashStore(), rank=0, world_size=2)
    calls.update()
    clock.now_s = 31.0
    calls.exchange()  # requests the positions of both ranks
    monkeypatch.setattr(late_calls, "_wait_of", lambda frames: "broadcast")
    calls.update()
    clock.now_s = 36.0
    calls.exchange()
    assert capsys.readouterr().err == ""
