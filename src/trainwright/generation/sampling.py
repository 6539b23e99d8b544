"""Sampling of the next token from logits, and the ends of rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from trainwright.core.errors import ConfigurationError


class Sampling:
    """Function that changes logits so that the largest one is a sample. It is a `LogitsProcessor` of transformers.

    Source of `top_p`: Holtzman et al., "The Curious Case of Neural Text Degeneration" (2020), section 3.1. Source of
    the sample: Maddison et al., "A* Sampling" (2014), section 2: Gumbel noise is added to all logits.

    Args:
        temperature: Divisor of the logits, above 0.
        top_k: Number of tokens to sample from. 0 is all tokens.
        top_p: Total probability of the tokens to sample from, in (0, 1].
        top_p_decay: Factor of `top_p` after each call.
        generator: Generator of the noise. None adds no noise.

    Raises:
        ConfigurationError: A value is out of range.
    """

    def __init__(
        self, temperature: float, top_k: int, top_p: float, top_p_decay: float, generator: torch.Generator | None = None
    ) -> None:
        if temperature <= 0 or top_k < 0 or not 0 < top_p <= 1 or not 0 < top_p_decay <= 1:
            raise ConfigurationError(
                f"temperature={temperature}, top_k={top_k}, top_p={top_p}, top_p_decay={top_p_decay}: expected "
                "temperature > 0, top_k >= 0, 0 < top_p <= 1 and 0 < top_p_decay <= 1. For greedy search, pass none "
                "of them."
            )
        self._temperature = temperature
        self._top_k = top_k
        self._top_p = top_p
        self._decay = top_p_decay
        self._generator = generator

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Return scores of shape (batch, vocabulary), -inf for tokens that are not sampled."""
        scores = scores / self._temperature
        if 0 < self._top_k < scores.shape[-1]:
            smallest = scores.topk(self._top_k).values[:, -1:]
            scores = scores.masked_fill(scores < smallest, -torch.inf)
        if self._top_p < 1:
            ordered, tokens = scores.sort(dim=-1, descending=True)
            probabilities = ordered.softmax(-1)
            # A token is left out if the more probable ones have `top_p` already. The first one is always kept.
            more_probable = probabilities.cumsum(-1) - probabilities
            is_left_out = torch.zeros_like(ordered, dtype=torch.bool).scatter(-1, tokens, more_probable >= self._top_p)
            scores = scores.masked_fill(is_left_out, -torch.inf)
        self._top_p *= self._decay
        if self._generator is None:
            return scores
        # -log(Exponential(1)) is Gumbel noise.
        return scores - torch.empty_like(scores).exponential_(generator=self._generator).log()


def all_stop_words(words: Sequence[Sequence[int]], eos_token: int | None) -> list[list[int]]:
    """Return `words`, and the word `[eos_token]` unless `eos_token` is None.

    Raises:
        ConfigurationError: A word is empty or not a sequence of tokens.
    """
    for word in words:
        if isinstance(word, (int, str)):
            raise ConfigurationError(f"stop_words has {word!r}, expected sequences of tokens: [[11], [12, 13]].")
        if not len(word):
            raise ConfigurationError("stop_words has an empty sequence. Remove it.")
    all_words = [list(word) for word in words]
    if eos_token is not None:
        all_words.append([eos_token])
    return all_words


def ends(words: list[list[int]], tokens: Tensor) -> bool:
    """Return whether the new tokens of a row end with one of the stop words."""
    longest = max((len(word) for word in words), default=1)
    tail = tokens[-longest:].tolist()  # one copy to the host
    return any(tail[-len(word) :] == word for word in words)


def cut(words: list[list[int]], tokens: Tensor) -> Tensor:
    """Return the new tokens of a row up to and including the first stop word."""
    for length in range(1, len(tokens) + 1):
        if ends(words, tokens[:length]):
            return tokens[:length]
    return tokens
