"""What a file's tensors come to is bounded by the file; an error of writing is one line."""

from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

from trainwright.checkpoint import read_checkpoint, read_safetensors
from trainwright.checkpoint.interop.convert import convert_checkpoint
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.cli.main import main
from trainwright.core.errors import CheckpointError


@pytest.mark.parametrize("shape", [(750_000_000,), (2**40,), (2**20, 2**20), (2**61, 2**61)])
def test_an_expanded_tensor_is_not_made_large(
    shape: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.pt"
    torch.save({"w": torch.ones(1).expand(1, *([1] * len(shape)))[0]}, path)
    _set_sizes(path, shape)
    assert path.stat().st_size < 2000
    assert main(["checkpoint", "convert", str(path), str(tmp_path / "made")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["x.pt"]


def _set_sizes(path: Path, shape: tuple[int, ...]) -> None:
    """Put other sizes into the pickle of one tensor of ones, all with the stride 0."""
    with zipfile.ZipFile(path) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    name = next(name for name in entries if name.endswith("data.pkl"))
    sizes = b"(" + b"".join(b"\x8a\x09" + size.to_bytes(9, "little") for size in shape) + b"t"
    strides = b"(" + b"K\x00" * len(shape) + b"t"
    old = b"(" + b"K\x01" * len(shape) + b"t" if len(shape) > 3 else b"K\x01" * len(shape) + bytes([0x84 + len(shape)])
    code = entries[name]
    begin = code.index(b"K\x00" + old) + 2
    end = code.index(b"\x89", begin)  # requires_grad
    entries[name] = code[:begin] + sizes + strides + code[end:]
    with zipfile.ZipFile(path, "w") as archive:
        for entry, data in entries.items():
            archive.writestr(entry, data)


def test_expanded_tensors_of_ordinary_size_are_read(tmp_path: Path) -> None:
    torch.save({"mask": torch.ones(1).expand(1000, 10), "ids": torch.arange(8).expand(1, -1)}, tmp_path / "x.pt")
    convert_checkpoint(tmp_path / "x.pt", tmp_path / "made")
    model = read_checkpoint(tmp_path / "made").model
    assert model is not None
    assert model["mask"].shape == (1000, 10)


def test_an_inflated_storage_is_bounded(tmp_path: Path) -> None:
    torch.save({"w": torch.zeros(30_000_000)}, tmp_path / "plain.pt")
    with (
        zipfile.ZipFile(tmp_path / "plain.pt") as archive,
        zipfile.ZipFile(tmp_path / "x.pt", "w", zipfile.ZIP_DEFLATED) as small,
    ):
        for name in archive.namelist():
            small.writestr(name, archive.read(name))
    with pytest.raises(CheckpointError, match="tensors have more than"):
        read_torch_file(tmp_path / "x.pt")


def test_no_room_for_a_conversion_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trainwright.checkpoint.format.writer.write_files", full)
    assert main(["checkpoint", "convert", str(tmp_path / "x.pt"), str(tmp_path / "made")]) == 2
    error = capsys.readouterr().err
    assert "cannot be written" in error
    assert "No space left" in error
    assert error.count("\n") == 1
    assert sorted(os.listdir(tmp_path)) == ["x.pt"]


@pytest.mark.parametrize("command", ["convert", "export", "merge"])
def test_a_target_below_a_file_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "model.safetensors"
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    convert_checkpoint(tmp_path / "x.pt", tmp_path / "run")
    (tmp_path / "file").write_text("x")
    given = tmp_path / "x.pt" if command == "convert" else tmp_path / "run"
    assert main(["checkpoint", command, str(given), str(tmp_path / "file" / "made")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert not source.exists()
    assert read_safetensors(tmp_path / "run" / "model" / "model-00001-of-00001.safetensors")["w"].shape == (2,)
