"""The guide to loading big models, block by block, with a small GPT in the place of a large one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.bigmodels.min_gpt import GPT, HERE, TOKENS, Tokenizer, empty_gpt, make_gpt, save_shards
from trainwright import (
    ConfigurationError,
    check_device_map,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
    load_checkpoint_in_model,
)


@pytest.fixture
def weights_location(tmp_path: Path) -> Path:
    return save_shards(tmp_path / "checkpoint")


# How the process works


def test_the_usual_way_of_loading_gives_what_the_new_way_gives(tmp_path: Path) -> None:
    checkpoint_file = tmp_path / "model.bin"
    torch.save(make_gpt().state_dict(), checkpoint_file)
    my_model = GPT().eval()
    state_dict = torch.load(checkpoint_file, weights_only=True)
    my_model.load_state_dict(state_dict)
    with init_empty_weights():
        empty = GPT().eval()
    assert load_checkpoint_in_model(empty, checkpoint_file) == ([], [])
    assert torch.equal(empty(TOKENS), my_model(TOKENS))


def test_a_model_of_a_hundred_billion_parameters_is_built_without_memory() -> None:
    with init_empty_weights():
        large = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
    assert sum(parameter.numel() for parameter in large.parameters()) == 1000 * (10**8 + 10**4)


def test_shards_are_found_by_an_index_of_names_and_files(tmp_path: Path) -> None:
    model = nn.ModuleDict({"linear1": nn.Linear(3, 4), "linear2": nn.Linear(4, 2)})
    for layer, file in (("linear1", "first_state_dict.bin"), ("linear2", "second_state_dict.bin")):
        torch.save({f"{layer}.{name}": t for name, t in model[layer].state_dict().items()}, tmp_path / file)
    index = {
        "linear1.weight": "first_state_dict.bin",
        "linear1.bias": "first_state_dict.bin",
        "linear2.weight": "second_state_dict.bin",
        "linear2.bias": "second_state_dict.bin",
    }
    (tmp_path / "index.json").write_text(json.dumps(index))
    with init_empty_weights():
        empty = nn.ModuleDict({"linear1": nn.Linear(3, 4), "linear2": nn.Linear(4, 2)})
    load_checkpoint_in_model(empty, tmp_path, strict=True)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in empty.state_dict().items())


def test_shards_are_loaded_and_dispatched_and_text_is_generated(weights_location: Path) -> None:
    model: Any = load_checkpoint_and_dispatch(
        empty_gpt(), checkpoint=weights_location, device_map="auto", no_split_module_classes=["Block"]
    )
    assert model.hf_device_map
    tokenizer = Tokenizer()
    x1 = tokenizer("Hello, my name is").to(HERE)
    outputs = model.generate(x1, max_new_tokens=10, do_sample=False)[0]
    expected = make_gpt().generate(x1.cpu(), 10)[0]
    assert tokenizer.decode(outputs.cpu().squeeze()) == tokenizer.decode(expected)


def test_the_map_that_was_picked_names_the_layers(weights_location: Path, tmp_path: Path) -> None:
    model: Any = load_checkpoint_and_dispatch(
        empty_gpt(), checkpoint=weights_location, device_map="auto", no_split_module_classes=["Block"],
        max_memory={"cpu": "300KB"}, offload_folder=tmp_path / "offload",
    )  # fmt: skip
    assert list(model.hf_device_map)[:4] == [
        "transformer.wte",
        "transformer.wpe",
        "transformer.drop",
        "transformer.h.0",
    ]
    assert list(model.hf_device_map.values()) == sorted(model.hf_device_map.values())  # "cpu", then "disk"
    assert torch.equal(model(TOKENS), make_gpt()(TOKENS))


def test_a_map_of_ones_own_puts_parts_on_the_disk(weights_location: Path, tmp_path: Path) -> None:
    device_map: dict[str, Any] = {
        "transformer.wte": "cpu",
        "transformer.wpe": HERE,
        "transformer.drop": "cpu",
        "transformer.h": "disk",
        "transformer.ln_f": "disk",
        "lm_head": "cpu",
    }
    model: Any = load_checkpoint_and_dispatch(
        empty_gpt(), checkpoint=weights_location, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert model.hf_device_map == device_map
    torch.testing.assert_close(model(TOKENS), make_gpt()(TOKENS))


def test_the_guide_s_map_ends_early_and_is_refused_with_what_it_leaves_out(weights_location: Path) -> None:
    device_map = {
        "transformer.wte": "cpu",
        "transformer.wpe": 0,
        "transformer.drop": "cpu",
        "transformer.h.0": "disk",
    }
    model = empty_gpt()
    with pytest.raises(ConfigurationError, match=r"transformer\.h\.1\.ln_1\.weight.*lm_head\.weight"):
        load_checkpoint_and_dispatch(model, checkpoint=weights_location, device_map=device_map)
    assert all(parameter.is_meta for parameter in model.parameters())


# Designing a device map


def test_a_map_is_designed_for_devices_that_are_not_here() -> None:
    with init_empty_weights():
        my_model = GPT(vocabulary=50_000, width=2048, depth=48)
    device_map = infer_auto_device_map(my_model, max_memory={0: "10GiB", 1: "10GiB", "cpu": "30GiB"})
    assert set(device_map.values()) == {0}
    device_map = infer_auto_device_map(my_model, max_memory={0: "5GiB", 1: "5GiB", "cpu": "30GiB"})
    assert set(device_map.values()) == {0, 1}


def test_the_first_device_may_be_given_less() -> None:
    with init_empty_weights():
        my_model = GPT(vocabulary=250_880, width=14_336, depth=70)
    max_memory = {0: "30GIB", 1: "46GIB", 2: "46GIB", 3: "46GIB", 4: "46GIB", 5: "46GIB", 6: "46GIB", 7: "46GIB"}
    device_map = infer_auto_device_map(
        my_model, max_memory=max_memory, no_split_module_classes=["Block"], dtype=torch.bfloat16
    )
    blocks = [[name for name, device in device_map.items() if device == index] for index in range(8)]
    assert len(blocks[0]) < len(blocks[1]) == len(blocks[2])
    assert "disk" not in device_map.values()


def test_a_map_must_cover_the_whole_model() -> None:
    blocks = {
        block: nn.ModuleDict({name: nn.Linear(2, 2) for name in ("linear1", "linear2", "linear3")})
        for block in ("block1", "block2")
    }
    two = nn.ModuleDict(blocks)
    check_device_map(two, {"block1": 0, "block2": 1})
    check_device_map(two, {"block1": 0, "block2.linear1": 0, "block2.linear2": 1, "block2.linear3": 1})
    with pytest.raises(ConfigurationError, match=r"block2\.linear3\.weight, block2\.linear3\.bias"):
        check_device_map(two, {"block1": 0, "block2.linear1": 1, "block2.linear2": 1})


# CPU offload only, disk offload only


def test_a_whole_model_is_offloaded_to_the_host_or_to_disk(tmp_path: Path) -> None:
    wanted = make_gpt()(TOKENS)
    execution_device = torch.device(HERE)
    model, again, offload_dir = make_gpt(), make_gpt(), tmp_path / "weights"
    cpu_offload(model, execution_device)
    torch.testing.assert_close(model(TOKENS), wanted)
    disk_offload(again, offload_dir, execution_device)
    torch.testing.assert_close(again(TOKENS), wanted)


def test_models_that_follow_each_other_make_room_for_the_next() -> None:
    models = [nn.Linear(4, 4) for _ in range(3)]
    execution_device = torch.device(HERE)
    model_1, hook_1 = cpu_offload_with_hook(models[0], execution_device)
    model_2, hook_2 = cpu_offload_with_hook(models[1], execution_device, prev_module_hook=hook_1)
    model_3, hook_3 = cpu_offload_with_hook(models[2], execution_device, prev_module_hook=hook_2)
    hid_1 = model_1(torch.ones(1, 4))
    for _ in range(50):
        hid_2 = model_2(hid_1)
    hid_3 = model_3(hid_2)
    hook_3.offload()
    assert {tensor.device.type for model in models for tensor in model.parameters()} == {"cpu"}
    torch.testing.assert_close(hid_3.cpu(), _chain(models))


def _chain(models: list[nn.Linear]) -> torch.Tensor:
    hidden = torch.ones(1, 4)
    for model in models:
        hidden = nn.functional.linear(hidden, model.weight, model.bias)
    return hidden


# Saving and loading a model, in the guide to adding four lines to a script


def test_a_sharded_checkpoint_is_loaded_onto_a_device(weights_location: Path) -> None:
    unwrapped_model, device = GPT().eval(), torch.device(HERE)
    load_checkpoint_in_model(unwrapped_model, weights_location, device_map={"": device})
    assert {parameter.device.type for parameter in unwrapped_model.parameters()} == {device.type}
    torch.testing.assert_close(unwrapped_model(TOKENS.to(device)).cpu(), make_gpt()(TOKENS))
