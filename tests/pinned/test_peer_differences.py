"""No difference between the interfaces of Lightning and Accelerate and ours appears without a reason."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.sources import ROOT
from tests.pinned import peer_interfaces
from tests.pinned.peer_differences import FILE, differences, reviewed


def test_every_difference_is_in_the_reviewed_list() -> None:
    listed, found = reviewed(), differences()
    assert (sorted(set(found) - set(listed)), sorted(set(listed) - set(found))) == ([], []), (
        "run python -m tests.pinned.peer_differences; mend the new ones, or list them with a reason"
    )
    assert len(listed) == len(set(listed))


def test_every_difference_has_a_reason() -> None:
    for paragraph in FILE.read_text().strip().split("\n\n"):
        assert paragraph.startswith("# "), paragraph


def test_a_missing_argument_and_another_default_are_seen(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    entry = {"arguments": {"seed": "7", "no_such": "None"}}
    text = json.dumps({"lightning.pytorch": {"seed_everything": entry, "no_such_class": entry}})
    monkeypatch.setattr("tests.pinned.peer_differences.INTERFACES", _Text(text))
    assert differences() == [
        "lightning.pytorch.seed_everything(seed=7): None here",
        "lightning.pytorch.seed_everything(no_such): not there",
        "lightning.pytorch.no_such_class: not there",
    ]


class _Text:
    def __init__(self, text: str) -> None:
        self._text = text

    def read_text(self) -> str:
        return self._text


@pytest.mark.requires("lightning", "its interface is what the list is about")
def test_the_lists_of_the_peers_are_theirs() -> None:
    # In a separate process, because other tests of this process replace accelerate by Trainwright.
    code = "import json; from tests.pinned.peer_interfaces import peer_interfaces; print(json.dumps(peer_interfaces()))"
    printed = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert json.loads(printed.splitlines()[-1]) == json.loads(peer_interfaces.FILE.read_text())
