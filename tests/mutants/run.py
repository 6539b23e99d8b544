"""Make mistakes in the package, one at a time, and report which of them no test notices.

    python -m tests.mutants.run [--number 100] [--seed 0] [--files trainer/loop.py ...] [--output FILE]

Needs the record of `python -m tests.mutants.record`. Each mutant is written into a copy of the tree, in which the tests
that run its lines are started until one fails: first those of the file's own name, then the fastest. Tests beyond
`_MOST_RECORDED_S` are not tried. Exits with 1 if fewer than nine of ten are noticed.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import json
import os
import queue
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.mutants.generate import Mutant, mutants_of
from tests.mutants.record import FOLDER, MAKE_TEST, ROOT, Record

# The files in which a mistake costs users most. The folders at the top are also reached through links in
# src/trainwright, but the record has their real paths.
FILES = (
    "trainer/loop.py",
    "trainer/schedule.py",
    "trainer/evaluation.py",
    "trainer/optimization.py",
    "trainer/data.py",
    "trainer/checkpoints/*.py",
    "trainer/recovery/*.py",
    "strategies/engine.py",
    "strategies/state.py",
    "strategies/shards.py",
    "strategies/data_ranks.py",
    "strategies/precision.py",
    "strategies/precision_names.py",
    "strategies/mesh.py",
    "strategies/units.py",
    "strategies/step_group.py",
    "strategies/step_groups.py",
    "strategies/passes.py",
    "strategies/steps/*.py",
    "strategies/ddp/*.py",
    "strategies/fsdp/*.py",
    "strategies/deepspeed/*.py",
    "strategies/offload/*.py",
    "strategies/megatron/*.py",
    "strategies/context/*.py",
    "src/trainwright/accelerator/gradient_state.py",
    "src/trainwright/accelerator/gathering.py",
    "src/trainwright/accelerator/loop_checkpoints.py",
    "src/trainwright/accelerator/project.py",
    "src/trainwright/accelerator/prepared/*.py",
    "src/trainwright/data/*.py",
    "src/trainwright/checkpoint/format/*.py",
    "src/trainwright/checkpoint/disk/*.py",
    "src/trainwright/checkpoint/async_writer.py",
    "src/trainwright/checkpoint/run_folder.py",
    "src/trainwright/checkpoint/retention.py",
    "src/trainwright/checkpoint/remote.py",
    "loggers/metric_*.py",
    "src/trainwright/processes/collectives.py",
    "src/trainwright/processes/meetings.py",
    "src/trainwright/processes/process_group.py",
    "src/trainwright/processes/signals.py",
    "src/trainwright/processes/hang_detector.py",
    "src/trainwright/bigmodels/dispatch/*.py",
    "src/trainwright/bigmodels/weights/*.py",
    "src/trainwright/bigmodels/maps/*.py",
)
# Not run by `make test`: Megatron's library belongs to `make test-engines`, an older torch to `make check-oldest`.
_NOT_IN_MAKE_TEST = {
    "strategies/megatron/core_engine.py",
    "strategies/megatron/core_model.py",
    "strategies/fsdp/unit_state.py",
}
_MOST_RECORDED_S = 300.0  # of tests for one mutant
_TIMEOUT_S = 480.0  # a mutant that hangs counts as noticed
_WANTED = 0.9


@dataclass(frozen=True)
class Result:
    """The result of trying one mutant.

    Attributes:
        name: the mutant's name.
        status: `"noticed"`, `"survived"`, `"not run"` if no recorded test runs its file, or `"unclear"` if the test
            that failed also fails without the mutant.
        noticed_by: the first test that failed, or `"timeout"`; empty if it was not noticed.
        num_tests, num_left_out: test functions that were started, and those that were left out for lack of time.
    """

    name: str
    status: str
    noticed_by: str
    num_tests: int
    num_left_out: int


def sample(files: list[str], number: int, seed: int) -> list[Mutant]:
    """Return mutants of the files, drawn at random: each file has the same share, whatever its length."""
    generator = random.Random(seed)
    remaining: dict[str, list[Mutant]] = {}
    for file in sorted(files):
        mutants = mutants_of(file, (ROOT / file).read_bytes())
        if mutants:
            remaining[file] = generator.sample(mutants, len(mutants))
    found: list[Mutant] = []
    while remaining and len(found) < number:
        file = generator.choice(sorted(remaining))
        found.append(remaining[file].pop())
        if not remaining[file]:
            del remaining[file]
    return found


def try_out(mutant: Mutant, record: Record, tree: Path) -> Result:
    """Run the tests of a mutant's lines in a copy of the tree, which is restored."""
    tests = record.tests_of(mutant.file, range(mutant.line, mutant.end_line + 1))
    chosen = _within_budget(tests, record)
    num_left_out = len(tests) - len(chosen)
    if not chosen:
        return Result(mutant.name, "not run", "", 0, num_left_out)
    path = tree / mutant.file
    source = path.read_bytes()
    path.write_bytes(mutant.apply(source))
    try:
        failed = _first_failure(chosen, tree)
    finally:
        path.write_bytes(source)
    status = "noticed" if failed else "survived"
    if failed and failed != "timeout" and _first_failure([failed], tree):
        status = "unclear"
    return Result(mutant.name, status, failed, len(chosen), num_left_out)


def _within_budget(tests: list[str], record: Record) -> list[str]:
    chosen: list[str] = []
    seconds = 0.0
    for test in tests:
        seconds += record.seconds_of(test)
        if chosen and seconds > _MOST_RECORDED_S:
            break
        chosen.append(test)
    return chosen


def _first_failure(tests: list[str], tree: Path) -> str:
    """Return the first test that fails, `"timeout"`, or an empty text."""
    # The environment's own entry for the package names the original tree.
    environment = {**os.environ, "PYTHONPATH": f"{tree / 'src'}{os.pathsep}{tree}"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"  # two mutants of one length in one second would share bytecode
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider"]
    command += ["-m", MAKE_TEST, *tests]
    try:
        done = subprocess.run(
            command, cwd=tree, env=environment, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?::[^\s\[]+)", done.stdout, re.MULTILINE)
    if failed is not None:
        return failed[1]
    return tests[0]  # the package cannot be imported, or the process has ended


def _files(patterns: Iterable[str]) -> list[str]:
    found: set[str] = set()
    for pattern in patterns:
        files = glob.glob(pattern, root_dir=ROOT)
        if not files:
            raise SystemExit(f"No file is called {pattern}.")
        found.update(files)
    return sorted(found - _NOT_IN_MAKE_TEST)


def main() -> int:
    """Try a sample of mutants. Print and write the result of each."""
    parser = argparse.ArgumentParser(description="Make mistakes in the package, and report those that no test notices.")
    parser.add_argument("--number", type=int, default=100, help="mutants to try (default: 100)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample (default: 0)")
    parser.add_argument("--workers", type=int, default=2, help="mutants that are tried at a time (default: 2)")
    parser.add_argument("--files", nargs="*", default=list(FILES), help="patterns of files (default: the core)")
    parser.add_argument("--output", type=Path, default=FOLDER / "results.jsonl", help="file to write")
    options = parser.parse_args()
    mutants = sample(_files(options.files), options.number, options.seed)
    record = Record()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text("")
    with tempfile.TemporaryDirectory() as folder:
        trees: queue.Queue[Path] = queue.Queue()
        ignored = shutil.ignore_patterns(".venv*", ".git", "build", "demo", ".*_cache", "runs")
        for worker in range(options.workers):
            copy = shutil.copytree(ROOT, Path(folder) / str(worker), symlinks=True, ignore=ignored)
            trees.put(Path(copy))

        def work(mutant: Mutant) -> Result:
            tree = trees.get()
            try:
                result = try_out(mutant, record, tree)
            finally:
                trees.put(tree)
            print(f"{result.status:9} {result.name}  {result.noticed_by}", flush=True)
            with options.output.open("a") as output:
                output.write(json.dumps(dataclasses.asdict(result)) + "\n")
            return result

        with ThreadPoolExecutor(max_workers=options.workers) as pool:
            results = list(pool.map(work, mutants))
    counts = Counter(result.status for result in results)
    print(", ".join(f"{number} {status}" for status, number in counts.items()))
    return 0 if counts["noticed"] >= _WANTED * len(results) else 1


if __name__ == "__main__":
    sys.exit(main())
