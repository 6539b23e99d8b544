"""The replicas that take part in a step. Only this file imports the library torchft."""

from __future__ import annotations

import socket
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from trainwright.core.errors import require_package
from trainwright.processes.process_group import DEFAULT_TIMEOUT, Processes
from trainwright.strategies.ddp.replicas import flat_gradients


def load_torchft() -> Any:
    """Import torchft.

    Raises:
        MissingPackageError: torchft is not installed.
    """
    return require_package("torchft", purpose="strategy='torchft'")


class LiveReplicas:
    """Connection to the replicas that are alive.

    Args:
        state: Function that returns the state that a rejoining replica receives.
        step: Number of completed optimizer steps.
        device: Device of the gradients.
        processes: The processes of this replica.
        timeout: Maximum duration of an exchange of gradients.
        host: Name or address of this machine for the other replicas. None uses the machine's host name.
        **manager: Further arguments of torchft's Manager.

    Raises:
        MissingPackageError: torchft is not installed.

    Attributes:
        received: State of a replica that has completed more steps than this replica, until the state is loaded. None
            otherwise.
    """

    def __init__(
        self,
        state: Callable[[], dict[str, Any]],
        *,
        step: int,
        device: torch.device,
        processes: Processes,
        timeout: timedelta,
        host: str | None,
        **manager: Any,
    ) -> None:
        torchft = load_torchft()
        host = host or socket.gethostname()
        self.received: dict[str, Any] | None = None
        self._has_joined = False  # True from `join` to the next `average`
        self._device = device
        self._timeout = timeout
        # The processes of this replica exchange addresses in a store of its first process. Port 0 selects a free port.
        self._store: TCPStore | None = None
        address = None
        if processes.rank == 0:
            self._store = TCPStore(host, 0, is_master=True, wait_for_workers=False)
            address = (host, self._store.port)
        store_host, store_port = processes.gather_object(address)[0]
        group = torchft.ProcessGroupGloo if device.type == "cpu" else torchft.ProcessGroupNCCL
        self._manager = torchft.Manager(
            pg=group(timeout=timeout),
            load_state_dict=self._receive,
            state_dict=state,
            use_async_quorum=False,  # a rejoining replica contributes to its first step
            timeout=timeout,
            quorum_timeout=DEFAULT_TIMEOUT,
            rank=processes.rank,
            world_size=processes.world_size,
            store_addr=store_host,
            store_port=store_port,
            hostname=store_host,  # of the replica's server, which its first process starts
            **manager,
        )
        self._manager.load_state_dict({"step": step, "batches_committed": 0})

    def _receive(self, state: dict[str, Any]) -> None:
        self.received = state

    def join(self) -> None:
        """Agree with the other live replicas on the participants of the next step. Blocks.

        A second call before `average` has no effect. If another replica has completed more steps, `received` is set to
        its state.
        """
        if not self._has_joined:
            self._manager.start_quorum()
            self._has_joined = True

    def average(self, parameters: Iterable[nn.Parameter], weight: float) -> bool:
        """Replace gradients by their weighted mean over the live replicas. Blocks.

        Args:
            parameters: The parameters.
            weight: Weight of this replica's gradients.

        Returns:
            False if a replica has failed. The gradients are then unchanged. Call `join`, and call `average` again.
        """
        flats = flat_gradients(parameters, weight)
        total = torch.tensor([weight], dtype=torch.float64, device=self._device)
        summed = [flat.values for flat in flats]
        summed.append(total)
        for values in summed:
            self._manager.allreduce(values, reduce_op=torch.distributed.ReduceOp.SUM).wait()
        self._has_joined = False
        # When another replica dies, the exchange of one process of this replica may fail at once, and that of another
        # process only after the timeout. The first process must wait for the second.
        if not self._manager.should_commit(timeout=2 * self._timeout):
            return False
        total_weight = max(float(total), 1e-12)  # the sums are 0 if all replicas had only padding
        for flat in flats:
            flat.write_mean(total_weight)
        return True

    def close(self) -> None:
        """Disconnect from the other replicas."""
        self._manager.shutdown(wait=False)
