"""The strategy that docs/extending.md writes, taken from the page."""

from __future__ import annotations

import re
import types
from typing import Any

from tests.helpers.sources import ROOT
from trainwright.strategies import Strategy

_PAGE = ROOT / "docs" / "extending.md"


def block() -> str:
    blocks: list[str] = re.findall(r"^```python\n(.*?)^```$", _PAGE.read_text(), re.MULTILINE | re.DOTALL)
    (found,) = [text for text in blocks if "class AllReduceStrategy" in text]
    return found


def documented_strategy() -> Strategy:
    """Make the strategy, without registering its name."""
    module = types.ModuleType("documented")
    source = block().partition("\nSTRATEGIES.register")[0]
    names: dict[str, Any] = vars(module)
    exec(compile("import torch\n" + source, str(_PAGE), "exec"), names)
    made: Strategy = names["AllReduceStrategy"]()
    return made
