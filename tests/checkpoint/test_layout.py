from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.checkpoint.every_kind import every_kind
from tests.checkpoint.resealing import resealed
from tests.checkpoint.snapshots import same
from trainwright.checkpoint import RunIndex, read_checkpoint, verify
from trainwright.checkpoint.disk.durable import FileEntry
from trainwright.checkpoint.disk.untrusted import load_json
from trainwright.checkpoint.format import layout
from trainwright.checkpoint.format.layout import Manifest, Part
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
    manifest = Manifest(1, 0, "2026-01-01T00:00:00+00:00", "weights", {}, metrics={"loss": math.nan})
    assert math.isnan(Manifest.from_bytes(manifest.to_bytes(), "m").metrics["loss"])


def test_every_flipped_bit_of_a_manifest_is_noticed() -> None:
    data = _MANIFEST.to_bytes()
    for index in range(len(data)):
        damaged = bytearray(data)
        damaged[index] ^= 1 << (index % 8)
        with pytest.raises(CheckpointError):
            Manifest.from_bytes(bytes(damaged), "m")


@pytest.mark.parametrize("path", ["a/../../b", "/etc/passwd", "a//b", "", "c:/x", "a\\b", "a\0b"])
def test_a_manifest_that_points_outside_its_folder_is_refused(path: str) -> None:
    manifest = Manifest(1, 0, "now", "full", {"model": Part({path: FileEntry(1, "")})})
    with pytest.raises(CheckpointError, match=r"manifest\.json names"):
        Manifest.from_bytes(manifest.to_bytes(), "m")


@pytest.mark.parametrize(
    ("old", "new"),
    [('"kind": "full"', '"kind": "other"'), ('"parts": {', '"other": {'), ('"step": 12', '"step": null')],
)
def test_a_sealed_manifest_of_the_wrong_form_is_a_checkpoint_error(old: str, new: str) -> None:
    text = _MANIFEST.to_bytes().decode()
    assert old in text
    with pytest.raises(CheckpointError, match="not a manifest of format 1"):
        Manifest.from_bytes(resealed(text.replace(old, new)), "m")


@pytest.mark.parametrize("data", [b'[{"b": {"a": 1, "a": 1}}]', b"{", b"\xff{}", b"[NaN]", b"[" * 100_000])
def test_what_is_not_strict_json_is_a_checkpoint_error(data: bytes) -> None:
    with pytest.raises(CheckpointError):
        load_json(data, "file")


DATA = Path(__file__).parent / "data"
VERSIONS = sorted(DATA.glob("format-*"), key=lambda path: int(path.name.removeprefix("format-")))


def test_a_checkpoint_of_every_version_is_kept_and_every_older_one_has_an_upgrade() -> None:
    assert [path.name for path in VERSIONS] == [f"format-{n}" for n in range(1, layout.FORMAT_VERSION + 1)]
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


def test_checkpoints_stay_in_order_if_the_clock_is_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "_newest", "2999-12-31T23:59:59.999999+00:00")
    assert [layout.next_moment() for _ in range(2)] == [f"3000-01-01T00:00:00.00000{n}+00:00" for n in range(2)]


@pytest.mark.parametrize("folder", VERSIONS, ids=lambda path: path.name)
def test_a_stored_index_is_read(folder: Path) -> None:
    (entry,) = RunIndex(folder, run="0123456789abcdef").entries()
    assert (entry.name, entry.step, entry.kind, entry.metrics["loss"]) == ("step=12", 12, "full", 0.1)
