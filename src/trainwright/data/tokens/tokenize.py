"""Conversion of text to a file of tokens, in several processes."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, groupby, islice
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.host.hub import local_files_only
from trainwright.core.registry import import_object
from trainwright.data.tokens.token_file import TokenFile, TokenFileWriter

Encode = Callable[[str], Sequence[int]]

_DOCUMENTS_PER_TASK = 256  # documents that a process receives at once
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
        ConfigurationError: The tokenizer or token does not exist, or the hub cannot be reached. `vocab_size` is missing
            for a function, or passed for another tokenizer.
        MissingPackageError: The package of the tokenizer is not installed.
    """
    is_function = ":" in name and not Path(name).exists()
    if vocab_size is not None and not is_function:
        raise ConfigurationError(
            f"--vocab-size {vocab_size} is for functions. Remove it: --tokenizer {name} has its own vocabulary size."
        )
    vocabulary: dict[str, int] = {}
    if name == "bytes":
        tokenizer = Tokenizer(str.encode, vocab_size=257, eod=256, name=name)
    elif is_function:
        if vocab_size is None:
            raise ConfigurationError(f"--tokenizer {name} is a function: pass --vocab-size, too.")
        tokenizer = Tokenizer(_import_function(name), vocab_size, eod=None, name=name)
    else:
        fast = _load(name)
        vocabulary = fast.get_vocab()
        ends = [vocabulary[text] for text in _ENDS if text in vocabulary]
        tokenizer = Tokenizer(
            encode=partial(_encode_fast, fast),
            vocab_size=max(vocabulary.values()) + 1,  # numbers of tokens may have gaps, so not their count
            eod=ends[0] if ends else None,
            # A folder's name says nothing about its tokenizer. The same tokenizer in two folders has one name.
            name=hashlib.sha256(fast.to_str().encode()).hexdigest()[:16],
        )
    if eod is None:
        return tokenizer
    if str(eod).isdigit():
        return replace(tokenizer, eod=int(eod))
    if eod not in vocabulary:
        raise ConfigurationError(f"--eod {eod!r} is not a token of the tokenizer. Pass one of its tokens or a number.")
    return replace(tokenizer, eod=vocabulary[str(eod)])


def _import_function(name: str) -> Encode:
    try:
        encode: Encode = import_object(name)
    except (ImportError, AttributeError) as error:
        raise ConfigurationError(f"--tokenizer {name} cannot be imported: {error}.") from error
    return encode


def _load(name: str) -> Any:
    """Return a tokenizer of the library tokenizers, from a file, a folder or the hub."""
    tokenizers: Any = require_package("tokenizers", purpose=f"--tokenizer {name}")
    file = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
    is_local = file.is_file()
    # Any other name may be one on the hub.
    is_path = Path(name).exists() or file.suffix == ".json"
    if is_path and not is_local:
        raise ConfigurationError(
            f"--tokenizer {name}: {file} is missing. transformers' save_pretrained writes it for fast tokenizers."
        )
    if not is_local:
        local_files_only(name, "tokenizer.json")  # raises without a network; from_pretrained has no such argument
    try:
        if is_local:
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
        documents: Separator of documents in text files: `"line"`, `"blank-line"` or `"file"`. Line breaks at the end
            of a document remain a part of it. Default: `"blank-line"`.
        num_processes: Number of processes. Default: 1.
        progress: Show a progress bar, in bytes of text. It ends below 100 % for files with JSON or blank lines, whose
            bytes besides the texts are not counted. Default: True.

    Raises:
        ConfigurationError: A file is missing, a line is not text or JSON, or no document was found.
    """
    from tqdm import tqdm

    if documents not in ("line", "blank-line", "file"):
        raise ConfigurationError(f"documents={documents!r} is unknown. Use 'line', 'blank-line' or 'file'.")
    files = [Path(file) for file in inputs]
    for file in files:
        if not file.is_file():
            raise ConfigurationError(f"{file} is {'not a file' if file.exists() else 'missing'}.")
    total = sum(file.stat().st_size for file in files)
    texts = chain.from_iterable(_documents(file, key, documents) for file in files)
    encoded = _encoded(texts, tokenizer, num_processes)
    facts = {"tokenizer": tokenizer.name, "eod": tokenizer.eod}
    has_documents = False
    # Close the pool also after an error: Python waits for an open one at exit.
    with (
        tqdm(total=total, unit="B", unit_scale=True, disable=not progress, desc="tokenize") as bar,
        TokenFileWriter(output, tokenizer.vocab_size, **facts) as writer,
        closing(encoded),
    ):
        for size, tokens in encoded:
            has_documents = True
            writer.add(tokens)
            bar.update(size)
        if not has_documents:  # an error within the block, so that the writer leaves no file
            raise ConfigurationError(f"{', '.join(map(str, files))}: no document was found. Pass files with text.")
    return TokenFile(output)


def _documents(file: Path, key: str, documents: str) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8-sig") as stream:  # without the byte order mark that Windows programs write
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
    end = [] if tokenizer.eod is None else [tokenizer.eod]
    encode = partial(_encode, tokenizer.encode, end)
    if num_processes == 1:
        yield from map(encode, texts)
        return
    # A pool reads all of its input ahead, however slow its processes are. So it gets a few tasks at a time.
    num_at_once = 8 * num_processes * _DOCUMENTS_PER_TASK
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        while next_texts := list(islice(texts, num_at_once)):
            yield from pool.imap(encode, next_texts, chunksize=_DOCUMENTS_PER_TASK)


def _encode(encode: Encode, end: list[int], text: str) -> tuple[int, list[int]]:
    return len(text.encode()), [*encode(text), *end]


def _encode_fast(tokenizer: Any, text: str) -> Sequence[int]:
    tokens: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return tokens
