"""Models of transformers, dispatched in every way there is, compute what they compute in one place, to the last bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.bigmodels.nets import of_transformers
from trainwright import init_empty_weights, load_checkpoint_and_dispatch
from trainwright.bigmodels.maps.device_assignment import largest_layer
from trainwright.bigmodels.maps.sizes import read_outline
from trainwright.checkpoint.format.model import write_model

TOKENS = torch.arange(24).view(2, 12)
_LAYERS = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48, "num_hidden_layers": 2}
_T5 = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {**_LAYERS, "intermediate_size": 64, "num_hidden_layers": 3, "tie_word_embeddings": True},
    "t5": {**_T5, "vocab_size": 64},
    "mixtral": {**_LAYERS, **_EXPERTS},
}


@of_transformers
@pytest.mark.parametrize("name", KINDS)
def test_a_model_runs_and_generates_from_wherever_its_parts_lie(name: str, tmp_path: Path) -> None:
    import transformers

    config = transformers.AutoConfig.for_model(name, **KINDS[name])
    auto: Any = transformers.AutoModelForSeq2SeqLM if name == "t5" else transformers.AutoModelForCausalLM
    inputs = {"input_ids": TOKENS, "use_cache": False} | ({"decoder_input_ids": TOKENS[:, :5]} if name == "t5" else {})
    settings: dict[str, Any] = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    model: Any = auto.from_config(config).eval()
    write_model(tmp_path, model.state_dict(), max_shard_bytes=20_000)
    whole = list(model._no_split_modules or ())
    outline = read_outline(model, no_split_module_classes=whole)
    total, (largest, _) = outline.sizes_bytes[0], largest_layer(outline)

    def loaded(places: Any, **options: Any) -> Any:
        with init_empty_weights():
            empty: Any = auto.from_config(config).eval()
        empty.tie_weights()  # as from_pretrained does
        return load_checkpoint_and_dispatch(empty, tmp_path, places, no_split_module_classes=whole, **options)

    with torch.no_grad():
        wanted = model(**inputs).logits
        maps = set()
        for eighths in (1, 3, 5, 7, 9):
            budget = 2 * largest + (total - 2 * largest) * eighths // 8
            spread = loaded("auto", max_memory={"cpu": budget})
            maps.add(tuple(spread.hf_device_map.items()))
            assert torch.equal(spread(**inputs).logits, wanted), budget
        assert len(maps) > 2
        away = loaded({"": "disk"})
        assert all(parameter.is_meta for parameter in away.parameters())
        for _ in range(2):  # the second one with the order learned
            assert torch.equal(away(**inputs).logits, wanted)
        assert torch.equal(away.generate(TOKENS[:1], **settings), model.generate(TOKENS[:1], **settings))
