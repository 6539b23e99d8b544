"""A small pickle that shares its containers takes bounded work."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path

import pytest
import torch

from trainwright.bigmodels.weights.stored_weights import read_checkpoint as read_weights
from trainwright.checkpoint.interop import pickle_parser
from trainwright.checkpoint.interop.convert import ConvertOptions, convert_checkpoint
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.core.errors import CheckpointError

LEVELS = 100
_DOUBLE = b"q\x00h\x00\x86"  # remember the top, put it there once more, and make a tuple of both
CASES = {
    "a tuple that shares itself": b"\x80\x02)" + _DOUBLE * LEVELS + b".",
    "a list that shares itself": b"\x80\x02]" + b"q\x00]h\x00ah\x00a" * LEVELS + b".",
    "such a tuple as a key": b"\x80\x02})" + _DOUBLE * LEVELS + b"Ns.",
    "such a tuple in a set": b"\x80\x04\x8f()" + _DOUBLE * LEVELS + b"\x90.",
    "such a tuple in a frozen set": b"\x80\x04()" + _DOUBLE * LEVELS + b"\x91.",
    "such a tuple as a path": b"\x80\x02cpathlib\nPosixPath\n)" + _DOUBLE * LEVELS + b"\x85R.",
    "such a tuple as a key of an ordered dict": (
        b"\x80\x02ccollections\nOrderedDict\n](" + b")" + _DOUBLE * LEVELS + b"N\x86ae\x85R."
    ),
    "such a tuple as a shape": b"\x80\x02ctorch\nSize\n)" + _DOUBLE * LEVELS + b"\x85R.",
    "a list that holds itself": b"\x80\x02]q\x00h\x00a.",
    "a memo of gigabytes": b"\x80\x02Nr\xff\xff\xff\x7fr\x00\x00\x00\x10\x96" + b"\xff" * 7 + b"\x00.",
    "an array of gigabytes": b"\x80\x05\x96" + (2**40).to_bytes(8, "little") + b".",
    "text of gigabytes": b"\x80\x05\x8d" + (2**40).to_bytes(8, "little") + b".",
}


def archive(path: Path, code: bytes) -> Path:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("archive/data.pkl", code)
    return path


def former(path: Path, code: bytes) -> Path:
    """Put a pickle in the place of the tree of a file from before torch 1.6."""
    facts = {"protocol_version": 1001, "little_endian": True, "type_sizes": {}}
    head = b"".join(pickle.dumps(value, 2) for value in (0x1950A86A20F9469CFC6C, 1001, facts))
    path.write_bytes(head + code + pickle.dumps([], 2))
    return path


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("write", [archive, former])
def test_it_is_refused_at_once(name: str, write: object, tmp_path: Path) -> None:
    path = write(tmp_path / "x.pt", CASES[name])  # type: ignore[operator]
    assert path.stat().st_size < 3000
    for read in (read_torch_file, read_weights):
        with pytest.raises(CheckpointError, match=r"x\.pt"):
            read(path)  # type: ignore[operator]
    for drop in (False, True):
        with pytest.raises(CheckpointError, match=r"x\.pt"):
            convert_checkpoint(path, tmp_path / "made", ConvertOptions(drop_unknown=drop))
    assert not (tmp_path / "made").exists()


def test_containers_that_are_shared_stay_one_object_and_are_interpreted_once(tmp_path: Path) -> None:
    shared = [1, (2, torch.ones(1))]
    torch.save({"a": shared, "b": shared, "c": [shared] * 3}, tmp_path / "x.pt")
    found, _ = read_torch_file(tmp_path / "x.pt")
    assert found["a"] is found["b"] is found["c"][2]
    assert found["a"][1][1].item() == 1


def test_a_pickle_of_too_many_operations_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_parser, "MAX_OPERATIONS", 1000)
    path = archive(tmp_path / "x.pt", b"\x80\x02" + b"]" * 2000 + b".")
    with pytest.raises(CheckpointError, match="more than 1000 operations"):
        read_torch_file(path)
