"""A checkpoint's folder may be its own offload folder, in every run of a script."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from trainwright import init_empty_weights, load_checkpoint_and_dispatch


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))


def test_a_bin_checkpoint_loads_again_from_the_folder_it_was_offloaded_to(tmp_path: Path) -> None:
    net, x = _net(), torch.ones(1, 4)
    torch.save(net.state_dict(), tmp_path / "pytorch_model.bin")
    for _ in range(3):
        with init_empty_weights():
            empty = _net()
        loaded = load_checkpoint_and_dispatch(
            empty, tmp_path, device_map={"0": "disk", "1": "cpu"}, offload_folder=tmp_path
        )
        assert torch.equal(loaded(x), net(x))
        assert (tmp_path / "pytorch_model.bin").is_file()
