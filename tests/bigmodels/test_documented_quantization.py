"""The guide to quantizing models, block by block, with a small GPT in the place of a large one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.bigmodels.min_gpt import HERE, TOKENS, empty_gpt, make_gpt, save_shards
from trainwright import BnbQuantizationConfig, has_offloaded_params, load_and_quantize_model, save_model

pytestmark = [
    pytest.mark.requires("bitsandbytes", reason="layers in 8 and 4 bits"),
    pytest.mark.filterwarnings("ignore"),  # of bitsandbytes, about kernels that it would rather have
]


@pytest.fixture
def weights_location(tmp_path: Path) -> Path:
    return save_shards(tmp_path / "checkpoint")


def _error(model: nn.Module) -> float:
    with torch.no_grad():
        return float((model(TOKENS).float() - make_gpt()(TOKENS)).abs().max())


def test_an_empty_model_is_quantized_to_8_bits_saved_and_loaded_into_the_same_object(
    weights_location: Path, tmp_path: Path
) -> None:
    empty_model = empty_gpt()
    bnb_quantization_config = BnbQuantizationConfig(load_in_8bit=True, llm_int8_threshold=6, torch_dtype=torch.float32)
    quantized_model = load_and_quantize_model(
        empty_model,
        weights_location=weights_location,
        bnb_quantization_config=bnb_quantization_config,
        device_map="auto",
    )
    assert _error(quantized_model) < 0.1
    scores = quantized_model(TOKENS)
    new_weights_location = tmp_path / "saved"
    save_model(quantized_model, new_weights_location)
    quantized_model_from_saved = load_and_quantize_model(
        empty_model,
        weights_location=new_weights_location,
        bnb_quantization_config=bnb_quantization_config,
        device_map="auto",
    )
    assert torch.equal(quantized_model_from_saved(TOKENS), scores)


def test_an_empty_model_is_quantized_to_4_bits_with_quantized_scales(weights_location: Path) -> None:
    bnb_quantization_config = BnbQuantizationConfig(
        load_in_4bit=True,
        bnb_4bit_compute_dtype=torch.bfloat16,
        bnb_4bit_use_double_quant=True,
        bnb_4bit_quant_type="nf4",
    )
    quantized_model = load_and_quantize_model(
        empty_gpt(),
        weights_location=weights_location,
        bnb_quantization_config=bnb_quantization_config,
        device_map="auto",
    )
    assert _error(quantized_model) < 0.5


@pytest.mark.parametrize("width", ["8", "4"])
def test_modules_are_offloaded_by_a_map_of_ones_own(width: str, weights_location: Path, tmp_path: Path) -> None:
    device_map: dict[str, Any] = {
        "transformer.wte": HERE,
        "transformer.wpe": HERE,
        "transformer.drop": HERE,
        "transformer.h": "cpu",
        "transformer.ln_f": "disk",
        "lm_head": "disk",
    }
    quantized_model = load_and_quantize_model(
        empty_gpt(),
        weights_location=weights_location,
        bnb_quantization_config=BnbQuantizationConfig(**{f"load_in_{width}bit": True}, torch_dtype=torch.float32),
        device_map=device_map,
        offload_folder=tmp_path / "offload",
    )
    head = quantized_model.get_submodule("lm_head")
    assert has_offloaded_params(head)
    assert head.weight.is_meta
    assert _error(quantized_model) < 0.5


def test_a_model_that_is_to_be_fine_tuned_needs_no_map(weights_location: Path) -> None:
    quantized_model = load_and_quantize_model(
        empty_gpt(),
        weights_location=weights_location,
        bnb_quantization_config=BnbQuantizationConfig(load_in_8bit=True, torch_dtype=torch.float32),
    )
    adapter = nn.Linear(23, 1)
    adapter(quantized_model(TOKENS.to(HERE)).cpu()).sum().backward()
    assert adapter.weight.grad is not None
