"""Models spread over places give the numbers of the model in one place, and nothing is lost on the way."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.bigmodels.nets import ALL_DISK, MIXED, TOKENS, Net, empty_net, make_net, tree_of
from trainwright.bigmodels.dispatch.dispatch import disk_offload, dispatch_model
from trainwright.bigmodels.dispatch.loading import load_offloaded_weights
from trainwright.bigmodels.weights.weights_map import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    save_offload_index,
)
from trainwright.core.errors import CheckpointError, ConfigurationError

EXPECTED = make_net()(TOKENS)


@pytest.mark.parametrize("places", [{"": "cpu"}, ALL_DISK, MIXED], ids=["cpu", "disk", "mixed"])
def test_a_dispatched_model_gives_the_same_bits(places: dict[str, str], tmp_path: Path) -> None:
    net = dispatch_model(make_net(), places, offload_dir=tmp_path, force_hooks=True)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            assert torch.equal(net(TOKENS), EXPECTED)
    assert net.hf_device_map == places


def test_a_model_on_one_device_gets_no_hooks_unless_they_are_forced() -> None:
    device_map = {"": "cpu", "head": "cpu:0", "embed": torch.device("cpu:0")}
    assert "_hf_hook" not in vars(dispatch_model(make_net(), device_map))
    forced = dispatch_model(make_net(), {"": "cpu"}, force_hooks=True)
    assert {"_hf_hook" in vars(module) for module in forced.modules() if module.state_dict()} == {True}


def test_the_cpu_as_a_device_is_the_cpu() -> None:
    assert "_hf_hook" not in vars(dispatch_model(make_net(), {"": torch.device("cpu")}))
    assert "_hf_hook" not in vars(
        dispatch_model(make_net(), {"": "cpu", "head": "cpu:0", "embed": torch.device("cpu:0")})
    )


def test_a_model_without_weights_has_an_empty_map() -> None:
    assert dispatch_model(nn.ReLU(), {}).hf_device_map == {}


def test_a_model_is_dispatched_by_a_word() -> None:
    net = dispatch_model(make_net(), "auto")
    place = 0 if torch.accelerator.is_available() else "cpu"
    assert set(net.hf_device_map.values()) == {place}
    assert torch.equal(net(TOKENS).cpu(), EXPECTED)


def test_weights_that_are_nowhere_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        dispatch_model(empty_net(), MIXED)
    net = make_net()
    net.blocks[0][0].to("meta")
    with pytest.raises(CheckpointError, match=r"blocks\.0\.0\.weight"):
        dispatch_model(net, {"embed": "cpu", "blocks": "disk", "head": "cpu"})


def test_a_folder_of_another_model_does_not_give_its_weights_to_this_one(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {name: torch.zeros_like(t) for name, t in make_net().state_dict().items()})
    net = make_net()
    disk_offload(net, tmp_path)
    assert torch.equal(net(TOKENS), EXPECTED)


def _with_copied_head(net: Net) -> Net:
    """Give the head a parameter of its own in the memory of the embedding's weight."""
    net.head.weight = nn.Parameter(net.embed.weight.detach())
    return net


@pytest.mark.parametrize("change", [lambda net: net, _with_copied_head], ids=["tied", "same memory"])
@pytest.mark.parametrize(
    "offload",
    [disk_offload, lambda net, folder: dispatch_model(net, ALL_DISK, offload_dir=folder)],
    ids=["disk_offload", "dispatch_model"],
)
def test_shared_weights_are_found_in_the_folder_of_an_earlier_call(
    offload: Callable[[Net, Path], nn.Module], change: Callable[[Net], Net], tmp_path: Path
) -> None:
    net = change(make_net())
    offload(net, tmp_path)
    assert torch.equal(net(TOKENS), EXPECTED)
    again = change(empty_net())
    for block, filled in zip(again.blocks, make_net().blocks, strict=True):  # buffers are not offloaded
        block[1].load_state_dict(filled[1].state_dict(), assign=True)
    offload(again, tmp_path)
    assert torch.equal(again(TOKENS), EXPECTED)


class _Bits(nn.Module):
    """A parameter, and a buffer that views it as integers."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.register_buffer("bits", self.weight.detach().view(torch.int32))

    def forward(self) -> torch.Tensor:
        assert isinstance(self.bits, torch.Tensor)
        return self.bits + 0


def test_a_buffer_that_views_a_parameter_as_another_dtype_keeps_its_values(tmp_path: Path) -> None:
    model = _Bits()
    expected = model()
    disk_offload(model, tmp_path, offload_buffers=True)
    assert torch.equal(model(), expected)


def test_buffers_stay_unless_they_are_offloaded_too(tmp_path: Path) -> None:
    net = dispatch_model(make_net(), ALL_DISK, offload_dir=tmp_path / "a")
    assert {buffer.device.type for buffer in net.buffers()} == {"cpu"}
    net = dispatch_model(make_net(), ALL_DISK, offload_dir=tmp_path / "b", offload_buffers=True)
    assert {buffer.device.type for buffer in net.buffers()} == {"meta"}
    assert torch.equal(net(TOKENS), EXPECTED)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (2, 0), (2, 3)])
def test_a_weight_in_a_folder_comes_back_with_dtype_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    weight = torch.ones(shape).to(dtype)
    index = offload_weight(weight, "block.weight", tmp_path)
    found = load_offloaded_weight(tmp_path / "block.weight.dat", index["block.weight"])
    assert found.dtype is dtype
    assert torch.equal(found.float(), weight.float())
    assert found.shape == weight.shape


def test_the_loader_prefers_memory_and_lists_both(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a.x": torch.zeros(2), "a.y": torch.ones(2)})
    loader = OffloadedWeightsLoader({"a.x": torch.full((2,), 5.0)}, tmp_path)
    assert sorted(loader) == ["a.x", "a.y"]
    assert len(loader) == 2
    inner = PrefixedDataset(loader, "a.")
    assert {name: inner[name].tolist() for name in inner} == {"x": [5.0, 5.0], "y": [1.0, 1.0]}
    with pytest.raises(ConfigurationError, match="state_dict"):
        OffloadedWeightsLoader()


def test_the_loader_reads_from_safetensors_files_that_an_index_names(tmp_path: Path) -> None:
    file = {"safetensors_file": str(tmp_path / "m.safetensors")}
    save_file({"inner": torch.tensor([0.5, 1.5]), "b": torch.ones(2)}, tmp_path / "m.safetensors")
    loader = OffloadedWeightsLoader(index={"a": {**file, "weight_name": "inner", "dtype": "float16"}, "b": file})
    torch.testing.assert_close(dict(loader), {"a": torch.tensor([0.5, 1.5]).half(), "b": torch.ones(2)})
    assert [loader.locate(name) is None for name in loader] == [True, False]


STATE = make_net().state_dict()


def test_a_folder_that_is_written_weight_by_weight_is_loaded_by_its_index(tmp_path: Path) -> None:
    index: dict[str, dict[str, Any]] = {}
    for name, tensor in STATE.items():
        offload_weight(tensor, name, tmp_path, index)
    save_offload_index(index, tmp_path)
    net = empty_net()
    load_offloaded_weights(net, index, tmp_path)
    for each in (net, disk_offload(empty_net(), tmp_path)):
        assert torch.equal(each(TOKENS), EXPECTED)


def test_buffers_that_stay_at_hand_come_from_the_folder(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, STATE)
    before = tree_of(tmp_path)
    for net in (
        disk_offload(empty_net(), tmp_path, "cpu"),
        dispatch_model(empty_net(), ALL_DISK, offload_dir=tmp_path),
    ):
        assert torch.equal(net(TOKENS), EXPECTED)
    assert tree_of(tmp_path) == before


@pytest.mark.requires("cuda", reason="weights are brought from the host to a device of its own")
@pytest.mark.parametrize("places", [{"": "cpu"}, ALL_DISK, MIXED], ids=["cpu", "disk", "mixed"])
@pytest.mark.parametrize("prefetch_bytes", [0, None])
def test_a_device_gets_its_weights_from_host_and_disk(
    places: dict[str, str], prefetch_bytes: int | None, tmp_path: Path
) -> None:
    expected = make_net().cuda()(TOKENS.cuda())
    net = dispatch_model(
        make_net(), places, main_device=0, offload_dir=tmp_path, force_hooks=True, prefetch_bytes=prefetch_bytes
    )
    with torch.no_grad():
        for _ in range(5):
            assert torch.equal(net(TOKENS.cuda()), expected)
        assert net(TOKENS).device.type == "cpu"


@pytest.mark.parametrize("places", [{"": "cpu"}, ALL_DISK, MIXED], ids=["cpu", "disk", "mixed"])
def test_the_last_name_of_a_tied_weight_in_a_state_dict_counts_as_in_load_state_dict(
    places: dict[str, str], tmp_path: Path
) -> None:
    state = make_net().state_dict()
    state["embed.weight"] = state["embed.weight"] + 1
    net = dispatch_model(empty_net(), places, state_dict=state, offload_dir=tmp_path, offload_buffers=True)
    assert torch.equal(net(TOKENS), EXPECTED)


def test_a_file_that_cannot_be_put_in_place_is_an_error_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "weight.dat" / "inside").mkdir(parents=True)
    (tmp_path / "index.json" / "inside").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"weight\.dat cannot be written"):
        offload_weight(torch.ones(2), "weight", tmp_path)
    with pytest.raises(CheckpointError, match=r"index\.json cannot be written"):
        save_offload_index({"weight": {"dtype": "float32", "shape": [2]}}, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.json", "weight.dat"]
    with pytest.raises(CheckpointError, match=r"'weight' .* could not be written to .*missing"):
        offload_weight(torch.ones(2), "weight", tmp_path / "missing")
    with pytest.raises(CheckpointError, match=r"index\.json cannot be written"):
        save_offload_index({"weight": {"dtype": "float32", "shape": [2]}}, tmp_path / "missing")
