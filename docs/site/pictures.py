"""The page that shows what the tools print and draw."""
from __future__ import annotations

from pathlib import Path


def shown_page(folder: Path, *, pictures: bool) -> str:
    return "# What it looks like\n"
