"""Position of a rank: the Trainer's counters and the activity of the main thread, read by another thread."""

# The stack of the main thread comes from Python. torch's flight recorder (2.13) does not contain lines of the user's
# code, or ranks outside of collectives, which cause most hangs. faulthandler writes to a file descriptor of its own
# process, where no other rank can read it.

from __future__ import annotations

import json
import linecache
import os
import socket
import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

_MOST_STACK_CHARACTERS = 20_000
# Names of torch's wrapper functions. The function that the user called is inside them.
_WRAPPERS = ("wrapper", "decorate_context", "<lambda>")


@dataclass(frozen=True)
class Position:
    """Progress of a rank. A rank has made progress if any field has changed."""

    step: int  # completed optimizer steps
    batch: int  # micro-batches consumed by this rank
    evaluated: int  # evaluation batches that this rank has completed in this stage
    phase: str  # what the Trainer is doing: "fit", "validate", "test", "predict"; "user-written loop" without a Trainer

    def __str__(self) -> str:
        return f"{self.phase}, step {self.step}, batch {self.batch}, {self.evaluated} evaluation batches done"


@dataclass(frozen=True)
class RankPosition:
    """Position of a rank in a hang report. All fields are JSON-compatible."""

    rank: int
    position: str  # `str` of its Position
    still_s: float  # seconds since its last progress
    waits_in: str  # the collective that its main thread is in; empty outside of collectives
    doing: str  # "saving", "fetching data", "setting up" or empty
    place: str  # innermost line of its main thread
    process: str  # host and process ID
    stacks: str  # the Python stacks of its threads, the main one first; see `stacks_of`
    last_collective: str = ""  # of torch's flight recorder; empty if torch has recorded none


def position_of_rank(rank: int, position: Position, still_s: float, thread_id: int) -> RankPosition:
    """Return the position of the thread `thread_id`, without stopping the thread. Callable from any thread."""
    frames = frames_of(thread_id)
    return RankPosition(
        rank=rank,
        position=str(position),
        still_s=still_s,
        waits_in=collective_of(frames),
        doing=activity_of(frames),
        place=_place(frames[0]) if frames else "nowhere: the thread has ended",
        process=f"process {os.getpid()} on {socket.gethostname()}",
        stacks=stacks_of(thread_id),
        last_collective=last_recorded_collective(),
    )


def last_recorded_collective() -> str:
    """Return the collective that torch's flight recorder has recorded last in this process, with its number.

    Return an empty string if torch has recorded none.
    """
    # Private names of torch 2.13; its own command line reads the same JSON from files.
    if not dist.is_available():  # builds of torch without it do not have the module below
        return ""
    read = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if read is None:
        return ""
    trace = json.loads(read(True, False))  # with collectives, and not only those that still run
    entries = trace.get("entries") or []
    if not entries:
        return ""
    last = entries[-1]
    shapes = ", ".join(map(str, last["input_sizes"]))
    group = last["process_group"][1]  # a pair of the group's name and its description
    return f"{last['profiling_name']} of {shapes}, number {last['collective_seq_id']} of group {group}"


def frames_of(thread_id: int) -> list[FrameType]:
    """Return a thread's frames, innermost first. Empty if the thread has ended."""
    frame = sys._current_frames().get(thread_id)
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def collective_of(frames: list[FrameType]) -> str:
    """Return the name of the collective that a thread is in, or an empty string.

    A backward pass counts as a collective, because torch averages gradients over ranks in it.
    """
    if not frames:
        return ""
    # The innermost torch frames are helpers. The outermost torch frame is the function that the user called, unless it
    # is a wrapper. For example, a wrapper calls `dist.all_reduce`.
    collective = ""
    for frame in frames:
        module = _module(frame)
        name = frame.f_code.co_name
        is_wrapper = name in _WRAPPERS
        if module.startswith(("torch.distributed", "torch.nn.parallel.distributed")):
            if not collective or not is_wrapper:
                collective = name
        elif not is_wrapper and not module.startswith("torch.utils._contextlib"):
            break
    if collective:
        return collective
    innermost = (_module(frames[0]), frames[0].f_code.co_name)
    return "backward" if innermost == ("torch.autograd.graph", "_engine_run_backward") else ""


def activity_of(frames: list[FrameType]) -> str:
    """Return `"saving"`, `"fetching data"` or `"setting up"` for the frames of a Trainer's thread, otherwise `""`."""
    for frame in frames:
        module = _module(frame)
        if module.startswith(("trainwright.checkpoint", "trainwright.trainer.checkpoints.saves")):
            return "saving"
        if module.startswith(("torch.utils.data", "trainwright.data")):
            return "fetching data"
        if module == "trainwright.trainer.run" and frame.f_code.co_name == "set_up":
            return "setting up"
    return ""


def stacks_of(thread_id: int) -> str:
    """Return the Python stacks of all threads except the calling thread. The stack of `thread_id` is the first.

    The text is cut after 20,000 characters.
    """
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    frames = sys._current_frames()
    other_ids = sorted(frames.keys() - {thread_id, threading.get_ident()})
    parts = []
    for ident in [thread_id, *other_ids]:
        if ident not in frames:  # the thread has ended
            continue
        title = "main thread" if ident == thread_id else f"thread {names.get(ident, ident)}"
        lines = traceback.extract_stack(frames[ident])
        lines_to_print = [line for line in lines if not line.filename.startswith("<frozen importlib")]
        parts.append(f"{title}:\n{''.join(traceback.format_list(lines_to_print))}")
    return "".join(parts)[:_MOST_STACK_CHARACTERS]


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__", "")
    return name


def _place(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


@dataclass(frozen=True)
class ProcessMark:
    """Mark that distinguishes a process from all others, including later processes with the same process ID."""

    node: str  # host name, and on Linux the namespace of process IDs
    pid: int
    started: str  # start time in the kernel's unit; empty on systems without /proc

    @classmethod
    def mine(cls) -> ProcessMark:
        """Return this process's mark."""
        pid = os.getpid()
        node = socket.gethostname()
        namespace = Path("/proc/self/ns/pid")  # a link such as "pid:[4026531836]"
        if namespace.exists():
            node += f" {os.readlink(namespace)}"
        status = _kernel_status(pid)
        return cls(node, pid, "" if status is None else status[1])

    def is_gone(self) -> bool:
        """Return whether the process has ended, even if its parent has not reaped it. Call it on the process's node."""
        if self.started:
            status = _kernel_status(self.pid)
            if status is None:
                return True
            state, started = status
            return state in "ZX" or started != self.started  # zombie, dead, or a later process with the same ID
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return True
        except PermissionError:  # it exists, and belongs to another user
            return False
        return False


def _kernel_status(pid: int) -> tuple[str, str] | None:
    """Return a process's state letter and start time, or None if the process or /proc does not exist."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # For example "1234 (python) S 1 …". The name may contain spaces and parentheses. Without the ID and the name, the
    # state is field 0 and the start time is field 19 (proc_pid_stat(5) counts them from 1 as fields 3 and 22).
    fields = text.rpartition(")")[2].split()
    return fields[0], fields[19]


def user_line() -> str:
    """Return file, line and text of the innermost call that is not in torch or Trainwright."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _module(frame).split(".")[0] in ("torch", "trainwright"):
        frame = frame.f_back
    place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
    text = linecache.getline(frame.f_code.co_filename, frame.f_lineno, frame.f_globals).strip()
    return f"{place} ({text})" if text else place
