"""Files that would take gigabytes once parsed are refused before they are parsed, with the limit named."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.resealing import reseal, resealed
from tests.checkpoint.snapshots import small_snapshot, write_small
from trainwright.checkpoint import read_checkpoint, read_safetensors, write_checkpoint
from trainwright.checkpoint.disk import untrusted
from trainwright.checkpoint.disk.untrusted import MAX_JSON_BYTES, MAX_JSON_VALUES
from trainwright.checkpoint.format.layout import MAX_MANIFEST_BYTES, sealed
from trainwright.core.errors import CheckpointError


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the lengths of what has been parsed as JSON."""
    found: list[int] = []
    loads = json.loads

    def counted(text: Any, **options: Any) -> Any:
        found.append(len(text))
        return loads(text, **options)

    monkeypatch.setattr(untrusted.json, "loads", counted)
    return found


def test_many_small_values_are_counted_before_they_are_parsed(tmp_path: Path, parsed: list[int]) -> None:
    path = write_small(tmp_path)
    (path / "trainer.json").write_bytes(b'{"progress": [' + b"[]," * (22 * 2**20) + b"[]]}")
    reseal(path)
    parsed.clear()
    with pytest.raises(CheckpointError, match=rf"trainer\.json.* more than the {MAX_JSON_VALUES} that are read"):
        read_checkpoint(path)
    assert max(parsed) < 10_000


@pytest.mark.parametrize("size", [MAX_MANIFEST_BYTES - 100, MAX_MANIFEST_BYTES + 1])
def test_a_manifest_is_not_parsed_before_its_seal_fits(size: int, tmp_path: Path, parsed: list[int]) -> None:
    path = write_small(tmp_path)
    manifest = path / "manifest.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-60] + b" " * (size - len(whole)) + whole[-60:])
    parsed.clear()
    with pytest.raises(CheckpointError, match=r"manifest\.json .*(its seal does not match|that are read)"):
        read_checkpoint(path)
    assert parsed == []


def test_a_header_of_very_many_names_is_refused_unparsed(tmp_path: Path, parsed: list[int]) -> None:
    entry = b'{"dtype":"F32","shape":[],"data_offsets":[0,0]}'
    header = b"{" + b",".join(b'"%d":%s' % (number, entry) for number in range(1_000_000)) + b"}"
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", len(header)) + header)
    with pytest.raises(CheckpointError, match=rf"more than the {MAX_JSON_VALUES} that are read"):
        read_safetensors(file)
    assert parsed == []


def test_what_is_written_can_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(untrusted, "MAX_JSON_VALUES", 1000)
    with pytest.raises(CheckpointError, match=r"trainer\.json .* more than the 1000 that are read. Save long lists as"):
        write_checkpoint(tmp_path / "a", small_snapshot(trainer={"losses": [0.5] * 2000}))
    tensors = {str(number): torch.ones(1) for number in range(500)}
    with pytest.raises(CheckpointError, match=r"more than the 1000 that are read"):
        write_checkpoint(tmp_path / "a", small_snapshot(model=tensors))
    assert not (tmp_path / "a").exists()


def test_the_limits_hold_what_large_runs_write() -> None:
    # 10,000 ranks with six files each; 140,000 tensors of optimizer state of a mixture of experts, in shards.
    files = {f"optimizer/rank-{rank:05d}.safetensors": {"size": 10**9, "xxh3_128": "0" * 32} for rank in range(60_000)}
    assert len(sealed({"parts": {"optimizer": {"files": files}}})) < MAX_MANIFEST_BYTES
    name = "optimizer-00000.state.model.layers.00.mlp.experts.000.gate_proj.weight.exp_avg_sq"
    piece = {
        "tensor": name,
        "stored": name,
        "dtype": "BF16",
        "shape": [2048, 7168],
        "offsets": [0, 0],
        "lengths": [256, 7168],
    }
    data = untrusted.dump_json({"pieces": [piece] * 140_000}).encode()
    untrusted.check_json_size(data, "rank-00000.json")
    assert len(data) < MAX_JSON_BYTES / 2


def test_a_newer_manifest_is_told_by_its_version_whatever_its_seal(tmp_path: Path) -> None:
    path = write_small(tmp_path)
    text = (path / "manifest.json").read_text().replace('"format_version": 1', '"format_version": 99')
    for data in (text.encode(), resealed(text)):
        (path / "manifest.json").write_bytes(data)
        with pytest.raises(CheckpointError, match="newer than"):
            read_checkpoint(path)
