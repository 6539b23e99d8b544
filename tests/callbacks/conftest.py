from __future__ import annotations

import time

import pytest


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The monotonic clock's time, which only the test moves."""
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    return now
