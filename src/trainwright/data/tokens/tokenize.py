"""Conversion of text to a file of tokens, in several processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.host.hub import local_files_only
from trainwright.core.registry import import_object
from trainwright.data.tokens.token_file import TokenFile, TokenFileWriter

Encode = Callable[[str], Sequence[int]]

_IN_A_TASK = 256  # documents that a process receives at once
_ENDS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")  # of texts, in well-known tokenizers


@dataclass(frozen=True, slots=True)
class Tokenizer:
    """A function from texts to tokens, and its description in a file of tokens.

    Attributes:
        encode: Returns the tokens of a text, without special tokens.
        vocab_size: Size of the vocabulary, including special tokens.
        eod: Token that ends documents, or None.
        name: Name that differs between tokenizers.
    """

    encode: Encode
    vocab_size: int
    eod: int | None
    name: str


def load_tokenizer(name: str, *, vocab_size: int | None = None, eod: int | str | None = None) -> Tokenizer:
    """Return a tokenizer by its name.

    Args:
        name: `"bytes"` (bytes of UTF-8, and 256 after each document), a file `tokenizer.json`, a folder with such a
            file, a name on Hugging Face's hub, or `"package.module:function"`, which returns a list of integers.
        vocab_size: Vocabulary size of a function. Default: None, for other tokenizers.
        eod: The token that ends documents, as a number or a text. Default: None, which is `<|endoftext|>`,
            `<|end_of_text|>`, `</s>` or `<eos>`, if the tokenizer has one.

    Raises:
        ConfigurationError: There is no such tokenizer or token, or the hub cannot be reached.
        MissingPackageError: The package of the tokenizer is not installed.
    """
    is_function = ":" in name and not Path(name).exists()
    if vocab_size is not None and not is_function:
        raise ConfigurationError(
            f"--vocab-size {vocab_size} is for functions. Remove it: --tokenizer {name} has its own vocabulary size."
        )
    encode: Encode
    known: dict[str, int] = {}
    label = name
    end = None
    if name == "bytes":
        encode = str.encode
        size = 257
        end = 256
    elif is_function:
        if vocab_size is None:
            raise ConfigurationError(f"--tokenizer {name} is a function: pass --vocab-size, too.")
        try:
            encode = import_object(name)
            size = vocab_size
        except (ImportError, AttributeError) as error:
            raise ConfigurationError(f"--tokenizer {name} cannot be imported: {error}.") from error
    else:
        made = _load(name)
        encode = partial(_encode_fast, made)
        known = made.get_vocab()
        size = max(known.values()) + 1
        end = next((known[token] for token in _ENDS if token in known), None)
        label = hashlib.sha256(made.to_str().encode()).hexdigest()[:16]
    if eod is not None:
        if eod not in known and not str(eod).isdigit():
            raise ConfigurationError(
                f"--eod {eod!r} is not a token of the tokenizer. Pass one of its tokens or a number."
            )
        end = int(eod) if str(eod).isdigit() else known[str(eod)]
    return Tokenizer(encode, size, end, label)


def _load(name: str) -> Any:
    """Return a tokenizer of the library tokenizers, from a file, a folder or the hub."""
    tokenizers: Any = require_package("tokenizers", purpose=f"--tokenizer {name}")
    file = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
    if not file.is_file() and (Path(name).exists() or file.suffix == ".json"):
        raise ConfigurationError(
            f"--tokenizer {name}: {file} is missing. transformers' save_pretrained writes it for fast tokenizers."
        )
    if not file.is_file():
        local_files_only(name, "tokenizer.json")  # raises if there is no network; from_pretrained has no such argument
    try:
        if file.is_file():
            return tokenizers.Tokenizer.from_file(str(file))
        return tokenizers.Tokenizer.from_pretrained(name)
    except Exception as error:  # the library raises nothing more exact
        raise ConfigurationError(
            f"--tokenizer {name} cannot be loaded: {' '.join(str(error).split())} Write bytes, the path of a "
            "tokenizer.json, a name on Hugging Face's hub, or package.module:function."
        ) from error


def tokenize_files(
    inputs: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    tokenizer: Tokenizer,
    *,
    key: str = "text",
    documents: str = "blank-line",
    num_processes: int = 1,
    progress: bool = True,
) -> TokenFile:
    """Write the tokens of texts to `OUTPUT.bin` and `OUTPUT.idx`, and return that file.

    Args:
        inputs: `.jsonl` files, with a document in each line, and text files.
        output: Path without an ending. Existing files are replaced at the end.
        tokenizer: See `load_tokenizer`.
        key: Key of the text in a line of `.jsonl`. Default: `"text"`.
        documents: Separator of documents in text files: `"line"`, `"blank-line"` or `"file"`. Default: `"blank-line"`.
        num_processes: Number of processes. Default: 1.
        progress: Show a progress bar, in bytes. Default: True.

    Raises:
        ConfigurationError: A file is missing, a line is not text or JSON, or there is no document.
    """
    from tqdm import tqdm

    if documents not in ("line", "blank-line", "file"):
        raise ConfigurationError(f"documents={documents!r} is unknown. Use 'line', 'blank-line' or 'file'.")
    files = [Path(file) for file in inputs]
    for file in files:
        if not file.is_file():
            raise ConfigurationError(f"{file} is {'not a file' if file.exists() else 'missing'}.")
    total = sum(file.stat().st_size for file in files)
    texts = (text for file in files for text in _documents(file, key, documents))
    encoded = _encoded(texts, tokenizer, num_processes)
    size = None
    facts = {"tokenizer": tokenizer.name, "eod": tokenizer.eod}
    # Close the pool also after an error: Python waits for an open one at exit.
    with (
        tqdm(total=total, unit="B", unit_scale=True, disable=not progress, desc="tokenize") as bar,
        TokenFileWriter(output, tokenizer.vocab_size, **facts) as writer,
        closing(encoded),
    ):
        for size, tokens in encoded:
            writer.add(tokens)
            bar.update(size)
        if size is None:
            raise ConfigurationError(f"{', '.join(map(str, files))}: no document was found. Pass files with text.")
    return TokenFile(output)


def _documents(file: Path, key: str, documents: str) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8-sig") as stream:
            if file.suffix == ".jsonl":
                yield from _values(stream, key, file)
            elif documents == "file":
                yield stream.read()
            elif documents == "line":
                yield from filter(str.strip, stream)
            else:
                for is_text, lines in groupby(stream, lambda line: bool(line.strip())):
                    if is_text:
                        yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{file} is not text in UTF-8: {error}. Convert it to UTF-8.") from error


def _values(lines: Iterable[str], key: str, file: Path) -> Iterator[str]:
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            text = json.loads(line)[key]
        except (ValueError, KeyError, TypeError) as error:
            raise ConfigurationError(
                f"{file}, line {number} is not a JSON object with {key!r}. Pass --key for another name."
            ) from error
        if not isinstance(text, str):
            raise ConfigurationError(f"{file}, line {number}: {key!r} is {type(text).__name__}, expected text.")
        yield text


def _encoded(texts: Iterator[str], tokenizer: Tokenizer, num_processes: int) -> Generator[tuple[int, list[int]]]:
    """Yield the size of each text in bytes and its tokens, in order."""
    encode = partial(_encode, tokenizer.encode, [] if tokenizer.eod is None else [tokenizer.eod])
    if num_processes == 1:
        yield from map(encode, texts)
        return
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        # A pool reads its input without a bound: a few tasks at a time.
        while some := list(islice(texts, 8 * num_processes * _IN_A_TASK)):
            yield from pool.imap(encode, some, chunksize=_IN_A_TASK)


def _encode(encode: Encode, end: list[int], text: str) -> tuple[int, list[int]]:
    return len(text.encode()), [*encode(text), *end]


def _encode_fast(tokenizer: Any, text: str) -> Sequence[int]:
    found: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return found
