"""The fake run answers everything that the protocol names, so that a test of a callback says something."""

from __future__ import annotations

from pathlib import Path

from tests.callbacks.fake_run import FakeRun
from trainwright.core.run import Run


def test_the_fake_run_has_every_member_of_the_protocol(tmp_path: Path) -> None:
    run: Run = FakeRun([], tmp_path)  # type: ignore[assignment]  # plain attributes stand for properties
    members = {*Run.__annotations__, *(name for name in vars(Run) if not name.startswith("_"))}
    assert {name for name in members if not hasattr(run, name)} == set()
