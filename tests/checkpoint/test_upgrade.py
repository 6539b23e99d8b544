"""Checkpoints of older versions are read; those of newer ones are refused."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint import format_reader
from tests.checkpoint.cutting import write_in_pieces
from tests.checkpoint.every_kind import every_kind
from tests.checkpoint.snapshots import same
from trainwright.checkpoint import (
    NewerFormatError,
    RunIndex,
    newest_valid,
    read_checkpoint,
    read_manifest,
    verify,
    write_checkpoint,
)
from trainwright.checkpoint.format import layout
from trainwright.core.errors import CheckpointError

DATA = Path(__file__).parent / "data"
VERSIONS = sorted(DATA.glob("format-*"), key=lambda path: int(path.name.removeprefix("format-")))


def test_a_checkpoint_of_every_version_is_kept() -> None:
    assert [path.name for path in VERSIONS] == [f"format-{n}" for n in range(1, layout.FORMAT_VERSION + 1)]


def test_every_older_version_has_an_upgrade() -> None:
    assert set(layout.UPGRADES) == set(range(1, layout.FORMAT_VERSION))


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_a_stored_checkpoint_is_read_to_the_values_that_were_saved(folder: Path) -> None:
    assert verify(folder / "step=12") == []
    back, expected = read_checkpoint(folder / "step=12"), every_kind()
    assert same(back.state, expected.state)
    assert same(back.trainer, expected.trainer)
    assert same(back.optimizers, expected.optimizers)
    assert same(back.rng, expected.rng)
    assert same(back.metrics, expected.metrics)
    model = dict(expected.model or {})
    assert back.model is not None
    assert set(back.model) == set(model)
    for name, value in model.items():
        assert same(back.model[name], value), name
    assert back.model["head.weight"] is back.model["embed.weight"]


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_a_stored_index_is_read(folder: Path) -> None:
    (entry,) = RunIndex(folder, run="0123456789abcdef").entries()
    assert (entry.name, entry.step, entry.kind, entry.metrics["loss"]) == ("step=12", 12, "full", 0.1)


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_a_stored_checkpoint_is_read_by_a_reader_of_the_document(folder: Path) -> None:
    assert format_reader.read(folder / "step=12")["trainer"]["progress"]["step"] == 12


def test_whole_tensors_and_indices_are_written_so_that_readers_of_the_first_version_read_them(tmp_path: Path) -> None:
    assert read_manifest(write_checkpoint(tmp_path / "whole", every_kind())).format_version == 1
    RunIndex(tmp_path, run="a").add(tmp_path / "whole")
    assert '"format_version": 1,' in (tmp_path / "index.json").read_text()
    assert read_manifest(write_in_pieces(tmp_path / "pieces", every_kind())).format_version == 2


def test_a_reader_of_the_first_version_refuses_pieces_as_newer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_in_pieces(tmp_path / "pieces", every_kind())
    monkeypatch.setattr(layout, "FORMAT_VERSION", 1)
    with pytest.raises(NewerFormatError, match="format_version=2 is newer than 1"):
        read_checkpoint(path)


def _from_one_to_two(trees: dict[str, Any]) -> dict[str, Any]:
    """An invented version: steps are called differently, and the optimizers' names are in upper case."""
    found = dict(trees)
    if "manifest" in found:
        found["manifest"] = {**found["manifest"], "step": found["manifest"]["step"] + 100}
    if "trainer" in found:
        progress = {**found["trainer"]["progress"], "step": 112}
        found["trainer"] = {**found["trainer"], "progress": progress}
    if "optimizer" in found:
        found["optimizer"] = [{**tree, "class": tree["class"].upper()} for tree in found["optimizer"]]
    if "model" in found:
        found["model"] = {f"renamed.{name}": value for name, value in found["model"].items()}
    if "rng" in found:
        found["rng"] = found["rng"][:1]
    if "index" in found:
        entries = [{**entry, "run": "another"} for entry in found["index"]["checkpoints"]]
        found["index"] = {**found["index"], "checkpoints": entries}
    return found


@pytest.fixture
def two_versions_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Be a Trainwright two versions on, whose second change concerns the trainer part only."""

    def from_two_to_three(trees: dict[str, Any]) -> dict[str, Any]:
        return {**trees, "trainer": {**trees["trainer"], "new": True}} if "trainer" in trees else trees

    monkeypatch.setattr(layout, "FORMAT_VERSION", 3)
    monkeypatch.setattr(layout, "UPGRADES", {1: _from_one_to_two, 2: from_two_to_three})


@pytest.mark.usefixtures("two_versions_on")
def test_everything_of_an_older_version_goes_through_all_upgrades_in_order() -> None:
    folder = DATA / "format-1"
    manifest = read_manifest(folder / "step=12")
    assert (manifest.step, manifest.format_version) == (112, 1)
    back = read_checkpoint(folder / "step=12")
    assert back.state["step"] == 112
    assert back.trainer["new"] is True
    assert [tree["class"] for tree in back.optimizers] == ["ADAM", "SGD"]
    assert len(back.rng) == 1
    assert "renamed.scale" in (back.model or {})
    assert newest_valid(folder) == folder / "step=12"
    assert [entry.name for entry in RunIndex(folder, run="another").entries()] == ["step=12"]


@pytest.mark.usefixtures("two_versions_on")
def test_an_upgrade_is_given_the_parts_that_were_asked_for() -> None:
    back = read_checkpoint(DATA / "format-1" / "step=12", parts=["model"])
    assert "renamed.scale" in (back.model or {})
    assert (back.state, back.optimizers) == ({}, [])


def test_a_version_without_a_way_to_today_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "UPGRADES", {})
    with pytest.raises(CheckpointError, match="format_version=1 is older than this Trainwright can read"):
        read_manifest(DATA / "format-1" / "step=12")


def test_a_newer_version_is_told_apart_from_damage(tmp_path: Path) -> None:
    folder = shutil.copytree(DATA / "format-1", tmp_path / "run")
    manifest = folder / "step=12" / "manifest.json"
    newer = layout.FORMAT_VERSION + 1
    manifest.write_text(manifest.read_text().replace('"format_version": 1', f'"format_version": {newer}'))
    for read in (read_manifest, read_checkpoint):
        with pytest.raises(NewerFormatError, match="pip install -U trainwright"):
            read(folder / "step=12")
    with pytest.raises(NewerFormatError):
        newest_valid(folder)
