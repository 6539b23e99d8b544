"""One tensor of a model is put somewhere else, or one file is read or mapped, and nothing else changes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.bigmodels.nets import TOKENS, empty_net, make_net, plain_state
from trainwright import CheckpointError, ConfigurationError, load_state_dict, set_module_tensor_to_device

STATE = plain_state(make_net())


def test_an_empty_model_is_filled_tensor_by_tensor() -> None:
    net = empty_net()
    for name, tensor in (STATE | {"head.weight": STATE["embed.weight"]}).items():
        set_module_tensor_to_device(net, name, "cpu", value=tensor)
    assert torch.equal(net(TOKENS), make_net()(TOKENS))
    assert isinstance(net.embed.weight, nn.Parameter)
    assert isinstance(net.blocks[0][1].running_mean, torch.Tensor)


@pytest.mark.parametrize(
    ("name", "device", "value", "complaint"),
    [
        ("blocks.0.0.wieght", "cpu", None, "Did you mean 'blocks.0.0.weight'"),
        ("nowhere.weight", "cpu", None, "no tensor 'nowhere.weight'"),
        ("embed.weight", "cpu", None, "on the meta device"),
        ("embed.weight", "cpu", torch.ones(3), r"shape \(12, 8\).*\(3,\)"),
        ("embed.weight", "cuda:77", torch.ones(12, 8), "not on this machine"),
    ],
)
def test_what_cannot_be_put_is_named(name: str, device: str, value: torch.Tensor | None, complaint: str) -> None:
    net = empty_net()
    with pytest.raises(ConfigurationError, match=complaint):
        set_module_tensor_to_device(net, name, device, value=value)
    assert all(tensor.is_meta for tensor in net.state_dict().values())


@pytest.mark.parametrize("suffix", ["safetensors", "bin"])
def test_a_file_is_read_onto_the_devices_of_a_map(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"model.{suffix}"
    (save_file if suffix == "safetensors" else torch.save)(STATE, path)
    found = load_state_dict(path)
    assert found.keys() == STATE.keys()
    assert all(torch.equal(tensor, STATE[name]) for name, tensor in found.items())
    found = load_state_dict(path, device_map={"": "cpu", "embed": "meta", "blocks.0": "disk"})
    assert [name for name, tensor in found.items() if tensor.is_meta] == ["embed.weight"]
    with pytest.raises(ConfigurationError, match="not on this machine"):
        load_state_dict(path, device_map={"": "cuda:77"})
    path.write_bytes(path.read_bytes()[:-50])
    with pytest.raises(CheckpointError, match=path.name):
        load_state_dict(path)
