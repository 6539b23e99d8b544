"""Safetensors that are offloaded to the disk are read where they lie."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.bigmodels.nets import ALL_DISK, TOKENS, empty_net, make_net, plain_state, save_sharded, tree_of
from trainwright import load_checkpoint_and_dispatch


def test_a_sharded_checkpoint_is_offloaded_without_a_byte_written(tmp_path: Path) -> None:
    expected = make_net()(TOKENS)
    save_sharded(tmp_path / "checkpoint", plain_state(make_net()))
    before = tree_of(tmp_path)
    net = load_checkpoint_and_dispatch(
        empty_net(), tmp_path / "checkpoint", device_map=ALL_DISK, offload_folder=tmp_path / "offload", strict=True
    )
    for _ in range(3):
        assert torch.equal(net(TOKENS), expected)
    assert tree_of(tmp_path) == before
    assert not (tmp_path / "offload").exists()


def test_weights_are_used_where_the_file_is_mapped_and_not_copied(tmp_path: Path) -> None:
    save_sharded(tmp_path / "checkpoint", plain_state(make_net()))
    net = load_checkpoint_and_dispatch(empty_net(), tmp_path / "checkpoint", device_map=ALL_DISK)
    addresses: list[int] = []
    net.blocks[0][0].register_forward_pre_hook(lambda module, args: addresses.append(module.weight.data_ptr()))
    for _ in range(3):
        net(TOKENS)
    assert len(set(addresses)) == 1
    maps = [line.split() for line in Path("/proc/self/maps").read_text().splitlines()]
    spans = [tuple(int(edge, 16) for edge in fields[0].split("-")) for fields in maps if "safetensors" in fields[-1]]
    assert any(start <= addresses[0] < end for start, end in spans)
