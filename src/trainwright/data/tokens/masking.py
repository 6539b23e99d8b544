"""Samples for masked language models: masks of single tokens, as for BERT, and of spans, as for T5."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trainwright.core.errors import ConfigurationError
from trainwright.data.tokens.token_file import Tokens

IGNORED = -100  # the label of a position without a target, in transformers and torch


@dataclass(frozen=True, slots=True)
class MaskedTokens:
    """A `transform` of `TokenDataset` that replaces some tokens, which the model predicts.

    A sample has `input_ids`, `labels` (-100 for tokens that are not predicted) and `attention_mask`, each int64 of
    shape (length,). Of the predicted tokens, 80 % become the mask, 10 % a random token, and 10 % are not changed.
    Source: Devlin et al., "BERT" (2018), section 3.1.

    Args:
        length: Length of the dataset's samples.
        mask_token: Mask token of the tokenizer.
        vocab_size: Upper bound of random tokens, exclusive.
        probability: Fraction of tokens that are predicted. Default: 0.15.
        special_tokens: Tokens that are never predicted. They may still be random replacements. Default: none.
        pad_token: Fills short samples. Default: 0.
    """

    length: int
    mask_token: int
    vocab_size: int
    probability: float = 0.15
    special_tokens: Collection[int] = ()
    pad_token: int = 0

    def __call__(self, tokens: Tokens, generator: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return a sample from the first `length` of the int64 tokens."""
        ids = tokens[: self.length].copy()
        is_predicted = generator.random(len(ids)) < self.probability
        is_predicted &= ~np.isin(ids, list(self.special_tokens))
        labels = np.where(is_predicted, ids, IGNORED)
        # Below 0.8 the mask, from 0.9 on a random token, and between them no change.
        draw = generator.random(len(ids))
        ids[is_predicted & (draw < 0.8)] = self.mask_token
        is_random = is_predicted & (draw >= 0.9)
        ids[is_random] = generator.integers(self.vocab_size, size=int(is_random.sum()))
        return _sample(ids, self.length, self.pad_token, labels, self.length)


@dataclass(frozen=True, slots=True)
class MaskedSpans:
    """A `transform` of `TokenDataset` that replaces spans by one mask each. The model generates the replaced tokens.

    A sample has `input_ids` and `attention_mask` of shape (input_length,), and `labels` of shape (target_length,), all
    int64. Source: Raffel et al., "Exploring the Limits of Transfer Learning" (2019), section 3.1.4.

    Args:
        length: Length of the dataset's samples. The input is shorter.
        masks: Mask tokens in order, such as `range(32099, 31999, -1)` of T5.
        eos_token: Ends inputs and labels.
        probability: Fraction of tokens that are replaced. Default: 0.15.
        mean_length: Mean length of a span. Default: 3.
        pad_token: Fills inputs. Default: 0.

    Raises:
        ConfigurationError: There are fewer masks than a sample needs.
    """

    length: int
    masks: range | tuple[int, ...]
    eos_token: int
    probability: float = 0.15
    mean_length: float = 3.0
    pad_token: int = 0

    def __post_init__(self) -> None:
        _, num_spans = self._spans(self.length)
        if len(self.masks) < num_spans:
            raise ConfigurationError(
                f"samples of length={self.length} have {num_spans} spans, and there are {len(self.masks)} masks. "
                "Pass more, or a shorter length."
            )

    @property
    def input_length(self) -> int:
        """Length of `input_ids`: all other tokens of a full sample, the masks and the end."""
        num_replaced, num_spans = self._spans(self.length)
        return self.length - num_replaced + num_spans + 1

    @property
    def target_length(self) -> int:
        """Length of `labels`: all replaced tokens of a full sample, their masks and the end."""
        num_replaced, num_spans = self._spans(self.length)
        return num_replaced + num_spans + 1

    def _spans(self, length: int) -> tuple[int, int]:
        """Return the numbers of replaced tokens and of spans for a text of `length` tokens."""
        # 100 tokens: 15 are replaced, in 5 spans. At least one token is replaced and one stays. Each span follows one
        # or more tokens that stay, so there are at most as many spans as such tokens.
        num_replaced = min(max(round(length * self.probability), 1), length - 1)
        num_spans = min(round(num_replaced / self.mean_length), length - num_replaced)
        return num_replaced, max(1, num_spans)

    def __call__(self, tokens: Tokens, generator: np.random.Generator) -> dict[str, torch.Tensor]:
        """Return a sample from the first `length` of the int64 tokens.

        Raises:
            ConfigurationError: There are fewer than 2 tokens.
        """
        text = tokens[: self.length]
        if len(text) < 2:
            raise ConfigurationError(
                f"MaskedSpans needs at least 2 tokens, not {len(text)}. Leave out such short texts."
            )
        num_replaced, num_spans = self._spans(len(text))
        kept_lengths = _random_parts(len(text) - num_replaced, num_spans, generator)
        replaced_lengths = _random_parts(num_replaced, num_spans, generator)
        # The text a b c d e f with kept lengths 1, 2 and replaced lengths 2, 1 has the parts a, b c, d e, f. With the
        # masks X and Y, the input is a X d e Y, and the labels are X b c Y f. Both end with the end token.
        lengths = np.stack([kept_lengths, replaced_lengths], axis=1)
        parts = np.split(text, np.cumsum(lengths)[:-1])
        ids: list[Any] = []
        labels: list[Any] = []
        for kept, mask, replaced in zip(parts[::2], self.masks[:num_spans], parts[1::2], strict=True):
            ids += [kept, [mask]]
            labels += [[mask], replaced]
        end = [self.eos_token]
        all_ids = np.concatenate([*ids, end])
        all_labels = np.concatenate([*labels, end])
        return _sample(all_ids, self.input_length, self.pad_token, all_labels, self.target_length)


def _random_parts(total: int, num: int, generator: np.random.Generator) -> Tokens:
    """Return `num` random whole numbers of at least 1 whose sum is `total`."""
    # 10 in 3 parts: cuts after 2 and 7 give 2, 5 and 3.
    cuts = np.sort(generator.choice(total - 1, num - 1, replace=False)) + 1
    return np.diff([0, *cuts.tolist(), total])


def _sample(ids: Tokens, length: int, pad_token: int, labels: Tokens, num_labels: int) -> dict[str, torch.Tensor]:
    """Return a sample that is padded to `length` tokens and `num_labels` labels."""
    return {
        "input_ids": _padded(ids, length, pad_token),
        "attention_mask": _padded(np.ones_like(ids), length, 0),
        "labels": _padded(labels, num_labels, IGNORED),
    }


def _padded(values: Tokens, length: int, padding: int) -> torch.Tensor:
    padded = np.full(length, padding, dtype=np.int64)
    padded[: len(values)] = values
    return torch.from_numpy(padded)
