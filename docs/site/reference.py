"""The pages of the API reference and of all settings, from the docstrings of the public names."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from typing import Any

from docs.site.arguments_page import arguments_table
from tests.pinned.public_names import public_modules

from trainwright import Accelerator, Trainer
from trainwright.callbacks import CALLBACKS
from trainwright.loggers import LOGGERS
from trainwright.strategies import STRATEGIES

_CODE = re.compile(r"(`[^`]+`)")
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_SECTION = re.compile(r"^(Args|Attributes|Returns|Yields|Raises|Warns):\n((?: {4}.*\n?|\n)*)", re.MULTILINE)
_ENTRY = re.compile(r"^([\w.*\\]+(?:, [\w.*\\]+)*): ", re.MULTILINE)
_FILTER = """<input class="filter" placeholder="Filter" aria-label="Filter" oninput="
for (const row of document.querySelectorAll('tbody tr'))
  row.hidden = !row.textContent.toLowerCase().includes(this.value.toLowerCase())">
"""


class _Text(str):
    """An annotation, shown without quotes."""

    def __repr__(self) -> str:
        return str(self)


def _escaped(text: str) -> str:
    """Escape Markdown outside of code."""
    parts = _CODE.split(text)
    return "".join(part if i % 2 else re.sub(r"([*_<\[\]])", r"\\\1", part) for i, part in enumerate(parts))


def _section(match: re.Match[str]) -> str:
    """Return a section of a docstring, with its entries as a list."""
    title, text = match.groups()
    entries = _ENTRY.sub(lambda found: f"- `{found[1]}`: ".replace("\\", ""), _escaped(inspect.cleandoc(text)))
    return f"**{title}**\n\n{entries}\n\n"


def _docstring(value: Any) -> str:
    """Return a docstring as Markdown. Paragraphs that are indented by four spaces are code."""
    found = []
    rest = inspect.getdoc(value) or ""
    while rest:
        section = _SECTION.search(rest)
        text = rest[: section.start()] if section else rest
        paragraphs = text.strip("\n").split("\n\n")
        found += [one if one.startswith("    ") else _escaped(one) for one in paragraphs]
        found += [_section(section)] if section else []
        rest = rest[section.end() :] if section else ""
    return "\n\n".join(found)


def _first_sentence(value: Any) -> str:
    text = " ".join(_escaped(inspect.getdoc(value) or "").split("\n\n")[0].split())
    return re.split(r"(?<=[.!?]) (?=[A-Z`])", text)[0].replace("|", "\\|")


def _signature(name: str, value: Any) -> str:
    """Return a call as a code block, with one parameter per line if it is long."""
    try:
        signature = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = [
        one.replace(annotation=_Text(one.annotation)) if isinstance(one.annotation, str) else one
        for one in signature.parameters.values()
    ]
    returns = signature.return_annotation
    text = str(
        signature.replace(
            parameters=parameters, return_annotation=_Text(returns) if isinstance(returns, str) else returns
        )
    )
    if len(name + text) > 100:
        kinds = [one.kind for one in parameters]
        star = kinds.index(inspect.Parameter.KEYWORD_ONLY) if inspect.Parameter.KEYWORD_ONLY in kinds else None
        lines = [str(one) for one in parameters]
        if star is not None and inspect.Parameter.VAR_POSITIONAL not in kinds:
            lines.insert(star, "*")
        end = "" if returns is inspect.Signature.empty else f" -> {returns}"
        text = "(\n    " + ",\n    ".join(lines) + f",\n){end}"
    return f"```python\n{name}{_ADDRESS.sub('', text)}\n```\n\n"


def _members(cls: type, pages: dict[int, str]) -> Iterator[str]:
    """Yield the entries of the members that a class and its unlisted bases define, then links to the other bases."""
    seen: set[str] = set()
    for base in cls.__mro__:
        if base is not cls and id(base) in pages:
            yield f"Further members: [{base.__name__}]({pages[id(base)]}.md)\n\n"
            return
        if not base.__module__.startswith("trainwright"):
            continue
        for name, member in vars(base).items():
            function = getattr(member, "__func__", member)
            is_function = inspect.isfunction(function)
            if name.startswith("_") or name in seen or not (is_function or inspect.isdatadescriptor(member)):
                continue
            seen.add(name)
            signature = _signature(name, function) if is_function else ""
            yield f"## {_escaped(name)}\n\n{signature}{_docstring(function)}\n\n"


def _page(path: str, value: Any, others: list[str], pages: dict[int, str]) -> str:
    """Return the page of a public name."""
    name = path.rpartition(".")[2]
    module = path.rpartition(".")[0]
    text = f"# {_escaped(name)}\n\n`from {module} import {name}`"
    text += f" (the same as {', '.join(f'`{one}`' for one in others)})\n\n" if others else "\n\n"
    text += _signature(name, value) if callable(value) else ""
    text += _docstring(value) + "\n\n"
    return text + "".join(_members(value, pages)) if inspect.isclass(value) else text


def _settings_page(pages: dict[int, str]) -> str:
    """Return the page with the table of every registered name, and one of every setting."""
    text = f"---\nhide: [toc]\n---\n\n# All settings\n\n{_FILTER}\n"
    text += "| name | kind | class | what it does |\n|---|---|---|---|\n"
    owners: dict[str, Any] = {"Trainer": Trainer, "Accelerator": Accelerator}
    for kind, registry in {"callback": CALLBACKS, "logger": LOGGERS, "strategy": STRATEGIES}.items():
        for name in registry:
            made = registry.get(name)
            cls = made if inspect.isclass(made) else type(made())
            owners[cls.__name__] = cls
            link = f"[{cls.__name__}]({pages[id(cls)]}.md)" if id(cls) in pages else f"`{cls.__name__}`"
            text += f"| `{name}` | {kind} | {link} | {_first_sentence(cls)} |\n"
    text += "\n| setting | of | default | meaning |\n|---|---|---|---|\n"
    for owner, cls in owners.items():
        found = set()
        for row in list(arguments_table(cls))[1:]:
            setting, rest = row.removeprefix("| ").split(" | ", 1)
            found |= set(re.findall(r"\w+", setting))
            text += f"| {setting} | {owner} | {rest}\n"
        for one in inspect.signature(cls).parameters.values():
            if one.name not in found and one.kind not in (one.VAR_POSITIONAL, one.VAR_KEYWORD):
                text += f"| `{one.name}` | {owner} | `{one.default!r}` | see [{owner}]({pages[id(cls)]}.md) |\n"
    return text


def reference_pages() -> dict[str, str]:
    """Return the text of each page by its name: one per public name, their index, and the settings."""
    values: dict[int, Any] = {}
    names: dict[int, list[str]] = {}
    packages: dict[str, list[tuple[str, int]]] = {}
    for package, module in public_modules():
        for name in sorted(module.__all__):
            value = getattr(module, name)
            if not inspect.ismodule(value) and name != "__version__":
                values[id(value)] = value
                names.setdefault(id(value), []).append(f"{package}.{name}")
                packages.setdefault(package, []).append((name, id(value)))
    pages = {key: found[0] for key, found in names.items()}
    made = {found[0]: _page(found[0], values[key], found[1:], pages) for key, found in names.items()}
    index = "# API\n\nThe public names, with the first sentence of their docstrings.\n"
    for package, found in packages.items():
        index += f"\n## {package}\n\n| name | what it is |\n|---|---|\n"
        index += "".join(f"| [{name}]({pages[key]}.md) | {_first_sentence(values[key])} |\n" for name, key in found)
    return {**made, "reference": index, "settings": _settings_page(pages)}
