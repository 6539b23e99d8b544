"""No public name, member or argument changes without a line in the list that is kept of them."""

from __future__ import annotations

import inspect
import json
import re
from inspect import Parameter
from typing import Any

import pytest
from docs.site import arguments_page

from tests.pinned.public_names import FILE, public_names
from trainwright.callbacks import CALLBACKS
from trainwright.core.registry import Registry
from trainwright.loggers import LOGGERS
from trainwright.strategies import STRATEGIES


def test_public_names_and_signatures_are_those_of_the_list() -> None:
    listed = json.loads(FILE.read_text())
    found = public_names()
    gone = {name: entry for name, entry in listed.items() if found.get(name) != entry}
    new = {name: entry for name, entry in found.items() if listed.get(name) != entry}
    assert (new, gone) == ({}, {}), "run python -m tests.pinned.public_names, and tell users in CHANGELOG.md"


@pytest.mark.parametrize("name", arguments_page.pages())
def test_the_pages_of_arguments_are_those_of_the_docstrings(name: str) -> None:
    assert (arguments_page.FOLDER / name).read_text() == arguments_page.pages()[name], (
        "run python -m docs.site.arguments_page"
    )


@pytest.mark.parametrize("registry", [CALLBACKS, LOGGERS, STRATEGIES])
def test_the_pages_document_every_argument_of_what_has_a_short_name(registry: Registry[Any]) -> None:
    for name in registry:
        cls = registry.get(name)
        if inspect.isclass(cls):
            names = " ".join(row.split(" | ")[0] for row in arguments_page.arguments_table(cls))
            documented = set(re.findall(r"`(\w+)`", names))
            kinds = {one.name: one.kind for one in inspect.signature(cls).parameters.values()}
            further = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
            named = {one for one, kind in kinds.items() if kind not in further}
            assert named <= documented, name
