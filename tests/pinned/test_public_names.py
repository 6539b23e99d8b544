"""No public name, member or argument changes without a line in the list that is kept of them."""

from __future__ import annotations

import json

from tests.pinned import arguments_page
from tests.pinned.public_names import FILE, public_names


def test_public_names_and_signatures_are_those_of_the_list() -> None:
    listed = json.loads(FILE.read_text())
    found = public_names()
    gone = {name: entry for name, entry in listed.items() if found.get(name) != entry}
    new = {name: entry for name, entry in found.items() if listed.get(name) != entry}
    assert (new, gone) == ({}, {}), "run python -m tests.pinned.public_names, and tell users in CHANGELOG.md"


def test_the_list_sees_arguments_and_members() -> None:
    trainer = json.loads(FILE.read_text())["trainwright.Trainer"]
    assert "max_epochs" in trainer["()"]
    assert "ckpt_path" in trainer["fit"]
    assert trainer["callback_metrics"] == "property"


def test_the_page_of_arguments_is_that_of_the_docstrings() -> None:
    assert arguments_page.FILE.read_text() == arguments_page.arguments_page(), (
        "run python -m tests.pinned.arguments_page"
    )
