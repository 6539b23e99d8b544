"""Options and process group that all strategies of several processes share."""

from __future__ import annotations

import datetime
from typing import Any, Literal

from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError
from trainwright.core.process import Topology
from trainwright.processes.process_group import DEFAULT_TIMEOUT, Processes, ProcessGroup, length_of_time
from trainwright.strategies.engine import Engine
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.strategy import Strategy


class DataParallel(Strategy):
    """Base class of strategies whose engine joins several processes.

    Args:
        timeout: How long a collective may take: seconds, a timedelta, a Duration or text such as `"30 min"`. Default:
            None, which is torch's.
        hang_timeout: Time without progress on a rank after which the position of each rank is printed; `"auto"`: half
            of `timeout`, at most ten minutes; None: never. Default: `"auto"`.
        process_group_backend: Default: None, which is gloo on the CPU and NCCL on CUDA.
    """

    is_distributed = True

    def __init__(
        self,
        *,
        timeout: float | datetime.timedelta | Duration | str | None = None,
        hang_timeout: float | datetime.timedelta | Duration | str | None = "auto",
        process_group_backend: str | None = None,
    ) -> None:
        self.timeout = None if timeout is None else length_of_time("timeout", timeout)
        self.hang_timeout = _hang_timeout(hang_timeout, self.timeout)
        self.process_group_backend = process_group_backend

    def engine(self, settings: EngineSettings) -> Engine:
        return ParallelEngine(self, settings)


class ParallelEngine(Engine):
    """Joins the processes of a run. Sub-classes determine what each holds of the model."""

    strategy: DataParallel

    def _make_processes(self, topology: Topology) -> Processes:
        given = self.strategy
        return ProcessGroup(
            topology, timeout=given.timeout, backend=given.process_group_backend, hang_timeout=given.hang_timeout
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
