"""The package and its pages are written in the field's words: dialect is counted per 1,000 words of prose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.helpers import word_rules
from tests.helpers.sources import PARTS, ROOT, Source, package_sources
from tests.helpers.word_rules import Count, Passage

SOURCES = package_sources()
PAGES = [ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]

WANTED = 1.0
# What a folder or a page reaches today where that is not WANTED yet: it only sinks.
ALLOWED: dict[str, float] = {}
# Phrases with a counted word in a plain meaning, each with that meaning.
EXCUSED: dict[str, str] = {}


def _folder(part: str) -> Count:
    found = (passage for source in SOURCES if source.part == part for passage in word_rules.passages(source))
    return word_rules.count(found, EXCUSED)


def _name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def _expect_plain(name: str, found: Count) -> None:
    allowed = ALLOWED.get(name, WANTED)
    if found.per_thousand > allowed:
        said = f"{name}: {found.per_thousand:.2f} per 1,000 words, {allowed} are allowed. Write instead:"
        pytest.fail("\n".join([said, *found.found]), pytrace=False)


@pytest.mark.parametrize("part", PARTS)
def test_a_folder_is_written_in_the_fields_words(part: str) -> None:
    _expect_plain(part, _folder(part))


@pytest.mark.parametrize("path", PAGES, ids=_name)
def test_a_page_is_written_in_the_fields_words(path: Path) -> None:
    name = _name(path)
    text = path.read_text(encoding="utf-8")
    _expect_plain(name, word_rules.count(word_rules.page_passages(name, text), EXCUSED))


def test_what_is_allowed_is_not_reached_yet() -> None:
    assert {name: rate for name, rate in ALLOWED.items() if rate <= WANTED} == {}


def _offences(text: str) -> list[str]:
    return word_rules.count(word_rules.passages(Source("trainwright.core.x", text)), EXCUSED).found


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ('"""Return the pieces of a model."""', "piece"),
        ('"""Load what is\ncut."""', "cut"),
        ("# a tensor that is taken\n# apart", "taken apart"),
        ('x = f"pass {y} that is whole"', "whole"),
        ('"""Return the length; 2 unless told."""', "unless told"),
        ('"""What becomes of a model when a stage is over."""', "begins with 'What'"),
        ('"""Whether it is done."""', "begins with 'Whether'"),
        ('"""Raise for what is no task."""', "is no"),
        ("y = 1  # stands at the first step", "stand"),
    ],
)
def test_dialect_is_caught(text: str, name: str) -> None:
    (found,) = _offences(text)
    assert name in found


@pytest.mark.parametrize(
    "text",
    [
        '"""Return the shards of a model, or its full state; a whole number."""',
        '"""Say that there is no folder, and `whole` no longer."""',
        "pieces = whole = anew = 1",
        'x = "is cut"',
    ],
)
def test_plain_text_and_names_are_not_counted(text: str) -> None:
    assert _offences(text) == []


def test_a_page_is_counted_without_its_code() -> None:
    text = "# Title\n\n```python\nwhole = 1  # in pieces\n```\n\nThe `whole` model\nstands in\nits place.\n"
    found: Iterator[Passage] = word_rules.page_passages("docs/x.md", text)
    assert [line.partition("'")[0] for line in word_rules.count(found).found] == ["docs/x.md:7: "] * 2
