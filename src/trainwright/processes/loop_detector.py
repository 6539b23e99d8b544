"""Monitor of each rank in a user-written loop, which detects failed ranks, and ranks that wait for one that has ended.

A user-written loop has no counters. Its monitor reports no hang, but the calls in which ranks are late (`LateCalls`). A
rank that ends without an error does not end the others, which may still write files or evaluate. They end only when all
of them wait in collectives, which the ended rank can never call. These keys of the store are added to those of the
`HangDetector`:

    departed            the ranks that have left without a failure
    aware               the ranks that have read that rank 0, which serves the store, has left without a failure
    hosts               the host of each rank, written by `ProcessGroup.open` before all ranks have met
    link                where rank 0 accepts the connections of ranks on other hosts (`HostLinks`)
    stuck/RANK          the line where a rank waits for others, after a rank has departed; empty if it does not wait

`events` also grows when a rank is added to `departed`.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from torch.distributed import Store  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.core.process import in_notebook
from trainwright.processes.hang_detector import HangDetector, is_echo, say
from trainwright.processes.hang_report import Failure, ranks_text
from trainwright.processes.host_links import HostLinks
from trainwright.processes.late_calls import LateCalls
from trainwright.processes.rank_position import Position

_NO_COUNTERS = Position(0, 0, 0, "user-written loop")
_EXIT_S = 12.0  # for a failed script that has left the run to end its process: seconds on a busy machine
_LOST_S = 8.0  # in one collective, after which a rank waits in vain for a rank that has ended
_LOST_WITHOUT_STORE_S = 60.0  # the same without a store if other ranks remain, whose positions are then not known
_WITHOUT_AGENT_S = 10.0  # the same if the agent that served the store has ended
_LINK_S = 5.0  # for rank 0 to create its Accelerator, so that ranks on other hosts can connect to it
_LEAVING_S = 1.0  # from the end of a connection until `left/RANK` must be in the store if the rank has left the run
_AWARE_S = 1.5  # for other ranks to read that rank 0 ends without an error, before the store ends with it
_WITH_STORE_S = 15.0  # for several remaining ranks to detect that all of them wait for rank 0, which takes 8 s


class LoopDetector(HangDetector):
    """Monitor thread of one rank during a user-written loop.

    Args:
        store: separate connection to the store of the process group, with a prefix for this loop.
        late_calls: the calls of this rank, which use the same connection.
        host: the host of rank 0.
        rank: this rank.
        world_size: number of ranks.
        timeout_s: seconds after which a collective fails.
        store_dies_with_rank_0: True if the process of rank 0 serves the store, False if torchrun's agent does.
    """

    _repeats_tracebacks = False  # Python prints the error of the failed script

    def __init__(
        self,
        store: Store,
        late_calls: LateCalls,
        *,
        host: str,
        rank: int,
        world_size: int,
        timeout_s: float,
        store_dies_with_rank_0: bool,
    ) -> None:
        super().__init__(
            store,
            rank=rank,
            world_size=world_size,
            position=lambda: _NO_COUNTERS,
            hang_timeout_s=None,  # a loop without counters may compute for any time
            timeout_s=timeout_s,
            store_dies_with_rank_0=store_dies_with_rank_0,
            interrupt_only=in_notebook(),
        )
        self._late_calls = late_calls
        self._host = host
        # None without ranks on other hosts, or if rank 0 has not published its port.
        self._links: HostLinks | None = None
        self._ended_links: dict[int, tuple[float, bool]] = {}  # by rank: time, and True if its host cannot be reached
        self._departed: set[int] = set()  # ranks that have left without a failure, as of the last event
        self._stuck_at = ""  # the value of this rank's key `stuck/RANK`

    def start(self) -> None:
        # Not in the thread: a process may be killed right after its start.
        self._link_hosts()
        super().start()

    def leave(self, error: BaseException) -> None:
        super().leave(error)
        follows_other = self._failure is not None and self._failure.rank != self._rank
        if not follows_other and self._departed and is_echo(error):
            error.add_note(f"{self._departed_text()} before.")

    def close(self) -> None:
        super().close()
        # The reason of this rank's end is in the store now. The connection of a failed rank lasts as long as its
        # process, for whose end the others wait.
        if self._links is not None and self._error is None:
            self._links.close()

    # The thread

    def _beat(self, now: float) -> None:
        super()._beat(now)
        self._late_calls.update()
        self._late_calls.exchange()
        nothing_failed = self._error is None and self._failure is None
        if self._departed and nothing_failed:
            self._end_if_lost()

    def _read_events(self, now: float) -> None:
        super()._read_events(now)
        departed_before = self._departed
        self._departed = departed_ranks(self._open_store)
        if 0 in self._departed - departed_before:
            self._open_store.append("aware", f"{self._rank} ")

    def _finish(self) -> None:
        reason = "its script has ended" if self._error is None else type(self._error).__name__
        self._open_store.set(f"left/{self._rank}", reason)
        self._open_store.append("departed", f"{self._rank} ")
        self._open_store.add("events", 1)

    def _grace_s(self, is_gone: bool) -> float:
        # A script that has failed still runs the exit of its interpreter, which a launcher would cut short if this
        # process ended first. The launcher would then report this process as the first that failed.
        return super()._grace_s(is_gone) if is_gone else _EXIT_S

    # Other hosts

    def _link_hosts(self) -> None:
        """Connect to rank 0 if it is on another host. A rank that cannot connect is only not monitored by rank 0."""
        lines = self._open_store.get("hosts").decode().splitlines()  # for example "3 node-1 pid:[4026531836]"
        hosts = dict(line.split(" ", 1) for line in lines)
        if self._rank == 0 and len(set(hosts.values())) > 1:
            self._links = HostLinks(self._record_end)
            self._open_store.set("link", self._links.listen())
        elif hosts[str(self._rank)] != hosts["0"]:
            deadline = time.monotonic() + _LINK_S
            while not self._open_store.check(["link"]) and time.monotonic() < deadline:
                time.sleep(0.01)
            if self._open_store.check(["link"]):
                self._links = HostLinks(self._record_end)
                self._links.connect(self._host, self._open_store.get("link").decode(), self._rank)

    def _record_end(self, rank: int, is_unreachable: bool) -> None:
        """Record that the connection to a rank has ended. Called in the thread of the links."""
        self._ended_links[rank] = time.monotonic(), is_unreachable
        if is_unreachable and rank == 0:
            # The monitor thread waits for the store, which is on the host of rank 0, for up to the timeout.
            time.sleep(_LEAVING_S)
            if not self._stopping and self._error is None and not in_notebook():
                say(f"trainwright: rank {self._rank} ends, because the host of rank 0 cannot be reached.")
                sys.stdout.flush()
                os._exit(1)

    def _check_neighbours(self) -> None:
        super()._check_neighbours()
        for rank, (ended_at, is_unreachable) in list(self._ended_links.items()):  # a copy: another thread adds items
            if time.monotonic() < ended_at + _LEAVING_S:
                continue
            del self._ended_links[rank]
            self._known_gone.add(rank)
            self._open_store.set(f"gone/{rank}", "")
            if self._open_store.check([f"left/{rank}"]):
                continue
            if is_unreachable:
                text = "its host cannot be reached."
            else:
                text = "its process, on another host, has ended without a traceback (killed, or crashed)."
            self._post_failure(Failure(rank, f"rank {rank}: {text}", gone=True))

    # A rank that waits for one that has ended

    def _end_if_lost(self) -> None:
        """End this process if all remaining ranks wait for others, and so for a rank that has ended.

        While one of them does not wait, the others may wait for that one in a collective of a part of the ranks.
        """
        place = self._late_calls.place_of_wait(_LOST_S)
        if place != self._stuck_at:
            self._open_store.set(f"stuck/{self._rank}", place)
            self._stuck_at = place
        if not place:
            return
        remaining = set(range(self._world_size)) - self._departed
        if all(self._is_stuck(rank) for rank in remaining):
            self._end_lost(place)

    def _is_stuck(self, rank: int) -> bool:
        key = f"stuck/{rank}"
        if not self._open_store.check([key]):  # `get` would wait for the key
            return False
        return bool(self._open_store.get(key))

    def _end_lost(self, place: str) -> None:
        """End this process, which waits for others at `place` in vain."""
        if in_notebook():
            return
        if self._store is not None:  # otherwise, others would report this process as crashed
            self._store.set(f"left/{self._rank}", "it waited for a rank that has left")
        say(
            f"trainwright: rank {self._rank} ends, because {self._departed_text()} and cannot make the call that it "
            f"waits in. Every rank must make each collective call.\n  rank {self._rank}: {place}"
        )
        sys.stdout.flush()
        os._exit(1)

    def _departed_text(self) -> str:
        verb = "has" if len(self._departed) == 1 else "have"
        return f"{ranks_text(sorted(self._departed))} {verb} left the run"

    # The end of the store

    def _run_without_store(self) -> None:
        if 0 in self._departed:
            self._wait_without_store()
        else:
            super()._run_without_store()

    def _wait_without_store(self) -> None:
        """End this process if it waits for others after rank 0, which served the store, has ended without an error."""
        others_remain = len(self._departed) + 1 < self._world_size
        limit_s = _LOST_WITHOUT_STORE_S if others_remain else _LOST_S
        while not self._stopping and self._error is None:
            self._late_calls.update()
            place = self._late_calls.place_of_wait(limit_s)
            if place:
                self._end_lost(place)
            self._wake.wait(self._beat_s)
            self._wake.clear()

    def _waits_for_long(self, now: float, lost_at: float) -> bool:
        self._late_calls.update()
        return self._late_calls.place_of_wait(_WITHOUT_AGENT_S) != ""


def departed_ranks(store: Any) -> set[int]:
    """Return the ranks that have left the run without a failure.

    Args:
        store: connection of the calling thread, with the prefix of the detector.
    """
    return _ranks_in(store, "departed")


def wait_until_known(store: Any, rank: int, world_size: int) -> None:
    """Wait until the other ranks have read that rank 0 has ended without an error, or have ended.

    Afterwards, rank 0 may end the store, which it serves. The other ranks would report a sudden end as a failure. The
    wait takes at most 1.5 s. If several ranks remain, they need the store to detect that all of them wait for rank 0.
    Then this function waits until only one remains, for at most 15 s.

    Args:
        store: connection of the calling thread, with the prefix of the detector.
        rank: this rank.
        world_size: number of ranks.
    """
    start_s = time.monotonic()
    while time.monotonic() < start_s + _WITH_STORE_S:
        ended = {rank} | departed_ranks(store)
        for other in range(world_size):
            if store.check([f"gone/{other}"]) or store.check([f"left/{other}"]):
                ended.add(other)
        ended_or_aware = ended | _ranks_in(store, "aware")
        all_have_read = len(ended_or_aware) == world_size
        is_time_over = time.monotonic() >= start_s + _AWARE_S
        num_remaining = world_size - len(ended)
        if (all_have_read or is_time_over) and num_remaining < 2:
            return
        time.sleep(0.01)


def _ranks_in(store: Any, key: str) -> set[int]:
    """Return the ranks that have appended themselves to a key of the store."""
    if not store.check([key]):
        return set()
    return {int(rank) for rank in store.get(key).split()}
