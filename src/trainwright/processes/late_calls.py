"""Where every rank is while one of them waits in a collective call that others do not make."""

from __future__ import annotations

import atexit
import threading
import time
from types import FrameType

import torch.distributed as dist
from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.processes.standing import collective_of, frames_of

_LOOK_S = 0.5
_RANKS_PER_LOOK_S = 256  # more ranks look less often, so that the store is not overloaded
_ANSWER_S = 3.0


class LateCalls:
    """A daemon thread of each rank that says where its main thread is when another rank asks.

    Args:
        store: Of the process group; a connection of its own.
        rank, world_size: This rank, and the number of ranks.
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
        number = 0
        try:
            while not self._stop.wait(self._look_s):
                if self._store.check([f"ask/{number}"]):
                    self._store.set(f"at/{number}/{self._rank}", _place_of(self._thread_id))
                    number += 1
        except dist.DistError:
            pass  # rank 0 has ended, and the store with it

    def ask(self, store: Store) -> list[str]:
        """Return where each rank is, a line of text for each that answers. Blocks for some seconds.

        Args:
            store: The same, through the calling thread's connection.
        """
        number = store.add("asked", 1) - 1
        store.set(f"ask/{number}", "")
        keys = {rank: f"at/{number}/{rank}" for rank in range(self._world_size)}
        deadline = time.monotonic() + _ANSWER_S + self._look_s
        while time.monotonic() < deadline and not store.check(list(keys.values())):
            time.sleep(0.05)
        return [f"rank {rank}: {store.get(key).decode()}" for rank, key in keys.items() if store.check([key])]


def _place_of(thread_id: int) -> str:
    """Return the line of the user's program that a thread executes, and the collective that it waits in."""
    frames = frames_of(thread_id)
    if not frames:
        return "its main thread has ended"
    frame = next((one for one in frames if not _is_library(one)), frames[-1])
    collective = collective_of(frames)
    waits = f", waits in {collective}" if collective else ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}{waits}"


def _is_library(frame: FrameType) -> bool:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0] in (
        "torch",
        "trainwright",
        "contextlib",
        "deepspeed",
    )
