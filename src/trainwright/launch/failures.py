"""The failure that caused the failures of other processes, found in the error of torch's elastic agent."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any

# Errors that follow from the end of another process.
_CONSEQUENCE = re.compile(
    r"[Cc]onnection|Broken pipe|[Tt]imed out|[Tt]imeout|remote process|DistNetworkError|ends after the failure of rank"
)
_BLAMES = re.compile(r"ends after the failure of rank (\d+)\.")  # the message of a process that has ended itself
_AGENT_WAITS_S = 30  # between SIGTERM and SIGKILL (torch 2.13)


@dataclass(frozen=True, slots=True)
class FirstFailure:
    """The process that failed first."""

    rank: int
    pid: int
    code: int  # exit code of the launcher: that of the process, or 128 + the number of the signal
    how: str  # such as "exit code 1" or "signal SIGKILL"
    line: str  # its error, or empty if it has written none
    file: Path | None  # its output; None for the first process of a machine, whose output is in the terminal

    def error(self) -> str:
        """Return the end of the message: the error of the process, and where its output is."""
        if self.file is None:
            return "; its output is above"
        if not self.line:
            return "; it has written no error"  # killed by a signal, or ended by sys.exit
        return f": {self.line}\nIts output: {self.file}"


class _Cause(IntEnum):
    """Kinds of failures, from the likeliest cause of the others to the least likely one."""

    SIGNAL = 0  # of another sender than the agent, such as a crash or the kernel's memory killer
    ERROR = 1
    NO_ERROR = 2  # an exit code, and no output in a file
    CONSEQUENCE = 3  # an error that follows from the end of another process, such as a lost connection
    ENDED_BY_AGENT = 4


def first_failure(error: Any, logs: str | Path) -> FirstFailure:
    """Return the failure that caused other failures.

    A process that another process names as failed comes first, then the likeliest cause (`_Cause`), then the earliest.
    The time of an error is that of the process's last output, because torch's error has whole seconds.

    Args:
        error: `ChildFailedError` of torch's agent.
        logs: Folder for the output of processes.
    """
    failures = []
    causes: dict[int, _Cause] = {}
    times_s: dict[int, float] = {}
    blamed: set[int] = set()
    earliest_s = min(failure.timestamp for failure in error.failures.values())
    for rank, failure in error.failures.items():
        exit_code = failure.exitcode  # negative: the number of a signal
        # Files of an earlier attempt, before a restart, have a lower number.
        file = max(Path(logs).glob(f"*/attempt_*/{failure.local_rank}/stderr.log"), default=None)
        text = "" if file is None else file.read_text(errors="replace")
        blamed.update(int(found) for found in _BLAMES.findall(text))
        line = _error_line(text)
        if exit_code == -signal.SIGKILL and "Traceback (" not in text:
            line = ""  # the last output of a killed process is no error
        if exit_code < 0:
            causes[rank] = _cause_of_signal(exit_code, failure.timestamp - earliest_s, text, line)
        elif not line:
            causes[rank] = _Cause.NO_ERROR
        elif _CONSEQUENCE.search(line):
            causes[rank] = _Cause.CONSEQUENCE
        else:
            causes[rank] = _Cause.ERROR
        times_s[rank] = failure.timestamp
        if file is not None and line:
            times_s[rank] = file.stat().st_mtime
        how = f"exit code {exit_code}"
        code = exit_code
        if exit_code < 0:
            how = f"signal {failure.signal_name()}"
            code = 128 - exit_code  # as in a shell
        failures.append(FirstFailure(rank, failure.pid, code, how, line, file))
    # False is less than True, so that a blamed rank is the first.
    return min(failures, key=lambda one: (one.rank not in blamed, causes[one.rank], times_s[one.rank], one.rank))


def _cause_of_signal(exit_code: int, after_s: float, text: str, line: str) -> _Cause:
    """Return the kind of a failure by a signal.

    Args:
        exit_code: The negative number of the signal.
        after_s: Seconds after the first failure.
        text: Output of the process.
        line: Its error.
    """
    # The agent sends SIGTERM to the other processes, and SIGKILL if they still run after 30 s.
    is_killed_late = exit_code == -signal.SIGKILL and after_s > _AGENT_WAITS_S / 2
    if exit_code != -signal.SIGTERM and not is_killed_late:
        return _Cause.SIGNAL
    # A failed script may need longer to exit than the agent waits for it. Its traceback ends its output then.
    was_exiting = "Traceback (" in text and text.rstrip().endswith(line)
    if was_exiting and not _CONSEQUENCE.search(line):
        return _Cause.ERROR
    return _Cause.ENDED_BY_AGENT


def _error_line(text: str) -> str:
    """Return the first line of the last error in a process's output, or else the last line of the output."""
    lines = [line for line in text.splitlines() if line.strip()]
    if not lines:
        return ""
    # torch begins each line of a traceback by "[rank1]: ".
    unprefixed = [re.sub(r"^\[rank\d+\]: ?", "", line) for line in lines]
    starts = [number for number, line in enumerate(unprefixed) if line.startswith("Traceback (")]
    if starts:
        # The lines of a traceback's frames are indented. The error follows them.
        for number in range(starts[-1] + 1, len(lines)):
            if not unprefixed[number].startswith(" "):
                return lines[number].strip()
    return lines[-1].strip()
