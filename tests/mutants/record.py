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
_SUITE_OPTIONS = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]  # both as in the Makefile
_COMPARES_ONLY_S = 0.5  # a shorter test starts no process
# coverage's .pth file starts a measurement in each Python process that finds this configuration in its environment:
# pytest, its workers, and what they start. In pytest the plugin sets the context. A process that a test starts has the
# context of the test that pytest has put into the environment.
_CONFIGURATION = """
[run]
source_pkgs = trainwright
data_file = {folder}/coverage
parallel = true
context = ${{PYTEST_CURRENT_TEST-}}
disable_warnings = no-data-collected, module-not-imported
"""


def record(arguments: Sequence[str]) -> int:
    """Run pytest, and write the record, or add to it. Return the exit status of pytest."""
    import coverage

    FOLDER.mkdir(parents=True, exist_ok=True)
    outdated = [*FOLDER.glob("coverage.*")]  # of a run that was interrupted
    if not arguments:
        outdated += [FOLDER / "coverage", FOLDER / "durations.json"]
    for path in outdated:
        path.unlink(missing_ok=True)
    configuration = FOLDER / "settings.ini"  # not coverage.ini, because combine() reads every coverage.*
    configuration.write_text(_CONFIGURATION.format(folder=FOLDER))
    environment = {**os.environ, "COVERAGE_PROCESS_START": str(configuration)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "tests.mutants.plugin", "-m", MAKE_TEST, *_SUITE_OPTIONS]
    done = subprocess.run([*command, *arguments], cwd=ROOT, env=environment, check=False)
    os.environ.pop("PYTEST_CURRENT_TEST", None)  # coverage reads it for `context`, in this process too
    measured = coverage.Coverage(config_file=str(configuration))
    measured.load()
    measured.combine([str(FOLDER)])
    return done.returncode


def current_tests() -> set[str]:
    """Return the test functions that `make test` has now. Tests of the record may have been removed or moved since."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", "-m", MAKE_TEST]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"pytest cannot collect the tests:\n{done.stdout}{done.stderr}")
    return {function_of_context(line) for line in done.stdout.splitlines() if "::" in line}


class Record:
    """The tests that run each line, and how long each takes. Only tests that `make test` still has count."""

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
        """Return the test functions to try for lines of a file: those that run one of them.

        A line that runs where a module is imported or a fixture is made belongs to no test, and a process of a loader
        is not measured. All tests that run a line of the file are tried then.

        What started processes return is often kept in a fixture, and belongs to the test that was the first to ask for
        it. The short tests of the same test file are tried, too, because they may compare it.

        The tests of the file's own name come first (`test_precision.py` for `precision.py`), then the fastest.
        """
        contexts_of_line = self._data.contexts_by_lineno(str(ROOT / file))
        contexts: set[str] = set()
        for line in lines:
            contexts.update(contexts_of_line.get(line, []))
        found = self._tests_in(contexts)
        belongs_to_no_test = "" in contexts  # coverage's name for what runs outside of test functions
        if not found or belongs_to_no_test:
            found = self._tests_in(set().union(*contexts_of_line.values()))
        stem = Path(file).stem

        def order(test: str) -> tuple[bool, float, str]:
            is_of_this_file = stem in Path(test.partition("::")[0]).stem
            return not is_of_this_file, self._durations[test], test

        return sorted(found, key=order)

    def _tests_in(self, contexts: Iterable[str]) -> set[str]:
        found: set[str] = set()
        files_with_processes: set[str] = set()
        for context in contexts:
            for part in context.split("|"):  # the static and the dynamic context of a process, as coverage joins them
                test = function_of_context(part)
                if test in self._durations:
                    found.add(test)
                    if part.endswith(")"):  # a phase, which only started processes have
                        files_with_processes.add(test.partition("::")[0])
        for test, seconds in self._durations.items():
            if seconds < _COMPARES_ONLY_S and test.partition("::")[0] in files_with_processes:
                found.add(test)
        return found

    def seconds_of(self, test: str) -> float:
        """Return how long all cases of a test function took."""
        return self._durations[test]


def function_of_context(context: str) -> str:
    """Return `tests/…/test_file.py::test_name` for a context of the record; empty if it is not a test.

    A context is the name of a case, with its parameters, and in started processes with the phase of the test:
    `tests/test_file.py::test_name[1] (call)`.
    """
    return context.partition(" (")[0].partition("[")[0]


if __name__ == "__main__":
    sys.exit(record(sys.argv[1:]))
