"""The mutants: what is changed in a file, which tests are chosen for a line, and what is reported."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.mutants import run
from tests.mutants.generate import mutants_of
from tests.mutants.record import function_of_context
from tests.mutants.run import sample

_SOURCE = b'''
def total(numbers, scale: int = 2, *, start=0):
    """Return the sum."""
    result = start
    for number in numbers:
        if number > 0 and number < 10:
            result += number * scale
    check(result)
    if not numbers:
        raise ValueError(f"{scale + 1} numbers")
    return rounded(result, scale, digits=2)
'''


def _changes(source: bytes) -> set[tuple[str, str, str]]:
    return {(mutant.kind, mutant.before, mutant.after) for mutant in mutants_of("a.py", source)}


def test_every_kind_of_mistake_is_made_where_it_can_be() -> None:
    assert _changes(_SOURCE) == {
        ("condition inverted", "number > 0 and number < 10", "(not (number > 0 and number < 10))"),
        ("condition inverted", "not numbers", "(not (not numbers))"),
        ("and/or swapped", "and", "or"),
        ("comparison changed", ">", ">="),
        ("comparison changed", "<", "<="),
        ("off by one", "0", "1"),
        ("off by one", "10", "11"),
        ("off by one", "2", "3"),
        ("assignment removed", "result += number * scale", "pass"),
        ("operator changed", "*", "//"),
        ("call removed", "check(result)", "pass"),
        ("returns nothing", "return rounded(result, scale, digits=2)", "return None"),
        ("argument dropped", ", digits=2", ""),
        ("arguments swapped", "result, scale", "scale, result"),
    }


@pytest.mark.parametrize(
    "source",
    [
        "x = f'{a + 1}'\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\n",
        "x: int\n",
        "x = '%s' % 'y'\n",
        "for a, b in zip(first, strict=True): pass\n",
        "x = max(first, second)\n",
        "_NUM_BYTES: int = 4 * 2\n",
        "x = Thread(daemon=True)\n",
        "fault_point(first, second)\n",
        "@dataclass(frozen=True)\nclass A:\n    pass\n",
    ],
)
def test_what_changes_nothing_for_a_user_is_left_alone(source: str) -> None:
    assert _changes(source.encode()) == set()


def test_a_context_of_the_record_names_its_test() -> None:
    this = "tests/mutants/test_mutants.py"
    assert function_of_context(f"{this}::test_a") == f"{this}::test_a"
    assert function_of_context(f"{this}::test_a[1-x::y] (call)") == f"{this}::test_a"
    assert function_of_context("") == ""


@pytest.mark.slow
def test_a_sample_is_determined_by_its_seed() -> None:
    files = ["trainer/schedule.py", "trainer/loop.py"]
    names = [[mutant.name for mutant in sample(files, 20, seed)] for seed in (1, 1, 2)]
    assert names[0] == names[1] != names[2]
    assert len(set(names[0])) == 20


class _Record:
    """One test for every line of every file."""

    def __init__(self, test: str) -> None:
        self.test = test

    def tests_of(self, file: str, lines: range) -> list[str]:
        return [self.test]

    def seconds_of(self, test: str) -> float:
        return 1.0


@pytest.mark.slow
@pytest.mark.parametrize(("asserts", "status"), [("total([1, 2]) == 3", "noticed"), ("total([]) == 0", "survived")])
def test_a_mutant_is_noticed_by_a_test_that_fails(asserts: str, status: str, tmp_path: Path) -> None:
    source = (
        b"def total(numbers):\n    result = 0\n    for each in numbers:\n        result += each\n    return result\n"
    )
    (tmp_path / "src").mkdir()
    (tmp_path / "code.py").write_bytes(source)
    (tmp_path / "test_code.py").write_text(f"from code import total\ndef test_total():\n    assert {asserts}\n")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (removed,) = [mutant for mutant in mutants_of("code.py", source) if mutant.kind == "assignment removed"]
    result = run.try_out(removed, _Record("test_code.py::test_total"), tmp_path)  # type: ignore[arg-type]
    assert result.status == status
    assert (result.noticed_by == "test_code.py::test_total") == (status == "noticed")
    assert (tmp_path / "code.py").read_bytes() == source
