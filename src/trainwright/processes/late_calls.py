"""Report of the positions of all ranks when a rank waits in a collective that other ranks do not call."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from types import FrameType

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.processes.rank_position import collective_of, frames_of

_LOOK_S = 0.5
_RANKS_PER_LOOK_S = 256  # more ranks look less often, so that the store is not overloaded
_ANSWER_S = 3.0
_STUCK_S = 30.0  # in one collective


class LateCalls:
    """Daemon thread that reports the position of this rank's main thread to other ranks that request it.

    When the main thread has been in one collective for 30 s, the daemon thread requests the positions of all ranks. It
    prints these positions, unless all ranks are in the same collective.

    Args:
        store: Separate connection to the store of the process group.
        rank, world_size: this rank, and the number of ranks.
    """

    def __init__(self, store: Store, rank: int, world_size: int) -> None:
        self._store, self._rank, self._world_size = store, rank, world_size
        self._look_s = max(_LOOK_S, world_size / _RANKS_PER_LOOK_S)
        self._thread_id, self._stop = threading.get_ident(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="trainwright-late-calls", daemon=True)
        atexit.register(self.close)  # a thread that uses the store during interpreter shutdown would abort the process
        self._thread.start()

    def close(self) -> None:
        """Stop the thread. Not collective."""
        atexit.unregister(self.close)
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        number, request = 0, None
        waits_in, since_s, is_told = "", time.monotonic(), False
        try:
            while not self._stop.wait(self._look_s):
                while self._store.check([f"ask/{number}"]):
                    self._store.set(f"at/{number}/{self._rank}", _place_of(self._thread_id))
                    number += 1
                frames, now_s = frames_of(self._thread_id), time.monotonic()
                if not _is_marked(frames):
                    waits_in, since_s, is_told = collective_of(frames), now_s, False
                elif now_s - since_s > _STUCK_S and not is_told:
                    request, is_told = (self._request(self._store), now_s), True
                elif request is not None and now_s - request[1] > _ANSWER_S:
                    self._report(request[0], now_s - since_s, waits_in)
                    request = None
        except dist.DistError:
            pass  # rank 0 has ended, and the store with it

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
        deadline = time.monotonic() + _ANSWER_S + self._look_s
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
    frames[0].f_trace_lines = not collective_of(frames)
    return False


def _place_of(thread_id: int) -> str:
    """Return the line of the user's program that a thread executes, and the collective that it waits in."""
    frames = frames_of(thread_id)
    if not frames:
        return "its main thread has ended"
    frame = next((one for one in frames if not _is_library(one)), frames[-1])
    collective = collective_of(frames)
    waits = f", waits in {collective}" if collective else ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}{waits}"


def is_in_collective(place: str) -> bool:
    """Return whether the position of a rank, as `LateCalls.ask` returns it, is within a collective."""
    return ", waits in " in place


def _is_library(frame: FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package in ("torch", "trainwright", "contextlib", "deepspeed")
