"""Models in 8 and 4 bits: close to the original, saved and loaded as they are, and never half done."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from trainwright import (
    BnbQuantizationConfig,
    CheckpointError,
    ConfigurationError,
    TorchaoQuantizationConfig,
    init_empty_weights,
    load_and_quantize_model,
    quantized_state_dict,
    save_model,
    save_quantized_model,
)
from trainwright.bigmodels.quantization.quantized_layers import flatten_quantized

pytestmark = [
    pytest.mark.requires("bitsandbytes", reason="8 and 4 bit layers"),
    pytest.mark.requires("torchao", reason="int8 and float8 layers"),
    pytest.mark.filterwarnings("ignore"),  # of libraries, about kernels that they would rather have
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(64, 128)
        self.norm = nn.LayerNorm(128)
        self.block = nn.Sequential(nn.Linear(128, 128, bias=False), nn.GELU())
        self.head = nn.Linear(128, 10)
        self.register_buffer("shift", torch.full((10,), 0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.block(self.norm(self.first(inputs)))
        return self.head(hidden) + self.shift


INPUTS = torch.randn(16, 64, generator=torch.Generator().manual_seed(3))


def make_net() -> Net:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return Net().eval()


def empty_net() -> Net:
    with init_empty_weights():
        return Net().eval()


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    save_file(make_net().state_dict(), path)
    return path


def bnb(**options: Any) -> BnbQuantizationConfig:
    return BnbQuantizationConfig(**{"torch_dtype": torch.float32, **options})


CONFIGS: dict[str, tuple[Callable[[], Any], float]] = {
    "8bit": (lambda: bnb(load_in_8bit=True), 0.03),
    "nf4": (lambda: bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32"), 0.3),
    "fp4": (lambda: bnb(load_in_4bit=True, bnb_4bit_quant_type="fp4", bnb_4bit_compute_dtype="fp32"), 0.4),
    "nf4 twice": (
        lambda: bnb(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32",
                    bnb_4bit_use_double_quant=True),
        0.3,
    ),
    "torchao int8": (lambda: TorchaoQuantizationConfig("int8_weight_only"), 0.03),
    "torchao dynamic": (lambda: TorchaoQuantizationConfig("int8_dynamic"), 0.06),
    "torchao float8": (lambda: TorchaoQuantizationConfig("float8_weight_only"), 0.15),
}  # fmt: skip


ON_DISK: dict[str, Any] = {"first": "cpu", "norm": "cpu", "block": "disk", "head": "disk", "shift": "cpu"}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantized_model_computes_nearly_the_same_with_a_byte_or_half_of_one_for_a_weight(
    name: str, weights: Path
) -> None:
    make, tolerance = CONFIGS[name]
    wanted = make_net()(INPUTS)
    model = load_and_quantize_model(empty_net(), make(), weights_location=weights)
    largest = max(quantized_state_dict(model.block[0]).values(), key=lambda tensor: tensor.nbytes)
    assert largest.nbytes == 128 * 128 // (2 if "4" in name else 1)
    found = model(INPUTS)
    assert 0 < float((found - wanted).abs().max()) < tolerance
    assert torch.equal(load_and_quantize_model(make_net(), make())(INPUTS), found)  # in its place
    assert type(model.head) is nn.Linear  # the last module stays as it is
    assert torch.equal(model.head.weight, make_net().head.weight)
    assert torch.equal(model.shift, torch.full((10,), 0.5))


@pytest.mark.parametrize("name", CONFIGS)
def test_what_was_saved_quantized_is_loaded_as_it_was(name: str, weights: Path, tmp_path: Path) -> None:
    make = CONFIGS[name][0]
    model = load_and_quantize_model(empty_net(), make(), weights_location=weights)
    save_quantized_model(model, tmp_path / "saved")
    again = load_and_quantize_model(empty_net(), make(), weights_location=tmp_path / "saved")
    assert torch.equal(again(INPUTS), model(INPUTS))
    with pytest.raises(CheckpointError, match="exists"):
        save_quantized_model(model, tmp_path / "saved")


@pytest.mark.parametrize("name", CONFIGS)
def test_a_model_is_saved_after_a_forward_as_before_it_and_computes_the_same_afterwards(
    name: str, weights: Path, tmp_path: Path
) -> None:
    model = load_and_quantize_model(empty_net(), CONFIGS[name][0](), weights_location=weights)
    save_model(model, tmp_path / "before")
    with torch.inference_mode():
        wanted = model(INPUTS)  # bitsandbytes packs 4-bit weights for some CPUs here, and rounds their scales
    save_model(model, tmp_path / "after")
    before, after = (load_file(tmp_path / when / "model.safetensors") for when in ("before", "after"))
    assert before.keys() == after.keys()
    assert all(torch.equal(tensor, after[key]) for key, tensor in before.items())
    with torch.inference_mode():
        assert torch.equal(model(INPUTS), wanted)
    for state in (model.state_dict(), quantized_state_dict(copy.deepcopy(model))):
        flat = flatten_quantized(state)
        assert all(torch.equal(tensor, flat[key]) for key, tensor in before.items())
    with torch.inference_mode():
        assert torch.equal(model(INPUTS), wanted)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_quantized_model_that_is_partly_on_the_disk_is_saved_as_it_is(
    name: str, weights: Path, tmp_path: Path
) -> None:
    make = CONFIGS[name][0]
    model = load_and_quantize_model(
        empty_net(), make(), weights_location=weights, device_map=ON_DISK, offload_folder=tmp_path / "offload"
    )
    save_model(model, tmp_path / "saved")
    again = load_and_quantize_model(
        empty_net(), make(), weights_location=tmp_path / "saved", device_map=ON_DISK, offload_folder=tmp_path / "other"
    )
    assert torch.equal(again(INPUTS), model(INPUTS))
    here = load_and_quantize_model(empty_net(), make(), weights_location=tmp_path / "saved")  # all in memory
    assert float((here(INPUTS) - make_net()(INPUTS)).abs().max()) < CONFIGS[name][1]


def test_modules_are_left_out_by_name_and_kept_in_float32(weights: Path) -> None:
    config = bnb(load_in_8bit=True, torch_dtype=torch.bfloat16, skip_modules=["first"], keep_in_fp32_modules=["head"])
    model = load_and_quantize_model(empty_net(), config, weights_location=weights)
    assert model.first.weight.dtype == torch.bfloat16
    assert model.norm.weight.dtype == torch.bfloat16
    assert model.head.weight.dtype == torch.float32
    assert model.block[0].weight.dtype == torch.int8


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"load_in_8bit": True, "load_in_4bit": True}, "set one of them to True"),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "int4"}, "expected 'fp4' or 'nf4'"),
        ({"load_in_8bit": True, "torch_dtype": torch.int8}, "a floating-point dtype"),
        ({"load_in_8bit": True, "torch_dtype": "half-way"}, "torch_dtype='half-way', expected one of 'fp32'"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        BnbQuantizationConfig(**options)


def test_a_torchao_type_that_is_unknown_or_not_for_this_device_is_refused(weights: Path) -> None:
    with pytest.raises(ConfigurationError, match="group_size=32 needs quant_type='int4_weight_only'"):
        TorchaoQuantizationConfig(group_size=32)
    with pytest.raises(ConfigurationError, match="Did you mean 'int8_dynamic'"):
        TorchaoQuantizationConfig("int8_dynamik")  # type: ignore[arg-type]
    model = empty_net()
    with pytest.raises(ConfigurationError, match=r"no int4 kernels for cpu.*load_in_4bit"):
        load_and_quantize_model(model, TorchaoQuantizationConfig("int4_weight_only"), weights_location=weights)
    assert type(model.first) is nn.Linear
    assert model.first.weight.is_meta


@pytest.mark.parametrize(
    ("name", "value", "complaint"),
    [
        ("norm.weight", torch.ones(127), r"norm\.weight"),
        ("first.weight", torch.zeros(128, 63), r"first\.weight.*\(128, 63\).*expected.*\(128, 64\)"),
    ],
)
def test_a_weight_that_does_not_fit_is_named_and_the_model_stays_as_it_was(
    name: str, value: torch.Tensor, complaint: str, tmp_path: Path
) -> None:
    save_file(make_net().state_dict() | {name: value}, tmp_path / "model.safetensors")
    model = empty_net()
    first = model.first
    with pytest.raises(CheckpointError, match=complaint):
        load_and_quantize_model(model, bnb(load_in_8bit=True), weights_location=tmp_path)
    assert model.first is first
    assert all(parameter.is_meta for parameter in model.parameters())


def test_an_empty_model_without_weights_and_one_without_layers_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="weights_location"):
        load_and_quantize_model(empty_net(), bnb(load_in_8bit=True))
    with pytest.raises(ConfigurationError, match="no layer to quantize"):
        load_and_quantize_model(nn.Sequential(nn.ReLU()), bnb(load_in_8bit=True))
