"""Data that is at hand without a download: Python's own manual as text, and scikit-learn's digits."""

from __future__ import annotations

from functools import cache

import torch
from torch.utils.data import Dataset


@cache
def manual() -> str:
    """Return the text of Python's manual that comes with the standard library (465,000 characters in Python 3.11)."""
    from pydoc_data.topics import topics

    return "".join(topics[name] for name in sorted(topics))


@cache
def characters() -> tuple[torch.Tensor, int]:
    """Return the manual as indices of its characters, and the number of different characters."""
    text = manual()
    index = {character: i for i, character in enumerate(sorted(set(text)))}
    return torch.tensor([index[character] for character in text]), len(index)


class Blocks(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Blocks of a sequence of tokens, each with the block that is one token further.

    Args:
        tokens: indices of tokens, shape (n,).
        block_size: tokens in a block.
        stride: distance between the beginnings of two blocks.
    """

    def __init__(self, tokens: torch.Tensor, block_size: int, stride: int = 1) -> None:
        self.tokens, self.block_size, self.stride = tokens, block_size, stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.block_size - 1) // self.stride + 1

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        at = index * self.stride
        return self.tokens[at : at + self.block_size], self.tokens[at + 1 : at + 1 + self.block_size]
