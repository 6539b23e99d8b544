"""Report of the positions of all ranks when a rank waits in a collective that other ranks do not call."""

from __future__ import annotations

import sys
import threading
import time
from types import FrameType

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.processes.rank_position import collective_of, frames_of

_BEAT_S = 0.5  # the time between two beats of the detector, which answers requests
_ANSWER_S = 3.0  # for ranks to answer a request
_STUCK_S = 30.0  # in one collective
_MOST_IDLE_SHARE = 0.2  # of a core, that a process uses while it only waits for others
# Waits for other ranks that are not collectives of torch: module and function, and the name that users know.
_OWN_WAITS = {("trainwright.processes.partial_state", "_wait_for"): "main_process_first"}


class LateCalls:
    """Calls of a user-written loop in which this rank waits for others. The thread of the `HangDetector` reads them.

    Other ranks that request the position of this rank's main thread receive it. When the main thread has been in one
    collective for 30 s, the positions of all ranks are requested. They are printed 3 s later, unless all ranks are in
    the same collective. Keys of the store:

        asked               number of requests
        ask/N               exists if request N was made
        at/N/RANK           the answer of a rank: the line that its main thread executes

    Args:
        store: Connection of the detector's thread to the store of the process group.
        rank, world_size: this rank, and the number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._thread_id = threading.get_ident()
        self._num_answers = 0  # requests that this rank has answered
        self._begin_wait("")

    def _begin_wait(self, collective: str) -> None:
        """Set the collective that the main thread has entered. Empty if it does not wait for other ranks."""
        self._collective = collective
        self._since_s = time.monotonic()
        self._cpu_s_before = time.process_time()
        self._was_requested = False  # the positions, for this wait
        # Number and time of that request. None before the request and after the report. The answers to a request of an
        # earlier wait are positions of that wait.
        self._last_request: tuple[int, float] | None = None

    def update(self) -> None:
        """Update the wait of the main thread. Does not communicate."""
        frames = frames_of(self._thread_id)
        if not _is_marked(frames):  # otherwise the thread is still in the same collective
            self._begin_wait(_wait_of(frames))

    def exchange(self) -> None:
        """Answer requests of other ranks, and report a long wait. Call `update` first."""
        while self._store.check([f"ask/{self._num_answers}"]):
            self._store.set(f"at/{self._num_answers}/{self._rank}", _place_of(self._thread_id))
            self._num_answers += 1
        if not self._collective:
            return
        now_s = time.monotonic()
        waited_s = now_s - self._since_s
        if waited_s > _STUCK_S and not self._was_requested:
            self._last_request = self._request(self._store), now_s
            self._was_requested = True
        elif self._last_request is not None:
            number, requested_at_s = self._last_request
            if now_s - requested_at_s > _ANSWER_S:
                self._report(number, waited_s, self._collective)
                self._last_request = None

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
        num_in_same = sum(place.endswith(f"waits in {collective}") for place in places)
        if num_in_same == self._world_size:
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
        """Return the answers to a request so far, one line of text each."""
        answers = []
        for rank in range(self._world_size):
            key = f"at/{number}/{rank}"
            if store.check([key]):
                answers.append(f"rank {rank}: {store.get(key).decode()}")
        return answers

    def request_places(self, store: Store) -> list[str]:
        """Return the positions of all ranks that answer, one line of text each. Blocks for at most 3.5 s.

        Called by the main thread, while the detector's thread of each rank answers.

        Args:
            store: The store, through the calling thread's connection.
        """
        number = self._request(store)
        deadline = time.monotonic() + _ANSWER_S + _BEAT_S
        while time.monotonic() < deadline and len(self._answers(store, number)) < self._world_size:
            time.sleep(0.05)
        return self._answers(store, number)


def _is_marked(frames: list[FrameType]) -> bool:
    """Return whether the thread is still in the collective of an earlier call. Otherwise, mark its innermost frame.

    The mark is a tracer setting of the frame, which no other code changes in frames of torch. The frame's address is
    not unique over time, and a reference to the frame would keep its tensors alive.
    """
    if not frames:
        return False
    innermost = frames[0]
    if not innermost.f_trace_lines:
        return True
    if _wait_of(frames):
        innermost.f_trace_lines = False
    return False


def _wait_of(frames: list[FrameType]) -> str:
    """Return the name of the collective, or of the wait for other ranks without one, that a thread is in."""
    if not frames:
        return ""
    module = str(frames[0].f_globals.get("__name__", ""))
    function = frames[0].f_code.co_name
    return _OWN_WAITS.get((module, function)) or collective_of(frames)


def _place_of(thread_id: int) -> str:
    """Return the line of the user's program that a thread executes, and the collective that it waits in."""
    frames = frames_of(thread_id)
    if not frames:
        return "its main thread has ended"
    frame = next((frame for frame in frames if not _is_library(frame)), frames[-1])
    place = f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"
    collective = _wait_of(frames)
    return f"{place}, waits in {collective}" if collective else place


def is_in_collective(place: str) -> bool:
    """Return whether the position of a rank, as `LateCalls.request_places` returns it, is within a collective."""
    return ", waits in " in place


def _is_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("torch", "trainwright", "contextlib", "deepspeed")
