from __future__ import annotations

import os
import zipfile
from pathlib import Path

import pytest
import torch

from tests.checkpoint.test_torch_file import rewritten, tensor_pickle
from trainwright.bigmodels.weights.stored_weights import read_checkpoint as read_weights
from trainwright.checkpoint import read_safetensors
from trainwright.checkpoint.interop.convert import ConvertOptions, convert_checkpoint
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.cli.main import main
from trainwright.core.errors import CheckpointError

LEVELS = 100
_DOUBLE = b"q\x00h\x00\x86"  # remember the top, put it there once more, and make a tuple of both
CASES = {
    "a tuple that shares itself": b"\x80\x02)" + _DOUBLE * LEVELS + b".",
    "a list that shares itself": b"\x80\x02]" + b"q\x00]h\x00ah\x00a" * LEVELS + b".",
    "such a tuple as a key": b"\x80\x02})" + _DOUBLE * LEVELS + b"Ns.",
    "a list that holds itself": b"\x80\x02]q\x00h\x00a.",
    "a memo of gigabytes": b"\x80\x02Nr\xff\xff\xff\x7fr\x00\x00\x00\x10\x96" + b"\xff" * 7 + b"\x00.",
    "an array of gigabytes": b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",
}


def archive(path: Path, code: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", code)
    return path


@pytest.mark.parametrize("name", CASES)
def test_a_pickle_with_shared_containers_is_an_error_at_once(name: str, tmp_path: Path) -> None:
    path = archive(tmp_path / "x.pt", CASES[name])
    for read in (read_torch_file, read_weights):
        with pytest.raises(CheckpointError, match=r"x\.pt"):
            read(path)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match=r"x\.pt"):
        convert_checkpoint(path, tmp_path / "made", ConvertOptions(drop_unknown=True))


@pytest.mark.parametrize("shape", [(750_000_000,), (2**61, 2**61)])
def test_an_expanded_tensor_is_not_made_large(
    shape: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = rewritten(tmp_path / "x.pt", tensor_pickle(0, shape, (0,) * len(shape), 1), {"0": bytes(4)})
    assert main(["checkpoint", "convert", str(path), str(tmp_path / "made")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert os.listdir(tmp_path) == ["x.pt"]


@pytest.mark.parametrize("command", ["convert", "export", "merge"])
def test_a_target_below_a_file_is_an_error_of_one_line(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "x.pt")
    convert_checkpoint(tmp_path / "x.pt", tmp_path / "run")
    (tmp_path / "file").write_text("x")
    given = tmp_path / "x.pt" if command == "convert" else tmp_path / "run"
    assert main(["checkpoint", command, str(given), str(tmp_path / "file" / "made")]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    assert read_safetensors(tmp_path / "run" / "model" / "model-00001-of-00001.safetensors")["w"].shape == (2,)
