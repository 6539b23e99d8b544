"""Checks of untrusted file content: JSON of limited size, and paths that stay inside their folder."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any

import torch

from trainwright.core.errors import CheckpointError

# The index of 140,000 sharded tensors of optimizer state has 50 MB and 2,300,000 values.
MAX_JSON_BYTES = 128 * 2**20
# The memory of parsed JSON depends on the number of values, not on the length: an empty list of 2 bytes takes 64.
MAX_JSON_VALUES = 4_000_000


def dump_json(value: object, *, indent: int | None = None) -> str:
    """Return `value` as JSON text. NaN and infinities, which JSON lacks, raise ValueError."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)


def load_json(data: bytes, origin: str) -> Any:
    """Parse UTF-8 JSON. Invalid JSON, NaN, a duplicate key and too large data raise `CheckpointError`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in pairs:
            if key in values:  # Python would use the last value, another reader maybe the first
                raise CheckpointError(f"{origin}: an object has the key {key!r} twice. Use another file.")
            values[key] = value
        return values

    def refuse_constant(word: str) -> Any:
        raise CheckpointError(f"{origin} contains {word}, which is not JSON. Use another file.")

    check_json_size(data, origin)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=refuse_constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{origin} is not readable JSON: {shortened(error)}. It is damaged or has another format."
        ) from error


def check_json_size(data: bytes, origin: str, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return `data`. Raise a `CheckpointError` if it has more than `max_bytes` or more than `MAX_JSON_VALUES` values.

    The writer calls it, too, so that it writes nothing that cannot be read again. The number of values is estimated
    without parsing: commas and brackets are counted, including those in text.
    """
    if len(data) > max_bytes:
        raise CheckpointError(
            f"{origin} has {len(data)} bytes, and the limit is {max_bytes}. Save long lists as tensors or arrays."
        )
    if len(data) > MAX_JSON_VALUES:  # a value has at least one byte
        count = data.count(b",") + data.count(b"[") + data.count(b"{")
        if count > MAX_JSON_VALUES:
            raise CheckpointError(
                f"{origin} has {count} values, the limit is {MAX_JSON_VALUES}. Save long lists as tensors or arrays."
            )
    return data


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Return the content of a JSON file. Raises the errors of `load_json` and `read_bytes`."""
    return load_json(read_bytes(path, max_bytes=max_bytes), str(path))


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """Return a file's content. An unreadable file, or one longer than `max_bytes`, raises `CheckpointError`."""
    check_regular(path)
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(
                f"{path} has {size} bytes, the limit is {max_bytes}. It is damaged or has another format."
            )
        data = file.read(max_bytes + 1)  # the file may have grown since
    if len(data) > max_bytes:
        raise CheckpointError(
            f"{path} is longer than the limit of {max_bytes} bytes. It is damaged or has another format."
        )
    return data


def check_relative(path: object, origin: str) -> str:
    """Return `path` if it is a relative path that stays inside its folder on every operating system. Otherwise raise a
    `CheckpointError`, which names the file `origin`.
    """
    # Windows reads a backslash as a separator, and "C:" as a drive.
    if not isinstance(path, str) or not path or not is_printable(path) or not set(path).isdisjoint("\\:\0"):
        raise CheckpointError(f"{origin} names {path!r}, which is not a plain relative path.")
    if path.startswith("/") or any(step in ("", ".", "..") for step in path.split("/")):
        raise CheckpointError(f"{origin} names {path!r}, which may be outside its folder.")
    return path


def inside(folder: Path, relative: str, origin: str) -> Path:
    """Return `folder / relative`. Raise a `CheckpointError` if this path, or a symbolic link in it, leaves `folder`."""
    path = folder / PurePosixPath(check_relative(relative, origin))
    with reading(path):  # such as a link to itself
        target = path.resolve()
        root = folder.resolve()
    if not target.is_relative_to(root):
        raise CheckpointError(f"{origin} names {relative!r}, a link to {target} outside {folder}.")
    return path


def is_printable(text: str) -> bool:
    """Return whether `text` can be encoded as UTF-8. Lone surrogates, as in undecodable file names, cannot."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_MAX_MESSAGE = 300  # characters of another error's message, which may quote a file


@contextlib.contextmanager
def reading(what: object, problem: str = "cannot be read") -> Iterator[None]:
    """Return a context that converts errors to `CheckpointError`s about `what`, except `torch.OutOfMemoryError`.

    Errors of all classes are converted, because untrusted values raise many (overflowing sizes, invalid names, links to
    themselves).
    """
    try:
        yield
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{what} {problem}: {shortened(error)}. It is damaged or has another format.") from error


def check_regular(path: os.PathLike[str] | str) -> None:
    """Raise a `CheckpointError` for a pipe, a device, a socket or a folder, because opening a pipe would block.

    No error is raised for a missing file, which cannot be opened anyway.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} is not a regular file. It is damaged or has another format.")


def shortened(error: BaseException) -> str:
    """Return an error's type and message, truncated to 300 characters."""
    text = type(error).__name__
    if str(error):
        text = f"{text}: {error}"
    if len(text) > _MAX_MESSAGE:
        text = f"{text[:_MAX_MESSAGE]}…"
    return text
