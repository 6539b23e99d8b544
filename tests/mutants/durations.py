"""Pytest plugin that writes the seconds of each test function, all cases together, for `tests.mutants.record`."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.mutants.record import FOLDER, test_function

_SECONDS: Counter[str] = Counter()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of a phase of a test that passed."""
    if report.passed:
        _SECONDS[test_function(report.nodeid)] += report.duration


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add to the file, in the process that has all reports."""
    if not hasattr(session.config, "workerinput"):
        path = FOLDER / "durations.json"
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps({**before, **_SECONDS}))
