"""Files of tokens in Megatron-LM's format: tokens in `NAME.bin`, starts of documents in `NAME.idx`.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py, version 1 of the format. All numbers are little-endian.
`NAME.idx` is: `MMIDIDX\\0\\0`; uint64 1; uint8 code of the dtype; uint64 number of sequences s; uint64 number d of
document boundaries; int32[s] lengths; int64[s] first bytes; int64[d] first sequence of each document, and s. This
package writes one sequence for each document. `NAME.json`, which Megatron-LM ignores, describes the tokenizer.
"""

from __future__ import annotations

import json
import os
import struct
from bisect import bisect_right
from collections.abc import Callable, Iterable
from functools import partial
from itertools import takewhile
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import ConfigurationError

Tokens = npt.NDArray[Any]

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_CHECKED_AT_ONCE = 2**16  # sequences of an index; the check needs some MB for an index of any size
# Codes of the format. 6 and 7 are floating-point numbers.
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}


class TokenFile:
    """The documents of one file, mapped into memory. Opening a file reads and checks its index, but not its tokens.

    Args:
        path: Path of the file, with or without its ending `.bin` or `.idx`.
        verify: Check the whole index, which takes about a second for 100 million documents. False checks sizes only.
            Default: True.

    Attributes:
        path: Path of the file without an ending.
        num_documents, num_tokens: Numbers of documents and tokens in the file.
        tokens: All tokens, of shape (num_tokens,).
        facts: The contents of `NAME.json`: `"tokenizer"`, `"vocab_size"` and `"eod"`, the token that ends documents,
            if known. Empty without that file.

    Raises:
        ConfigurationError: A file is missing, is not of this format, is damaged, or has another size than its index
            says.
    """

    def __init__(self, path: str | os.PathLike[str], *, verify: bool = True) -> None:
        self.path = _prefix(path)
        index = _file(self.path, ".idx")
        data = _file(self.path, ".bin")
        facts = _file(self.path, ".json")
        for file in (index, data):
            if not file.is_file():
                raise ConfigurationError(f"{file} is missing. Write it with `trainwright data tokenize`.")
        with index.open("rb") as stream:
            header = stream.read(_HEADER.size)
        # A shorter file is filled, and then refused for its contents or its size.
        magic, version, code, num_sequences, num_bounds = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or version != 1 or code not in _DTYPES:
            raise ConfigurationError(
                f"{index} is not an index of tokens (Megatron-LM's format, version 1). Write such files with "
                "`trainwright data tokenize`."
            )
        self.dtype: npt.DTypeLike = np.dtype(_DTYPES[code])
        # Three arrays follow each other: int32 lengths, int64 starts and int64 boundaries.
        starts_at = 4 * num_sequences
        bounds_at = starts_at + 8 * num_sequences
        arrays_end = bounds_at + 8 * num_bounds
        _check_size(index, _HEADER.size + arrays_end, exact=False)  # Megatron-LM may append modes
        arrays = np.memmap(index, np.uint8, "r")[_HEADER.size :]
        self._lengths = arrays[:starts_at].view(np.int32)
        self._starts = arrays[starts_at:bounds_at].view(np.int64)
        self._bounds = arrays[bounds_at:arrays_end].view(np.int64)
        token_bytes = np.dtype(self.dtype).itemsize
        if verify:
            self._check_index(index, token_bytes)
        num_bytes = 0
        if num_sequences > 0:
            num_bytes = int(self._starts[-1]) + token_bytes * int(self._lengths[-1])
        _check_size(data, num_bytes, exact=True)
        self.num_documents = num_bounds - 1
        self.num_tokens = num_bytes // token_bytes
        if self.num_tokens > 0:
            self.tokens: Tokens = np.memmap(data, self.dtype, "r", shape=(self.num_tokens,))
        else:
            self.tokens = np.zeros(0, self.dtype)  # an empty file cannot be mapped
        self.facts = _read_facts(facts) if facts.is_file() else {}

    def _check_index(self, index: Path, token_bytes: int) -> None:
        if not self._index_fits(token_bytes):
            raise ConfigurationError(
                f"{index} is damaged: its lengths, starts and documents do not fit together. Write or copy it again."
            )

    def _index_fits(self, token_bytes: int) -> bool:
        """Return whether sequences follow each other without gaps, and documents divide them."""
        lengths = self._lengths
        starts = self._starts
        bounds = self._bounds
        if len(bounds) == 0 or bounds[0] != 0 or bounds[-1] != len(lengths):
            return False
        if len(starts) > 0 and starts[0] != 0:
            return False
        for first in range(0, max(len(lengths), len(bounds)), _CHECKED_AT_ONCE):
            stop = first + _CHECKED_AT_ONCE
            if (lengths[first:stop] < 0).any():
                return False
            # One entry more than the part: its last sequence must end where the next part begins.
            next_starts = starts[first + 1 : stop + 1]
            ends = starts[first:stop] + lengths[first:stop].astype(np.int64) * token_bytes
            if (ends[: len(next_starts)] != next_starts).any():
                return False
            if (np.diff(bounds[first : stop + 1]) < 0).any():
                return False
        return True

    def __reduce__(self) -> tuple[Callable[..., TokenFile], tuple[Path]]:
        # Spawned workers map the file themselves. Its index has been checked.
        return partial(TokenFile, verify=False), (self.path,)

    def __len__(self) -> int:
        return int(self.num_documents)

    def __getitem__(self, document: int) -> Tokens:
        """Return the tokens of a document, without a copy."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} is not in [0, {self.num_documents}).")
        return self.tokens[self.start(document) : self.start(document + 1)]

    def start(self, document: int) -> int:
        """Return the index of a document's first token in `tokens`. For `num_documents` it is `num_tokens`."""
        sequence = int(self._bounds[document])
        if sequence >= len(self._starts):
            return self.num_tokens
        return int(self._starts[sequence]) // np.dtype(self.dtype).itemsize

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document. Reads all of the index."""
        ends = np.append(self._starts // np.dtype(self.dtype).itemsize, self.num_tokens)
        return np.diff(ends[self._bounds])

    def boundaries(self, start: int, stop: int) -> list[int]:
        """Return the indices `start < index < stop` of tokens that begin a document."""
        documents = range(self._first_after(start), self.num_documents)
        return list(takewhile(lambda place: place < stop, map(self.start, documents)))

    def nearest_boundary(self, place: int) -> int:
        """Return the start of a document, except the first, that is nearest to the token index `place`.

        For a file with a single document, return `place`.
        """
        after = self._first_after(place)
        starts = []
        for document in (after - 1, after):  # the last start at or before `place`, and the first one after it
            if 0 < document < self.num_documents:
                starts.append(self.start(document))
        return min(starts, key=lambda start: abs(start - place), default=place)

    def _first_after(self, place: int) -> int:
        """Return the index of the first document that begins after a token index."""
        return bisect_right(range(self.num_documents), place, key=self.start)


class TokenFileWriter:
    """Writer of a file of tokens. Use it in a `with` block.

    An error leaves no file, or the earlier file. A process that is killed leaves the earlier file, the new one, or a
    file without an index, which is an error when it is opened.

    Args:
        path: Path of the file, without an ending.
        vocab_size: Vocabulary size of the tokenizer. It determines the dtype: uint16 up to 65,536, otherwise int32.
        facts: Contents of `NAME.json`, such as `tokenizer="…"`; see `TokenFile`. `vocab_size` is added.
    """

    def __init__(self, path: str | os.PathLike[str], vocab_size: int, **facts: Any) -> None:
        self.path = _prefix(path)
        self._vocab_size = vocab_size
        self._facts = {**facts, "vocab_size": vocab_size}
        self._code = 8 if vocab_size <= 2**16 else 4  # see _DTYPES
        self._lengths: list[int] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._folder = TemporaryDirectory(prefix=f".{self.path.name}-", dir=self.path.parent)
        self._written = Path(self._folder.name, self.path.name)
        self._data = _file(self._written, ".bin").open("wb")

    def add(self, tokens: Iterable[int] | Tokens) -> None:
        """Write the next document.

        Raises:
            ConfigurationError: A token is not an integer, or not in the vocabulary.
        """
        document = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
        if document.size > 0:
            # Written as uint16, a token of 65,536 would silently be 0.
            self._check_tokens(document)
        self._data.write(document.astype(_DTYPES[self._code]).tobytes())
        self._lengths.append(document.size)

    def _check_tokens(self, document: Tokens) -> None:
        number = len(self._lengths)
        if document.dtype.kind not in "iu":
            raise ConfigurationError(f"document {number} has tokens of {document.dtype}, expected integers.")
        least = int(document.min())
        greatest = int(document.max())
        if least < 0 or greatest >= self._vocab_size:
            raise ConfigurationError(
                f"document {number} has the tokens {least} to {greatest}, and "
                f"vocab_size={self._vocab_size}. Pass the size of the tokenizer, with its special tokens."
            )

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with self._folder, self._data:
            if kind is not None:
                return
            num = len(self._lengths)
            header = _HEADER.pack(_MAGIC, 1, self._code, num, num + 1)
            lengths = np.array(self._lengths, dtype=np.int32)
            starts = (np.cumsum(lengths, dtype=np.int64) - lengths) * np.dtype(_DTYPES[self._code]).itemsize
            bounds = np.arange(num + 1, dtype=np.int64)  # each document is one sequence
            index = header + lengths.tobytes() + starts.tobytes() + bounds.tobytes()
            _file(self._written, ".idx").write_bytes(index)
            _file(self._written, ".json").write_text(json.dumps(self._facts), encoding="utf-8")
            self._data.close()
            # Contents first, then names: a name on the disk never stands for contents that a power failure has lost.
            for ending in (".json", ".bin", ".idx"):
                _sync(_file(self._written, ending))
            self._publish()

    def _publish(self) -> None:
        """Replace the earlier files. Without an index no file opens, so an old index never describes new tokens."""
        _file(self.path, ".idx").unlink(missing_ok=True)
        _sync(self.path.parent)  # otherwise a power failure may undo the removal alone
        for ending in (".json", ".bin"):
            _file(self._written, ending).replace(_file(self.path, ending))
        _sync(self.path.parent)
        _file(self._written, ".idx").replace(_file(self.path, ".idx"))
        _sync(self.path.parent)


def _prefix(path: str | os.PathLike[str]) -> Path:
    file = Path(path)
    if file.suffix in (".bin", ".idx"):
        return file.with_suffix("")
    return file


def _file(path: Path, ending: str) -> Path:
    # Not `with_suffix`, which would replace the end of a name such as "wiki.v2".
    return path.with_name(path.name + ending)


def _sync(path: Path) -> None:
    """Wait until a file, or the names in a folder, are on the disk."""
    if os.name == "nt":
        return  # Windows cannot sync a folder, and syncs only files that are open for writing
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError:
        if not path.is_dir():  # network file systems cannot sync folders
            raise
    finally:
        os.close(handle)


def _read_facts(file: Path) -> dict[str, Any]:
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigurationError(f"{file} is damaged: {error}. Write it again.") from None
    if not isinstance(facts, dict):
        raise ConfigurationError(f"{file} is damaged: it is a {type(facts).__name__}, expected a dict. Write it again.")
    size = facts.get("vocab_size")
    if size is not None and type(size) is not int:
        raise ConfigurationError(f"{file} is damaged: vocab_size is {size!r}, expected a whole number. Write it again.")
    return facts


def _check_size(file: Path, needed: int, *, exact: bool) -> None:
    size = file.stat().st_size
    if size < needed or (exact and size != needed):
        raise ConfigurationError(
            f"{file} has {size} bytes, and its index needs {needed}: it was not written or copied to its end, or "
            "belongs to another index. Write or copy it again."
        )
