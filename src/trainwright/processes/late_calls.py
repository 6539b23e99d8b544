"""Report of the positions of all ranks when a rank waits in a collective that other ranks do not call."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.processes.rank_position import collective_of, frames_of

_LOOK_S = 0.5
_ANSWER_S = 3.0
_STUCK_S = 30.0  # in one collective
_MOST_IDLE_SHARE = 0.2  # of a core, that a process uses in which nothing but the wait for others happens
_OWN_WAITS = {("trainwright.processes.partial_state", "_wait_for"): "main_process_first"}


class LateCalls:
    """Calls of a user-written loop in which this rank waits for others. The thread of the `HangDetector` reads them.

    Other ranks that request the position of this rank's main thread receive it. When the main thread has been in one
    collective for 30 s, the positions of all ranks are requested. They are printed, unless all ranks are in the same
    collective.

    Args:
        store: Connection of the detector's thread to the store of the process group.
        rank, world_size: this rank, and the number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._thread_id = threading.get_ident()
        self._num_answers = 0
        self._request_sent: tuple[int, float] | None = None  # its number and time
        # The collective that the main thread is in
        self._collective = ""
        self._since_s = time.monotonic()
        self._cpu_s_before = time.process_time()
        self._is_told = False

    def note(self) -> None:
        """Update the wait of the main thread. Does not communicate."""
        frames = frames_of(self._thread_id)
        if not _is_marked(frames):
            self._collective = _wait_of(frames)
            self._since_s = time.monotonic()
            self._cpu_s_before = time.process_time()
            self._is_told = False

    def exchange(self) -> None:
        """Answer requests of other ranks, and report a long wait. Call `note` first."""
        while self._store.check([f"ask/{self._num_answers}"]):
            self._store.set(f"at/{self._num_answers}/{self._rank}", _place_of(self._thread_id))
            self._num_answers += 1
        now_s = time.monotonic()
        waited_s = now_s - self._since_s
        if self._collective and waited_s > _STUCK_S and not self._is_told:
            self._request_sent = self._request(self._store), now_s
            self._is_told = True
        elif self._collective and self._request_sent is not None and now_s - self._request_sent[1] > _ANSWER_S:
            self._report(self._request_sent[0], waited_s, self._collective)
            self._request_sent = None

    def place_of_wait(self, at_least_s: float) -> str:
        """Return the line in which the main thread has waited for others for some time. Empty if it does not wait.

        A process that computes, for example in the backward pass of a model that only it trains, does not wait.
        """
        waited_s = time.monotonic() - self._since_s
        if not self._collective or waited_s < at_least_s:
            return ""
        computed_s = time.process_time() - self._cpu_s_before
        if computed_s > _MOST_IDLE_SHARE * waited_s:
            return ""
        place = _place_of(self._thread_id)
        return place if is_in_collective(place) else ""

    def _report(self, number: int, waited_s: float, collective: str) -> None:
        """Print the positions of the ranks, unless all ranks are in the same collective."""
        places = self._answers(self._store, number)
        if all(place.endswith(f"waits in {collective}") for place in places) and len(places) == self._world_size:
            return
        text = f"trainwright: rank {self._rank} has waited {waited_s:.0f} s in {collective}. The ranks are at:"
        sys.stderr.write("\n  ".join([text, *places]) + "\n")

    @staticmethod
    def _request(store: Store) -> int:
        """Request the positions of all ranks, and return the number of the request."""
        number: int = store.add("asked", 1) - 1
        store.set(f"ask/{number}", "")
        return number

    def _answers(self, store: Store, number: int) -> list[str]:
        keys = {rank: f"at/{number}/{rank}" for rank in range(self._world_size)}
        return [f"rank {rank}: {store.get(key).decode()}" for rank, key in keys.items() if store.check([key])]

    def ask(self, store: Store) -> list[str]:
        """Return the positions of all ranks that answer, one line of text each. Blocks for some seconds.

        Args:
            store: The store, through the calling thread's connection.
        """
        number = self._request(store)
        deadline = time.monotonic() + _ANSWER_S + _LOOK_S
        while time.monotonic() < deadline and len(self._answers(store, number)) < self._world_size:
            time.sleep(0.05)
        return self._answers(store, number)


def _is_marked(frames: list[FrameType]) -> bool:
    """Return whether the thread is still in the collective of an earlier call. Otherwise, mark its innermost frame.

    The mark is a tracer setting of the frame, which no other code changes in frames of torch. The frame's address is
    not unique over time, and a reference to the frame would keep its tensors alive.
    """
    if not frames or not frames[0].f_trace_lines:
        return bool(frames)
    frames[0].f_trace_lines = not _wait_of(frames)
    return False


def _wait_of(frames: list[FrameType]) -> str:
    """Return the name of the collective, or of the wait for other ranks without one, that a thread is in."""
    if not frames:
        return ""
    innermost = str(frames[0].f_globals.get("__name__", "")), frames[0].f_code.co_name
    return _OWN_WAITS.get(innermost) or collective_of(frames)


def _place_of(thread_id: int) -> str:
    """Return the line of the user's program that a thread executes, and the collective that it waits in."""
    frames = frames_of(thread_id)
    if not frames:
        return "its main thread has ended"
    frame = next((one for one in frames if not _is_library(one)), frames[-1])
    collective = _wait_of(frames)
    waits = f", waits in {collective}" if collective else ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}{waits}"


def is_in_collective(place: str) -> bool:
    """Return whether the position of a rank, as `LateCalls.ask` returns it, is within a collective."""
    return ", waits in " in place


def _is_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("torch", "trainwright", "contextlib", "deepspeed")
