"""Say where a trained project has put its checkpoint, TensorBoard log and CSV; fail when one of them is missing."""

from __future__ import annotations

import sys
from pathlib import Path

_WHAT = {
    "checkpoint": "manifest.json",
    "TensorBoard log": "events.out.tfevents.*",
    "CSV": "metrics.csv",
}


def report(project: Path) -> tuple[list[str], list[str]]:
    """Return one line for each thing found under `project`, and the names of those that are missing."""
    lines: list[str] = []
    missing: list[str] = []
    for what, pattern in _WHAT.items():
        found = sorted(project.rglob(pattern))
        if not found:
            missing.append(what)
        for path in found:
            shown = path.parent if what == "checkpoint" else path
            lines.append(f"{what + ':':<17} {shown}")
    return lines, missing


if __name__ == "__main__":
    found_lines, missing_names = report(Path(sys.argv[1]))
    print("\n".join(found_lines))
    if missing_names:
        sys.exit(f"{sys.argv[1]}: no {' and no '.join(missing_names)} was written")
