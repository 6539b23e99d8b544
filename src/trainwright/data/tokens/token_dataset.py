"""Samples of equal length from files of tokens, as a map-style dataset."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
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


class TokenDataset(Dataset[Any]):
    """Samples of `length` tokens from one or several files.

    A sample is a dict of int64 tensors of shape (length,). `labels` equal `input_ids`. `shift_labels` are the next
    tokens, or -100 if there is none. Models of transformers use `shift_labels` if both are passed, so that every token
    is predicted once. `documents="separate"` adds `position_ids`.

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
            begin and end at document boundaries, unless a file is a single document. Default: (0, 1), the entire file.
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
        weights = dict(files) if isinstance(files, Mapping) else None
        paths = list(weights) if weights else [files] if isinstance(files, (str, os.PathLike)) else list(files)
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
        self._sources = [
            _Packed(file, length, split)
            if documents == "packed"
            else _Windows(file, length, split, with_starts=documents == "separate")
            for file in self.files
        ]
        counts = [len(source) for source in self._sources]
        for file, count in zip(self.files, counts, strict=True):
            if not count:
                raise ConfigurationError(
                    f"{file.path} has no sample of length={length} in split={split}. Use a shorter length or more data."
                )
        self._orders: list[KeyedPermutation] | None = None
        if weights is not None or num_samples is not None:
            self._orders = [KeyedPermutation(count, derive_key(seed, i)) for i, count in enumerate(counts)]
            shares = list(weights.values()) if weights else counts
            counts = _divide_exactly(sum(counts) if num_samples is None else num_samples, shares)
        self._ends = list(itertools.accumulate(counts))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, index: int) -> Sample:
        """Return a sample, which depends only on the index."""
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} is not in [0, {len(self)}).")
        which = bisect.bisect_right(self._ends, index)
        source = self._sources[which]
        place = index - (self._ends[which - 1] if which else 0)
        place %= len(source)
        if self._orders is not None:
            place = self._orders[which][place]
        tokens, starts = source.read(place)
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
        num = min(len(tokens), self.length)
        ids = np.full(length, self._pad, dtype=np.int64)
        labels, following = np.full((2, length), IGNORED, dtype=np.int64)
        ids[:num] = labels[:num] = tokens[:num]
        following[: len(tokens) - 1] = tokens[1 : length + 1]
        sample = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if self.documents != "joined":
            following[[start - 1 for start in starts if start]] = IGNORED
            positions = np.arange(length)
            for start, stop in itertools.pairwise([*starts, length]):
                positions[start:stop] -= start
            sample["position_ids"] = torch.from_numpy(positions)
        sample["shift_labels"] = torch.from_numpy(following)
        return sample


class _Windows:
    """Consecutive samples of a file: `length` tokens and the next token."""

    def __init__(self, file: TokenFile, length: int, split: tuple[float, float], *, with_starts: bool) -> None:
        self._file = file
        self._length = length
        self._with_starts = with_starts
        places = (int(part * file.num_tokens) for part in split)
        self._first, last = (file.nearest_boundary(at) if 0 < at < file.num_tokens else at for at in places)
        self._num = (last - self._first - 1) // length if last > self._first else 0

    def __len__(self) -> int:
        return self._num

    def read(self, place: int) -> tuple[Tokens, list[int]]:
        start = self._first + place * self._length
        stop = start + self._length + 1
        tokens = self._file.tokens[start:stop].astype(np.int64)
        if not self._with_starts:
            return tokens, []
        return tokens, [0, *(place - start for place in self._file.boundaries(start, stop))]


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
        key = repr((length, split, index.st_size, index.st_mtime_ns, file.num_tokens, 1))
        name = f".{file.path.name}.packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
        folder = file.path.parent
        if not ((folder / name).is_file() or os.access(folder, os.W_OK)):
            folder = Path(tempfile.gettempdir())
        plan = folder / name
        if not plan.is_file():
            temporary = plan.with_suffix(f".{os.getpid()}.npy")
            np.save(temporary, _plan(file.lengths(), length, split))
            temporary.replace(plan)
        # (parts, 3): first token, length, and number of the sample that it is in; by sample
        self._parts = np.load(plan, mmap_mode="r")

    def __len__(self) -> int:
        return int(self._parts[-1, 2]) + 1 if len(self._parts) else 0

    def read(self, place: int) -> tuple[Tokens, list[int]]:
        """Return the tokens of a sample, and the positions at which documents or parts of documents begin."""
        low, high = np.searchsorted(self._parts[:, 2], [place, place + 1])
        parts = self._parts[low:high]
        tokens = np.concatenate([self._file.tokens[start : start + num] for start, num, _ in parts])
        return tokens.astype(np.int64), (np.cumsum(parts[:, 1]) - parts[:, 1]).tolist()


def _plan(lengths: Tokens, length: int, split: tuple[float, float]) -> Tokens:
    first, last = (int(part * len(lengths)) for part in split)
    starts = np.cumsum(lengths) - lengths
    starts = starts[first:last]
    lengths = lengths[first:last]
    num_parts = -(-lengths // length)
    # every part but the last one of a document is as long as a sample
    offsets = length * (np.arange(num_parts.sum()) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts))
    part_lengths = np.minimum(np.repeat(lengths, num_parts) - offsets, length)
    order = np.argsort(-part_lengths, kind="stable")
    samples = _best_fit(part_lengths[order], length)
    plan = np.stack([(np.repeat(starts, num_parts) + offsets)[order], part_lengths[order], samples], axis=1)
    return plan[np.argsort(samples, kind="stable")]


def _best_fit(lengths: Tokens, capacity: int) -> Tokens:
    """Return the index of the sample for each part. `lengths` must be in decreasing order."""
    found = np.empty(len(lengths), dtype=np.int64)
    num = 0
    by_space: dict[int, list[int]] = {}  # free space → samples that have it
    spaces: list[int] = []  # its keys in ascending order: the least one that is enough is found by bisection
    for i, wanted in enumerate(lengths.tolist()):
        at = bisect.bisect_left(spaces, wanted)
        if at < len(spaces):
            space = spaces[at]
            sample = by_space[space].pop()
            if not by_space[space]:
                del by_space[space], spaces[at]
        else:
            space = capacity
            sample = num
            num = num + 1
        found[i] = sample
        left = space - wanted
        if left:
            if left not in by_space:
                bisect.insort(spaces, left)
            by_space.setdefault(left, []).append(sample)
    return found


def _check_files(files: Sequence[TokenFile], vocab_size: int | None) -> None:
    first = files[0]
    for file in files:
        found = file.facts.get("tokenizer")
        size = file.facts.get("vocab_size")
        if file.facts and first.facts and found != first.facts.get("tokenizer"):
            raise ConfigurationError(
                f"{file.path} was written with the tokenizer {found!r}, and {first.path} with "
                f"{first.facts.get('tokenizer')!r}. Tokenize both files with one tokenizer."
            )
        if vocab_size is not None and isinstance(size, int) and size > vocab_size:
            raise ConfigurationError(
                f"{file.path} has tokens of a vocabulary of {size}, and the model's is {vocab_size}. Give the model "
                f"at least {size} embeddings, or tokenize with the model's own tokenizer."
            )


def _vocab_size(file: TokenFile, of_model: int | None) -> int:
    """Return the upper bound of a file's tokens, exclusive. `_check_files` has compared both sizes."""
    size = file.facts.get("vocab_size")
    if isinstance(size, int):
        return size
    return np.iinfo(np.int64).max if of_model is None else of_model


def _divide_exactly(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into integers in proportion to weights. Each differs by less than 1 from the exact value.

    Raises:
        ConfigurationError: A weight is negative or not a number, or all weights are 0.
    """
    if not all(weight >= 0 for weight in weights) or not 0 < sum(weights) < float("inf"):
        raise ConfigurationError(f"weights {list(weights)}: write positive numbers.")
    shares = [total * weight / sum(weights) for weight in weights]
    found = [int(share) for share in shares]
    by_rest = sorted(range(len(found)), key=lambda i: found[i] - shares[i])
    for i in by_rest[: total - sum(found)]:
        found[i] += 1
    return found
