"""Record which tests run which lines of the package, in started processes too.

    python -m tests.mutants.record [ARGUMENTS OF PYTEST ...]

writes build/mutants/{coverage,durations.json}. Without arguments it runs the tests of `make test`; with arguments, such
as a file of new tests, it adds to the record that there is.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "build" / "mutants"
MAKE_TEST = "not (engines or exhaustive or torture)"
_TESTS = ["-m", MAKE_TEST, "--dist", "loadfile", "--no-loadscope-reorder"]
# coverage's .pth file starts a measurement in each Python process that finds this configuration in its environment:
# pytest, its workers, and what they start. In pytest the context is the test function on the stack. A process that a
# test starts has no such function: its context is the test that pytest has put into the environment.
_CONFIGURATION = """
[run]
source_pkgs = trainwright
data_file = {folder}/coverage
parallel = true
dynamic_context = test_function
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported
"""


def record(arguments: Sequence[str]) -> int:
    """Run pytest, and write the record, or add to it. Return the exit status of pytest."""
    import coverage

    FOLDER.mkdir(parents=True, exist_ok=True)
    old = [*FOLDER.glob("coverage.*")]  # of a run that was interrupted
    if not arguments:
        old += [FOLDER / "coverage", FOLDER / "durations.json"]
    for path in old:
        path.unlink(missing_ok=True)
    configuration = FOLDER / "settings.ini"  # combine() would read a file whose name begins with that of the data
    configuration.write_text(_CONFIGURATION.format(folder=FOLDER))
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(configuration)}
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "-p", "tests.mutants.durations"]
    done = subprocess.run([*command, *(arguments or _TESTS)], cwd=ROOT, env=environment, check=False)
    os.environ.pop("PYTEST_CURRENT_TEST", None)
    measured = coverage.Coverage(config_file=str(configuration))
    measured.load()
    measured.combine([str(FOLDER)])
    return done.returncode


def current_tests() -> set[str]:
    """Return the test functions that `make test` has now. Some of the record may have been removed or moved since."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", MAKE_TEST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return {test_function(line) for line in done.stdout.splitlines() if "::" in line}


class Record:
    """Which tests run a line, and how long each takes. Only tests that `make test` still has count."""

    def __init__(self) -> None:
        import coverage

        path = FOLDER / "coverage"
        if not path.is_file():
            raise SystemExit("The tests are not recorded yet. Run: python -m tests.mutants.record")
        self._data = coverage.CoverageData(basename=str(path))
        self._data.read()
        tests = current_tests()
        durations: dict[str, float] = json.loads((FOLDER / "durations.json").read_text())
        self._durations = {test: seconds for test, seconds in durations.items() if test in tests}

    def tests_of(self, file: str, lines: Iterable[int]) -> list[str]:
        """Return the test functions to try for lines of a file: those that run one of them, the fastest first.

        A line that runs where a module is imported or a fixture is made belongs to no test, and a process of a loader
        is not measured. The tests of all lines of the file follow then.
        """
        by_line = self._data.contexts_by_lineno(str(ROOT / file))
        contexts = {context for line in lines for context in by_line.get(line, [])}
        found = self._fastest_first(contexts)
        if not found or "" in contexts:
            every = self._fastest_first({context for each in by_line.values() for context in each})
            found += [test for test in every if test not in found]
        return found

    def _fastest_first(self, contexts: Iterable[str]) -> list[str]:
        names = {test_function(part) for context in contexts for part in context.split("|")}
        known = [name for name in names if name in self._durations]
        return sorted(known, key=lambda name: (self._durations[name], name))

    def seconds_of(self, test: str) -> float:
        """Return how long all cases of a test function took."""
        return self._durations[test]


def test_function(context: str) -> str:
    """Return `tests/…/test_file.py::test_name` for a context of the record; empty if it is not a test.

    In pytest a context is the dotted name of the function. In started processes it is the name of a case, with its
    parameters and phase: `tests/test_file.py::test_name[1] (call)`.
    """
    if "::" in context:
        return context.partition(" (")[0].partition("[")[0]
    words = context.split(".")
    for length in range(len(words) - 1, 0, -1):
        file = "/".join(words[:length]) + ".py"
        if (ROOT / file).is_file():
            return "::".join([file, *words[length:]])
    return ""


if __name__ == "__main__":
    sys.exit(record(sys.argv[1:]))
