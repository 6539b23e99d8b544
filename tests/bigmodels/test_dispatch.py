"""Models spread over places give the numbers of the model in one place, and nothing is lost on the way."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.bigmodels.nets import ALL_DISK, MIXED, TOKENS, empty_net, make_net, plain_state, tree_of
from trainwright.bigmodels.dispatch.align import has_offloaded_params
from trainwright.bigmodels.dispatch.dispatch import cpu_offload, disk_offload, dispatch_model
from trainwright.bigmodels.dispatch.model_hooks import remove_hook_from_submodules
from trainwright.bigmodels.weights.weights_map import (
    OffloadedWeightsLoader,
    PrefixedDataset,
    load_offloaded_weight,
    offload_state_dict,
    offload_weight,
    read_offload_index,
)
from trainwright.core.errors import CheckpointError, ConfigurationError

EXPECTED = make_net()(TOKENS)
MODES = [torch.no_grad, torch.inference_mode, torch.enable_grad]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("places", [{"": "cpu"}, ALL_DISK, MIXED], ids=["cpu", "disk", "mixed"])
def test_a_dispatched_model_gives_the_same_bits(
    places: dict[str, str], mode: Callable[[], Any], tmp_path: Path
) -> None:
    net = dispatch_model(make_net(), places, offload_dir=tmp_path, force_hooks=True)
    with mode():
        for _ in range(3):
            assert torch.equal(net(TOKENS), EXPECTED)
    assert net.hf_device_map == places


@pytest.mark.parametrize("places", [ALL_DISK, MIXED], ids=["disk", "mixed"])
def test_taking_the_hooks_off_brings_weights_and_ties_back(places: dict[str, str], tmp_path: Path) -> None:
    net = dispatch_model(make_net(), places, offload_dir=tmp_path)
    net(TOKENS)
    remove_hook_from_submodules(net)
    assert {tensor.device.type for tensor in net.state_dict().values()} == {"cpu"}
    assert net.head.weight is net.embed.weight
    assert torch.equal(net.to("cpu")(TOKENS), EXPECTED)


def test_a_model_on_one_device_gets_no_hooks_unless_they_are_forced() -> None:
    assert "_hf_hook" not in vars(dispatch_model(make_net(), {"": "cpu"}))
    assert "_hf_hook" in vars(dispatch_model(make_net(), {"": "cpu"}, force_hooks=True))


def test_a_model_with_weights_away_refuses_to_be_moved(tmp_path: Path) -> None:
    net = dispatch_model(make_net(), MIXED, offload_dir=tmp_path)
    for move in (lambda: net.to("cpu"), net.cpu, net.cuda):
        with pytest.raises(ConfigurationError, match="offloaded"):
            move()
    assert torch.equal(net(TOKENS), EXPECTED)


def test_a_tied_weight_that_is_in_memory_anyway_is_not_written(tmp_path: Path) -> None:
    dispatch_model(make_net(), MIXED, offload_dir=tmp_path)
    assert not any(name.startswith(("embed", "head")) for name in read_offload_index(tmp_path))


def test_a_folder_is_asked_for_where_weights_have_to_be_written() -> None:
    net = make_net()
    with pytest.raises(ConfigurationError, match="offload_dir"):
        dispatch_model(net, MIXED)
    assert torch.equal(net(TOKENS), EXPECTED)


def test_a_map_that_does_not_cover_the_model_is_refused_with_what_is_missing() -> None:
    with pytest.raises(ConfigurationError, match=r"blocks\.1\.0\.weight"):
        dispatch_model(make_net(), {"embed": "cpu", "blocks.0": "disk", "head": "cpu"})


def _emptied(module: nn.Module) -> None:
    if isinstance(module, nn.Linear) and module.bias is not None:
        module.to("meta")


def test_weights_that_are_nowhere_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        dispatch_model(empty_net(), MIXED)
    with pytest.raises(CheckpointError, match=r"blocks\.0\.0\.weight"):
        dispatch_model(make_net().apply(_emptied), {"embed": "cpu", "blocks": "disk", "head": "cpu"})
    with pytest.raises(CheckpointError, match=r"embed\.weight"):
        cpu_offload(empty_net(), "cpu")


def test_an_empty_model_finds_its_weights_in_the_folder(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, make_net().state_dict())
    before = tree_of(tmp_path)
    net = empty_net()
    disk_offload(net, tmp_path)
    for name, buffer in make_net().named_buffers():
        owner, _, leaf = name.rpartition(".")
        net.get_submodule(owner)._buffers[leaf] = buffer
    assert torch.equal(net(TOKENS), EXPECTED)
    assert tree_of(tmp_path) == before


def test_a_folder_of_another_model_does_not_give_its_weights_to_this_one(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {name: torch.zeros_like(t) for name, t in make_net().state_dict().items()})
    net = make_net()
    disk_offload(net, tmp_path)
    assert torch.equal(net(TOKENS), EXPECTED)


def test_buffers_stay_unless_they_are_offloaded_too(tmp_path: Path) -> None:
    net = dispatch_model(make_net(), ALL_DISK, offload_dir=tmp_path / "a")
    assert {buffer.device.type for buffer in net.buffers()} == {"cpu"}
    net = dispatch_model(make_net(), ALL_DISK, offload_dir=tmp_path / "b", offload_buffers=True)
    assert {buffer.device.type for buffer in net.buffers()} == {"meta"}
    assert torch.equal(net(TOKENS), EXPECTED)


def test_a_model_that_is_no_longer_used_gives_its_memory_back(tmp_path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        net = dispatch_model(make_net(), MIXED, offload_dir=tmp_path, prefetch_bytes=0)
        with torch.no_grad():
            net(TOKENS)
        weight = weakref.ref(net.embed.weight)
        del net
        assert weight() is None
    finally:
        gc.enable()


def test_gradients_reach_what_is_not_offloaded(tmp_path: Path) -> None:
    """As for an adapter over a frozen base."""
    base = nn.Linear(4, 4).requires_grad_(False)
    adapter = nn.Linear(4, 4)
    plain = nn.Sequential(adapter, base)
    plain(torch.ones(2, 4)).sum().backward()
    expected = adapter.weight.grad
    adapter.weight.grad = None
    net = dispatch_model(copy.deepcopy(plain), {"0": "cpu", "1": "disk"}, offload_dir=tmp_path)
    net(torch.ones(2, 4)).sum().backward()
    assert expected is not None
    assert torch.equal(net[0].weight.grad, expected)


def test_a_batch_norm_s_statistics_are_kept_in_training(tmp_path: Path) -> None:
    plain = nn.Sequential(nn.BatchNorm1d(3))
    net = copy.deepcopy(plain)
    dispatch_model(net, ALL_DISK, offload_dir=tmp_path)
    plain(torch.ones(4, 3))
    net(torch.ones(4, 3))
    assert torch.equal(net[0].running_mean, plain[0].running_mean)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn])
@pytest.mark.parametrize("shape", [(), (3,), (2, 0), (2, 3)])
def test_a_weight_in_a_folder_comes_back_with_dtype_and_shape(
    dtype: torch.dtype, shape: tuple[int, ...], tmp_path: Path
) -> None:
    weight = torch.ones(shape).to(dtype)
    index = offload_weight(weight, "block.weight", tmp_path)
    found = load_offloaded_weight(tmp_path / "block.weight.dat", index["block.weight"])
    assert found.dtype is dtype
    assert torch.equal(found.float(), weight.float())
    assert found.shape == weight.shape


def test_a_name_that_leaves_the_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="outside its folder"):
        offload_weight(torch.ones(1), "../weight", tmp_path)


def test_the_loader_prefers_memory_and_lists_both(tmp_path: Path) -> None:
    offload_state_dict(tmp_path, {"a.x": torch.zeros(2), "a.y": torch.ones(2)})
    loader = OffloadedWeightsLoader({"a.x": torch.full((2,), 5.0)}, tmp_path)
    assert sorted(loader) == ["a.x", "a.y"]
    assert len(loader) == 2
    inner = PrefixedDataset(loader, "a.")
    assert {name: inner[name].tolist() for name in inner} == {"x": [5.0, 5.0], "y": [1.0, 1.0]}
    with pytest.raises(ConfigurationError, match="state_dict"):
        OffloadedWeightsLoader()


def test_an_index_may_point_into_a_safetensors_file(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    save_file({"inner": torch.arange(4.0)}, tmp_path / "m.safetensors")
    entry = {"safetensors_file": str(tmp_path / "m.safetensors"), "weight_name": "inner", "dtype": "float32"}
    loader = OffloadedWeightsLoader(index={"outer": entry})
    assert loader["outer"].tolist() == [0.0, 1.0, 2.0, 3.0]


def _language_models() -> dict[str, Any]:
    transformers = pytest.importorskip("transformers")
    small = {"vocab_size": 33, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    return {
        "llama": transformers.LlamaConfig(**small, **heads, tie_word_embeddings=True),
        "gpt2": transformers.GPT2Config(
            n_embd=16, n_layer=2, n_head=2, vocab_size=33, n_positions=32, bos_token_id=0, eos_token_id=0
        ),
        "t5": transformers.T5Config(
            d_model=16, d_ff=24, d_kv=8, num_layers=2, num_heads=2, vocab_size=33, decoder_start_token_id=0
        ),
        "mixtral": transformers.MixtralConfig(**small, **heads, num_local_experts=3),
    }


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="its models have the ties, buffers and experts that people run")
@pytest.mark.parametrize("name", ["llama", "gpt2", "t5", "mixtral"])
def test_language_models_give_the_same_bits_from_every_place(name: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    from trainwright.bigmodels.dispatch.loading import load_checkpoint_and_dispatch
    from trainwright.bigmodels.weights.empty import init_empty_weights

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what importing and building transformers' models says
        import transformers

        config = _language_models()[name]
        auto = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
        base = auto.from_config(config).eval()
    tokens = torch.arange(8).reshape(2, 4)
    inputs = {"input_ids": tokens} | ({"decoder_input_ids": tokens} if name == "t5" else {})
    save_file(plain_state(base), tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = base(**inputs).logits
        text = base.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0)
    children = [child for child, _ in base.named_children()]
    mixed = {child: ("disk", "cpu")[position % 2] for position, child in enumerate(children)}
    for places in ({"": "cpu"}, ALL_DISK, mixed):
        with init_empty_weights():
            net = auto.from_config(config).eval()
        load_checkpoint_and_dispatch(net, tmp_path / "model.safetensors", device_map=places, strict=True)
        with torch.no_grad():
            assert torch.equal(net(**inputs).logits, expected), places
            assert torch.equal(net(**inputs).logits, expected), places
            assert torch.equal(net.generate(tokens, max_new_tokens=3, do_sample=False, pad_token_id=0), text), places
        assert any(has_offloaded_params(module) for module in net.modules()) == ("disk" in places.values())


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
