"""Meetings: ranks wait for each other in a call through the run's store, and report the ranks that are late.

A barrier of torch would block without a message when a rank never makes the call. The store works even while a late
rank is in a collective of the process group.
"""

from __future__ import annotations

import datetime
import sys
import time
from typing import TYPE_CHECKING, Any, Literal

from torch.distributed import PrefixStore  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.core.errors import ConfigurationError, WorkerError
from trainwright.processes.hang_report import ranks_text
from trainwright.processes.late_calls import is_in_collective

if TYPE_CHECKING:
    from trainwright.processes.loop_watch import LoopWatch

LONGEST_POLL_S = 0.25
_FIRST_POLL_S = 0.0005
_LATE_S = 10.0  # after which a rank that waits for others in a call names them
_TOO_LATE_S = 60.0  # after which a main rank makes a call alone
_ENDED_S = 1.0  # after which a rank that waits in a call checks for ranks that have ended
_LATE_AGAIN_S = 1.0  # the same as _LATE_S for a main rank that has made a call alone before

Turn = Literal["together", "alone", "done"]  # see `Processes.meet_or_lead`


class Meetings:
    """The calls in which the ranks of a process group meet.

    Keys in the store of one call: the number of each rank that has arrived, `arrived` (how many have), and the key that
    ends the wait: `everyone` in `meet`, `outcome` in `meet_or_lead`.

    Args:
        store: store of the process group.
        rank: this rank.
        world_size: number of ranks.
        timeout: longest time that a rank waits for the others.

    Attributes:
        loop_watch: monitor of a user-written loop, which knows the positions of late ranks and the ranks that have
            left. None in a Trainer.
    """

    def __init__(self, store: Any, rank: int, world_size: int, timeout: datetime.timedelta) -> None:
        self.loop_watch: LoopWatch | None = None
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._timeout = timeout
        # Equal on all ranks, since all ranks make the same calls. They separate the keys of different calls.
        self._num_meetings = 0
        self._num_joint_calls = 0
        self._last_meeting: Any = None  # store of the last `meet`, whose keys the next one deletes
        self._has_led = False  # this main rank has made a call of `meet_or_lead` alone

    def meet(self, call: str) -> None:
        """Wait until every rank makes the call; see `Processes.meet`."""
        self._num_meetings += 1
        store = PrefixStore(f"meet/{self._num_meetings}/{call}", self._store)
        last_meeting = self._last_meeting
        self._last_meeting = store
        store.set(str(self._rank), "")
        if store.add("arrived", 1) == self._world_size:
            if last_meeting is not None:  # all ranks are in this meeting, so none reads the keys of the last one
                last_meeting.delete_key("arrived")
                last_meeting.delete_key("everyone")
                for rank in range(self._world_size):
                    last_meeting.delete_key(str(rank))
            store.set("everyone", "")
        self._wait_for("everyone", store, call)

    def meet_or_lead(self, call: str, position: str) -> Turn:
        """Wait for the other ranks, or make the call alone as the main rank; see `Processes.meet_or_lead`."""
        while True:
            self._num_joint_calls += 1
            store = PrefixStore(f"joint/{self._num_joint_calls}/{call}", self._store)
            store.set(str(self._rank), "")
            # `compare_set` keeps an existing outcome: the last rank may arrive while the main rank decides to make the
            # call alone.
            if store.add("arrived", 1) == self._world_size:
                store.compare_set("outcome", "", "together")
            if not self._wait_for("outcome", store, call, leads=self._rank == 0):
                store.compare_set("outcome", "", f"alone at {position}")
            outcome = store.get("outcome").decode()
            if outcome == "together":
                return "together"
            if self._rank == 0:
                self._has_led = True
                return "alone"
            if outcome == f"alone at {position}":
                return "done"
            # The main rank has made an earlier call alone. This call is a later one.

    def _wait_for(self, key: str, store: Any, call: str, *, leads: bool = False) -> bool:
        """Wait until `key` exists, and report the ranks that are late. See `Processes.meet` for errors.

        If `leads` is True, return False when all late ranks are in collectives, which they cannot leave without this
        rank, or are too late: on an accelerator, a rank that waits for this one may be in any call.

        Args:
            key: the key of `store` that ends the wait.
            store: the store of this call.
            call: the name of the call, for messages.
            leads: this rank may make the call alone. Default: False.
        """
        start_s = time.monotonic()
        poll_s = _FIRST_POLL_S
        next_report_s = _LATE_AGAIN_S if leads and self._has_led else _LATE_S
        # Positions of the late ranks at the last report, if they were in collectives. None before the first report.
        blocked_before: list[str] | None = None
        while not store.check([key]):  # store.wait() would log two warnings of torch for each second
            time.sleep(poll_s)  # Ctrl-C works here
            poll_s = min(2 * poll_s, LONGEST_POLL_S)
            waited_s = time.monotonic() - start_s
            is_over = waited_s >= self._timeout.total_seconds()
            if waited_s >= _ENDED_S and self._cannot_complete(store, call, key, leads=leads):
                return False
            if waited_s < next_report_s and not is_over:
                continue

            late = self._not_arrived(store, range(self._world_size))
            text = (
                f"rank {self._rank} waits in {call} for {ranks_text(late)}, which may be slow or never makes this "
                "call. Call it on every rank, not on the main one alone."
            )
            if is_over:
                raise TimeoutError(f"{text} Waited for {self._timeout}.")
            places = self._places()
            # Ranks that have arrived wait for the store, not in a collective.
            blocked = [place for place in places if is_in_collective(place)]
            all_late_are_blocked = late != [] and len(blocked) == len(late)
            if leads:
                if all_late_are_blocked or waited_s >= _TOO_LATE_S:
                    return False
                next_report_s = min(next_report_s + _LATE_S, _TOO_LATE_S)
                continue

            if blocked_before is None:
                sys.stderr.write("\n  ".join([f"trainwright: {text}", *places]) + "\n")
            # No rank computes: those that have arrived wait here, and the late ones have waited in the same collectives
            # since the last report. A collective needs all ranks, so the program would wait forever.
            elif all_late_are_blocked and blocked == blocked_before:
                raise ConfigurationError("\n  ".join([text, *places]))
            blocked_before = blocked
            next_report_s += _LATE_S
        return True

    def _not_arrived(self, store: Any, ranks: range | list[int]) -> list[int]:
        return [rank for rank in ranks if not store.check([str(rank)])]

    def _places(self) -> list[str]:
        """Return the position of each rank in its program, one line of text each. Empty without a monitor."""
        if self.loop_watch is None:
            return []
        return self.loop_watch.late_calls.request_places(PrefixStore("late", self._store))

    def _cannot_complete(self, store: Any, call: str, key: str, *, leads: bool) -> bool:
        """Return whether a rank that may lead must make the call alone, because all late ranks have left the run.

        Raises:
            WorkerError: this rank waits for a rank that has left the run.
        """
        if self.loop_watch is None:
            return False
        # A rank may have made this call and then have left.
        departed = self._not_arrived(store, self.loop_watch.departed_ranks())
        if not departed:
            return False
        if leads:
            num_arrived = int(store.add("arrived", 0))  # adding 0 reads a counter
            return num_arrived + len(departed) == self._world_size
        if key == "outcome" and 0 not in departed:  # rank 0 can make the call alone
            return False
        names = ranks_text(departed)
        verb = "has" if len(departed) == 1 else "have"
        raise WorkerError(
            f"rank {self._rank} waits in {call} for {names}, but {names} {verb} left the run. Call it on every rank."
        )
