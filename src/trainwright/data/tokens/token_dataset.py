"""Samples of equal length from files of tokens, as a map-style dataset."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import secrets
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from trainwright.core.errors import ConfigurationError
from trainwright.data.order import KeyedPermutation, derive_key
from trainwright.data.tokens.masking import IGNORED, MaskedSpans, MaskedTokens
from trainwright.data.tokens.token_file import TokenFile, Tokens

PathLike = str | os.PathLike[str]
Sample = dict[str, torch.Tensor]

_PLAN_VERSION = 1  # of `_plan`; increase it when the function returns another plan


class TokenDataset(Dataset[Any]):
    """Samples of `length` tokens from one or several files.

    A sample is a dict of int64 tensors of shape (length,). `labels` equal `input_ids`, except -100 at padding.
    `shift_labels` are the next tokens, or -100 if there is none. Models of transformers use `shift_labels` if both are
    passed, so that every token is predicted once. `documents="separate"` and `"packed"` add `position_ids`.

    Samples are computed from their index, so the dataset needs no memory that grows with its size. The Trainer and the
    Accelerator shuffle it and resume without such memory, too.

    Args:
        files: The path of a file (see `TokenFile`), a list of paths, or a dict from paths to weights.
        length: Tokens of a sample.
        num_samples: Number of samples. Each file contributes a part by its weight, in random order. Samples of a file
            are repeated if it has fewer. With weights, pass the number of the entire training. Default: None, which is
            the number of all samples.
        documents: With `"joined"`, a sample may contain parts of several documents, which attend to each other. With
            `"separate"`, `position_ids` restart at each document, by which models of transformers separate the
            attention (with `use_cache=False` and no attention mask), and no token is predicted from another document.
            `"packed"` is like `"separate"`, but samples consist of complete documents and padding. Only documents
            longer than a sample are divided. Default: `"joined"`.
        split: The part of each file to use, such as `(0, 0.98)` for training and `(0.98, 1)` for validation. Parts
            begin and end at document boundaries, unless a file is a single document. With `"packed"`, parts are counted
            in documents instead of tokens, and a single document cannot be divided. Default: (0, 1), the entire file.
        transform: Function that returns a sample. Its arguments are an int64 array of up to `length` + 1 tokens, and a
            NumPy generator seeded for the sample. See `MaskedTokens` and `MaskedSpans`. Default: None.
        vocab_size: Vocabulary size of the model, to check files and tokens. Default: None, which is that of each file,
            if known.
        pad_token: Fills packed samples. Default: 0.
        seed: Seed of the order within files and of `transform`. Default: 0.

    Raises:
        ConfigurationError: A file is missing, damaged or shorter than one sample, its tokenizer differs from that of
            the first file, its vocabulary is larger than `vocab_size`, or an argument such as a weight is not valid.
    """

    def __init__(
        self,
        files: PathLike | Sequence[PathLike] | Mapping[PathLike, float],
        length: int,
        *,
        num_samples: int | None = None,
        documents: str = "joined",
        split: tuple[float, float] = (0.0, 1.0),
        transform: Callable[[Tokens, np.random.Generator], Sample] | None = None,
        vocab_size: int | None = None,
        pad_token: int = 0,
        seed: int = 0,
    ) -> None:
        if documents not in ("joined", "separate", "packed"):
            raise ConfigurationError(f"documents={documents!r} is unknown. Use 'joined', 'separate' or 'packed'.")
        if transform is not None and documents == "separate":
            raise ConfigurationError(
                "transform is not used with documents='separate'. Pass documents='joined' or 'packed'."
            )
        if isinstance(transform, (MaskedTokens, MaskedSpans)) and transform.length != length:
            raise ConfigurationError(
                f"length={length}, and the transform has length={transform.length}. Use one length."
            )
        if length < 1 or not 0 <= split[0] < split[1] <= 1:
            raise ConfigurationError(f"length={length}, split={split}: write at least 1, and two numbers from 0 to 1.")
        weights = list(files.values()) if isinstance(files, Mapping) else None
        paths: list[PathLike] = [files] if isinstance(files, (str, os.PathLike)) else list(files)
        if not paths:
            raise ConfigurationError("files is empty. Pass the path of a file of tokens.")
        self.length = length
        self.documents = documents
        self.seed = seed
        self._pad = pad_token
        self._transform = transform
        self.files = [TokenFile(path) for path in paths]
        _check_files(self.files, vocab_size)
        self._vocab_sizes = [_vocab_size(file, vocab_size) for file in self.files]
        self._sources: list[_Windows | _Packed] = []
        for file in self.files:
            if documents == "packed":
                self._sources.append(_Packed(file, length, split))
            else:
                self._sources.append(_Windows(file, length, split, with_starts=documents == "separate"))
        counts = [len(source) for source in self._sources]
        for file, count in zip(self.files, counts, strict=True):
            if not count:
                raise ConfigurationError(
                    f"{file.path} has no sample of length={length} in split={split}. Use a shorter length or more data."
                )
        # A file may give only some of its samples. They are chosen at random, not from its beginning.
        self._orders: list[KeyedPermutation] | None = None
        if num_samples is not None and num_samples < 1:
            raise ConfigurationError(f"num_samples={num_samples}: write at least 1, or None.")
        if weights is not None or num_samples is not None:
            self._orders = [KeyedPermutation(count, derive_key(seed, i)) for i, count in enumerate(counts)]
            total = sum(counts) if num_samples is None else num_samples
            counts = _divide_exactly(total, counts if weights is None else weights)
        # Files with 3 and 5 samples have the indices 0 to 2 and 3 to 7. The ends are 3 and 8.
        self._ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        """Return a sample, which depends only on the index."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in [0, {len(self)}).")
        which = bisect.bisect_right(self._ends, index)
        source = self._sources[which]
        first = self._ends[which - 1] if which > 0 else 0
        # With weights or `num_samples` a file may give more samples than it has. Then they repeat in the same order.
        place = (index - first) % len(source)
        if self._orders is not None:
            place = self._orders[which][place]
        tokens, starts = source.read(place)
        # On a GPU a token outside of the vocabulary is an assertion in a kernel that names neither file nor sample.
        if not 0 <= tokens.min() <= tokens.max() < self._vocab_sizes[which]:
            raise ConfigurationError(
                f"{self.files[which].path}.bin has the tokens {tokens.min()} to {tokens.max()} in sample {index}, "
                f"expected 0 to {self._vocab_sizes[which] - 1}. If the vocabulary is right, write or copy it again."
            )
        if self._transform is not None:
            return self._transform(tokens, np.random.default_rng((self.seed, index)))
        return self._causal(tokens, starts)

    def _causal(self, tokens: Tokens, starts: list[int]) -> Sample:
        """Return a sample of up to `length` + 1 tokens in which documents begin at `starts`."""
        length = self.length
        num = min(len(tokens), length)
        ids = np.full(length, self._pad, dtype=np.int64)
        ids[:num] = tokens[:num]
        labels = np.full(length, IGNORED, dtype=np.int64)
        labels[:num] = tokens[:num]
        # A window has length + 1 tokens, so each position has a next token. In a packed sample the last one has none.
        next_tokens = np.full(length, IGNORED, dtype=np.int64)
        next_tokens[: len(tokens) - 1] = tokens[1 : length + 1]
        sample = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.documents != "joined":
            # length 6, starts [0, 4]: position_ids are 0 1 2 3 0 1, and the token at 3 does not predict the one at 4.
            positions = np.arange(length)
            for start, stop in itertools.pairwise([*starts, length]):
                positions[start:stop] -= start
                if start > 0:
                    next_tokens[start - 1] = IGNORED
            sample["position_ids"] = torch.from_numpy(positions)
        sample["shift_labels"] = torch.from_numpy(next_tokens)
        return sample


class _Windows:
    """Consecutive samples of a file: `length` tokens and the next token."""

    def __init__(self, file: TokenFile, length: int, split: tuple[float, float], *, with_starts: bool) -> None:
        self._file = file
        self._length = length
        self._with_starts = with_starts
        self._first = _nearest_boundary(file, split[0])
        end = _nearest_boundary(file, split[1])
        # The last sample needs a next token, too: 9 tokens are two samples of length 4, and 8 tokens are one.
        self._num = max(0, (end - self._first - 1) // length)

    def __len__(self) -> int:
        return self._num

    def read(self, place: int) -> tuple[Tokens, list[int]]:
        """Return the tokens of a sample, and the positions at which documents begin, if they are needed."""
        start = self._first + place * self._length
        stop = start + self._length + 1
        tokens = self._file.tokens[start:stop].astype(np.int64)
        if not self._with_starts:
            return tokens, []
        return tokens, [0, *(boundary - start for boundary in self._file.boundaries(start, stop))]


def _nearest_boundary(file: TokenFile, part: float) -> int:
    """Return the index of the first token after a part of a file, moved to the nearest document boundary."""
    place = int(part * file.num_tokens)
    # The two ends of the file stay: `nearest_boundary` never returns them.
    if place in (0, file.num_tokens):
        return place
    return file.nearest_boundary(place)


class _Packed:
    """The packed samples of a file: best-fit packing of its documents.

    The packing is computed once, stored beside the file, and mapped into memory. If the file's folder is read-only, the
    packing is stored in the folder for temporary files.

    Source: Ding et al., "Fewer Truncations Improve Language Modeling" (2024): documents that are longer than a sample
    are divided, and parts are placed by decreasing length into the sample with the least free space that has enough.
    """

    def __init__(self, file: TokenFile, length: int, split: tuple[float, float]) -> None:
        self._file = file
        index = file.path.with_name(file.path.name + ".idx").stat()
        # A file that is written again has another time, so its old plan is not used.
        key = repr((length, split, index.st_size, index.st_mtime_ns, file.num_tokens, _PLAN_VERSION))
        name = f".{file.path.name}.packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
        folder = file.path.parent
        if not ((folder / name).is_file() or os.access(folder, os.W_OK)):
            folder = Path(tempfile.gettempdir())
        plan = folder / name
        if not plan.is_file():
            # All ranks may compute the plan at once, also on several machines. Each renames its own complete file.
            temporary = plan.with_suffix(f".{secrets.token_hex(8)}.npy")
            np.save(temporary, _plan(file.lengths(), length, split))
            temporary.replace(plan)
        self._parts = np.load(plan, mmap_mode="r")  # see _plan

    def __len__(self) -> int:
        if len(self._parts) == 0:
            return 0
        return int(self._parts[-1, 2]) + 1

    def read(self, place: int) -> tuple[Tokens, list[int]]:
        """Return the tokens of a sample, and the positions at which documents or parts of documents begin."""
        low, high = np.searchsorted(self._parts[:, 2], [place, place + 1])
        parts = self._parts[low:high]
        tokens = np.concatenate([self._file.tokens[start : start + num] for start, num, _ in parts])
        starts = np.cumsum(parts[:, 1]) - parts[:, 1]  # parts of 5, 3 and 2 tokens begin at 0, 5 and 8
        return tokens.astype(np.int64), starts.tolist()


def _plan(lengths: Tokens, length: int, split: tuple[float, float]) -> Tokens:
    """Return the packing of documents with `lengths` into samples of `length` tokens.

    Each row of shape (parts, 3) is a part of a document: the index of its first token in the file, its number of
    tokens, and the index of its sample. Rows are sorted by sample.
    """
    first = int(split[0] * len(lengths))
    end = int(split[1] * len(lengths))
    starts = (np.cumsum(lengths) - lengths)[first:end]
    lengths = lengths[first:end]
    # With length 4, documents of 10 and 3 tokens have 3 parts and 1 part. The parts begin 0, 4 and 8 tokens, and
    # 0 tokens, after the start of their document, and are 4, 4, 2 and 3 tokens long.
    num_parts = -(-lengths // length)
    first_parts = np.cumsum(num_parts) - num_parts
    number_in_document = np.arange(num_parts.sum()) - np.repeat(first_parts, num_parts)
    offsets = length * number_in_document
    part_starts = np.repeat(starts, num_parts) + offsets
    part_lengths = np.minimum(np.repeat(lengths, num_parts) - offsets, length)
    longest_first = np.argsort(-part_lengths, kind="stable")
    samples = _best_fit(part_lengths[longest_first], length)
    plan = np.stack([part_starts[longest_first], part_lengths[longest_first], samples], axis=1)
    return plan[np.argsort(samples, kind="stable")]


def _best_fit(lengths: Tokens, capacity: int) -> Tokens:
    """Return the index of the sample for each part. `lengths` must be in decreasing order."""
    samples = np.empty(len(lengths), dtype=np.int64)
    num_samples = 0
    by_space: dict[int, list[int]] = {}  # free space → samples that have it
    spaces: list[int] = []  # its keys in ascending order: the least one that is enough is found by bisection
    for part, part_length in enumerate(lengths.tolist()):
        at = bisect.bisect_left(spaces, part_length)
        if at < len(spaces):
            space = spaces[at]
            sample = by_space[space].pop()
            if not by_space[space]:
                del by_space[space]
                del spaces[at]
        else:
            space = capacity
            sample = num_samples
            num_samples += 1
        samples[part] = sample
        space -= part_length
        if space > 0:
            if space not in by_space:
                bisect.insort(spaces, space)
                by_space[space] = []
            by_space[space].append(sample)
    return samples


def _check_files(files: Sequence[TokenFile], vocab_size: int | None) -> None:
    first = files[0]
    first_tokenizer = first.facts.get("tokenizer")
    for file in files:
        tokenizer = file.facts.get("tokenizer")
        size = file.facts.get("vocab_size")
        # Files that Megatron-LM wrote have no facts, so their tokenizer is not known.
        if file.facts and first.facts and tokenizer != first_tokenizer:
            raise ConfigurationError(
                f"{file.path} was written with the tokenizer {tokenizer!r}, and {first.path} with "
                f"{first_tokenizer!r}. Tokenize both files with one tokenizer."
            )
        if vocab_size is not None and isinstance(size, int) and size > vocab_size:
            raise ConfigurationError(
                f"{file.path} has tokens of a vocabulary of {size}, and the model's is {vocab_size}. Give the model "
                f"at least {size} embeddings, or tokenize with the model's own tokenizer."
            )


def _vocab_size(file: TokenFile, of_model: int | None) -> int:
    """Return the upper bound of a file's tokens, exclusive."""
    size = file.facts.get("vocab_size")
    if isinstance(size, int):
        return size  # at most that of the model, see _check_files
    if of_model is not None:
        return of_model
    return np.iinfo(np.int64).max


def _divide_exactly(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into integers in proportion to weights. Each differs by less than 1 from the exact value.

    Raises:
        ConfigurationError: A weight is negative or not a number, or all weights are 0.
    """
    if not all(weight >= 0 for weight in weights) or not 0 < sum(weights) < float("inf"):
        raise ConfigurationError(f"weights {list(weights)}: write positive numbers.")
    # 10 by the weights 1, 1, 1: exact values of 3.33, counts of 3, and the rest of 1 goes to the first of them. The
    # largest fractions are rounded up.
    exact = [total * weight / sum(weights) for weight in weights]
    counts = [int(value) for value in exact]
    largest_fraction_first = sorted(range(len(counts)), key=lambda i: counts[i] - exact[i])
    for i in largest_fraction_first[: total - sum(counts)]:
        counts[i] += 1
    return counts
