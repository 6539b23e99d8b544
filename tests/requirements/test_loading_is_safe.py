"""Whatever a checkpoint holds, reading it runs nothing of it, leaves its folder alone and takes bounded memory.

`tests/checkpoint/test_reader.py`, `test_layout.py` and `test_codec.py` go through every file and every type.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.resealing import edit_trainer, reseal
from tests.checkpoint.snapshots import write_small
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.checkpoint import FileEntry, Part, RunIndex, read_checkpoint, read_manifest
from trainwright.core.errors import CheckpointError, TrainwrightWarning


class _Bomb:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.mark,))


@pytest.mark.parametrize("name", ["last.ckpt", "model.pt", "pytorch_model.bin"])
def test_a_crafted_pickle_is_refused_by_every_stage_and_never_executed(tmp_path: Path, name: str) -> None:
    mark = tmp_path / "executed"
    torch.save({"state_dict": _Bomb(mark)}, tmp_path / name)
    trainer = quiet_trainer(max_epochs=1)
    for stage in (trainer.fit, trainer.validate, trainer.test, trainer.predict):
        with pytest.raises(CheckpointError, match=r"`trainwright checkpoint convert \S+ FOLDER`"):
            stage(RegressionTask(), regression_loader(2), ckpt_path=tmp_path / name)  # type: ignore[operator]
    with pytest.raises(CheckpointError, match="trainwright checkpoint convert"):
        RegressionTask.load_from_checkpoint(tmp_path / name)
    assert not mark.exists()
    torch.load(tmp_path / name, weights_only=False)  # it would have gone off
    assert mark.exists()


def _pickle_weights(checkpoint: Path) -> None:
    (checkpoint / "model" / "model-00001-of-00001.safetensors").write_bytes(
        pickle.dumps(_Bomb(checkpoint.parent / "executed"))
    )


def _header(checkpoint: Path, length: int | None = None, **entries: Any) -> None:
    header = json.dumps(entries).encode()
    size = len(header) if length is None else length
    file = checkpoint / "model" / "model-00001-of-00001.safetensors"
    file.write_bytes(struct.pack("<Q", size) + header + bytes(64))


def _index(checkpoint: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = checkpoint / "model" / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index))


def _point_outside(checkpoint: Path, where: str) -> None:
    outside = checkpoint.parent / "secret.safetensors"
    outside.write_bytes((checkpoint / "model" / "model-00001-of-00001.safetensors").read_bytes())
    _index(checkpoint, lambda index: index["weight_map"].update(weight=where))


_HUGE_BYTES = 2 * 2**30


def _huge_file(file: Path) -> None:
    file.touch()
    os.truncate(file, _HUGE_BYTES)  # sparse: it takes no room on the disk


@contextmanager
def bounded_memory() -> Iterator[None]:
    """Fail if the block takes more than a manifest of 64 MiB does, twice while it is decoded."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < 200 * 2**20
    finally:
        tracemalloc.stop()


def _tensor(dtype: str, shape: list[int], end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}


def _state(value: Any) -> Callable[[Path], None]:
    return lambda checkpoint: edit_trainer(checkpoint, lambda entries: entries.update(callbacks=value))


CRAFTED: dict[str, Callable[[Path], None]] = {
    "a pickle as weights": _pickle_weights,
    "a header longer than the file": lambda c: _header(c, 2**62, weight=_tensor("F32", [2, 3], 24)),
    "a tensor larger than the file": lambda c: _header(c, weight=_tensor("F32", [2**38], 2**40), bias={}),
    "a tensor before the file": lambda c: _header(c, weight={"dtype": "F32", "shape": [6], "data_offsets": [-24, 0]}),
    "a shard above the folder": lambda c: _point_outside(c, "../../secret.safetensors"),
    "a dtype that is none": lambda c: _index(c, lambda i: i["metadata"]["trainwright"]["dtypes"].update(weight="os")),
    "an array larger than memory": _state({"a": {"$": "ndarray", "dtype": "<f8", "shape": [2**40]}}),
    "an unknown type": _state({"a": {"$": "os.system", "v": "touch executed"}}),
    "a tree of 2 GB": lambda c: _huge_file(c / "trainer.json"),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A small checkpoint in a folder of its own."""
    return write_small(tmp_path / "run", 3)


@pytest.mark.parametrize("craft", CRAFTED)
def test_what_is_sealed_and_crafted_is_refused_in_bounded_memory(checkpoint: Path, craft: str) -> None:
    CRAFTED[craft](checkpoint)
    if "GB" in craft:  # sealed by its size alone: nobody hashes it here
        _seal_size(checkpoint, "trainer.json", _HUGE_BYTES)
    else:
        reseal(checkpoint)  # as a forger would
    with bounded_memory(), pytest.raises(CheckpointError):
        read_checkpoint(checkpoint, verify="GB" not in craft)
    assert not (checkpoint.parent / "executed").exists()


def test_a_huge_manifest_or_index_is_refused_in_bounded_memory(checkpoint: Path) -> None:
    _huge_file(checkpoint / "manifest.json")
    with bounded_memory(), pytest.raises(CheckpointError):
        read_checkpoint(checkpoint)
    _huge_file(checkpoint.parent / ".index.json")
    with bounded_memory(), pytest.warns(TrainwrightWarning):  # it is rebuilt
        RunIndex(checkpoint.parent)


def _seal_size(checkpoint: Path, file: str, size: int) -> None:
    manifest = read_manifest(checkpoint)
    parts = {
        name: Part({path: FileEntry(size, "0" * 32) if path == file else old for path, old in part.files.items()})
        for name, part in manifest.parts.items()
    }
    (checkpoint / "manifest.json").write_bytes(dataclasses.replace(manifest, parts=parts).to_bytes())


def test_a_shard_that_the_manifest_has_not_sealed_is_refused(tmp_path: Path) -> None:
    checkpoint = write_small(tmp_path / "saved")
    index = checkpoint / "model" / "model.safetensors.index.json"
    text = index.read_text().replace("model-00001-of-00001.safetensors", "another.safetensors")
    model = checkpoint / "model"
    os.link(model / "model-00001-of-00001.safetensors", model / "another.safetensors")
    index.write_text(text)
    reseal(checkpoint)
    with pytest.raises(CheckpointError, match=r"names the shard 'another.safetensors', which the manifest does not"):
        read_checkpoint(checkpoint)
