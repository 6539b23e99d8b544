"""Hashes of whole files, by which what was written is known again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import xxhash

from trainwright.checkpoint.disk.durable import CHUNK_BYTES

HashFiles = Callable[[Sequence[Path]], list[str]]
"""Returns the hash of each of some files, as `hash_files` does; several processes may share the work."""


def hash_file(path: Path) -> str:
    """Return the XXH3 128-bit hash of a file in hexadecimal, reading it in pieces."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def hash_files(paths: Sequence[Path]) -> list[str]:
    """Return the hash of each of some files, one after the other."""
    return [hash_file(path) for path in paths]
