"""Tiny language models of transformers."""

from __future__ import annotations

from typing import Any

import torch

_LLAMA = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
_SIZES: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 16, "n_head": 4, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0},
    "bert": _LLAMA | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {
        "d_model": 16, "d_kv": 6, "d_ff": 32, "num_layers": 2, "num_heads": 4, "dropout_rate": 0.0,
        "decoder_start_token_id": 0, "pad_token_id": 0, "relative_attention_num_buckets": 8,
    },
    "qwen3": _LLAMA | {"head_dim": 8},
    "phi": _LLAMA | {"embd_pdrop": 0.0, "resid_pdrop": 0.0, "attention_dropout": 0.0},
    "bart": {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "pad_token_id": 0},
}  # fmt: skip
_SIZES["mt5"] = _SIZES["t5"]


def make_model(kind: str, *, layers: int = 2, **changes: Any) -> Any:
    """Return a tiny language model with a vocabulary of 24; the same weights every time."""
    import transformers

    sizes = {"vocab_size": 24, "max_position_embeddings": 16, "bos_token_id": 0, "eos_token_id": 0}
    if kind not in ("t5", "mt5", "bart"):
        sizes["n_layer" if kind == "gpt2" else "num_hidden_layers"] = layers
    config = transformers.AutoConfig.for_model(kind, **(sizes | _SIZES.get(kind, _LLAMA) | changes))
    auto: Any = transformers.AutoModelForMaskedLM if kind == "bert" else transformers.AutoModelForCausalLM
    auto = transformers.AutoModelForSeq2SeqLM if kind in ("t5", "mt5", "bart") else auto
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(2)
        return auto.from_config(config)
