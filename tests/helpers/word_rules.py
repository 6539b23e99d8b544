"""Count house dialect in prose: words that have a plain term of the field, and first sentences that are riddles."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tests.helpers.sources import Source

_BE = r"(?:is|are|was|were|be|been|being|gets|get)"

# What is counted, each with the term to use instead.
DIALECT: dict[str, tuple[str, re.Pattern[str]]] = {
    name: (instead, re.compile(pattern, re.IGNORECASE))
    for name, instead, pattern in (
        ("piece", "shard", r"\bpieces?\b"),
        ("cut", "sharded, split", rf"\b{_BE} (?:not |never |only )?cut\b(?! short| off)"),
        ("cut into", "sharded, split", r"\bcut (?:into|apart|along|over|alike|as|up|across|by|at)\b|\bcuts\b"),
        ("taken apart", "unwrapped", r"\b(?:taken|takes?|taking) (?:\w+ )?apart\b"),
        ("whole", "full, unsharded", r"\bwholes?\b(?! numbers?\b)"),
        ("by hand", "manual, yourself", r"\bby hand\b"),
        ("unless told", "Default: …", r"\bunless (?:\w+ )?told\b"),
        ("is told", "is reported, is passed", rf"\b{_BE} (?:not |never )?told\b|\btold (?:by|of|to|apart|with)\b"),
        ("anew", "from scratch, again", r"\banew\b"),
        ("go on", "continue, resume", r"\b(?:go|goes|going|gone|went) on\b"),
        ("wish", "request", r"\bwish(?:es|ed)?\b"),
        ("drop a group", "discard a step", r"\bdrop(?:s|ped)? (?:a|an|the|that|whole) (?:\w+ )?(?:group|step)s?\b"),
        ("leave out", "skip, omit, exclude", r"\b(?:leave|leaves|leaving|left) (?:\S+ )?out\b"),
        ("home", "host storage", r"\bat home\b|\bhomes\b|\bhome (?!folder|directory)|\ba home\b"),
        ("listen", "registered callbacks", r"\blistens?\b"),
        ("hear", "is called, is reported", r"\bhears?\b|\bheard\b"),
        ("lie", "is in", r"\blies?\b|\blying\b|\blay\b"),
        ("stand", "is at", r"\bst(?:ands?|anding|ood)\b(?! for\b|-|\])"),
        ("in the place of", "instead of, where", r"\bin (?:the|its|their|his|your) places?\b"),
        ("is no", "is not a", rf"(?<!here )\b{_BE} no (?!longer\b|more\b|less\b|such\b|\w+er\b)"),
    )
}
_RIDDLE = re.compile(r"(?:What|Whatever|Who|Whose|Which|Whether|How|When|Where|Why)\b")
_CODE = re.compile(r"``[^`]+``|`[^`\n]*`|<[a-z/][^>]*>|\]\([^)]*\)")
_FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class Passage:
    """A stretch of prose.

    Attributes:
        where: module or page.
        line: 1-based line at which it begins.
        text: its words, with single spaces between them.
        is_docstring: its first sentence is held to be an imperative or a noun phrase.
    """

    where: str
    line: int
    text: str
    is_docstring: bool = False


@dataclass
class Count:
    """What was found in some prose."""

    words: int
    found: list[str]

    @property
    def per_thousand(self) -> float:
        """Occurrences per 1,000 words."""
        return 1000 * len(self.found) / max(self.words, 1)


def passages(source: Source) -> Iterator[Passage]:
    """Return a module's docstrings, its comments, and its strings of four words and more."""
    documented = {
        id(node.value)
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    }
    inside: set[int] = set()
    for node in ast.walk(source.tree):
        if isinstance(node, ast.JoinedStr):
            inside.update(id(value) for value in node.values)
            text = "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inside:
            text = node.value
        else:
            continue
        if id(node) in documented or text.count(" ") > 2:
            yield Passage(source.module, node.lineno, _plain(text), id(node) in documented)
    yield from _comments(source)


def page_passages(name: str, text: str) -> Iterator[Passage]:
    """Return the paragraphs of a Markdown page, without its code blocks."""
    prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
    line = 1
    for paragraph in prose.split("\n\n"):
        yield Passage(name, line + len(paragraph) - len(paragraph.lstrip("\n")), _plain(paragraph))
        line += paragraph.count("\n") + 2


def count(found: Iterable[Passage], excused: Iterable[str] = ()) -> Count:
    """Count the words, and the occurrences of dialect outside `excused` phrases."""
    total = Count(0, [])
    for passage in found:
        text = passage.text
        for phrase in excused:
            text = text.replace(phrase, " ".join("…" for _ in phrase.split()))
        total.words += len(_WORD.findall(passage.text))
        at = f"{passage.where}:{passage.line}"
        if passage.is_docstring and _RIDDLE.match(text):
            total.found.append(f"{at}: begins with '{text.split()[0]}'; write an imperative: {text[:60]}")
        for name, (instead, pattern) in DIALECT.items():
            for match in pattern.finditer(text):
                around = text[max(match.start() - 35, 0) : match.end() + 35]
                total.found.append(f"{at}: '{name}'; write '{instead}': …{around}…")
    return total


def _comments(source: Source) -> Iterator[Passage]:
    """Join comments on consecutive lines, so that a phrase over two lines is found."""
    run: list[str] = []
    first = last = 0
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        if token.type != tokenize.COMMENT:
            continue
        if run and token.start[0] != last + 1:
            yield Passage(source.module, first, _plain(" ".join(run)))
            run = []
        first, last = (first if run else token.start[0]), token.start[0]
        run.append(token.string.lstrip("#: "))
    if run:
        yield Passage(source.module, first, _plain(" ".join(run)))


def _plain(text: str) -> str:
    return " ".join(_CODE.sub("…", text).split())
