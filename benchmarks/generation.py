"""Time per token of `generate`, as a ratio to transformers' own `generate`, interleaved in one run.

    python benchmarks/generation.py
    python benchmarks/generation.py --own

Models are a Llama and a GPT-2 of random weights; prompts have 16 tokens. With `--own`, the model is not transformers',
and its times with a `KeyValueCache` are compared to those without it.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trainwright.generation import KeyValueCache, generate

NEW_TOKENS, ROUNDS = 64, 11
SIZE = {"vocab_size": 1024, "bos_token_id": None, "eos_token_id": None}


def main() -> None:
    """Print the table."""
    torch.manual_seed(0)
    llama = LlamaConfig(**SIZE, hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4)
    gpt = GPT2Config(**SIZE, n_embd=128, n_layer=4, n_head=4)
    for model in (LlamaForCausalLM(llama).eval(), GPT2LMHeadModel(gpt).eval()):
        for rows, beams in ((1, 1), (8, 1), (2, 4)):
            prompts = torch.randint(1024, (rows, 16))
            library = {"do_sample": False, "num_beams": beams, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}

            def ours(model: Any = model, prompts: Any = prompts, beams: int = beams) -> Any:
                return generate(model, prompts, max_new_tokens=NEW_TOKENS, num_beams=beams)

            def theirs(model: Any = model, prompts: Any = prompts, library: Any = library) -> Any:
                return model.generate(prompts, attention_mask=torch.ones_like(prompts), **library)

            assert torch.equal(ours(), theirs())
            times = [(_seconds(ours), _seconds(theirs)) for _ in range(ROUNDS)]
            ratio = statistics.median(one / other for one, other in times)
            token = 1e3 * statistics.median(one for one, _ in times) / NEW_TOKENS
            print(f"{type(model).__name__:18} {rows} rows, {beams} beams: {token:6.2f} ms per token, ratio {ratio:.3f}")


class Block(nn.Module):
    """Causal attention and an MLP, of the sizes of the others."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm_1, self.norm_2 = nn.LayerNorm(128), nn.LayerNorm(128)
        self.qkv, self.out = nn.Linear(128, 384), nn.Linear(128, 128)
        self.mlp = nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128))

    def forward(self, x: Tensor, cache: KeyValueCache | None) -> Tensor:
        """Return values of (batch, length, 128)."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
        if cache is not None:
            k, v = cache.update(self.number, k, v)
        mask = None if cache is None else cache.mask
        y = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=cache is None)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_2(x))


class OwnModel(nn.Module):
    """A language model that takes a cache."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(1024, 128), nn.Embedding(1024, 128)
        self.blocks = nn.ModuleList(Block(number) for number in range(4))
        self.head = nn.Linear(128, 1024)

    def forward(self, tokens: Tensor, cache: KeyValueCache | None = None) -> Tensor:
        """Return logits of (batch, length, 1024)."""
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]) if cache is None else cache.positions)
        for block in self.blocks:
            x = block(x, cache)
        return self.head(x)


class Recomputing(nn.Module):
    """The same model without a cache."""

    def __init__(self, model: OwnModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, tokens: Tensor) -> Any:
        """Return logits of (batch, length, 1024)."""
        return self.model(tokens)


def compare_own() -> None:
    """Print the table of the model that takes a cache."""
    torch.manual_seed(0)
    model = OwnModel().eval()
    models = (model, Recomputing(model))
    for rows in (1, 8):
        prompts = torch.randint(1024, (rows, 16))
        assert torch.equal(*(generate(one, prompts, max_new_tokens=64) for one in models))
        for num in (64, 256):
            times = [
                [_seconds(lambda one=one, num=num: generate(one, prompts, max_new_tokens=num)) for one in models]  # noqa: B023
                for _ in range(ROUNDS)
            ]
            own, other = (1e3 * statistics.median(pair[i] for pair in times) / num for i in (0, 1))
            ratio = statistics.median(one / two for one, two in times)
            print(f"{rows} rows, {num} tokens: {own:6.2f} ms per token, {other:6.2f} without, ratio {ratio:.3f}")


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    compare_own() if "--own" in sys.argv else main()
