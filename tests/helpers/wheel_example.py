"""Run README.md's first example in an empty folder with an installed Trainwright, and check what it leaves behind.

    PYTHON tests/helpers/wheel_example.py FOLDER

PYTHON is the interpreter of an environment with the wheel, without the optional packages. This script imports nothing
but Python's own library.
"""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
OPTIONAL = ("tensorboard", "wandb", "deepspeed", "lightning")


def main(folder: Path) -> None:
    """Run the example in `folder`. Exits with an error if it fails, or leaves no checkpoint or no logs behind."""
    present = [name for name in OPTIONAL if importlib.util.find_spec(name) is not None]
    if present:
        sys.exit(f"The environment is not empty: it has {', '.join(present)}.")
    example = re.search(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL | re.M)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "example.py").write_text(example[1], encoding="utf-8")
    done = subprocess.run([sys.executable, "-W", "error", "example.py"], cwd=folder, capture_output=True, text=True)
    print(done.stdout)
    if done.returncode:
        sys.exit(done.stderr)
    if "Epoch 4/4: 20/20 (100%)" not in done.stdout:
        sys.exit("The example shows no progress bar.")
    for pattern in ("runs/checkpoints/*/manifest.json", "runs/**/metrics.csv"):
        if not list(folder.glob(pattern)):
            sys.exit(f"The example leaves no {pattern} behind.")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
