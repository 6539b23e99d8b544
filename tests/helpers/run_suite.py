"""Run pytest in two processes, then run the tests that failed once more by themselves.

A test that passes the second time is flaky: it failed because of what ran beside it. The run is green then, and the
names of such tests are printed at the end.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence

import pytest

_MOST_REPEATED = 10
"""If more tests than this fail, the code is broken and none is repeated."""


class FailedTests:
    """Pytest plugin that collects the names of failed tests, in the order of their failures."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Store the name of a test whose setup, call or teardown failed."""
        if report.failed and report.nodeid not in self.names:
            self.names.append(report.nodeid)


def run(arguments: Sequence[str]) -> int:
    """Run pytest with `arguments` and return its exit status, or 0 if each failed test passed when it ran alone."""
    failed = FailedTests()
    status = int(pytest.main([*arguments], plugins=[failed]))
    if status != pytest.ExitCode.TESTS_FAILED or not 0 < len(failed.names) <= _MOST_REPEATED:
        return status
    print(f"\nrunning {len(failed.names)} failed test(s) once more, alone", flush=True)
    repeated = subprocess.run([sys.executable, "-m", "pytest", "-n", "0", *failed.names], check=False)
    if repeated.returncode != pytest.ExitCode.OK:
        return status
    print("\nflaky (failed beside other tests, passed alone):", *failed.names, sep="\n  ")
    return 0


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
