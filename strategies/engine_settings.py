"""What a Trainer tells its strategy before anything starts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainwright.strategies.precision import Precision


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """The Trainer's arguments that say where and in which format a strategy computes.

    Attributes:
        device_type: `"cpu"`, `"cuda"`, ...
        device_indices: of this node's devices, one for each of its processes.
        num_nodes: machines of the run, each with as many processes.
        precision: the format of weights and computation.
        compile_options: arguments of `torch.compile`; None: nothing is compiled.
    """

    device_type: str
    device_indices: list[int]
    num_nodes: int
    precision: Precision
    compile_options: dict[str, Any] | None = None

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return len(self.device_indices) * self.num_nodes
