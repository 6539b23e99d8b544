"""Models of transformers, dispatched in every way there is, compute what they compute in one place, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainwright import (
    init_empty_weights,
    load_checkpoint_and_dispatch,
)
from trainwright.bigmodels.maps.placement import largest_layer
from trainwright.bigmodels.maps.sizes import read_outline
from trainwright.checkpoint.format.model import write_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.requires("transformers", reason="models by their configuration"),
    pytest.mark.filterwarnings("ignore"),  # of transformers, about configurations without a tokenizer's numbers
]

TOKENS = torch.arange(24).view(2, 12)


_LAYERS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "num_hidden_layers": 2}
_GPT2 = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 32, "bos_token_id": 1, "eos_token_id": 2}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**_LAYERS, "intermediate_size": 64, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "gpt2": {**_GPT2, "vocab_size": 64},
    "t5": {**_T5, "vocab_size": 64},
    "mixtral": {**_LAYERS, **_EXPERTS},
}


class Saved:
    """A model with values, the folder it was saved to, and what it computes."""

    def __init__(self, name: str, folder: Path) -> None:
        import transformers

        self.config = transformers.AutoConfig.for_model(name, **KINDS[name])
        self.is_pair = name == "t5"
        self.auto: Any = transformers.AutoModelForSeq2SeqLM if self.is_pair else transformers.AutoModelForCausalLM
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.model = self.auto.from_config(self.config).eval()
        self.folder = folder
        if name == "mixtral":  # save_pretrained gives experts the names of its hub, which only from_pretrained undoes
            folder.mkdir()
            write_model(folder, self.model.state_dict(), max_shard_bytes=20_000)
            self.config.save_pretrained(folder)
        else:
            self.model.save_pretrained(folder, max_shard_size="20KB")
        self.wanted = self.run(self.model)

    def empty(self) -> nn.Module:
        with init_empty_weights():
            model: nn.Module = self.auto.from_config(self.config).eval()
        model.tie_weights()  # type: ignore[operator]  # as from_pretrained does
        return model

    def run(self, model: nn.Module) -> torch.Tensor:
        inputs: dict[str, Any] = {"input_ids": TOKENS, "use_cache": False}
        if self.is_pair:
            inputs["decoder_input_ids"] = TOKENS[:, :5]
        with torch.no_grad():
            logits: torch.Tensor = model(**inputs).logits
        return logits


@pytest.fixture(scope="module", params=list(KINDS))
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    return Saved(request.param, tmp_path_factory.mktemp("saved") / "model")


def _no_split(model: Any) -> list[str]:
    return list(model._no_split_modules or ())


def test_all_on_the_disk_and_nothing_is_written(saved: Saved) -> None:
    before = {path: path.stat().st_mtime_ns for path in saved.folder.iterdir()}
    model = load_checkpoint_and_dispatch(saved.empty(), saved.folder, device_map={"": "disk"})
    assert torch.equal(saved.run(model), saved.wanted)
    assert torch.equal(saved.run(model), saved.wanted)  # now with the order learned
    assert {path: path.stat().st_mtime_ns for path in saved.folder.iterdir()} == before
    assert all(parameter.is_meta for parameter in model.parameters())


def test_every_budget_that_holds_the_largest_layer(saved: Saved) -> None:
    outline = read_outline(saved.model, no_split_module_classes=_no_split(saved.model))
    total, (largest, _) = outline.sizes_bytes[0], largest_layer(outline)
    maps = set()
    for eighths in range(1, 10):
        budget = 2 * largest + (total - 2 * largest) * eighths // 8
        model = load_checkpoint_and_dispatch(
            saved.empty(), saved.folder, device_map="auto", max_memory={"cpu": budget},
            no_split_module_classes=_no_split(saved.model),
        )  # fmt: skip
        maps.add(tuple(model.hf_device_map.items()))  # type: ignore[operator,union-attr]
        assert torch.equal(saved.run(model), saved.wanted), budget
    assert len(maps) > 2


def test_text_is_generated_alike_from_the_disk(saved: Saved) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    wanted = saved.model.generate(TOKENS[:1], **settings)
    model: Any = load_checkpoint_and_dispatch(saved.empty(), saved.folder, device_map={"": "disk"})
    assert torch.equal(model.generate(TOKENS[:1], **settings), wanted)
