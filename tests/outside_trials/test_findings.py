"""Every finding has its tests, and every test file a finding."""

from __future__ import annotations

from pathlib import Path

from tests.outside_trials import FINDINGS, TESTS_ELSEWHERE

ROWS = {"S": 17, "P": 32, "A": 11}


def test_every_finding_has_a_test() -> None:
    assert list(FINDINGS) == [f"{kind}{number}" for kind, last in ROWS.items() for number in range(1, last + 1)]


def test_every_file_of_tests_belongs_to_a_finding() -> None:
    here = Path(__file__).parent
    files = {f"{path.parent.name}/{path.stem}" for path in here.glob("*/test_*.py")}
    assert {file for found in FINDINGS.values() for file in found} == files


def test_every_later_finding_has_a_test_or_a_page() -> None:
    tests = Path(__file__).parents[1]
    assert list(TESTS_ELSEWHERE) == [f"T{number}" for number in range(1, 38)]
    for place in (place for found in TESTS_ELSEWHERE.values() for place in found):
        file, _, function = place.partition("::")
        path = tests.parent / file if file.startswith("docs/") else tests / file
        assert f"def {function}(" in path.read_text() if function else path.is_file(), place
