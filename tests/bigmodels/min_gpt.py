"""A GPT in the layout of the one that guides to large models use, without attention, and its weights on disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright import init_empty_weights

HERE: int | str = 0 if torch.accelerator.is_available() else "cpu"  # where guides have GPU 0
TOKENS = torch.arange(10).view(2, 5)


class Block(nn.Module):
    """A block with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return (batch, tokens, width)."""
        changed: torch.Tensor = self.mlp(self.ln_1(hidden))
        return hidden + changed


class GPT(nn.Module):
    """Tokens in, scores of shape (batch, tokens, vocabulary) out."""

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
        """Return scores for the token after each."""
        parts: Any = self.transformer
        hidden = parts["drop"](parts["wte"](tokens) + parts["wpe"](torch.arange(tokens.shape[1], device=tokens.device)))
        for block in parts["h"]:
            hidden = block(hidden)
        scores: torch.Tensor = self.lm_head(parts["ln_f"](hidden))
        return scores

    @torch.no_grad()
    def generate(self, tokens: torch.Tensor, max_new_tokens: int, do_sample: bool = False) -> torch.Tensor:
        """Append the most probable token, again and again."""
        assert not do_sample
        for _ in range(max_new_tokens):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens


class Tokenizer:
    """A letter is a token; called as the guide calls its own."""

    def __call__(self, text: str) -> torch.Tensor:
        """Return tokens of shape (1, letters)."""
        return torch.tensor([[ord(letter) % 23 for letter in text]])

    def decode(self, tokens: torch.Tensor) -> str:
        """Return a letter for each token."""
        return "".join(chr(ord("a") + int(token)) for token in tokens)


def make_gpt() -> GPT:
    """Return a model with values; each call gives the same."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return GPT().eval()


def empty_gpt() -> GPT:
    """Return a model without values."""
    with init_empty_weights():
        return GPT().eval()


def save_shards(folder: Path) -> Path:
    """Write shards of `torch.save` and a plain index, as the guide lays them out; return the folder."""
    folder.mkdir()
    state = make_gpt().state_dict()
    index: dict[str, str] = {}
    names = list(state)
    for file, part in (("first_state_dict.bin", names[:9]), ("second_state_dict.bin", names[9:])):
        torch.save({name: state[name] for name in part}, folder / file)
        index.update(dict.fromkeys(part, file))
    (folder / "index.json").write_text(json.dumps(index))
    return folder
