"""Whatever is wrong with a map, a budget, a checkpoint or a disk: it is said, and model and files are as before."""

from __future__ import annotations

import copy
import io
import json
import pickle
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.bigmodels.nets import ALL_DISK, MIXED, Net, empty_net, files_end_at, make_net, plain_state, tree_of
from trainwright import (
    CheckpointError,
    ConfigurationError,
    check_device_map,
    cpu_offload,
    disk_offload,
    dispatch_model,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
    offload_state_dict,
    remove_hook_from_module,
)

STATE = plain_state(make_net())


@contextmanager
def nothing_changes(net: Net, folder: Path) -> Iterator[None]:
    """Hold that the block leaves the model's tensors and hooks, and the files below a folder, as they are."""
    state = {name: (tensor, tensor.clone()) for name, tensor in net.state_dict(keep_vars=True).items()}
    files = tree_of(folder)
    folders = {path for path in folder.rglob("*") if path.is_dir()}
    yield
    now = net.state_dict(keep_vars=True)
    for name, (tensor, values) in state.items():
        assert now[name] is tensor, name
        assert tensor.is_meta or torch.equal(tensor, values), name
    assert net.head.weight is net.embed.weight
    for module in net.modules():
        assert not [key for key in vars(module) if key.startswith("_hf_")]
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not hasattr(net, "hf_device_map")
    assert tree_of(folder) == files
    assert {path for path in folder.rglob("*") if path.is_dir()} == folders


@contextmanager
def refused(
    net: Net, folder: Path, error: type[Exception], match: str | None = None
) -> Iterator[pytest.ExceptionInfo[Exception]]:
    with nothing_changes(net, folder), pytest.raises(error, match=match) as caught:
        yield caught


@pytest.fixture
def safetensors(tmp_path: Path) -> Path:
    save_file(STATE, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    torch.save(STATE, tmp_path / "model.bin")
    return tmp_path / "model.bin"


GAPS = {"embed": "cpu", "blocks.0": "disk", "head": "cpu"}
CALLS: dict[str, Callable[[nn.Module, Path, Any], Any]] = {
    "in model": lambda net, path, places: load_checkpoint_in_model(net, path, places),
    "and dispatch": lambda net, path, places: load_checkpoint_and_dispatch(net, path, places),
    "dispatch": lambda net, path, places: dispatch_model(net, places, offload_dir=path.parent / "o"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_map_with_gaps_is_refused_with_all_that_it_lacks(call: str, safetensors: Path) -> None:
    net = make_net()
    with refused(net, safetensors.parent, ConfigurationError) as caught:
        CALLS[call](net, safetensors, GAPS)
    for name in STATE:
        if not name.endswith("num_batches_tracked"):
            assert (name in str(caught.value)) == name.startswith("blocks.1"), name


@pytest.mark.parametrize(
    ("device", "complaint"),
    [("dsik", "Did you mean 'disk'"), (77, "77"), ("cuda:77", "cuda:77.*is not on this machine"), ("xpu:5", "xpu:5")],
)
def test_a_device_that_is_none_or_not_here_is_named(device: int | str, complaint: str, safetensors: Path) -> None:
    net = make_net()
    for call in CALLS.values():
        with refused(net, safetensors.parent, ConfigurationError, rf"device_map\['blocks.0'\].*{complaint}"):
            call(net, safetensors, MIXED | {"blocks.0": device})
    with refused(net, safetensors.parent, ConfigurationError, r"cuda:77.*not on this machine"):
        cpu_offload(net, "cuda:77")


def test_a_name_in_a_map_that_the_model_lacks_is_an_error_on_request(tmp_path: Path) -> None:
    net = make_net()
    with refused(net, tmp_path, ConfigurationError, r"\['embde'\]"):
        dispatch_model(net, {"embde": "cpu", "": "cpu"}, strict=True)


@pytest.mark.parametrize("word", ["auto", "sequential"])
def test_a_budget_too_small_for_the_largest_layer_says_how_much_is_needed(word: str, safetensors: Path) -> None:
    net = empty_net()
    with refused(net, safetensors.parent, ConfigurationError, r"'blocks\.0', the largest layer.* needs 424 bytes"):
        load_checkpoint_and_dispatch(
            net, safetensors, word, max_memory={"cpu": 200}, no_split_module_classes=["Sequential"]
        )


def _no_tensor(path: Path) -> None:
    save_file({name: tensor for name, tensor in STATE.items() if name != "blocks.1.0.weight"}, path)


def _with_bias(bias: torch.Tensor) -> Callable[[Path], None]:
    return lambda path: save_file(STATE | {"blocks.1.0.bias": bias}, path)


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a missing tensor": (_no_tensor, r"'blocks\.1\.0\.weight'"),
    "a shape": (_with_bias(torch.ones(9)), r"'blocks\.1\.0\.bias' has shape \(9,\), expected \(8,\)"),
    "a dtype": (
        _with_bias(torch.ones(8, dtype=torch.int64)), r"'blocks\.1\.0\.bias' is torch\.int64, expected torch\.float32"
    ),
    "cut": (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"model\.safetensors.*truncated"),
    "cut in its header": (lambda path: path.write_bytes(path.read_bytes()[:100]), r"model\.safetensors"),
    "no header": (lambda path: path.write_bytes(b"\xff" * 64), r"model\.safetensors"),
    "empty": (lambda path: path.write_bytes(b""), r"model\.safetensors.*empty"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("damage", DAMAGES)
def test_a_checkpoint_that_does_not_fit_is_refused(damage: str, safetensors: Path) -> None:
    spoil, complaint = DAMAGES[damage]
    spoil(safetensors)
    for places in ({"": "cpu"}, ALL_DISK, MIXED):
        net = empty_net()
        with refused(net, safetensors.parent, CheckpointError, complaint):
            load_checkpoint_and_dispatch(net, safetensors, places)
    if damage != "a missing tensor":
        net = make_net()
        with refused(net, safetensors.parent, CheckpointError, complaint):
            load_checkpoint_in_model(net, safetensors)


def test_values_of_the_model_s_own_that_would_have_to_be_written_ask_for_a_folder(safetensors: Path) -> None:
    _no_tensor(safetensors)
    net = make_net()
    with torch.no_grad():
        net.blocks[0][0].bias += 1  # what the checkpoint would write over
    with refused(net, safetensors.parent, ConfigurationError, r"'blocks\.1\.0\.weight'.*Pass offload_folder"):
        load_checkpoint_and_dispatch(net, safetensors, {"": "cpu", "blocks": "disk"})


@pytest.mark.parametrize("target", ["../outside.safetensors", "{root}/outside.safetensors"])
def test_an_index_that_points_outside_its_folder_is_refused(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    folder.mkdir()
    save_file(STATE, tmp_path / "outside.safetensors")
    index: dict[str, Any] = dict.fromkeys(STATE, target.format(root=tmp_path))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    net = empty_net()
    with refused(net, tmp_path, CheckpointError, "outside its folder"):
        load_checkpoint_and_dispatch(net, folder, MIXED, offload_folder=tmp_path / "o")


def test_a_state_dict_that_lacks_a_weight_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    net = make_net()
    part = {name: tensor for name, tensor in net.state_dict().items() if not name.endswith("0.bias")}
    with refused(net, tmp_path, CheckpointError, r"2 offloaded weights.*'blocks\.0\.0\.bias', 'blocks\.1\.0\.bias'"):
        cpu_offload(net, "cpu", state_dict=part)
    wrong = net.state_dict() | {"blocks.1.0.bias": torch.ones(9)}
    with refused(net, tmp_path, CheckpointError, r"'bias' has shape \(9,\)"):
        cpu_offload(net, "cpu", state_dict=wrong)


WRITES: dict[str, Callable[[nn.Module, Path], Any]] = {
    "dispatch_model": lambda net, folder: dispatch_model(net, ALL_DISK, offload_dir=folder / "new" / "o"),
    "disk_offload": lambda net, folder: disk_offload(net, folder / "new" / "o", "cpu"),
    "a file of torch": lambda net, folder: load_checkpoint_and_dispatch(
        net, folder / "model.bin", MIXED, offload_folder=folder / "new" / "o"
    ),
}


@pytest.mark.parametrize("call", WRITES)
def test_a_full_disk_is_said_beforehand_or_leaves_nothing(
    call: str, pickled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = make_net()
    for limit in (300, 500):  # at the first large tensor, and at the index
        with refused(net, pickled.parent, CheckpointError, "could not be written|be offloaded"), files_end_at(limit):
            WRITES[call](net, pickled.parent)
    usage = shutil.disk_usage(pickled.parent)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    with refused(net, pickled.parent, CheckpointError, r"needs \d+ bytes and the disk has 100 free"):
        WRITES[call](net, pickled.parent)


def test_a_folder_that_cannot_be_replaced_keeps_its_former_weights(tmp_path: Path) -> None:
    folder = tmp_path / "o"
    offload_state_dict(folder, STATE)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with files_end_at(500), pytest.raises(CheckpointError):
        offload_state_dict(folder, {name: torch.ones_like(tensor) for name, tensor in STATE.items()})
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


def test_a_dtype_that_is_none_of_weights_is_refused(tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"dtype=.*expected a floating-point dtype.*load_and_quantize_model"):
        load_checkpoint_and_dispatch(empty_net(), tmp_path, device_map={"": "cpu"}, dtype="int8")


@pytest.mark.parametrize("prefetch_bytes", ["64MB", -1])
def test_an_amount_that_is_no_number_of_bytes_is_refused(prefetch_bytes: Any, tmp_path: Path) -> None:
    net = make_net()
    with nothing_changes(net, tmp_path), pytest.raises(ConfigurationError, match="expected a number of bytes"):
        cpu_offload(net, "cpu", prefetch_bytes=prefetch_bytes)


def test_pickling_an_offloaded_model_says_what_to_do_instead() -> None:
    offloaded = cpu_offload(make_net(), "cpu")
    with pytest.raises(ConfigurationError, match=r"cannot be pickled.*save_model"):
        torch.save(offloaded, io.BytesIO())
    pickle.dumps(remove_hook_from_module(copy.deepcopy(offloaded), recurse=True))


@pytest.mark.parametrize("device_map", ["auto", ["cpu"], {0: "cpu", "": "cpu"}], ids=str)
def test_what_is_no_map_from_names_is_refused(device_map: Any, tmp_path: Path) -> None:
    save_file(STATE, tmp_path / "model.safetensors")
    with pytest.raises(ConfigurationError, match=r"device_map.*expected"):
        load_checkpoint_in_model(empty_net(), tmp_path, device_map=device_map)
    with pytest.raises(ConfigurationError, match=r"device_map.*expected"):
        check_device_map(make_net(), device_map)
