"""The workflows that guides to Accelerate's large models show, step by step, with a small GPT in the place of one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import (
    BnbQuantizationConfig,
    ConfigurationError,
    check_device_map,
    cpu_offload,
    cpu_offload_with_hook,
    disk_offload,
    infer_auto_device_map,
    init_empty_weights,
    load_and_quantize_model,
    load_checkpoint_and_dispatch,
)
from trainwright.strategies.offload.quantization import save_quantized_model


class Block(nn.Module):
    """A block with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        changed: torch.Tensor = self.mlp(self.ln_1(hidden))
        return hidden + changed


class GPT(nn.Module):
    """The layout of minGPT, without attention."""

    def __init__(self, vocabulary: int = 23, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {
                "wte": nn.Embedding(vocabulary, width),
                "wpe": nn.Embedding(32, width),
                "drop": nn.Dropout(0.1),
                "h": nn.ModuleList(Block(width) for _ in range(depth)),
                "ln_f": nn.LayerNorm(width),
            }
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        parts: Any = self.transformer
        hidden = parts["drop"](parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1], device=tokens.device)))
        for block in parts["h"]:
            hidden = block(hidden)
        scores: torch.Tensor = self.lm_head(parts["ln_f"](hidden))
        return scores

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, max_new_tokens: int) -> torch.Tensor:
        """Append the most probable token, again and again."""
        for _ in range(max_new_tokens):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


TOKENS = torch.arange(10).view(2, 5)


@pytest.fixture
def model() -> GPT:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT().eval()


@pytest.fixture
def weights_location(model: GPT, tmp_path: Path) -> Path:
    """Shards of `torch.save` and a plain index, as the guide lays them out."""
    folder, state = tmp_path / "checkpoint", model.state_dict()
    folder.mkdir()
    index: dict[str, str] = {}
    names = list(state)
    for file, part in (("first_state_dict.bin", names[:9]), ("second_state_dict.bin", names[9:])):
        torch.save({name: state[name] for name in part}, folder / file)
        index.update(dict.fromkeys(part, file))
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def empty() -> GPT:
    with init_empty_weights():
        return GPT().eval()


def test_a_model_of_a_hundred_billion_parameters_is_built_without_memory() -> None:
    with init_empty_weights():
        large = nn.Sequential(*[nn.Linear(10000, 10000) for _ in range(1000)])
    assert sum(parameter.numel() for parameter in large.parameters()) == 1000 * (10**8 + 10**4)


def test_shards_are_loaded_and_dispatched_and_text_is_generated(model: GPT, weights_location: Path) -> None:
    loaded: Any = load_checkpoint_and_dispatch(
        empty(), checkpoint=weights_location, device_map="auto", no_split_module_classes=["Block"]
    )
    assert loaded.hf_device_map
    assert torch.equal(loaded.generate(TOKENS, 6), model.generate(TOKENS, 6))


def test_a_map_of_ones_own_puts_parts_on_the_disk(model: GPT, weights_location: Path, tmp_path: Path) -> None:
    device_map: dict[str, Any] = {
        "transformer.wte": "cpu",
        "transformer.wpe": "cpu",
        "transformer.drop": "cpu",
        "transformer.h": "disk",
        "transformer.ln_f": "disk",
        "lm_head": "cpu",
    }
    loaded: Any = load_checkpoint_and_dispatch(
        empty(), checkpoint=weights_location, device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert loaded.hf_device_map == device_map
    assert torch.equal(loaded(TOKENS), model(TOKENS))


def test_a_map_is_designed_for_devices_that_are_not_here() -> None:
    with init_empty_weights():
        large = GPT(vocabulary=50_000, width=1024, depth=40)
    device_map = infer_auto_device_map(large, max_memory={0: "1GiB", 1: "1GiB", "cpu": "30GiB"})
    assert set(device_map.values()) == {0, 1}
    sizes = {0: "300MIB", 1: "600MIB", 2: "600MIB", 3: "600MIB"}  # units in capitals, too
    assert set(infer_auto_device_map(large, max_memory=sizes).values()) == {0, 1, 2, 3}


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


def test_a_whole_model_is_offloaded_to_the_host_or_to_disk(model: GPT, tmp_path: Path) -> None:
    wanted = model(TOKENS)
    assert torch.equal(cpu_offload(model, torch.device("cpu"))(TOKENS), wanted)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        again = GPT().eval()
    assert torch.equal(disk_offload(again, tmp_path / "weights", torch.device("cpu"))(TOKENS), wanted)


def test_models_that_follow_each_other_make_room_for_the_next() -> None:
    models = [nn.Linear(4, 4) for _ in range(3)]
    model_1, hook_1 = cpu_offload_with_hook(models[0], torch.device("cpu"))
    model_2, hook_2 = cpu_offload_with_hook(models[1], torch.device("cpu"), prev_module_hook=hook_1)
    model_3, hook_3 = cpu_offload_with_hook(models[2], torch.device("cpu"), prev_module_hook=hook_2)
    hidden = model_1(torch.ones(1, 4))
    for _ in range(50):
        hidden = model_2(hidden)
    hidden = model_3(hidden)
    hook_3.offload()
    wanted = models[0](torch.ones(1, 4))
    for _ in range(50):
        wanted = models[1](wanted)
    assert torch.equal(hidden, models[2](wanted))


@pytest.mark.requires("bitsandbytes", reason="layers in 8 bits")
@pytest.mark.filterwarnings("ignore")
def test_a_model_is_quantized_saved_and_loaded_again(model: GPT, weights_location: Path, tmp_path: Path) -> None:
    config = BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=6, torch_dtype=torch.float32)
    quantized = load_and_quantize_model(
        empty(), weights_location=weights_location, bnb_quantization_config=config, device_map="auto"
    )
    assert float((quantized(TOKENS) - model(TOKENS)).abs().max()) < 0.1
    location = save_quantized_model(quantized, tmp_path / "saved")
    again = load_and_quantize_model(
        empty(), weights_location=location, bnb_quantization_config=config, device_map="auto"
    )
    assert torch.equal(again(TOKENS), quantized(TOKENS))
