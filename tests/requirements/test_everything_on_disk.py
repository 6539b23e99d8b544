"""A model may lie on the disk as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.bigmodels.nets import TOKENS, empty_net, make_net, plain_state
from trainwright import load_checkpoint_and_dispatch


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_model_runs_with_everything_on_the_disk(suffix: str, tmp_path: Path) -> None:
    expected = make_net()(TOKENS)
    path = tmp_path / f"model.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(plain_state(make_net()), path)
    net = load_checkpoint_and_dispatch(
        empty_net(), path, device_map={"": "disk"}, offload_folder=tmp_path / "offload", strict=True
    )
    assert all(parameter.is_meta for parameter in net.parameters())
    assert torch.equal(net(TOKENS), expected)
    assert net.hf_device_map == {"": "disk"}
