"""Manifests: sealed, relative, of a known version."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.resealing import resealed
from trainwright.checkpoint.disk.durable import FileEntry
from trainwright.checkpoint.disk.untrusted import check_relative, inside, load_json
from trainwright.checkpoint.format.layout import FORMAT_VERSION, Manifest, Part, numbered
from trainwright.core.errors import CheckpointError

_MANIFEST = Manifest(
    step=12,
    epoch=1,
    created="2026-01-01T00:00:00.000000+00:00",
    kind="full",
    parts={"model": Part({"model/a.safetensors": FileEntry(3, "ab" * 16)}), "rng": Part({}, required=False)},
    topology={"world_size": 4},
    versions={"torch": "2"},
    metrics={"loss": 0.1, "bad": math.inf},
)


def test_a_manifest_comes_back_equal() -> None:
    assert Manifest.from_bytes(_MANIFEST.to_bytes(), "m") == _MANIFEST


def test_a_manifest_keeps_a_nan_metric_in_valid_json() -> None:
    manifest = Manifest(1, 0, "2026-01-01T00:00:00+00:00", "weights", {}, metrics={"loss": math.nan})
    assert math.isnan(Manifest.from_bytes(manifest.to_bytes(), "m").metrics["loss"])


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    data = _MANIFEST.to_bytes()
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 1 << (index % 8)
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(bytes(damaged), "m")


def test_a_manifest_cut_short_anywhere_is_noticed() -> None:
    data = _MANIFEST.to_bytes()
    for length in range(len(data)):
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(data[:length], "m")


def test_a_newer_format_is_refused_with_the_way_to_upgrade() -> None:
    text = _MANIFEST.to_bytes().decode().replace('"format_version": 1', f'"format_version": {FORMAT_VERSION + 1}')
    with pytest.raises(CheckpointError, match=rf"newer than {FORMAT_VERSION}.*pip install -U trainwright"):
        Manifest.from_bytes(resealed(text), "m")


@pytest.mark.parametrize("version", ["true", "0", '"1"', "null", "1.5"])
def test_a_format_version_that_is_no_version_is_refused(version: str) -> None:
    text = _MANIFEST.to_bytes().decode().replace('"format_version": 1', f'"format_version": {version}')
    with pytest.raises(CheckpointError, match="format_version"):
        Manifest.from_bytes(resealed(text), "m")


@pytest.mark.parametrize(
    "path", ["../a", "a/../../b", "/etc/passwd", "a//b", "./a", "a/.", "", "c:/x", "a\\b", "a\0b", "a/"]
)
def test_a_manifest_that_points_outside_its_folder_is_refused(path: str) -> None:
    manifest = Manifest(1, 0, "now", "full", {"model": Part({path: FileEntry(1, "")})})
    with pytest.raises(CheckpointError, match=r"manifest\.json names"):
        Manifest.from_bytes(manifest.to_bytes(), "m")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"kind": "full"', '"kind": "other"'), ('"parts": {', '"other": {'), ('"step": 12', '"step": null'),
     ('"files": {', '"filed": {'), ('"size": 3', '"size": "x"')],
)  # fmt: skip
def test_a_sealed_manifest_of_the_wrong_form_is_a_checkpoint_error(old: str, new: str) -> None:
    text = _MANIFEST.to_bytes().decode()
    assert old in text
    with pytest.raises(CheckpointError, match="not a manifest of format 1"):
        Manifest.from_bytes(resealed(text.replace(old, new)), "m")


@pytest.mark.parametrize("text", ['{"a": 1, "a": 2}', '[{"b": {"a": 1, "a": 1}}]'])
def test_a_key_that_stands_twice_is_refused(text: str) -> None:
    with pytest.raises(CheckpointError, match="'a' twice"):
        load_json(text.encode(), "file")


@pytest.mark.parametrize("data", [b"", b"{", b"\xff{}", b"NaN", b"[1e400, Infinity]", b"[" * 100_000, b"\x80\x04\x95"])
def test_what_is_not_strict_json_is_a_checkpoint_error(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        load_json(data, "file")


@given(st.lists(st.text("ab.-_0", min_size=1, max_size=5), min_size=1, max_size=4))
def test_a_relative_path_is_accepted_exactly_if_no_step_of_it_is_a_dot_or_two(steps: list[str]) -> None:
    path = "/".join(steps)
    if {".", ".."} & set(steps):
        with pytest.raises(CheckpointError):
            check_relative(path, "test")
    else:
        assert check_relative(path, "test") == path


def test_a_link_out_of_the_folder_is_refused_and_one_within_is_followed(tmp_path: Path) -> None:
    folder = tmp_path / "inner"
    folder.mkdir()
    (tmp_path / "secret").write_text("x")
    (folder / "real").write_text("x")
    (folder / "out").symlink_to(tmp_path / "secret")
    (folder / "within").symlink_to("real")
    assert inside(folder, "within", "test").read_text() == "x"
    with pytest.raises(CheckpointError, match="a link to"):
        inside(folder, "out", "test")


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        (["rng/rank-00001.json", "rng/rank-00000.json", "rng/rank-00000.safetensors"], 2),
        (["rng/rank-00001.json"], None),
        ([], 0),
    ],
)
def test_numbered_files_are_counted_from_zero_without_gaps(files: Any, expected: int | None) -> None:
    if expected is None:
        with pytest.raises(CheckpointError, match="expected 0 to 0"):
            numbered(files, "rng", "rank")
    else:
        assert numbered(files, "rng", "rank") == [f"rng/rank-{number:05d}" for number in range(expected)]
