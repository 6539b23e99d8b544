from __future__ import annotations

import io
import pathlib
import pickle
import zipfile
from collections import Counter, OrderedDict, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.checkpoint.foreign import Evil
from tests.checkpoint.snapshots import same
from trainwright.checkpoint.interop.pickle_parser import Placeholder
from trainwright.checkpoint.interop.torch_file import read_torch_file
from trainwright.core.errors import CheckpointError


def rewritten(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None) -> Path:
    """Write an archive of torch's layout with a pickle of our own."""
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickled)
        archive.writestr("archive/version", "3\n")
        archive.writestr("archive/byteorder", "little")
        for key, data in (storages or {}).items():
            archive.writestr(f"archive/data/{key}", data)
    return path


@pytest.mark.parametrize(
    "tree",
    [
        {"a": 1, "b": [1.5, None, True, "text"], "c": (1, 2), "d": {3, 4}, "e": b"\xff\x00", "f": 2**80, "g": 1 + 2j},
        {"size": torch.Size([2, 3]), "dtype": torch.bfloat16, "device": torch.device("cpu"), "empty": b""},
        {"path": pathlib.Path("a/b"), "counter": Counter({3: 1}), "default": defaultdict(int, {1: 2})},
        {"scalar": np.float64(0.1), "array": np.arange(6, dtype=np.int16).reshape(2, 3), "big": np.ones(2, ">f4")},
        {"transposed": np.asfortranarray(np.arange(6.0).reshape(2, 3))},
    ],
)
def test_plain_data_comes_back_as_it_was(tree: Any, tmp_path: Path) -> None:
    torch.save(tree, tmp_path / "x.pt")
    read, unknown = read_torch_file(tmp_path / "x.pt")
    assert unknown == []
    assert same(read, tree)


@pytest.mark.parametrize("protocol", [0, 1, 2, 4, 5])
def test_containers_of_every_pickle_protocol_come_back(protocol: int, tmp_path: Path) -> None:
    tree = {"before": [1], "set": {1, 2}, "frozen": frozenset({3, (4, 5)}), "dict": {1: "a", "b": 2}, "after": (6,)}
    torch.save(tree, tmp_path / "x.pt", pickle_protocol=protocol)
    assert read_torch_file(tmp_path / "x.pt") == (tree, [])


def test_a_module_in_the_format_before_1_6_is_named(tmp_path: Path) -> None:
    tree = {"weights": torch.ones(2), "layer": torch.nn.Linear(1, 1)}
    torch.save(tree, tmp_path / "x.pt", _use_new_zipfile_serialization=False)
    read, unknown = read_torch_file(tmp_path / "x.pt")
    assert unknown == ["torch.nn.modules.linear.Linear"]
    assert same(read["weights"], torch.ones(2))


def test_what_is_outside_the_closed_list_is_named_and_never_run(tmp_path: Path) -> None:
    flag = tmp_path / "ran"
    tree = {"weights": torch.ones(2), "evil": Evil(flag), "layer": torch.nn.Linear(1, 1)}
    torch.save(tree, tmp_path / "x.pt")
    read, unknown = read_torch_file(tmp_path / "x.pt")
    assert not flag.exists()
    assert "posix.system" in unknown
    assert "torch.nn.modules.linear.Linear" in unknown
    assert isinstance(read["evil"], Placeholder)
    assert same(read["weights"], torch.ones(2))


@pytest.mark.parametrize(
    "code",
    [
        b"cos\nsystem\n(S'touch RAN'\ntR.",
        b"(S'touch RAN'\nios\nsystem\n.",
        b"\x80\x04\x8c\x02os\x8c\x06system\x93\x8c\x09touch RAN\x85R.",
        b"ccollections\nOrderedDict\n)R}S'__class__'\ncos\nsystem\nsb(S'touch RAN'\ntR.",
        b"ctorch\ndevice\n}S'__call__'\ncos\nsystem\nsb(S'touch RAN'\ntR.",
    ],
)
def test_no_opcode_of_a_crafted_pickle_runs_anything(
    code: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        _, unknown = read_torch_file(rewritten(tmp_path / "x.pt", code))
    except CheckpointError:
        unknown = ["refused"]
    assert not (tmp_path / "RAN").exists()
    assert unknown


def tensor_pickle(offset: int, size: tuple[int, ...], stride: tuple[int, ...], num: int) -> bytes:
    """Return the pickle of one tensor with whatever geometry."""

    class _Storage:
        pass

    class _Pickler(pickle.Pickler):
        def persistent_id(self, value: Any) -> Any:
            return ("storage", torch.FloatStorage, "0", "cpu", num) if isinstance(value, _Storage) else None

    class _Tensor:
        def __reduce__(self) -> tuple[Any, ...]:
            rebuild: Any = torch._utils._rebuild_tensor_v2  # type: ignore[attr-defined]  # how torch names it in files
            return rebuild, (_Storage(), offset, size, stride, False, OrderedDict())

    buffer = io.BytesIO()
    _Pickler(buffer, protocol=2).dump(_Tensor())
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("offset", "size", "stride", "num"),
    [(2, (3,), (1,), 4), (-1, (2,), (1,), 4), (0, (2,), (-1,), 4), (0, (2,), (1,), 5)],
)
def test_a_tensor_that_reaches_beyond_its_storage_is_refused(
    offset: int, size: tuple[int, ...], stride: tuple[int, ...], num: int, tmp_path: Path
) -> None:
    path = rewritten(tmp_path / "x.pt", tensor_pickle(offset, size, stride, num), {"0": bytes(16)})
    with pytest.raises(CheckpointError):
        read_torch_file(path)


@pytest.mark.parametrize(
    ("file", "data", "message"), [("constants.pkl", b"", "TorchScript"), ("byteorder", b"big", "big-endian")]
)
def test_archives_of_torchscript_and_of_big_endian_machines_are_told_apart(
    file: str, data: bytes, message: str, tmp_path: Path
) -> None:
    with zipfile.ZipFile(tmp_path / "x.pt", "w") as archive:
        archive.writestr("x/data.pkl", pickle.dumps({}))
        archive.writestr(f"x/{file}", data)
    with pytest.raises(CheckpointError, match=message):
        read_torch_file(tmp_path / "x.pt")


@pytest.mark.parametrize("mapped", [True, False])
def test_the_format_before_1_6_is_read_with_its_dtypes_and_ties(mapped: bool, tmp_path: Path) -> None:
    dtypes = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int8, torch.bool)
    tree = {str(dtype): torch.arange(6).to(dtype).view(2, 3) for dtype in dtypes}
    shared = torch.arange(10.0)
    tree |= {"whole": shared, "part": shared[3:7], "transposed": torch.arange(6.0).view(2, 3).T, "none": torch.empty(0)}
    path, whole = tmp_path / "x.bin", {"state_dict": OrderedDict(tree), "epoch": 3, "p": torch.nn.Parameter(shared)}
    torch.save(whole, path, _use_new_zipfile_serialization=False)
    read, unknown = read_torch_file(path, mapped=mapped)
    assert (read["epoch"], unknown) == (3, [])
    assert read["state_dict"].keys() == tree.keys()
    for name, tensor in tree.items():
        assert same(read["state_dict"][name], tensor), name
    read["state_dict"]["whole"].zero_()
    assert not read["state_dict"]["part"].any()
    assert same(torch.load(path)["state_dict"]["whole"], shared)


def test_values_of_numpy_that_are_not_numbers_are_placeholders(tmp_path: Path) -> None:
    tree = {
        "kept": np.ones(2),
        "text": np.array(["a", "b"]),
        "objects": np.array([None, {}], dtype=object),
        "date": np.datetime64("2020-01-01"),
        "word": np.str_("a"),
    }
    torch.save(tree, tmp_path / "x.pt")
    read, unknown = read_torch_file(tmp_path / "x.pt")
    assert unknown == ["numpy.dtype"]
    assert same(read.pop("kept"), np.ones(2))
    assert all(isinstance(value, Placeholder) for value in read.values())


def test_parameters_and_small_floats_with_attributes_are_tensors(tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "a"
    small = torch.ones(2).to(torch.float8_e4m3fn)
    small.tag = "b"
    torch.save({"parameter": parameter, "small": small}, tmp_path / "x.pt")
    read, unknown = read_torch_file(tmp_path / "x.pt")
    assert unknown == []
    assert torch.equal(read["parameter"], torch.ones(2))
    assert torch.equal(read["small"].float(), torch.ones(2))
    assert read["small"].dtype == torch.float8_e4m3fn
