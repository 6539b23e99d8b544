"""Checkpoints of every form into models of every place; what does not fit is named, and changes nothing."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.bigmodels.nets import ALL_DISK, MIXED, TOKENS, empty_net, make_net, plain_state, save_sharded
from trainwright.bigmodels.dispatch.loading import load_checkpoint_and_dispatch, load_checkpoint_in_model
from trainwright.bigmodels.weights.empty import init_empty_weights
from trainwright.bigmodels.weights.stored_weights import read_checkpoint
from trainwright.checkpoint.format.model import write_model
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning

STATE = plain_state(make_net())
EXPECTED = make_net()(TOKENS)


def _made(folder: Path, name: str, write: Callable[[Path], Any]) -> Path:
    folder.mkdir(parents=True)
    write(folder / name)
    return folder / name


def _single(folder: Path) -> Path:
    return _made(folder, "model.safetensors", lambda path: save_file(STATE, path)).parent


def _bin(folder: Path) -> Path:
    return _made(folder, "pytorch_model.bin", lambda path: torch.save(STATE, path)).parent


FORMS: dict[str, Callable[[Path], Path]] = {
    "one file": _single,
    "shards": lambda folder: save_sharded(folder, STATE),
    "their index": lambda folder: save_sharded(folder, STATE) / "model.safetensors.index.json",
    "bin": _bin,
    "bin and a plain index": lambda folder: save_sharded(folder, STATE, plain=True, pickled=True),
    "nested in a pt file": lambda folder: _made(
        folder, "weights.pt", lambda path: torch.save({"state_dict": STATE}, path)
    ),
    "a checkpoint of ours": lambda folder: _made(folder, "", lambda path: write_model(path, make_net().state_dict())),
    "a checkpoint of the Trainer": lambda folder: FORMS["a checkpoint of ours"](folder / "model").parent,
}


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_checkpoint_runs_from_every_place(form: str, tmp_path: Path) -> None:
    checkpoint = FORMS[form](tmp_path / "checkpoint")
    for places in (None, ALL_DISK, MIXED):
        net = empty_net()
        load_checkpoint_and_dispatch(net, checkpoint, places, offload_folder=tmp_path / "offload", strict=True)
        for _ in range(2):
            assert torch.equal(net(TOKENS), EXPECTED)
        assert net.embed.weight is net.head.weight or net.head.weight.is_meta


@pytest.mark.parametrize("places", [None, MIXED], ids=["no map", "mixed"])
def test_a_file_of_torch_may_be_written_to_while_the_weights_that_were_loaded_from_it_are_used(
    places: dict[str, str] | None, tmp_path: Path
) -> None:
    net = empty_net()
    path = _bin(tmp_path / "c") / "pytorch_model.bin"
    load_checkpoint_and_dispatch(net, path, device_map=places, offload_folder=tmp_path / "o")
    gc.collect()
    # torch.save cuts the file first; a view of it would then kill the process.
    assert str(path) not in Path("/proc/self/maps").read_text()
    torch.save(net.state_dict(), path)
    assert torch.equal(net(TOKENS), EXPECTED)


@pytest.mark.parametrize("places", [{"": "cpu"}, ALL_DISK], ids=["cpu", "disk"])
def test_floating_point_weights_take_the_dtype_but_for_those_that_stay_float32(
    places: dict[str, str], tmp_path: Path
) -> None:
    net = empty_net()
    folder = _single(tmp_path / "c")
    load_checkpoint_in_model(net, folder, places, dtype="bfloat16", keep_in_fp32_modules=["blocks.1"])
    assert net.embed.weight.dtype is torch.bfloat16
    assert net.blocks[0][0].weight.dtype is torch.bfloat16
    assert net.blocks[1][0].weight.dtype is torch.float32
    assert net.blocks[0][1].num_batches_tracked.dtype is torch.int64


def test_a_model_in_memory_keeps_its_parameters_unless_the_dtype_changes(tmp_path: Path) -> None:
    net, folder = make_net(), _single(tmp_path / "c")
    before = dict(net.named_parameters())
    for parameter in before.values():
        parameter.data.zero_()
    load_checkpoint_in_model(net, folder)
    assert torch.equal(net(TOKENS), EXPECTED)
    assert all(parameter is before[name] for name, parameter in net.named_parameters())  # an optimizer has them
    load_checkpoint_in_model(net, folder, dtype="bfloat16")
    assert net.embed.weight is net.head.weight
    assert {parameter.dtype for parameter in net.parameters()} == {torch.bfloat16}


def test_a_module_that_two_names_share_is_loaded_by_either(tmp_path: Path) -> None:
    net = nn.ModuleDict()
    net["first"] = net["second"] = nn.Linear(2, 2)
    save_file({"second.weight": torch.ones(2, 2), "second.bias": torch.ones(2)}, tmp_path / "m.safetensors")
    load_checkpoint_in_model(net, tmp_path / "m.safetensors", strict=True)
    assert torch.equal(net["first"].weight, torch.ones(2, 2))


def test_missing_and_unexpected_names_are_warned_of_and_returned(tmp_path: Path) -> None:
    state = {name: tensor for name, tensor in STATE.items() if name != "blocks.0.0.bias"} | {"extra": torch.ones(1)}
    save_file(state, tmp_path / "m.safetensors")
    net = make_net()
    with pytest.warns(
        TrainwrightWarning, match=r"missing in the checkpoint: 'blocks.0.0.bias'; not in the model: 'extra'"
    ):
        keys = load_checkpoint_in_model(net, tmp_path / "m.safetensors")
    assert keys.missing_keys == ["blocks.0.0.bias"]
    assert keys.unexpected_keys == ["extra"]
    for name in ("missing", "unexpected"):
        given = STATE | {"extra": torch.ones(1)} if name == "unexpected" else state
        save_file(given, tmp_path / "m.safetensors")
        with pytest.raises(CheckpointError, match="extra" if name == "unexpected" else "blocks.0.0.bias"):
            load_checkpoint_in_model(net, tmp_path / "m.safetensors", strict=True)


def test_a_file_that_is_cut_while_it_is_in_use_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    net = nn.Linear(64, 64, device="meta")
    path = tmp_path / "m.safetensors"
    save_file({"weight": torch.randn(64, 64), "bias": torch.randn(64)}, path)
    load_checkpoint_and_dispatch(net, path, device_map=ALL_DISK)
    net(torch.ones(1, 64))
    with open(path, "r+b") as file:
        file.truncate(4096)
    with pytest.raises(CheckpointError, match="has shrunk from"):
        net(torch.ones(1, 64))
    assert net.weight.is_meta


def test_a_model_of_sharded_tensors_is_loaded_as_it_is_and_refuses_another_dtype(tmp_path: Path) -> None:
    from torch.distributed.fsdp import fully_shard

    path = _single(tmp_path / "c")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    net = make_net()
    with torch.no_grad():
        net.embed.weight.zero_()
    fully_shard(net, mesh=init_device_mesh("cpu", (1,)))
    with pytest.raises(ConfigurationError, match=r"dtype=torch\.bfloat16.*before it is sharded"):
        load_checkpoint_in_model(net, path, dtype="bfloat16", broadcast_from_rank0=True)
    load_checkpoint_in_model(net, path, dtype="float32", broadcast_from_rank0=True)
    assert torch.equal(net(TOKENS), EXPECTED)


@pytest.mark.parametrize("device_map", [None, {"": "cpu"}], ids=["in place", "map"])
def test_weights_that_an_empty_model_lacks_are_told(device_map: Any, tmp_path: Path) -> None:
    def net() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    values = net().state_dict()
    for part, names in (("lacking", values.keys() - {"0.weight"}), ("rest", {"0.weight"})):
        save_file({name: values[name] for name in names}, tmp_path / f"{part}.safetensors")
    with init_empty_weights():
        first, second = net(), net()
    with pytest.raises(CheckpointError, match=r"does not contain '0\.weight', and the model has no values"):
        load_checkpoint_and_dispatch(first, tmp_path / "lacking.safetensors", device_map)
    assert all(parameter.is_meta for parameter in first.parameters())
    with pytest.warns(TrainwrightWarning, match=r"'0\.weight', on the meta device, have no values"):
        load_checkpoint_in_model(second, tmp_path / "lacking.safetensors", device_map)
    with pytest.warns(TrainwrightWarning, match="Missing weights keep their values"):
        load_checkpoint_in_model(second, tmp_path / "rest.safetensors", device_map)
    assert all(torch.equal(value, values[name]) for name, value in second.state_dict().items())


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_a_model_loads_and_runs_under_inference_mode(suffix: str, tmp_path: Path) -> None:
    (torch.save if suffix == "bin" else save_file)(STATE, tmp_path / f"model.{suffix}")
    for make in (empty_net, make_net):
        with torch.inference_mode():
            net = make()
            load_checkpoint_and_dispatch(net, tmp_path, device_map=MIXED, offload_folder=tmp_path / "offload")
            for _ in range(2):
                assert torch.equal(net(TOKENS), EXPECTED)
        with torch.no_grad():
            assert torch.equal(net(TOKENS), EXPECTED)


def test_an_unknown_word_for_a_map_and_an_unknown_dtype_are_refused(tmp_path: Path) -> None:
    folder = _single(tmp_path / "c")
    with pytest.raises(ConfigurationError, match="autp"):
        load_checkpoint_and_dispatch(empty_net(), folder, device_map="autp")
    with pytest.raises(ConfigurationError, match="floaty"):
        load_checkpoint_in_model(empty_net(), folder, dtype="floaty")


def test_an_empty_folder_and_a_missing_one_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="contains no weights"):
        read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="neither a file nor a folder"):
        read_checkpoint(tmp_path / "nowhere")
