"""Sampling of the next token from logits, and the ends of rows. Both are called as those of transformers are."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.core.errors import ConfigurationError


class Sampling:
    """Changes logits so that tokens are sampled from fewer of them.

    Source of `top_p`: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), section 3.1.

    Args:
        temperature: Above 0.
        top_k: 0: all tokens.
        top_p: In (0, 1].
        top_p_decay: `top_p` is multiplied by it after each call.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(self, temperature: float, top_k: int, top_p: float, top_p_decay: float) -> None:
        if temperature <= 0 or top_k < 0 or not 0 < top_p <= 1 or not 0 < top_p_decay <= 1:
            raise ConfigurationError(
                f"temperature={temperature}, top_k={top_k}, top_p={top_p}, top_p_decay={top_p_decay}: write a number "
                "above 0, one of 0 or more, and two above 0 and at most 1. For greedy search, pass none of them."
            )
        self._temperature, self._top_k, self._top_p, self._decay = temperature, top_k, top_p, top_p_decay

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of shape (batch, vocabulary), -inf for tokens that are not sampled."""
        scores = scores / self._temperature
        if 0 < self._top_k < scores.shape[-1]:
            smallest = scores.topk(self._top_k).values[:, -1:]
            scores = scores.masked_fill(scores < smallest, -torch.inf)
        if self._top_p < 1:
            ordered, places = scores.sort(dim=-1, descending=True)
            before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
            is_out = torch.zeros_like(before, dtype=torch.bool).scatter(-1, places, before >= self._top_p)
            scores = scores.masked_fill(is_out, -torch.inf)
            self._top_p *= self._decay
        return scores


class StopWords:
    """Says of each row whether it ended.

    Args:
        words: Sequences of tokens that end a row.
        begins: Place of the first new token of each row.
    """

    def __init__(self, words: Sequence[Sequence[int]], begins: list[int]) -> None:
        for word in words:
            if isinstance(word, (int, str)):
                raise ConfigurationError(f"stop_words has {word!r}, expected sequences of tokens: [[11], [12, 13]].")
        self.words, self.begins = [list(word) for word in words], begins
        if not all(self.words):
            raise ConfigurationError("stop_words has an empty sequence. Remove it.")

    def __call__(self, input_ids: Tensor, scores: object, **_: object) -> Tensor:
        """Return whether each row of (batch, length) ended; rows of beams repeat."""
        begin = self.begins[0]
        return torch.tensor([self.ends(row, begin) for row in input_ids], device=input_ids.device)

    def ends(self, row: Tensor, begin: int) -> bool:
        """Return whether the new tokens of a row, from `begin` on, end with one of the words."""
        longest = max(map(len, self.words), default=0)
        tail = row[max(begin, len(row) - longest) :].tolist()
        return any(tail[-len(word) :] == word for word in self.words)

    def cut(self, row: Tensor) -> Tensor:
        """Return a row of new tokens up to its first word, with it."""
        found = row.tolist()
        for end in range(1, len(found) + 1):
            if any(found[max(0, end - len(word)) : end] == word for word in self.words):
                return row[:end]
        return row
