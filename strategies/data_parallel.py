"""What strategies of several processes share: how these meet."""

from __future__ import annotations

import datetime
from typing import Any, Literal

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError
from trainwright.core.process import Topology
from trainwright.processes.process_group import DEFAULT_TIMEOUT, Processes, ProcessGroup, length_of_time
from trainwright.strategies.strategy import Strategy


class DataParallel(Strategy):
    """Joins the processes of a run; what each holds of the model is a sub-class's.

    Args:
        timeout: how long a collective may take: seconds, a timedelta, a Duration or text such as `"30 min"`.
        hang_timeout: how long a rank may stand still before it is printed where each rank stands; `"auto"`: half of
            `timeout`, ten minutes at most; None: never.
        process_group_backend: gloo on the CPU and NCCL on CUDA unless told.
    """

    is_distributed = True

    def __init__(
        self,
        *,
        timeout: float | datetime.timedelta | Duration | str | None = None,
        hang_timeout: float | datetime.timedelta | Duration | str | None = "auto",
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__()
        self.timeout = None if timeout is None else length_of_time("timeout", timeout)
        self.hang_timeout = _hang_timeout(hang_timeout, self.timeout)
        self.process_group_backend = process_group_backend

    def _make_processes(self, topology: Topology) -> Processes:
        return ProcessGroup(
            topology, timeout=self.timeout, backend=self.process_group_backend, hang_timeout=self.hang_timeout
        )


def _hang_timeout(value: Any, timeout: datetime.timedelta | None) -> datetime.timedelta | Literal["auto"] | None:
    if value is None or value == "auto":
        found: Literal["auto"] | None = value
        return found
    length = length_of_time("hang_timeout", value)
    longest = timeout or DEFAULT_TIMEOUT
    if length >= longest:
        raise ConfigurationError(
            f"hang_timeout={value!r} is not shorter than timeout={longest}, at which a collective fails: nothing would "
            "be reported before. Make one longer or the other shorter, or pass hang_timeout=None."
        )
    return length
