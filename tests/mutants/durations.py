"""Pytest plugin that writes the seconds of each test function, all cases together, for `tests.mutants.record`."""

from __future__ import annotations

import json
from collections import Counter

import pytest

from tests.mutants.record import FOLDER, function_of_context

_SECONDS: Counter[str] = Counter()
_FAILED: set[str] = set()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add the time of a phase of a test."""
    test = function_of_context(report.nodeid)
    _SECONDS[test] += report.duration
    if report.failed:
        _FAILED.add(test)


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Add to the file, in the process that has all reports."""
    if not hasattr(session.config, "workerinput"):
        path = FOLDER / "durations.json"
        before = json.loads(path.read_text()) if path.is_file() else {}
        passed = {test: seconds for test, seconds in _SECONDS.items() if test not in _FAILED}
        path.write_text(json.dumps({**before, **passed}))
