"""Pytest plugin for `tests.mutants.record`.

It tells coverage which test is running, and writes the seconds of each test function, all cases together.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator

import coverage
import pytest

from tests.mutants.record import FOLDER, function_of_context

_SECONDS: Counter[str] = Counter()
_FAILED: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Record the lines that the test runs, in all threads, under its name. Fixtures belong to no test."""
    measurement = coverage.Coverage.current()
    assert measurement is not None
    measurement.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        measurement.switch_context("")


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
