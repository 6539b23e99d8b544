"""Settings of an engine that come from the Trainer or Accelerator, not from its strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.gradients import GradientClip


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Arguments of the Trainer or Accelerator that its engine needs.

    Attributes:
        device_type: `"cpu"`, `"cuda"`, ...
        device_indices: of this node's devices, one for each of its processes.
        num_nodes: machines of the run, each with as many processes.
        precision: the format of weights and computation.
        compile_options: arguments of `torch.compile`; None: nothing is compiled.
        accumulate_grad_batches: micro-batches of one optimizer step.
        clip: how gradients are clipped; None: they are not.
        compile_blocks: in user-written loops, compile repeated blocks of models, not whole models.
    """

    device_type: str
    device_indices: list[int]
    num_nodes: int
    precision: Precision
    compile_options: dict[str, Any] | None = None
    accumulate_grad_batches: int = 1
    clip: GradientClip | None = None
    compile_blocks: bool = False

    @property
    def num_processes(self) -> int:
        """Processes of the run."""
        return len(self.device_indices) * self.num_nodes
