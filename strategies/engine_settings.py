"""Settings of an engine that come from the Trainer or Accelerator, not from the strategy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.gradients import GradientClip


@dataclass(frozen=True, slots=True)
class EngineSettings:
    """Arguments of the Trainer or Accelerator that the engine needs.

    Attributes:
        device_type: `"cpu"`, `"cuda"`, …
        device_indices: Indices of this node's devices, one for each process of the node.
        num_nodes: Number of nodes, which have equal numbers of processes.
        precision: Number formats of weights and computation.
        compile_options: Arguments of `torch.compile`. None disables compilation.
        accumulate_grad_batches: Micro-batches per optimizer step.
        clip: Options of gradient clipping. None disables clipping.
        compile_blocks: Compile each repeated block of the model separately, instead of the full step.
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
        """Number of processes of the run."""
        return len(self.device_indices) * self.num_nodes
