"""`trainwright data`: token files for language models."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from trainwright.cli.import_path import add_project_to_import_path
from trainwright.cli.main import check_subcommand


def data(argv: Sequence[str]) -> int:
    """Run `trainwright data tokenize` or `trainwright data show`; see `trainwright data --help`.

    Returns:
        The exit code 0.

    Raises:
        ConfigurationError: an option is not valid, or a file cannot be read.
    """
    parser = argparse.ArgumentParser(prog="trainwright data", description="Files of tokens for language models.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    write = commands.add_parser("tokenize", help="write the tokens of texts to a file", allow_abbrev=False)
    write.add_argument("inputs", nargs="+", metavar="FILE", help=".jsonl files with a document in each line, or texts")
    write.add_argument(
        "--tokenizer",
        required=True,
        help="'bytes', a tokenizer.json, a folder with one, a name on the hub, or package.module:function",
    )
    write.add_argument("--output", required=True, metavar="NAME", help="writes NAME.bin, NAME.idx and NAME.json")
    write.add_argument("--key", default="text", help="key of the text in each line of a .jsonl file (default: text)")
    write.add_argument(
        "--documents",
        choices=("line", "blank-line", "file"),
        default="blank-line",
        help="what ends a document of a text file (default: blank-line)",
    )
    write.add_argument("--eod", metavar="TOKEN", help="ends documents: its text or number (default: the tokenizer's)")
    write.add_argument(
        "--vocab-size", type=int, metavar="N", help="vocabulary size of a tokenizer function, with its special tokens"
    )
    write.add_argument(
        "--processes", type=int, default=1, metavar="N", help="number of processes that tokenize (default: 1)"
    )
    show = commands.add_parser("show", help="print what a file of tokens holds", allow_abbrev=False)
    show.add_argument("file", metavar="NAME", help="with or without its ending")
    show.add_argument("--document", type=int, metavar="N", help="print the tokens of this document, from 0")
    check_subcommand("data", argv, ("tokenize", "show"))
    options = parser.parse_args(argv)
    return _tokenize(options) if options.command == "tokenize" else _show(options)


def _tokenize(options: argparse.Namespace) -> int:
    from trainwright.data.tokens.tokenize import load_tokenizer, tokenize_files

    add_project_to_import_path()  # the tokenizer may be a function of the project
    tokenizer = load_tokenizer(options.tokenizer, vocab_size=options.vocab_size, eod=options.eod)
    file = tokenize_files(
        options.inputs,
        options.output,
        tokenizer,
        key=options.key,
        documents=options.documents,
        num_processes=options.processes,
    )
    _print(file)
    return 0


def _show(options: argparse.Namespace) -> int:
    from trainwright.core.errors import ConfigurationError
    from trainwright.data.tokens.token_file import TokenFile

    file = TokenFile(options.file)
    if options.document is None:
        _print(file)
    elif 0 <= options.document < len(file):
        print(*file[options.document].tolist())
    else:
        raise ConfigurationError(f"--document {options.document}: {file.path} has documents 0 to {len(file) - 1}.")
    return 0


def _print(file: Any) -> None:
    facts = "".join(f", {name} {value}" for name, value in file.facts.items())
    print(f"{file.path}: {file.num_documents:,} documents, {file.num_tokens:,} tokens of {file.dtype}{facts}")
