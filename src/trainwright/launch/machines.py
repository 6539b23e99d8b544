"""Detection of machines whose launcher has ended, for the static rendezvous.

With a static rendezvous, torch's agents do not detect that the agent of another machine has ended. They restart their
processes, which then wait for the missing processes until a timeout of minutes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING

from trainwright.launch.launch_config import LaunchConfig

if TYPE_CHECKING:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing from its __all__

_BEAT_S = 0.5
_SILENCE_S = 15.0  # as torch's c10d rendezvous
_ENDING_S = 10.0  # how long the agent may take to end its processes


class MachineWatch:
    """Heartbeats of all launchers in the agents' store.

    When another launcher stops without success, this process receives SIGTERM, which ends the agent and its processes.
    If the agent is blocked, this process exits.

    Attributes:
        error: the message about the machine whose launcher has stopped. None while all machines run.
        _beats: number of heartbeats of each other machine at the last exchange, and the time at which the number last
            changed. Without machines that have not started, or have succeeded.
        _finished: the agent has ended, and the threads stop.
        _succeeded: the agent has ended without an error.
    """

    def __init__(self, config: LaunchConfig) -> None:
        self.error: str | None = None
        self._rank = config.machine_rank or 0
        self._count = config.num_machines or 1
        self._address = (str(config.main_process_ip), config.main_process_port or 0)
        self._beats: dict[int, tuple[int, float]] = {}
        self._finished = threading.Event()
        self._succeeded = False
        # An exchange blocks while the store cannot be reached, so that another thread checks the times.
        self._threads = [
            threading.Thread(target=run, name="trainwright-machines", daemon=True)
            for run in (self._exchange_beats, self._check_beats)
        ]

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Context manager in which threads send heartbeats and check the heartbeats of other machines."""
        for thread in self._threads:
            thread.start()
        try:
            yield
            self._succeeded = True
        finally:
            self._finished.set()
            for thread in self._threads:
                thread.join(_ENDING_S)

    def _exchange_beats(self) -> None:
        store: TCPStore | None = None
        while not self._finished.wait(_BEAT_S):
            with contextlib.suppress(RuntimeError):  # network errors: the store has not started, or has ended
                store = store or self._connect()
                self._exchange(store)
        with contextlib.suppress(RuntimeError):
            if store is not None and self._succeeded:
                store.add(f"trainwright/finished/{self._rank}", 1)

    def _check_beats(self) -> None:
        while not self._finished.wait(_BEAT_S):
            silent = self._silent_machine()
            if silent is not None:
                self._end(silent)
                return

    def _connect(self) -> TCPStore:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # missing from its __all__

        host, port = self._address
        return TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=5))

    def _exchange(self, store: TCPStore) -> None:
        """Send one heartbeat, and read the heartbeats of other machines."""
        store.add(f"trainwright/beats/{self._rank}", 1)
        for rank in set(range(self._count)) - {self._rank}:
            beats = store.add(f"trainwright/beats/{rank}", 0)  # adding 0 reads a counter
            if store.add(f"trainwright/finished/{rank}", 0):
                self._beats.pop(rank, None)
            elif beats and (rank not in self._beats or self._beats[rank][0] != beats):
                self._beats[rank] = (beats, time.monotonic())

    def _silent_machine(self) -> int | None:
        """Return the first machine without a heartbeat for 15 s, or None."""
        now = time.monotonic()
        for rank, (_, changed_at) in sorted(self._beats.items()):
            if now - changed_at > _SILENCE_S:
                return rank
        return None

    def _end(self, rank: int) -> None:
        self.error = (
            f"machine {rank} has sent no heartbeat for {_SILENCE_S:.0f} seconds: its launcher has ended, or it cannot "
            "be reached. All processes of this machine are ended. With --rdzv_backend c10d and --max_restarts, a "
            "machine that is started again rejoins"
        )
        if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:  # torch's agent has its handler
            os.kill(os.getpid(), signal.SIGTERM)
            if self._finished.wait(_ENDING_S):
                return
        print(f"\ntrainwright launch: {self.error}.", file=sys.stderr, flush=True)
        os._exit(1)
