"""Words of a shell command, with their positions, so that a command can be changed and its layout kept."""

from __future__ import annotations

import re
from dataclasses import dataclass

_CONTINUED = re.compile(r"\\\r?\n")
_CLOSING = {"(": ")", "{": "}"}


@dataclass(frozen=True)
class Word:
    """One word: its text as written, quotes included, and its position in the file."""

    text: str
    start: int
    end: int

    @property
    def bare(self) -> str:
        """The text without the quotes around it."""
        quoted = len(self.text) > 1 and self.text[0] == self.text[-1] and self.text[0] in "\"'"
        return self.text[1:-1] if quoted else self.text


def open_quote(text: str, position: int) -> str:
    """Return the quote within which a position of a command line is; empty if there is none."""
    start = position
    while (line := text.rfind("\n", 0, start)) >= 0 and text[:line].rstrip("\r").endswith("\\"):
        start = line
    quote, i = "", line + 1
    while i < position:
        if text[i] == "\\" and quote != "'":
            i += 1
        elif quote:
            quote = "" if text[i] == quote else quote
        elif text[i] in "\"'":
            quote = text[i]
        i += 1
    return quote


def split_words(text: str, start: int, *, quote: str = "", folded: bool = False) -> list[Word]:
    """Return the words from a position to the end of the command.

    Args:
        text: The file.
        start: Of the first word.
        quote: The quote around the command, which ends it.
        folded: Newlines separate words, as in a folded block of YAML.
    """
    words, i = [], start
    while i < len(text):
        continued = _CONTINUED.match(text, i)
        if continued:
            i = continued.end()
        elif text[i] in " \t" or (folded and text[i] in "\r\n"):
            i += 1
        elif text[i] in "\r\n;&|)`" or text[i] == quote or text[i] in "#<>":
            break
        else:
            end = _end_of_word(text, i, quote)
            words.append(Word(text[i:end], i, end))
            i = end
    return words


def _end_of_word(text: str, i: int, quote: str) -> int:
    while i < len(text) and text[i] not in " \t\r\n;&|)<>`":
        if text[i] == quote or _CONTINUED.match(text, i):
            break
        if text[i] == "\\":
            i += 2
        elif text[i] in "\"'":
            closing = text.find(text[i], i + 1)
            i = len(text) if closing < 0 else closing + 1
        elif text[i] == "$" and text[i + 1 : i + 2] in ("(", "{"):
            i = _end_of_group(text, i + 1)
        else:
            i += 1
    return i


def _end_of_group(text: str, i: int) -> int:
    """Return the position after the bracket that closes the one at `i`."""
    opening, depth = text[i], 0
    while i < len(text):
        depth += (text[i] == opening) - (text[i] == _CLOSING[opening])
        i += 1
        if not depth:
            break
    return i
