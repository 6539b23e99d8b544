"""`trainwright check`: start processes like `trainwright launch`, and check that the processes can train."""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import uuid
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from trainwright.core.errors import ConfigurationError
from trainwright.launch.launch import PREFIX, check_options, check_packages, options_help, run_agent, set_environment
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import LaunchCommand, read_config, split
from trainwright.processes.launcher import set_variable

PASS = "pass"
FAIL = "fail"
SKIPPED = "skipped"
STOPPED = "stopped: "  # prefix of the error in the part in which all processes were ended
# Each part, in its order, with the advice for a failure.
PARTS = {
    "processes": "Correct the options. Check that machines reach each other at --main_process_ip and its port.",
    "devices": "Give each process a device of its own, and all of them the same kind.",
    "versions": "Install the same versions on all machines.",
    "clocks": "Synchronize the clocks by NTP. They affect logs and which checkpoints are kept.",
    "collectives": "Check the network: NCCL_SOCKET_IFNAME or GLOO_SOCKET_IFNAME names the interface to use.",
    "data": "Report it with the output of `trainwright env`. Samples would be missing or repeated.",
    "parity": "Train on one process, or without --mixed_precision, to find the option that changes the result.",
    "run folder": "Pass --run_folder with an existing folder that all machines share and this user can write.",
    "resume": "Train without interruption until it is repaired: a resumed run would differ.",
}
_STOP_ADVICE = "Read the output of that rank above: its error, or its position. Look at its machine and its memory."
_FLAGS = {"config_file": True, "run_folder": True, "json": False}  # flags of this command → whether they have a value
_MODULE = "trainwright.launch.check_processes"


@dataclass(frozen=True, slots=True)
class Finding:
    """Row of the result.

    Attributes:
        part: the part of the check, a key of `PARTS`.
        result: `"pass"`, `"fail"` or `"skipped"`.
        found: figures, the error, or the reason why the part is skipped.
        advice: what to do after a failure. Empty otherwise.
    """

    part: str
    result: str
    found: str
    advice: str = ""


def failed(part: str, found: str) -> Finding:
    """Return the row of a part that failed. `found` is the error."""
    advice = PARTS[part]
    if found.startswith(STOPPED) and part != "processes":
        advice = _STOP_ADVICE
    return Finding(part, FAIL, found, advice)


def check(argv: Sequence[str]) -> int:
    """Check that processes with these options can train. Return 0 if all parts pass or are skipped, otherwise 1.

    Raises:
        ConfigurationError: An option is not valid.
    """
    if {"-h", "--help"} & set(argv):
        print(_help())
        return 0
    flags, own_flags, rest = split(argv, "check", _FLAGS)
    if rest:
        raise ConfigurationError(f"trainwright check takes options only, not {rest[0]!r}. It runs a script of its own.")
    config, notes = read_config(flags, own_flags.get("config_file"))
    check_options(config)
    if config.engine is not None:
        raise ConfigurationError(f"trainwright check starts its processes itself. Remove --{config.engine}.")
    check_packages(config)
    if (config.num_machines or 1) > 1 and "run_folder" not in own_flags:
        raise ConfigurationError("several machines need --run_folder with a folder that all of them share.")
    for note in notes:
        print(f"trainwright check: {note}", file=sys.stderr)
    start_s = time.monotonic()
    config = replace(config, max_restarts=None)  # the first failure is the result
    with tempfile.TemporaryDirectory(prefix="trainwright-check-", ignore_cleanup_errors=True) as temporary:
        rows = _run(config, own_flags.get("run_folder", temporary), Path(temporary))
    results = [row.result for row in rows]
    if "json" in own_flags:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        print(table(rows))
        counts = [f"{results.count(result)} {result}" for result in (PASS, FAIL, SKIPPED)]
        print(f"\n{', '.join(counts)}, in {time.monotonic() - start_s:.1f} s")
    return 1 if FAIL in results else 0


def _run(config: LaunchConfig, run_folder: str, temporary: Path) -> list[Finding]:
    """Run all parts in new processes. Return a row for each part."""
    from torch.distributed.elastic.rendezvous import RendezvousError  # torch takes seconds

    local, _ = set_environment(config)
    set_variable(PREFIX, "[rank ${rank}] ")
    results = temporary / "results"
    results.mkdir()
    work = Path(run_folder).absolute() / f"trainwright-check-{uuid.uuid4().hex[:8]}"
    command = LaunchCommand(config, _MODULE, [str(work), str(results)], "module", [])
    problem = ""
    try:
        with redirect_stdout(sys.stderr):  # of the agent, because only the rows are written to stdout
            first = run_agent(command, local, config.log_dir or str(temporary / "logs"))
        if first is not None:
            problem = f"rank {first.rank} ended ({first.how}); its output is above"
    except (OSError, RuntimeError, RendezvousError) as error:  # machines that do not meet
        problem = f"{type(error).__name__}: {error}".removesuffix(": ")  # some errors of torch have no text
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return complete(_read(results), problem)


def _read(results: Path) -> list[Finding]:
    """Return the rows of the process that wrote the most rows. A process that hangs writes no further rows."""
    lines_by_process = [file.read_text().splitlines() for file in sorted(results.glob("*.jsonl"))]
    longest = max(lines_by_process, key=len, default=[])
    return [Finding(**json.loads(line)) for line in longest]


def complete(rows: Sequence[Finding], problem: str) -> list[Finding]:
    """Return a row for every part. If `rows` end early, the next part failed with `problem`."""
    all_rows = list(rows)
    missing_parts = list(PARTS)[len(rows) :]
    # The watchdog of a process has written a row before it ended the processes.
    has_reason = len(all_rows) > 0 and all_rows[-1].found.startswith(STOPPED)
    if missing_parts and not has_reason:
        text = problem or "processes ended without a result"
        all_rows.append(failed(missing_parts.pop(0), STOPPED + text))
    for part in missing_parts:
        all_rows.append(Finding(part, SKIPPED, "not reached"))
    return all_rows


def table(rows: Sequence[Finding]) -> str:
    """Return the rows as text, with the advice below a failure."""
    lines = [f"{'part':<12} {'result':<8} found"]
    for row in rows:
        lines.append(f"{row.part:<12} {row.result:<8} {row.found}")
        if row.advice:
            lines.append(f"{'':<21} advice: {row.advice}")
    return "\n".join(lines)


def _help() -> str:
    return (
        "usage: trainwright check [options of launch] [--run_folder FOLDER] [--json]\n\n"
        "Start processes as `trainwright launch` does with the same options, variables and files, and check that they\n"
        f"can train: {', '.join(PARTS)}. The exit code is 0 if nothing failed.\n\n"
        "check:\n"
        "  --run_folder FOLDER\n        Existing folder, shared by all machines. Default: a temporary one.\n"
        f"  --json\n        Print the rows as JSON.\n\n{options_help()}"
    )
