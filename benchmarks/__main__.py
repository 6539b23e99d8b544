"""Run every benchmark, each in a process of its own, and print all bars in one table: `python -m benchmarks`."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))  # as for the scripts, which run as files

from measuring import BARS_FILE, Bar, print_table

SCRIPTS = (
    "startup.py",
    "import_time.py",
    "overhead.py",
    "real_model.py",
    "save_cost.py",
    "save_kinds.py",
    "checkpoint.py",
    "data_order.py",
    "growth.py",
    "dispatch.py",
    "ddp.py",
    "memory.py",
    "strategies.py",
    "parallel.py",
    "bigmodel.py",
    "offloaded_forward.py",
    "ring_attention.py",
    "tuned.py",
    "gpu.py",
)


def run(script: str, folder: Path) -> tuple[list[list[str]], bool]:
    """Run a benchmark.

    Args:
        script: its file name.
        folder: for the file of its bars.

    Returns:
        A row of the table for each bar, and whether the benchmark ran to its end.
    """
    print(f"\n== {script}", flush=True)
    file = folder / f"{script}.jsonl"
    variables = {**os.environ, BARS_FILE: str(file)}
    code = subprocess.run([sys.executable, str(Path(__file__).parent / script)], env=variables, check=False).returncode
    rows = []
    if file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            bar = Bar(**json.loads(line))
            rows.append([script, bar.what, f"{bar.measured:.4g} {bar.unit}", bar.bound, bar.verdict])
    if code:
        rows.append([script, f"ended with exit code {code}", "", "", "MISS"])
    return rows, code == 0


def main() -> int:
    """Return the number of benchmarks that broke; a missed bar is printed and does not count."""
    parser = argparse.ArgumentParser(description="Run benchmarks and print their bars in one table.")
    parser.add_argument("scripts", nargs="*", default=SCRIPTS, help="file names; default: all")
    rows = []
    num_broken = 0
    with tempfile.TemporaryDirectory() as folder:
        for script in parser.parse_args().scripts:
            found, ran = run(script, Path(folder))
            rows += found
            num_broken += not ran
    print()
    print_table(["benchmark", "figure", "measured", "bar", ""], rows)
    return num_broken


if __name__ == "__main__":
    sys.exit(main())
