"""Break one line of each part of the package in a copy, and check that `make test` would notice.

    python -m tests.helpers.mutations [PART ...]

Each mutation names the test file that is expected to fail; only tests that `make test` runs are run. Exits with 1 if a
mutation is not noticed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

_ROOT = Path(__file__).parents[2]
_QUIET: dict[str, Any] = {"check": False, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}


@dataclass(frozen=True)
class Mutation:
    """A line to break: `old` becomes `new` in `file`, and `test` fails."""

    part: str
    file: str
    old: str
    new: str
    test: str


MUTATIONS = [
    Mutation("loop", "trainer/loop.py", "else step.optimizer_step(clip)", "else step.optimizer_step(None)",
             "tests/trainer/test_clipping.py"),
    Mutation("step", "strategies/steps/step.py", "loss = loss / num", "loss = loss * 1",
             "tests/trainer/test_accumulation.py"),
    Mutation("data order", "src/trainwright/data/order.py", "__init__(n, epoch_key(seed, epoch))",
             "__init__(n, epoch_key(seed, 0))", "tests/data/test_order.py"),
    Mutation("checkpoint writer", "src/trainwright/checkpoint/format/writer.py", "sync_folder(sub)", "pass",
             "tests/checkpoint/test_crash.py"),
    Mutation("DDP", "strategies/ddp/strategy.py", "require_backward_grad_sync = last",
             "require_backward_grad_sync = False", "tests/contracts/test_strategy.py"),
    Mutation("FSDP", "strategies/fsdp/parallelize.py", "self.root.set_requires_gradient_sync(last)",
             "self.root.set_requires_gradient_sync(True)", "tests/strategies/fsdp"),
    Mutation("DeepSpeed", "strategies/deepspeed/step.py", "clip.value if by_norm and clip is not None else 0.0", "0.0",
             "tests/contracts/test_strategy.py"),
    Mutation("offload", "strategies/offload/step.py", "stream.weights_changed()  # the task's own step", "pass  #",
             "tests/strategies/offload"),
    Mutation("dispatch", "src/trainwright/bigmodels/dispatch/align.py", "self.forget()\n", "pass\n",
             "tests/bigmodels/test_loading_again.py"),
    Mutation("loggers", "loggers/metric_slot.py", "self.host_total += value * weight", "self.host_total += value",
             "tests/loggers/test_metric_buffer.py"),
]  # fmt: skip


def _environment(folder: Path) -> dict[str, str]:
    """Return the environment in which every process imports the copy, ranks of the fork server included."""
    return {**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}"}


def is_noticed(mutation: Mutation, folder: Path) -> bool:
    """Return whether the tests of a mutation fail in a copy of the tree in `folder`."""
    path = folder / mutation.file
    text = path.read_text()
    if mutation.old not in text:
        raise SystemExit(f"{mutation.file} has no {mutation.old!r} any more. Name another line of its {mutation.part}.")
    path.write_text(text.replace(mutation.old, mutation.new, 1))
    chosen = [mutation.test, "-m", "not exhaustive and not torture", "-x", "-q", "-p", "no:cacheprovider"]
    try:
        run = subprocess.run([sys.executable, "-m", "pytest", *chosen], cwd=folder, env=_environment(folder), **_QUIET)
        return run.returncode == pytest.ExitCode.TESTS_FAILED
    finally:
        path.write_text(text)


def main() -> int:
    """Try every mutation and print which are noticed."""
    chosen = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tree"
        ignored = shutil.ignore_patterns(".venv*", ".git", "demo", ".*_cache", "runs")
        shutil.copytree(_ROOT, folder, symlinks=True, ignore=ignored)
        noticed = {}
        for mutation in (m for m in MUTATIONS if not chosen or m.part in chosen):
            noticed[mutation.part] = is_noticed(mutation, folder)
            print(f"{mutation.part:18} {'noticed by ' if noticed[mutation.part] else 'NOT noticed by'} {mutation.test}")
    return 0 if all(noticed.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
