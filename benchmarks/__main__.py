"""Run every benchmark, each in a process of its own: `python -m benchmarks`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPTS = (
    "overhead.py",
    "real_model.py",
    "save_cost.py",
    "checkpoint.py",
    "data_order.py",
    "dispatch.py",
    "import_time.py",
    "ddp.py",
    "memory.py",
    "strategies.py",
    "parallel.py",
    "ring_attention.py",
    "bigmodel.py",
    "offloaded_forward.py",
)


def main() -> int:
    """Return the number of benchmarks that broke; a missed bar is printed and does not count."""
    folder = Path(__file__).parent
    broken = 0
    for script in SCRIPTS:
        print(f"\n== {script}", flush=True)
        broken += subprocess.run([sys.executable, str(folder / script)], check=False).returncode != 0
    return broken


if __name__ == "__main__":
    sys.exit(main())
