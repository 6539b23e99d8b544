"""The page docs/arguments.md, from the docstrings.

    python -m tests.pinned.arguments_page

writes it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from trainwright import Accelerator, TaskModule, Trainer
from trainwright.callbacks import BackboneFinetuning, GarbageCollection, ModelPruning, SlowRankDetector
from trainwright.profilers import AdvancedProfiler, Profiler, PyTorchProfiler, SimpleProfiler
from trainwright.utils import ProfileKwargs

FILE = Path(__file__).parents[2] / "docs" / "arguments.md"
_HEAD = """# Arguments

The arguments of the classes and methods that every program uses, of profilers and some callbacks, and what a task may
define. The page is made from the docstrings (`python -m tests.pinned.arguments_page`). `help(…)` shows the same for
every public name, with the errors that each raises.
"""
_ENTRY = re.compile(r"^ {4}(?P<names>\w+(?:, \w+)*): (?P<text>.*(?:\n {8,}.*)*)", re.MULTILINE)


def arguments_table(function: Callable[..., Any]) -> Iterator[str]:
    """Yield a table row for each documented argument."""
    args = re.search(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)*)", inspect.getdoc(function) or "", re.MULTILINE)
    parameters = inspect.signature(function).parameters
    yield "| argument | default | meaning |\n|---|---|---|"
    for entry in _ENTRY.finditer(args[1] if args else ""):
        names = entry["names"].split(", ")
        given = [parameters[name].default for name in names if name in parameters]
        defaults = dict.fromkeys("required" if value is inspect.Parameter.empty else f"`{value!r}`" for value in given)
        text = " ".join(entry["text"].split()).replace("|", "\\|")
        yield f"| {', '.join(f'`{name}`' for name in names)} | {', '.join(defaults)} | {text} |"


def _methods(cls: type) -> Iterator[str]:
    """Yield a table row for each public method, with the first sentence of its docstring."""
    yield "| method | what it does |\n|---|---|"
    for name, value in sorted(inspect.getmembers(cls, inspect.isfunction)):
        if not name.startswith("_") and value.__module__.startswith("trainwright"):
            first = " ".join((inspect.getdoc(value) or "").split("\n\n")[0].split())
            yield f"| `{name}{_names_of(value)}` | {first} |".replace("\\|", "|")


def _names_of(function: Callable[..., Any]) -> str:
    return f"({', '.join(name for name in inspect.signature(function).parameters if name != 'self')})"


def arguments_page() -> str:
    """Return the text of the page."""
    parts = [_HEAD]
    for title, function in {
        "Trainer": Trainer,
        "Trainer.fit": Trainer.fit,
        "TaskModule.log": TaskModule.log,
        "Accelerator": Accelerator,
    }.items():
        parts.append(f"## {title}\n\n" + "\n".join(arguments_table(function)) + "\n")
    listed = (Profiler, SimpleProfiler, AdvancedProfiler, PyTorchProfiler, ProfileKwargs)
    for cls in (*listed, BackboneFinetuning, GarbageCollection, ModelPruning, SlowRankDetector):
        parts.append(f"## {cls.__name__}\n\n" + "\n".join(arguments_table(cls)) + "\n")
    parts.append("## TaskModule\n\n" + "\n".join(_methods(TaskModule)) + "\n")
    return "\n".join(parts)


if __name__ == "__main__":
    FILE.write_text(arguments_page())
