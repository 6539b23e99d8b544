"""Files of tokens in Megatron-LM's format: `NAME.bin` holds the tokens, `NAME.idx` where each document begins.

Source: Megatron-LM, megatron/core/datasets/indexed_dataset.py, version 1 of the format. All numbers are little-endian.
`NAME.idx` is: `MMIDIDX\\0\\0`; uint64 1; uint8 code of the dtype; uint64 number of sequences s; uint64 number d of
document boundaries; int32[s] lengths; int64[s] first bytes; int64[d] first sequence of each document, and s. This
package writes one sequence for each document. `NAME.json`, which Megatron-LM ignores, describes the tokenizer.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from trainwright.core.errors import ConfigurationError

Tokens = npt.NDArray[Any]

_HEADER = struct.Struct("<9sQBQQ")
_MAGIC = b"MMIDIDX\x00\x00"
_DTYPES = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
_LONGEST = 2**31 - 1  # tokens of a document: lengths are int32


class TokenFile:
    """The documents of one file, mapped into memory: opening it reads a few bytes, whatever its size.

    Args:
        path: Path of the file, with or without its ending `.bin` or `.idx`.

    Attributes:
        path: Without an ending.
        num_documents: In the file.
        num_tokens: In the file.
        facts: What `NAME.json` says: `"tokenizer"`, `"vocab_size"` and `"eod"`, the token that ends documents, if
            known. Empty without it.

    Raises:
        ConfigurationError: A file is missing, is not of this format, or is shorter than its index says.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = _prefix(path)
        index, data = _file(self.path, ".idx"), _file(self.path, ".bin")
        with index.open("rb") as stream:
            header = stream.read(_HEADER.size)
        magic, version, code, num, bounds = _HEADER.unpack(header.ljust(_HEADER.size, b"\0"))
        if magic != _MAGIC or version != 1 or code not in _DTYPES:
            raise ConfigurationError(
                f"{index} is not an index of tokens (Megatron-LM's format, version 1). Write such files with "
                "`trainwright data tokenize`."
            )
        self.dtype: npt.DTypeLike = np.dtype(_DTYPES[code])
        needed = _HEADER.size + 12 * num + 8 * bounds
        if index.stat().st_size < needed:
            raise _short(index, needed)
        self._lengths = _mapped(index, np.int32, num, _HEADER.size)
        self._starts = _mapped(index, np.int64, num, _HEADER.size + 4 * num)
        self._bounds = _mapped(index, np.int64, bounds, _HEADER.size + 12 * num)
        size = np.dtype(self.dtype).itemsize
        end = int(self._starts[-1]) + size * int(self._lengths[-1]) if num else 0
        if data.stat().st_size < end:
            raise _short(data, end)
        self.num_documents = max(0, bounds - 1)
        self.num_tokens = end // size
        self.tokens = _mapped(data, self.dtype, self.num_tokens, 0)

    @cached_property
    def facts(self) -> dict[str, Any]:
        """What `NAME.json` says of the tokenizer; empty without it."""
        file = self.path.with_name(self.path.name + ".json")
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        return found if isinstance(found, dict) else {}

    def __len__(self) -> int:
        return int(self.num_documents)

    def __getitem__(self, document: int) -> Tokens:
        """Return the tokens of a document, without a copy."""
        if not 0 <= document < self.num_documents:
            raise IndexError(f"document {document} is not in [0, {self.num_documents}).")
        return self.tokens[self.start(document) : self.start(document + 1)]

    def start(self, document: int) -> int:
        """Return the place of a document's first token in `tokens`; of `num_documents`, `num_tokens`."""
        sequence = int(self._bounds[document])
        if sequence >= len(self._starts):
            return self.num_tokens
        return int(self._starts[sequence]) // np.dtype(self.dtype).itemsize

    def lengths(self) -> npt.NDArray[np.int64]:
        """Return the number of tokens of each document. Reads all of the index."""
        ends = np.append(self._starts // np.dtype(self.dtype).itemsize, self.num_tokens)
        return np.diff(ends[self._bounds])

    def boundaries(self, start: int, stop: int) -> list[int]:
        """Return the places `start < place < stop` at which a document begins."""
        document, found = self._first_after(start), list[int]()
        while document < self.num_documents and (place := self.start(document)) < stop:
            found.append(place)
            document += 1
        return found

    def nearest_boundary(self, place: int) -> int:
        """Return the place nearest to `place` at which a document other than the first begins.

        A file with a single document has none, and `place` is returned.
        """
        after = self._first_after(place)
        starts = [self.start(document) for document in (after - 1, after) if 0 < document < self.num_documents]
        return min(starts, key=lambda start: abs(start - place), default=place)

    def _first_after(self, place: int) -> int:
        """Return the number of the first document that begins after a place."""
        low, high = 0, self.num_documents
        while low < high:  # each look reads one page of the index
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self.start(middle) <= place else (low, middle)
        return low


class TokenFileWriter:
    """Writes a file of tokens; use it in a `with` block. An error leaves no file behind.

    Args:
        path: Path of the file, without an ending.
        vocab_size: Vocabulary of the tokenizer; determines the dtype: uint16 up to 65,536, otherwise int32.
        facts: See `TokenFile`; `vocab_size` is added.
    """

    def __init__(self, path: str | os.PathLike[str], vocab_size: int, **facts: Any) -> None:
        self.path, self._vocab_size = _prefix(path), vocab_size
        self._facts = {**facts, "vocab_size": vocab_size}
        self._dtype: Any = np.uint16 if vocab_size <= 2**16 else np.int32
        self._lengths: list[int] = []
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._data = self._temporary(".bin").open("wb")

    def add(self, tokens: Iterable[int] | Tokens) -> None:
        """Write the next document.

        Raises:
            ConfigurationError: A token is not an integer, or not in the vocabulary.
        """
        found = np.asarray(tokens if isinstance(tokens, np.ndarray) else list(tokens))
        if found.size and found.dtype.kind not in "iu":
            raise ConfigurationError(f"document {len(self._lengths)} has tokens of {found.dtype}, expected integers.")
        found = found.astype(np.int64)
        if found.size and not 0 <= int(found.min()) <= int(found.max()) < self._vocab_size:
            raise ConfigurationError(
                f"document {len(self._lengths)} has the tokens {int(found.min())} to {int(found.max())}, and "
                f"vocab_size={self._vocab_size}. Pass the size of the tokenizer, with its special tokens."
            )
        if found.size > _LONGEST:
            raise ConfigurationError(f"document {len(self._lengths)} has {found.size} tokens; {_LONGEST} are possible.")
        self._data.write(found.astype(self._dtype).tobytes())
        self._lengths.append(found.size)

    def __enter__(self) -> TokenFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._data.close()
        endings = (".json", ".bin", ".idx")  # a file is complete when its index is there
        try:
            if kind is None:
                self._write_index()
                for ending in endings:
                    self._temporary(ending).replace(self.path.with_name(self.path.name + ending))
        finally:
            for ending in endings:
                self._temporary(ending).unlink(missing_ok=True)

    def _write_index(self) -> None:
        num = len(self._lengths)
        lengths = np.asarray(self._lengths, dtype=np.int32)
        starts = np.zeros(num, dtype=np.int64)
        np.cumsum(lengths[:-1], dtype=np.int64, out=starts[1:])
        code = next(code for code, dtype in _DTYPES.items() if dtype is self._dtype)
        with self._temporary(".idx").open("wb") as file:
            file.write(_HEADER.pack(_MAGIC, 1, code, num, num + 1))
            for array in (lengths, starts * np.dtype(self._dtype).itemsize, np.arange(num + 1, dtype=np.int64)):
                file.write(array.tobytes())
        self._temporary(".json").write_text(json.dumps(self._facts), encoding="utf-8")

    def _temporary(self, ending: str) -> Path:
        return self.path.with_name(f".{self.path.name}{ending}.{os.getpid()}")


def _prefix(path: str | os.PathLike[str]) -> Path:
    found = Path(path)
    return found.with_suffix("") if found.suffix in (".bin", ".idx") else found


def _file(path: Path, ending: str) -> Path:
    file = path.with_name(path.name + ending)
    if not file.is_file():
        raise ConfigurationError(f"{file} is missing. Write it with `trainwright data tokenize`.")
    return file


def _mapped(file: Path, dtype: Any, num: int, offset: int) -> Tokens:
    if not num:
        return np.zeros(0, dtype=dtype)  # an empty file cannot be mapped
    return np.memmap(file, dtype=dtype, mode="r", offset=offset, shape=(num,))


def _short(file: Path, needed: int) -> ConfigurationError:
    return ConfigurationError(
        f"{file} has {file.stat().st_size} bytes, and its index needs {needed}: it was not written or copied to its "
        "end. Write or copy it again."
    )
