"""What the quick tour, the tutorial and the pages about transformers show of large models, on small random ones."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.bigmodels.min_gpt import HERE
from trainwright import (
    cpu_offload,
    disk_offload,
    dispatch_model,
    infer_auto_device_map,
    init_empty_weights,
    load_checkpoint_and_dispatch,
)


class MyModel(nn.Module):
    """Two layers, (batch, 3) → (batch, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.layers(inputs)
        return result


# The tutorial


def test_the_tutorial_s_full_example(tmp_path: Path) -> None:
    my_model, checkpoint_file = MyModel(), tmp_path / "model.bin"
    torch.save(my_model.state_dict(), checkpoint_file)

    with init_empty_weights():
        model: nn.Module = MyModel()
    assert all(parameter.is_meta for parameter in model.parameters())

    model = load_checkpoint_and_dispatch(model, checkpoint=checkpoint_file, device_map="auto")

    input = torch.randn(2, 3)
    input = input.to(HERE)
    output = model(input)
    torch.testing.assert_close(output.cpu(), my_model(input.cpu()))


# The package's overview of working with large models


def test_the_overview_s_offloading_to_the_host() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    inputs = torch.randn(32, 100)
    expected = model(inputs)
    model = cpu_offload(model, execution_device=HERE)
    with torch.no_grad():
        output = model(inputs.to(HERE))
    torch.testing.assert_close(output.cpu(), expected)


def test_the_overview_s_budgets_and_dispatch() -> None:
    model: nn.Module = nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10))
    max_memory = {0: "10GB", 1: "10GB", "cpu": "50GB"}
    device_map = infer_auto_device_map(
        model, max_memory=max_memory, no_split_module_classes=["LlamaDecoderLayer", "GPT2Block"]
    )
    assert device_map == {"": 0}
    device_map = infer_auto_device_map(model, max_memory={"cpu": "50GB"})
    model = dispatch_model(model, device_map=device_map)
    assert model.hf_device_map == {"": "cpu"}


def test_the_overview_s_budgets_for_devices_in_text(tmp_path: Path) -> None:
    my_model = MyModel()
    torch.save(my_model.state_dict(), tmp_path / "checkpoint.bin")
    with init_empty_weights():
        model: nn.Module = MyModel()
    assert infer_auto_device_map(model, max_memory={"0": "15GB", "1": "15GB", "cpu": "50GB"}) == {"": 0}
    model = load_checkpoint_and_dispatch(
        model,
        checkpoint=tmp_path / "checkpoint.bin",
        device_map="auto",
        max_memory={**({"0": "15GB"} if HERE == 0 else {}), "cpu": "50GB"},
        offload_folder=tmp_path / "offload_weights",
    )
    torch.testing.assert_close(model(torch.ones(1, 3)), my_model(torch.ones(1, 3)))


def test_the_overview_s_offloading_to_a_temporary_folder() -> None:
    model: nn.Module = MyModel()
    input_tensor = torch.ones(1, 3)
    expected = model(input_tensor)
    with tempfile.TemporaryDirectory() as temp_dir:
        model = disk_offload(model, offload_dir=temp_dir, execution_device=HERE)
        output = model(input_tensor)
    torch.testing.assert_close(output, expected)


# The quick tour, and models of transformers


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the configuration and the weights of a small Mixtral under the names of its modules."""
    transformers = pytest.importorskip("transformers")
    from trainwright.checkpoint.format.model import write_model

    config = transformers.MixtralConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, vocab_size=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("mixtral") / "Mixtral-8x7B-Instruct-v0.1"
    folder.mkdir()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        write_model(folder, transformers.AutoModelForCausalLM.from_config(config).state_dict(), max_shard_bytes=50_000)
    config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `save_pretrained` wrote, in shards."""
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_embd=32, n_layer=4, n_head=4, vocab_size=64, n_positions=32, bos_token_id=1, eos_token_id=2, pad_token_id=0
    )
    folder = tmp_path_factory.mktemp("gpt2") / "gpt2-large"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder, max_shard_size="50KB")
    return folder


TOKENS = torch.arange(24).view(2, 12)
MAPS: dict[str, Any] = {
    "auto": "auto",
    "balanced": "balanced",
    "one's own": {
        "transformer.wte": "cpu",
        "transformer.wpe": "cpu",
        "transformer.drop": "cpu",
        "transformer.h.0": HERE,
        "transformer.h.1": HERE,
        "transformer.h.2": "disk",
        "transformer.h.3": "disk",
        "transformer.ln_f": HERE,
        "lm_head": "cpu",
    },
}


def _empty(folder: Path, **options: Any) -> Any:
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder)
    with init_empty_weights():
        model = transformers.AutoModelForCausalLM.from_config(config, **options)
    model.tie_weights()
    return model.eval()


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="models by their configuration")
@pytest.mark.filterwarnings("ignore")
def test_the_quick_tour_loads_a_mixture_of_experts(mixtral: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(mixtral)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config)
    assert all(parameter.is_meta for parameter in model.parameters())
    model = load_checkpoint_and_dispatch(
        model, checkpoint=mixtral, device_map="auto", no_split_module_classes=["Block"]
    )
    assert model.eval()(TOKENS).logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.requires("transformers", reason="models by their configuration")
@pytest.mark.filterwarnings("ignore")
class TestTransformers:
    """Each block of the page about transformers, its `from_pretrained` arguments given to our functions."""

    @pytest.mark.parametrize("name", MAPS)
    def test_a_map_places_the_model_and_text_is_generated(self, name: str, gpt2: Path) -> None:
        import transformers

        model: Any = load_checkpoint_and_dispatch(_empty(gpt2), gpt2, device_map=MAPS[name])
        for module_name, module in model.named_modules():
            if hasattr(module, "weight") and module.weight is not None:
                assert module.weight.device.type in ("cpu", "cuda", "meta"), module_name
        whole = transformers.AutoModelForCausalLM.from_pretrained(gpt2).eval()
        inputs = {"input_ids": TOKENS.to(HERE), "attention_mask": torch.ones_like(TOKENS).to(HERE)}
        with torch.no_grad():
            outputs = model.generate(**inputs, max_new_tokens=6, do_sample=False)
            expected = whole.generate(
                **{key: value.cpu() for key, value in inputs.items()}, max_new_tokens=6, do_sample=False
            )
            torch.manual_seed(0)
            sampled = model.generate(**inputs, max_new_tokens=6, do_sample=True, temperature=0.7)
        assert torch.equal(outputs.cpu(), expected)
        assert sampled.shape == (2, 18)

    def test_memory_is_counted_by_device(self, gpt2: Path) -> None:
        model = load_checkpoint_and_dispatch(_empty(gpt2), gpt2, device_map="auto", dtype=torch.float16)
        device_memory: dict[str, int] = {}
        for _, param in model.named_parameters():
            device = str(param.device)
            size = param.numel() * param.element_size()
            device_memory[device] = device_memory.get(device, 0) + size
        assert sum(device_memory.values()) == 2 * sum(param.numel() for param in _empty(gpt2).parameters())

    def test_what_exceeds_the_budgets_goes_to_the_disk(self, gpt2: Path, tmp_path: Path) -> None:
        model: Any = load_checkpoint_and_dispatch(
            _empty(gpt2),
            gpt2,
            device_map="auto",
            offload_folder=tmp_path / "offload",
            offload_state_dict=True,
            dtype=torch.float16,
            max_memory={"cpu": "100KB"} if HERE == "cpu" else {0: "100KB", "cpu": "100KB"},
            no_split_module_classes=["GPT2Block"],
        )
        assert hasattr(model, "hf_device_map")
        assert "disk" in model.hf_device_map.values()
        assert not os.path.exists(tmp_path / "offload")  # safetensors are read where they lie
        with torch.no_grad():
            assert model(TOKENS).logits.dtype == torch.float16

    def test_a_dispatched_model_is_dispatched_by_a_word(self, gpt2: Path) -> None:
        import transformers

        model = transformers.AutoModelForCausalLM.from_pretrained(gpt2).eval()
        expected = model(TOKENS).logits
        model = dispatch_model(model, device_map="auto")
        for module_name, device in model.hf_device_map.items():
            assert device == HERE, module_name
        torch.testing.assert_close(model(TOKENS.to(HERE)).logits.cpu(), expected)

    def test_from_pretrained_in_the_context_leaves_a_model_that_can_be_loaded(self, gpt2: Path, tmp_path: Path) -> None:
        from transformers import AutoModel

        AutoModel.from_pretrained(gpt2).save_pretrained(tmp_path / "checkpoint", max_shard_size="50KB")
        with init_empty_weights(include_buffers=True):
            model: Any = AutoModel.from_pretrained(gpt2, torch_dtype=torch.float16)
        assert all(parameter.is_meta for parameter in model.parameters())
        model = load_checkpoint_and_dispatch(
            model,
            tmp_path / "checkpoint",
            device_map="auto",
            max_memory={"0": "12GB", "cpu": "30GB"} if HERE == 0 else {"cpu": "30GB"},
            dtype=torch.float16,
            offload_folder=tmp_path / "offload",
        )
        assert model.eval()(TOKENS.to(HERE)).last_hidden_state.dtype == torch.float16

    def test_a_model_of_two_stacks_is_loaded_in_half_precision(self, tmp_path: Path) -> None:
        import transformers

        config = transformers.T5Config(
            d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64, decoder_start_token_id=0
        )
        transformers.AutoModelForSeq2SeqLM.from_config(config).save_pretrained(tmp_path / "T0pp")
        for dtype in (None, torch.float16):
            with init_empty_weights():
                model: Any = transformers.AutoModelForSeq2SeqLM.from_config(config)
            model.tie_weights()
            model = load_checkpoint_and_dispatch(model, tmp_path / "T0pp", device_map="auto", dtype=dtype)
            found = model.eval().generate(TOKENS.to(HERE), max_new_tokens=4, do_sample=False)
            assert found.shape[0] == 2
            assert {p.dtype for p in model.parameters()} == {dtype or torch.float32}
