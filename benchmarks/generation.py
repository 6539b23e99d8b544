"""Time per token of `generate`, as a ratio to transformers' own `generate`, interleaved in one run.

    python benchmarks/generation.py

Models are a Llama and a GPT-2 of random weights; prompts have 16 tokens.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from trainwright.generation import generate

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


def _seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
