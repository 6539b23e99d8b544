"""docs/checkpoint-format.md is enough to read a checkpoint: a reader made from it alone gets what ours gets."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint import format_reader
from tests.checkpoint.cutting import Cut, spans, tiles, write_in_pieces
from tests.checkpoint.every_kind import every_kind
from tests.checkpoint.format_reader import Stored
from tests.helpers.sources import ROOT
from trainwright.checkpoint import Snapshot, write_checkpoint
from trainwright.checkpoint.format import codec, safetensors_io
from trainwright.core.state import TrainState

PAGE = ROOT / "docs" / "checkpoint-format.md"


def bytes_of(tensor: torch.Tensor) -> bytes:
    plain = tensor.detach().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes() if plain.numel() else b""


def check_alike(folder: Path, snapshot: Snapshot) -> None:
    """Check that the reader made from the document finds a snapshot's tensors and plain values in a folder."""
    found = format_reader.read(folder)
    assert found["manifest"]["metrics"].keys() == snapshot.metrics.keys()
    assert found["trainer"]["progress"] == snapshot.state
    assert found["trainer"].keys() == {"progress", *snapshot.trainer}
    assert found["trainer"]["callbacks"] == snapshot.trainer["callbacks"]
    assert len(found["rng"]) == len(snapshot.rng)
    assert bytes_of(snapshot.rng[0]["torch"]) == found["rng"][0]["torch"].data
    for tree, optimizer in zip(found["optimizer"], snapshot.optimizers, strict=True):
        assert [group["params"] for group in tree["groups"]] == [group["params"] for group in optimizer["groups"]]
        check_tensors(tree["state"], optimizer["state"])
    check_tensors(found["model"], snapshot.model)


def check_tensors(found: Any, expected: Any) -> None:
    if isinstance(expected, torch.Tensor):
        name = safetensors_io._DTYPE_NAMES.get(expected.dtype, str(expected.dtype))
        assert found == Stored(name, tuple(expected.shape), bytes_of(expected))
    elif isinstance(expected, Mapping):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            check_tensors(found[key], value)


def test_the_reader_made_from_the_document_reads_every_kind_of_value(tmp_path: Path) -> None:
    check_alike(write_checkpoint(tmp_path / "a", every_kind(), max_shard_bytes=40), every_kind())


@pytest.mark.parametrize("cut", [tiles, spans])
def test_it_reads_a_checkpoint_in_pieces(tmp_path: Path, cut: Cut) -> None:
    check_alike(write_in_pieces(tmp_path / "a", every_kind(), 3, cut), every_kind())


def _column(after: str, number: int) -> list[str]:
    """Return the words in backticks of a column of the first table after some text of the page."""
    lines = PAGE.read_text().partition(after)[2].splitlines()
    table = itertools.takewhile(
        lambda line: line.startswith("|"), itertools.dropwhile(lambda line: not line.startswith("|"), lines)
    )
    return [word for row in list(table)[2:] for word in re.findall(r"`([^`]+)`", row.split("|")[number + 1])]


def test_the_tags_are_those_of_the_code() -> None:
    assert set(_column("<!-- tags", 0)) == set(codec._DECODERS)


def test_the_dtypes_are_those_of_the_code() -> None:
    assert set(_column("<!-- dtypes", 0)) == set(safetensors_io._DTYPE_NAMES.values())
    assert set(_column("the name of its true dtype:", 0)) == set(safetensors_io._CONVERTED)


def test_the_progress_is_that_of_the_code() -> None:
    assert _column("<!-- progress", 0) == list(TrainState().to_dict())
