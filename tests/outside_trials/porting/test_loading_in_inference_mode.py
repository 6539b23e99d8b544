"""A model that is built and loaded under `torch.inference_mode()` runs, wherever its weights lie."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import cpu_offload, disk_offload, init_empty_weights, load_checkpoint_and_dispatch


def _net() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).eval()


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
@pytest.mark.parametrize("empty", [False, True])
@pytest.mark.parametrize("place", ["disk", "cpu"])
def test_a_model_loads_and_runs_under_inference_mode(place: str, empty: bool, suffix: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    net, x = _net(), torch.ones(2, 4)
    wanted = net(x)
    if suffix == "bin":
        torch.save(net.state_dict(), tmp_path / "model.bin")
    else:
        save_file(net.state_dict(), tmp_path / "model.safetensors")
    with torch.inference_mode():
        if empty:
            with init_empty_weights():
                model = _net()
        else:
            model = _net()
        device_map: dict[str, Any] = {"0": place, "1": "cpu", "2": place}
        loaded = load_checkpoint_and_dispatch(
            model, tmp_path / f"model.{suffix}", device_map=device_map, offload_folder=tmp_path / "offload"
        )
        for _ in range(2):
            assert torch.equal(loaded(x), wanted)
    with torch.no_grad():
        assert torch.equal(loaded(x), wanted)


def test_models_built_there_are_offloaded_there(tmp_path: Path) -> None:
    with torch.inference_mode():
        net, x = _net(), torch.ones(2, 4)
        wanted = net(x)
        assert torch.equal(cpu_offload(net, "cpu")(x), wanted)
        net = _net()
        wanted = net(x)
        assert torch.equal(disk_offload(net, tmp_path, "cpu")(x), wanted)
