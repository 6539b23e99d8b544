"""Print the results of a trained project in four lines: accuracy, checkpoint, report, what to try next.

    python tests/helpers/demo_report.py PROJECT

Exits with an error if one of the results is missing. It imports nothing but Python's own library.
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path


def test_accuracy(project: Path) -> float | None:
    """Return the last test accuracy in the project's CSV logs, or None if there is none."""
    found: float | None = None
    for path in sorted(project.rglob("metrics.csv")):
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                if row.get("test_acc"):
                    found = float(row["test_acc"])
    return found


def results(project: Path) -> tuple[list[str], list[str]]:
    """Return the lines for the results under `project`, and the names of those that are missing."""
    accuracy = test_accuracy(project)
    checkpoints = sorted(path.parent for path in project.rglob("manifest.json"))
    report = project / "report.html"
    lines: list[str] = []
    missing: list[str] = []
    if accuracy is None:
        missing.append("test accuracy")
    else:
        lines.append(f"accuracy:   {100 * accuracy:.1f} % of the test images")
    if checkpoints:
        lines.append(f"checkpoint: {checkpoints[-1]}")
    else:
        missing.append("checkpoint")
    if report.is_file():
        lines.append(f"report:     {report} (open it in a browser)")
    else:
        missing.append("report")
    return lines, missing


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    found_lines, missing_names = results(folder)
    print("\n".join(found_lines))
    if missing_names:
        sys.exit(f"{folder}: no {' and no '.join(missing_names)} was written")
    trainwright = Path(sys.executable).with_name("trainwright")
    print(f"next:       cd {folder} && {trainwright} fit --config config.yaml task.lr=0.001")
