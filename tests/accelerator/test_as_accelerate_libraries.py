"""transformers, peft, trl and diffusers on Trainwright in the place of accelerate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.accelerator.tiny_llama import WORDS, language_model
from tests.helpers.distributed import run_distributed

pytestmark = [
    pytest.mark.slow,
    pytest.mark.distributed,
    pytest.mark.filterwarnings("ignore"),  # of the libraries
]

_TOKENS = torch.arange(24).view(2, 12) % WORDS


# transformers: from_pretrained(device_map=…)

_LAYERS = {"model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu", "model.rotary_emb": "cpu"}
_ENDS = {"model.embed_tokens": "cpu", "lm_head": "cpu"}
_MAPS: dict[str, dict[str, Any]] = {
    "auto": {"device_map": "auto"},
    "everything on the CPU": {"device_map": {"": "cpu"}},
    "one name": {"device_map": "cpu"},
    "a layer on the disk": {"device_map": _LAYERS | _ENDS},
    "everything on the disk": {"device_map": {"": "disk"}},
    "max_memory": {"device_map": "auto", "max_memory": {"cpu": 45_000}},
    "max_memory, with buffers": {"device_map": "sequential", "max_memory": {"cpu": "45KB"}, "offload_buffers": True},
    "a parameter without a place": {"device_map": _LAYERS | {"lm_head": "cpu"}},
}


def _from_pretrained(folder: Path, kind: str) -> tuple[set[str], list[bool]]:
    """Load a saved model with a device map; returns the places and whether the results equal those without a map."""
    import trainwright

    trainwright.as_accelerate()
    from transformers import LlamaForCausalLM

    language_model(tie_word_embeddings=False).save_pretrained(folder / "model")
    plain = LlamaForCausalLM.from_pretrained(folder / "model").eval()
    kind_of_model: Any = LlamaForCausalLM
    if kind == "a parameter without a place":

        class WithoutPlace(LlamaForCausalLM):  # type: ignore[misc]  # it has no types
            _no_placement_params = ("model.embed_tokens.weight",)

        kind_of_model = WithoutPlace
    options = {"offload_folder": str(folder / "offloaded"), **_MAPS[kind]}
    model = kind_of_model.from_pretrained(folder / "model", **options).eval()
    with torch.no_grad():
        same = [torch.equal(model(_TOKENS).logits, plain(_TOKENS).logits)]
        settings = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
        same.append(torch.equal(model.generate(_TOKENS, **settings), plain.generate(_TOKENS, **settings)))
    model.save_pretrained(folder / "again")
    again = LlamaForCausalLM.from_pretrained(folder / "again").state_dict()
    same.append(all(torch.equal(value, again[name]) for name, value in plain.state_dict().items()))
    return {str(place) for place in getattr(model, "hf_device_map", {}).values()}, same


@pytest.mark.parametrize("kind", _MAPS)
def test_transformers_loads_with_a_device_map(kind: str, tmp_path: Path) -> None:
    (places, same), *_ = run_distributed(_from_pretrained, 1, tmp_path, kind, timeout=60)
    assert same == [True, True, True]
    on_disk = "disk" in kind or kind.startswith(("max_memory", "a parameter"))
    assert ("disk" in places) == on_disk
