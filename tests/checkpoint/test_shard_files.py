"""Tensors in pieces: their regions, the files that hold them, and the ranks that write one checkpoint together."""

from __future__ import annotations

import copy
import json
import math
import pickle
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.cutting import Cut, cut_snapshot, rows, spans, tiles, values_of, write_in_pieces
from tests.checkpoint.every_kind import every_kind
from tests.checkpoint.resealing import reseal
from tests.checkpoint.snapshots import same, small_snapshot
from trainwright.checkpoint import (
    Box,
    Contents,
    Draft,
    Region,
    SavedTensor,
    SaveGroup,
    Snapshot,
    Span,
    plan_share,
    read_checkpoint,
    verify,
    write_checkpoint,
)
from trainwright.checkpoint.format.regions import copy_common, lengths_of, overlap
from trainwright.checkpoint.format.shard_files import loaded
from trainwright.checkpoint.interop.diff import diff_checkpoints
from trainwright.core.errors import CheckpointError
from trainwright.core.tree import map_tensors

SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def regions(draw: st.DrawFn, shape: tuple[int, ...]) -> Region:
    """Return any region of a tensor of this shape."""
    if draw(st.booleans()):
        start, stop = sorted(draw(st.integers(0, math.prod(shape))) for _ in range(2))
        return Span(start, stop)
    ends = [sorted(draw(st.integers(0, size)) for _ in range(2)) for size in shape]
    return Box(tuple(a for a, _ in ends), tuple(b - a for a, b in ends))


def numbered(shape: tuple[int, ...]) -> torch.Tensor:
    """Return a tensor whose elements are their own numbers."""
    return torch.arange(math.prod(shape)).reshape(shape)


@given(st.data())
def test_what_two_regions_share_is_copied_and_nothing_else(data: st.DataObject) -> None:
    shape = data.draw(SHAPES)
    wanted, held = data.draw(regions(shape)), data.draw(regions(shape))
    target = torch.full(lengths_of(wanted), -1)
    copy_common(target, wanted, values_of(numbered(shape), held).clone(), held, shape)
    there = {int(number) for number in values_of(numbered(shape), held).reshape(-1)}
    expected = values_of(numbered(shape), wanted).clone().apply_(lambda number: number if number in there else -1)
    assert torch.equal(target, expected)
    shared = bool((target >= 0).any())
    assert overlap([wanted, held], shape) is shared


@pytest.mark.parametrize("cut", [rows, tiles, spans])
def test_every_kind_of_value_comes_back_however_it_was_cut(tmp_path: Path, cut: Cut) -> None:
    path = write_in_pieces(tmp_path / "a", every_kind(), 3, cut)
    assert verify(path) == []
    back, expected = read_checkpoint(path), every_kind()
    assert same(dict(back.model or {}), dict(expected.model or {}))
    assert same(back.optimizers, expected.optimizers)
    assert same(back.trainer, expected.trainer)
    moved = read_checkpoint(path, device="meta").model or {}
    assert moved["embed.weight"].is_meta
    assert moved["embed.weight"] is moved["head.weight"]


def test_without_a_copy_tensors_are_read_when_they_are_used(tmp_path: Path) -> None:
    path = write_in_pieces(tmp_path / "a", every_kind(), 2, tiles)
    back, expected = read_checkpoint(path, copy_model=False), every_kind()
    model = dict(back.model or {})
    weight = model["embed.weight"]
    assert isinstance(weight, SavedTensor)
    assert weight is model["head.weight"]
    assert (weight.shape, weight.dtype, weight.device.type) == ((3, 2), torch.bfloat16, "cpu")
    assert torch.equal(weight.read(Box((1, 0), (2, 1))), torch.tensor([[2.0], [4.0]], dtype=torch.bfloat16))
    assert torch.equal(weight.read(Span(1, 4)), torch.tensor([1.0, 2.0, 3.0], dtype=torch.bfloat16))
    assert type(weight * 2) is torch.Tensor
    assert torch.equal(torch.zeros(3, 2).copy_(weight), torch.arange(6.0).reshape(3, 2))
    assert same(map_tensors(loaded, model), dict(expected.model or {}))
    assert same(map_tensors(loaded, back.optimizers), expected.optimizers)


def test_whole_and_cut_checkpoints_of_one_state_do_not_differ(tmp_path: Path) -> None:
    whole = write_checkpoint(tmp_path / "whole", every_kind())
    cut = write_in_pieces(tmp_path / "cut", every_kind(), 3, tiles)
    found = diff_checkpoints(whole, cut)
    assert not found, found
    assert found.num_tensors > 20
    other = every_kind()
    other.optimizers[0]["state"]["embed.weight"]["exp_avg"] += 1
    found = diff_checkpoints(whole, write_in_pieces(tmp_path / "other", other, 2, spans))
    assert [item.path for item in found.tensors] == ["optimizer[0].state.embed.weight.exp_avg"]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda piece: piece.update(offsets=[0, 0]), r"have 6 elements, expected 6 without overlaps"),
        (lambda piece: piece.update(tensor="other"), r"the shards of 'weight' have 3 elements, expected 6"),
        (lambda piece: piece.update(dtype="F64"), r"does not match .*rank-00001.safetensors"),
        (lambda piece: piece.update(shape=[3, 3]), r"do not belong to a F32 tensor of shape \(2, 3\)"),
        (lambda piece: piece.update(stored="../weight"), r"is not an index of the shards"),
        (lambda piece: piece.update(dtype="os.system"), r"not a dtype that a checkpoint can hold"),
    ],
)
def test_an_index_that_does_not_fit_is_refused(tmp_path: Path, change: Any, text: str) -> None:
    path = write_in_pieces(tmp_path / "a", small_snapshot(1), 2, rows)
    index = path / "model" / "rank-00001.json"
    value = json.loads(index.read_text())
    change(value["pieces"][0])
    index.write_text(json.dumps(value))
    reseal(path)
    assert verify(path) == []  # whoever made it, it is not damage
    with pytest.raises(CheckpointError, match=text):
        read_checkpoint(path)


WORLD = 3


class Ranks:
    """Three ranks of one process over a store in memory, and a draft that they write."""

    def __init__(self, folder: Path, timeout_s: float = 60.0) -> None:
        self.store = dist.HashStore()  # type: ignore[attr-defined]  # public, not re-exported
        self.crews = [SaveGroup(self.store, rank=r, world_size=WORLD, timeout_s=timeout_s) for r in range(WORLD)]
        parts = cut_snapshot(small_snapshot(1), WORLD)
        self.shares: list[Contents] = [plan_share(part, rank) for rank, part in enumerate(parts)]
        self.draft = Draft(folder / "a")
        self.draft.make_folders(self.shares[0])

    def write(self, rank: int) -> None:
        if rank == 0:
            self.crews[0].write_and_publish(self.draft, self.shares[0])
        else:
            self.crews[rank].write_share(self.draft.folder, self.shares[rank])


def test_rank_zero_publishes_once_the_last_rank_has_reported(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    ranks.write(2)
    last = threading.Timer(0.2, ranks.write, [1])
    last.start()
    ranks.write(0)
    last.join()
    assert verify(tmp_path / "a") == []
    assert same(read_checkpoint(tmp_path / "a").optimizers, small_snapshot(1).optimizers)
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
    assert ranks.store.num_keys() == 0


def test_a_rank_that_reports_nothing_is_named_and_nothing_is_published(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, timeout_s=0.3)
    ranks.write(2)
    with pytest.raises(CheckpointError, match=r"rank 1 of 3 did not report its files within 0.3 s"):
        ranks.write(0)
    assert not list(tmp_path.iterdir())


def test_a_file_that_rank_zero_does_not_see_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path)
    for rank in (1, 2):
        ranks.write(rank)
    (ranks.draft.folder / "model" / "rank-00002.json").unlink()
    with pytest.raises(CheckpointError, match=r"rank 2 wrote model/rank-00002.json .* file system that all"):
        ranks.write(0)


def test_what_hooks_do_with_tensors_works_on_those_that_lie_in_pieces(tmp_path: Path) -> None:
    whole = torch.arange(6.0).reshape(2, 3)
    path = write_in_pieces(tmp_path / "a", Snapshot(model={"w": whole}, kind="weights"), 2, spans)
    saved = (read_checkpoint(path, copy_model=False).model or {})["w"]
    assert isinstance(saved, SavedTensor)
    assert (saved.numel(), saved.dim(), saved.is_floating_point()) == (6, 2, True)
    assert saved.tolist() == whole.tolist()
    assert saved.sum().item() == 15
    assert (saved.numpy() == np.asarray(saved)).all()
    for found in (
        saved.clone(), saved.to("cpu", copy=True), saved[:], copy.deepcopy(saved), pickle.loads(pickle.dumps(saved)),
        torch.cat([saved]), saved.detach(), saved.double().float(), saved.contiguous(),
    ):  # fmt: skip
        assert torch.equal(found, whole)
    assert type(saved.float()) is torch.Tensor or torch.equal(saved.float(), whole)
    assert "shape=(2, 3)" in repr(saved)
