"""How long `import trainwright` and `trainwright --help` take, in fresh processes.

    python benchmarks/import_time.py [--rounds 15]

Processes are started in turn; a figure is the median over rounds, a difference that of the same round.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from measuring import Bars, describe_machine, interleave, median_difference, print_table

_NAMES = "from trainwright import Callback, DataModule, TaskModule, Trainer"
_CODE = {
    "python": "pass",
    "import torch": "import torch",
    "import trainwright": "import trainwright",
    "import torch, trainwright": "import torch, trainwright",
    "import torch; from trainwright import Trainer, …": f"import torch; {_NAMES}",
}
_PEERS = {
    "lightning": "from lightning import LightningModule, Trainer",
    "accelerate": "from accelerate import Accelerator",
}
_HELP = "from trainwright.cli.main import main; main(['--help'])"
_HELP_ROW = "trainwright --help"


def run_fresh(code: str) -> float:
    """Run code in a fresh interpreter; returns seconds from its start to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def help_imports_torch() -> bool:
    """Tell whether printing the help imports torch."""
    code = f"import sys; {_HELP}; sys.exit('torch' in sys.modules)"
    return subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode != 0


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Start-up times in fresh processes.")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    code = {**_CODE, _HELP_ROW: _HELP}
    for package, statement in _PEERS.items():
        if find_spec(package):
            code[f"import torch; {statement}"] = f"import torch; {statement}"
    runs: dict[str, Callable[[], float]] = {name: partial(run_fresh, text) for name, text in code.items()}
    seconds = interleave(runs, rounds)

    print(f"\n{describe_machine()}")
    print(f"{rounds} interleaved rounds of fresh processes; seconds\n")
    torch = seconds["import torch"]
    rows = [
        [name, f"{statistics.median(found):.3f}", f"{min(found):.3f}", f"{median_difference(found, torch):+.3f}"]
        for name, found in seconds.items()
    ]
    print_table(["process", "median", "least", "over import torch"], rows)
    bars = Bars()
    alone, names = seconds["import torch, trainwright"], seconds[list(_CODE)[-1]]
    bars.add("import trainwright, over torch", median_difference(alone, torch), 0.2, "s")
    bars.add("… and its Trainer and TaskModule", median_difference(names, torch), 0.2, "s")
    bars.add("trainwright --help", statistics.median(seconds[_HELP_ROW]), 0.5, "s")
    bars.add("… importing torch", float(help_imports_torch()), 0, "times")
    bars.print()


if __name__ == "__main__":
    main()
