"""Models are saved wherever their weights lie, in files that others read as they are."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tests.bigmodels.nets import (
    ALL_DISK,
    MIXED,
    TOKENS,
    Net,
    empty_net,
    files_end_at,
    make_net,
    plain_state,
    save_sharded,
    tree_of,
)
from trainwright import (
    CheckpointError,
    ConfigurationError,
    cpu_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    save_model,
)
from trainwright.bigmodels.saving import save_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PLAIN = plain_state(make_net())  # its head is the embedding


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def same(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("size", ["10GB", "400B"], ids=["one file", "shards"])
def test_a_pickle_holds_tensors_alone_under_all_of_their_names(size: str, tmp_path: Path) -> None:
    net = make_net()
    net.register_parameter("piece", nn.Parameter(torch.arange(1000.0)[:4]))
    save_model(net, tmp_path, size, safe_serialization=False)
    stem = "pytorch_model.bin"
    files = [stem]
    if size == "400B":
        index = json.loads((tmp_path / f"{stem}.index.json").read_text())
        assert index["weight_map"].keys() == net.state_dict().keys()
        files = sorted(set(index["weight_map"].values()))
        assert files[0] == f"pytorch_model-00001-of-{len(files):05d}.bin"
    assert names_in(tmp_path) == sorted([*files, *([f"{stem}.index.json"] if size == "400B" else [])])
    shards = [torch.load(tmp_path / file, weights_only=True) for file in files]
    state = {name: tensor for shard in shards for name, tensor in shard.items()}
    assert same(state, net.state_dict())
    assert state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
    assert state["piece"].untyped_storage().nbytes() == 16  # and not the thousand numbers that it was cut from


def _on_disk(tmp_path: Path, device_map: Any, dtype: torch.dtype | None = None) -> nn.Module:
    save_sharded(tmp_path / "checkpoint", PLAIN)
    return load_checkpoint_and_dispatch(empty_net(), tmp_path / "checkpoint", device_map=device_map, dtype=dtype)


OFFLOADED: dict[str, Callable[[Path], nn.Module]] = {
    "cpu_offload with buffers": lambda path: cpu_offload(make_net(), execution_device="cpu", offload_buffers=True),
    "a mixed map of a checkpoint": lambda path: _on_disk(path, MIXED),
    "all on disk": lambda path: _on_disk(path, ALL_DISK),
    "forced hooks": lambda path: dispatch_model(make_net(), {"": "cpu"}, force_hooks=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
@pytest.mark.parametrize("where", OFFLOADED)
def test_offloaded_weights_are_written_with_their_values(where: str, safe: bool, tmp_path: Path) -> None:
    net = OFFLOADED[where](tmp_path)
    net(TOKENS)
    save_model(net, tmp_path / "saved", "0.4KB", safe)
    assert torch.equal(net(TOKENS), make_net()(TOKENS))  # and it runs on
    again = Net().eval()
    load_checkpoint_in_model(again, tmp_path / "saved", strict=True)
    assert same(again.state_dict(), make_net().state_dict())
    if safe:
        index = json.loads((tmp_path / "saved" / INDEX).read_text())
        assert index["weight_map"].keys() == PLAIN.keys()  # the tied head once


def test_a_model_on_disk_may_replace_the_files_that_it_lies_in(tmp_path: Path) -> None:
    save_model(make_net(), tmp_path, "0.4KB")
    net = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=ALL_DISK)
    save_model(net, tmp_path, "0.4KB")
    assert torch.equal(net(TOKENS), make_net()(TOKENS))
    net = load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map=ALL_DISK)
    assert torch.equal(net(TOKENS), make_net()(TOKENS))


class Odd(nn.Module):
    """Tensors that are not simply a block of memory of their own."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.arange(40.0)
        self.front = nn.Parameter(memory[:10])
        self.middle = nn.Parameter(memory[5:20])
        self.turned = nn.Parameter(torch.arange(6.0).view(2, 3).t())
        self.every_other = nn.Parameter(memory[::2])
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.number = nn.Parameter(torch.tensor(3.0))
        self.register_buffer("waves", torch.complex(torch.ones(3), torch.arange(3.0)).conj())
        self.register_buffer("flags", torch.tensor([True, False]))
        self.register_buffer("narrow", torch.ones(4).to(torch.float8_e4m3fnuz))
        self.register_buffer("passing", torch.zeros(2), persistent=False)


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_tensors_of_every_kind_are_written_by_their_values(safe: bool, tmp_path: Path) -> None:
    save_model(Odd(), tmp_path, safe_serialization=safe)
    found = load_file(tmp_path / SINGLE) if safe else torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    wanted = Odd().state_dict()
    assert "passing" not in found
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name].resolve_conj().float() if name == "narrow" else found[name],
                           tensor.float() if name == "narrow" else tensor)  # fmt: skip
    again = Odd()
    for value in again.state_dict().values():
        value.zero_()
    load_checkpoint_in_model(again, tmp_path, strict=True)
    assert torch.equal(again.waves, wanted["waves"])
    assert torch.equal(again.middle, wanted["middle"])


def test_wrappers_are_not_in_the_names_and_models_with_compiled_parts_read_them(tmp_path: Path) -> None:
    net, again = make_net(), Net()
    for each in (net, again):
        each.blocks[0] = torch.compile(each.blocks[0], backend="eager")
    save_model(torch.compile(nn.DataParallel(net), backend="eager"), tmp_path)
    assert same(load_file(tmp_path / SINGLE), PLAIN)
    assert load_checkpoint_in_model(again, tmp_path, strict=True) == ([], [])
    assert same(again.state_dict(), net.state_dict())


def test_the_name_of_replicas_is_not_in_the_names_and_a_shard_is_not_saved_as_a_full_model(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    save_model(nn.parallel.DistributedDataParallel(make_net()), tmp_path)
    assert same(load_file(tmp_path / SINGLE), PLAIN)
    with pytest.raises(CheckpointError, match="is sharded over processes"):
        save_model(fully_shard(make_net(), mesh=init_device_mesh("cpu", (1,))), tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize(
    ("size", "nearest"), [("ten", "'10GB'"), ("5 gigs", "'5GB'"), (1.5e9, "1500000000"), (-1, "'1GB'")]
)
def test_a_size_that_is_none_is_refused_with_one_that_may_be_meant(size: Any, nearest: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=rf"max_shard_size={size!r} is not a size.* as {nearest}\."):
        save_model(make_net(), tmp_path / "saved", size)


def test_weights_without_values_are_named(tmp_path: Path) -> None:
    net = make_net()
    net.blocks[1] = empty_net().blocks[1]
    with pytest.raises(CheckpointError, match=r"7 weights have no values .*: 'blocks.1.0.weight', 'blocks.1.0.bias'"):
        save_model(net, tmp_path / "saved")
    net = make_net()
    net.blocks[0][0].weight.untyped_storage().resize_(0)  # as a run does that gives memory back
    with pytest.raises(CheckpointError, match=r"1 weights have no values .*: 'blocks.0.0.weight'"):
        save_model(net, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


def test_what_no_file_of_weights_can_hold_is_named(tmp_path: Path) -> None:
    module = nn.Module()
    module.register_buffer("odd", torch.eye(3).to_sparse())
    with pytest.raises(CheckpointError, match=r"'odd' cannot be saved: a torch.sparse_coo tensor"):
        save_model(module, tmp_path / "saved")
    assert not (tmp_path / "saved").exists()


@pytest.mark.parametrize("safe", [True, False], ids=["safetensors", "pickle"])
def test_a_disk_that_fills_up_leaves_the_folder_as_it_was(safe: bool, tmp_path: Path) -> None:
    save_model(make_net(), tmp_path)
    before = tree_of(tmp_path)
    for folder in (tmp_path, tmp_path / "new"):
        with files_end_at(600), pytest.raises(CheckpointError, match=r"File too large. The folder is unchanged"):
            save_model(make_net(), folder, 2000, safe)
    assert tree_of(tmp_path) == before


@pytest.mark.requires("cuda", reason="weights on a device and away from it")
def test_weights_on_a_device_and_on_the_host_are_written_together(tmp_path: Path) -> None:
    net = dispatch_model(make_net(), {"embed": 0, "blocks": "cpu", "head": "cpu"})
    for safe in (True, False):
        save_model(net, tmp_path, safe_serialization=safe)
        again = Net()
        load_checkpoint_in_model(again, tmp_path, strict=True)
        assert same(again.state_dict(), make_net().state_dict())


def test_safetensors_of_another_value_than_a_tensor_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="'epoch' is a int"):
        save_object({"weight": torch.ones(2), "epoch": 1}, tmp_path / "a.safetensors", safe_serialization=True)
    assert not list(tmp_path.iterdir())
