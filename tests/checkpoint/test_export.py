from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.checkpoint.snapshots import same
from trainwright.checkpoint import Snapshot, write_checkpoint
from trainwright.checkpoint.interop.export import export_weights
from trainwright.core.errors import CheckpointError

STATE = {
    "embed.weight": torch.randn(7, 3),
    "half": torch.randn(4).half(),
    "wide": torch.randn(2, 2, dtype=torch.float64),
    "count": torch.tensor(3),
    "mask": torch.tensor([True, False]),
    "small": torch.randn(4).to(torch.float8_e4m3fn),
    "empty": torch.empty(0, 2),
}


def _checkpoint(folder: Path, state: dict[str, object], *, max_shard_bytes: int = 64) -> Path:
    snapshot = Snapshot(model=state, kind="weights")
    return write_checkpoint(folder / "ckpt", snapshot, max_shard_bytes=max_shard_bytes)


def test_shards_have_an_index_that_names_every_tensor(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path, dict(STATE))
    exported = export_weights(source, tmp_path / "out", layout="sharded", max_shard_bytes=60)
    assert len(exported.files) > 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"]) == set(STATE)
    assert index["metadata"]["total_size"] == exported.num_bytes
    for name, file in index["weight_map"].items():
        assert same(load_file(tmp_path / "out" / file)[name], STATE[name])
    assert {tmp_path / "out" / file for file in index["weight_map"].values()} == set(exported.files[:-1])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_dtype_is_for_floating_point_numbers_wider_than_a_byte(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    export_weights(_checkpoint(tmp_path, dict(STATE)), tmp_path / "out.safetensors", dtype=name)
    loaded = load_file(tmp_path / "out.safetensors")
    for key in ("embed.weight", "half", "wide", "empty"):
        assert same(loaded[key], STATE[key].to(dtype))
    for key in ("count", "mask", "small"):
        assert same(loaded[key], STATE[key])


@pytest.mark.parametrize("layout", ["single", "sharded"])
def test_nothing_is_replaced_and_nothing_is_left_of_a_failure(
    layout: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = _checkpoint(tmp_path, dict(STATE))
    (tmp_path / "taken").touch()
    with pytest.raises(CheckpointError, match="exists"):
        export_weights(source, tmp_path / "taken", layout=layout)  # type: ignore[arg-type]

    def fail(*_: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("trainwright.checkpoint.interop.export._converted", fail)
    with pytest.raises(OSError, match="no space left"):
        export_weights(source, tmp_path / "out", layout=layout)  # type: ignore[arg-type]
    assert {entry.name for entry in tmp_path.iterdir()} == {"ckpt", "taken"}


def test_a_dtype_that_the_format_cannot_say_is_an_error(tmp_path: Path) -> None:
    source = _checkpoint(tmp_path, {"c": torch.ones(2, dtype=torch.complex128)})
    with pytest.raises(CheckpointError, match=r"'c' is torch\.complex128"):
        export_weights(source, tmp_path / "out.safetensors")
    assert [entry.name for entry in tmp_path.iterdir()] == ["ckpt"]
