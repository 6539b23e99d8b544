"""Best-fit packing: samples that are filled with complete documents.

Source: Ding et al., "Fewer Truncations Improve Language Modeling" (2024): documents that are longer than a sample are
divided, and parts are placed by decreasing length into the sample with the least free space that has enough.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from trainwright.data.tokens.token_file import TokenFile


class PackedDocuments:
    """The packed samples of a file. The plan is computed once, stored beside the file, and mapped into memory.

    Where that folder cannot be written, the plan is in the folder for temporary files.

    Args:
        file: File of tokens.
        length: Tokens of a sample.
        split: The part of the documents that is used.
    """

    def __init__(self, file: TokenFile, length: int, split: tuple[float, float]) -> None:
        self._file, self._length = file, length
        index = file.path.with_name(file.path.name + ".idx").stat()
        key = repr((length, split, index.st_size, index.st_mtime_ns, file.num_tokens, 1))
        name = f".{file.path.name}.packed-{hashlib.sha256(key.encode()).hexdigest()[:16]}.npy"
        folders = (file.path.parent, Path(tempfile.gettempdir()))
        found = next((folder / name for folder in folders if (folder / name).is_file()), None)
        if found is None:
            plan = self._plan(split)
            folder = next((folder for folder in folders if os.access(folder, os.W_OK)), folders[-1])
            found = folder / name
            temporary = found.with_name(f"{name}.{os.getpid()}")
            with temporary.open("wb") as stream:
                np.save(stream, plan)
            temporary.replace(found)
        # (parts, 3): first token, length, and number of the sample that it is in; by sample
        self._parts = np.load(found, mmap_mode="r")

    def __len__(self) -> int:
        return int(self._parts[-1, 2]) + 1 if len(self._parts) else 0

    def read(self, place: int) -> tuple[np.ndarray[Any, Any], list[int]]:
        """Return the tokens of a sample and where documents, or parts of them, begin in it."""
        low, high = np.searchsorted(self._parts[:, 2], [place, place + 1])
        parts, starts = self._parts[low:high], np.zeros(high - low, dtype=np.int64)
        np.cumsum(parts[:-1, 1], out=starts[1:])
        tokens = np.concatenate([self._file.tokens[start : start + num] for start, num, _ in parts])
        return tokens.astype(np.int64), starts.tolist()

    def _plan(self, split: tuple[float, float]) -> np.ndarray[Any, Any]:
        length, lengths = self._length, self._file.lengths()
        first, last = (int(part * len(lengths)) for part in split)
        starts = np.cumsum(lengths) - lengths
        starts, lengths = starts[first:last], lengths[first:last]
        num_parts = -(-lengths // length)
        # every part but the last one of a document is as long as a sample
        offsets = np.arange(num_parts.sum()) - np.repeat(np.cumsum(num_parts) - num_parts, num_parts)
        part_starts = np.repeat(starts, num_parts) + offsets * length
        part_lengths = np.minimum(np.repeat(lengths, num_parts) - offsets * length, length)
        order = np.argsort(-part_lengths, kind="stable")
        samples = _best_fit(part_lengths[order], length)
        plan = np.stack([part_starts[order], part_lengths[order], samples], axis=1)
        return plan[np.argsort(samples, kind="stable")]


def _best_fit(lengths: np.ndarray[Any, Any], capacity: int) -> np.ndarray[Any, Any]:
    """Return the sample of each part; `lengths` decrease."""
    found = np.empty(len(lengths), dtype=np.int64)
    by_space: dict[int, list[int]] = {}  # free space → samples that have it
    # a tree of which free spaces there are, to find the least one that is enough in O(log(capacity))
    size = 1 << capacity.bit_length()
    tree = [False] * (2 * size)

    def mark(space: int, there: bool) -> None:
        node = size + space
        tree[node] = there
        while node > 1:
            node //= 2
            tree[node] = tree[2 * node] or tree[2 * node + 1]

    num = 0
    for i, wanted in enumerate(lengths.tolist()):
        node = size + wanted
        while node and not tree[node]:  # to the next subtree on the right
            while node & 1:
                node //= 2
            node += 1 if node else 0
        if node:
            while node < size:
                node = 2 * node if tree[2 * node] else 2 * node + 1
            space = node - size
            sample = by_space[space].pop()
            if not by_space[space]:
                mark(space, False)
        else:
            space, sample, num = capacity, num, num + 1
        found[i], left = sample, space - wanted
        if left:
            if not by_space.get(left):
                mark(left, True)
            by_space.setdefault(left, []).append(sample)
    return found
