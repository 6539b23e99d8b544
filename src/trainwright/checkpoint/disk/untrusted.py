"""What a file says is checked before it is used: JSON within bounds, and paths that stay inside their folder."""

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

# 140,000 tensors of optimizer state in shards make an index of 50 MB and 2,300,000 values.
MAX_JSON_BYTES = 128 * 2**20
# What a parsed file takes in memory goes by its values (an empty list of two bytes takes 64), not by its length.
MAX_JSON_VALUES = 4_000_000


def dump_json(value: Any, *, indent: int | None = None) -> str:
    """Return `value` as JSON text; NaN and infinities are a ValueError, since JSON cannot hold them."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, indent=indent)


def load_json(data: bytes, origin: str) -> Any:
    """Parse strict UTF-8 JSON. A key that occurs twice in one object is a `CheckpointError` too, as two readers could
    take different values for it.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise CheckpointError(f"{origin}: the key {key!r} stands twice in one object. The file is not ours.")
            found[key] = value
        return found

    def constant(word: str) -> Any:
        raise CheckpointError(f"{origin}: {word} is not JSON.")

    check_json_size(data, origin)
    try:
        return json.loads(data.decode("utf-8"), object_pairs_hook=unique, parse_constant=constant)
    except (ValueError, RecursionError, MemoryError) as error:
        raise CheckpointError(
            f"{origin} is not readable JSON: {shortened(error)}. It is damaged or not ours."
        ) from error


def check_json_size(data: bytes, origin: str, *, max_bytes: int = MAX_JSON_BYTES) -> bytes:
    """Return `data` if readers accept its length and its number of values, which is estimated without parsing it:
    commas and brackets are counted, those in text too. Otherwise raise a `CheckpointError`.
    """
    if len(data) > max_bytes:
        raise CheckpointError(
            f"{origin} has {len(data)} bytes, more than the {max_bytes} that are read. Save long lists as tensors or "
            "arrays."
        )
    if len(data) > MAX_JSON_VALUES:  # a value takes a byte
        count = data.count(b",") + data.count(b"[") + data.count(b"{")
        if count > MAX_JSON_VALUES:
            raise CheckpointError(
                f"{origin} has {count} values, more than the {MAX_JSON_VALUES} that are read. Save long lists as "
                "tensors or arrays."
            )
    return data


def read_json(path: Path, *, max_bytes: int = MAX_JSON_BYTES) -> Any:
    """Read a JSON file as `load_json` does. Nothing is read if it is longer than `max_bytes`."""
    return load_json(read_bytes(path, max_bytes=max_bytes), str(path))


def read_bytes(path: Path, *, max_bytes: int) -> bytes:
    """Return the content of a small file. Nothing is read if it is longer than `max_bytes`."""
    check_regular(path)
    with reading(path), open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise CheckpointError(f"{path} has {size} bytes, more than the {max_bytes} that are read. It is not ours.")
        data = file.read(max_bytes + 1)
    if len(data) > max_bytes:
        raise CheckpointError(f"{path} is longer than the {max_bytes} bytes that are read. It is not ours.")
    return data


def check_relative(path: object, origin: str) -> str:
    """Return `path` if it is a plain relative path below its folder on every operating system; otherwise raise a
    `CheckpointError`.
    """
    if not isinstance(path, str) or not path or any(char in path for char in "\\:\0") or not is_printable(path):
        raise CheckpointError(f"{origin} names {path!r}, which is no plain relative path.")
    if path.startswith("/") or any(step in ("", ".", "..") for step in path.split("/")):
        raise CheckpointError(f"{origin} names {path!r}, which may lie outside its folder. It is refused.")
    return path


def inside(folder: Path, relative: str, origin: str) -> Path:
    """Return `folder / relative`. Raise a `CheckpointError` if it leaves `folder`, symbolic links included."""
    path = folder / PurePosixPath(check_relative(relative, origin))
    with reading(path):  # a link to itself, for one
        target, root = path.resolve(), folder.resolve()
    if not target.is_relative_to(root):
        raise CheckpointError(f"{origin} names {relative!r}, a link to {target} outside {folder}. It is refused.")
    return path


def is_printable(text: str) -> bool:
    """Tell whether `text` survives UTF-8 (lone surrogates, as in undecodable file names, do not)."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


_SHOWN = 300  # characters of another error's text: it may quote a file


@contextlib.contextmanager
def reading(what: object, problem: str = "cannot be read") -> Iterator[None]:
    """Turn every error of reading a file, except `torch.OutOfMemoryError`, into a `CheckpointError` that names `what`.

    The values in a file decide what goes wrong with it (a size that overflows, an impossible name, a link to itself),
    so that no list of exceptions is complete.
    """
    try:
        yield
    except (CheckpointError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CheckpointError(f"{what} {problem}: {shortened(error)}. It is damaged or not ours.") from error


def check_regular(path: os.PathLike[str] | str) -> None:
    """Refuse a pipe, a device, a socket or a folder: opening a pipe would block. A missing file passes, and opening it
    is an error.
    """
    with contextlib.suppress(OSError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise CheckpointError(f"{path} is no regular file. It is damaged or not ours.")


def shortened(error: BaseException) -> str:
    """Return an error's type and text, cut to a length that a message can hold."""
    text = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
