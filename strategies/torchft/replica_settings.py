"""The settings of one replica of a run under torchft."""

from __future__ import annotations

import datetime
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Checked settings of a replica.

    Attributes:
        number: Number of the replica.
        max_replicas: Number of replicas if all are alive.
        min_replicas: Number of live replicas below which training waits.
        lighthouse: Address of the lighthouse.
        timeout: Maximum duration of an exchange of gradients.
        host: Name or address of this machine for other replicas. None uses the machine's host name.
    """

    number: int
    max_replicas: int
    min_replicas: int
    lighthouse: str
    timeout: datetime.timedelta
    host: str | None
