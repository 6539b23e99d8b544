"""How long `import trainwright` and `trainwright --help` take, in fresh processes.

    python benchmarks/import_time.py [--rounds 15]

Processes are started in turn; a figure is the median over rounds, a difference that of the same round. Bytecode is
cached by the round that is thrown away, as it is on a machine where a package is installed.

The bars of the imports are of the import statement alone, timed in its process: importing torch takes ten times as
long, and from one process to the next it differs by as much as the bar allows.

torch's import leaves a full garbage collection due (0.09 s), which any program makes once it has some 8,000 objects of
its own. Every process here makes it directly after torch, so that it is not a part of the differences.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec

from measuring import Bars, describe_machine, interleave, median_difference, print_table
from safetensors.torch import save_file
from torch import nn

_NAMES = "from trainwright import Callback, DataModule, TaskModule, Trainer"
_STATEMENTS = ("import trainwright", _NAMES)
_TORCH = "import gc, torch; gc.collect()"
_CODE = {
    "python": "pass",
    "import torch": _TORCH,
    "import trainwright": "import trainwright",
    "import torch, trainwright": f"{_TORCH}; import trainwright",
    "import torch; from trainwright import Trainer, …": f"{_TORCH}; {_NAMES}",
}
_PEERS = {
    "lightning": "from lightning import LightningModule, Trainer",
    "accelerate": "from accelerate import Accelerator",
}
# Prints the seconds of one import statement after torch.
_STATEMENT = """
import gc, time, torch
gc.collect()
start = time.perf_counter()
{}
print(time.perf_counter() - start)
"""
_HELP = "from trainwright.cli.main import main; main(['--help'])"
_HELP_ROW = "trainwright --help"
# After what a script imports anyhow: looking the function up and calling it, twice; and what that has imported.
_DISPATCH = """
import gc, sys, time, torch, trainwright
from torch import nn
gc.collect()
folder, before, start = sys.argv[1], set(sys.modules), time.perf_counter()
trainwright.load_checkpoint_and_dispatch(nn.Linear(4, 4), folder, device_map={"": "cpu"})
first, imported = time.perf_counter() - start, [name for name in sys.modules if name not in before]
start = time.perf_counter()
trainwright.load_checkpoint_and_dispatch(nn.Linear(4, 4), folder, device_map={"": "cpu"})
print(first - (time.perf_counter() - start), *imported)
"""
_IMPORTS = """
import gc, importlib, sys, time, torch, trainwright
from torch import nn
gc.collect()
start = time.perf_counter()
for name in sys.argv[1:]:
    importlib.import_module(name)
print(time.perf_counter() - start)
"""


def run_fresh(code: str) -> float:
    """Run code in a fresh interpreter; returns seconds from its start to its end."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - start


def time_statement(statement: str) -> float:
    """Time one import statement in a fresh interpreter that has imported torch; returns seconds."""
    return float(*_read(_STATEMENT.format(statement)))


def first_dispatch(folder: str) -> tuple[float, float]:
    """Time the first `load_checkpoint_and_dispatch` of a process.

    Returns:
        By how many seconds it is slower than the second, and how many of a fresh process its imports alone take.
    """
    more, *imported = _read(_DISPATCH, folder)
    return float(more), float(*_read(_IMPORTS, *imported))


def _read(code: str, *arguments: str) -> list[str]:
    process = subprocess.run([sys.executable, "-c", code, *arguments], check=True, capture_output=True, text=True)
    return process.stdout.split()


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
            code[f"import torch; {statement}"] = f"{_TORCH}; {statement}"
    runs: dict[str, Callable[[], float]] = {name: partial(run_fresh, text) for name, text in code.items()}
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        os.environ["PYTHONPYCACHEPREFIX"] = f"{folder}/bytecode"
        save_file(nn.Linear(4, 4).state_dict(), f"{folder}/model.safetensors")
        seconds = interleave(runs, rounds)
        statements = interleave({name: partial(time_statement, name) for name in _STATEMENTS}, rounds)
        dispatches = [first_dispatch(folder) for _ in range(rounds + 1)][1:]

    print(f"\n{describe_machine()}")
    print(f"{rounds} interleaved rounds of fresh processes; seconds\n")
    torch = seconds["import torch"]
    rows = [
        [name, f"{statistics.median(found):.3f}", f"{min(found):.3f}", f"{median_difference(found, torch):+.3f}"]
        for name, found in seconds.items()
    ]
    print_table(["process", "median", "least", "over import torch"], rows)
    bars = Bars()
    alone, names = (statistics.median(statements[name]) for name in _STATEMENTS)
    bars.add("import trainwright, after torch", alone, 0.2, "s")
    bars.add("… and its Trainer and TaskModule", names, 0.15, "s")
    bars.add("trainwright --help", statistics.median(seconds[_HELP_ROW]), 0.5, "s")
    bars.add("… importing torch", float(help_imports_torch()), 0, "times")
    more, imports = (statistics.median(column) for column in zip(*dispatches, strict=True))
    bars.add("imports of the first load_checkpoint_and_dispatch", imports, 0.03, "s")
    bars.print()
    print(f"\nThe first load_checkpoint_and_dispatch of a process takes {more:.4f} s more than the second.")


if __name__ == "__main__":
    main()
