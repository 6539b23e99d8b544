"""Pipelines in user-written training loops, where a call of the model in training runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import TaskError
from trainwright.processes.process_group import Processes
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.megatron.runner import PipelineRunner, shape_of
from trainwright.strategies.megatron.staged_model import Pipeline
from trainwright.strategies.megatron.step import divide, target_counter
from trainwright.strategies.precision import Precision
from trainwright.strategies.shards import full_output


class PipelineOutput(dict[str, Any]):
    """Result of a call of a model in training. Entries can also be read as attributes.

    Attributes:
        loss: Mean over the batches of all data-parallel ranks. Its `backward` has no effect, because the call has
            already computed the gradients.
    """

    loss: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(
            f"{name!r}: a model that is divided into pipeline stages returns only its loss in training. Call it under "
            "torch.no_grad() for its full output."
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineLoop:
    """Runs the forward and backward of one optimizer step of a user-written loop.

    Attributes:
        model: The user's model.
        pipeline, runner: Pipeline of the model, and its runner.
        precision: Precision of forwards.
        processes, ranks: Processes and data-parallel ranks of the run.
        source: Global rank that provides losses in this rank's pipeline.
        base_seed: A seed, equal on every rank of the pipeline.
        num_parts: Number of micro-batches into which a call divides its arguments.
        sum_shared: Completes the gradients of parameters that do not belong to exactly one stage.
    """

    model: nn.Module
    pipeline: Pipeline
    runner: PipelineRunner
    precision: Precision
    processes: Processes
    ranks: DataRanks
    source: int
    base_seed: int
    num_parts: int
    sum_shared: Callable[[], None]

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the model's output. In training, run forward and backward and return the loss. Collective.

        In training, arguments are divided into micro-batches along the first dimension of their tensors. The loss is
        the mean over all labels for transformers models, otherwise over all rows.
        """
        if self.pipeline.is_computing:
            return self.model(*args, **kwargs)
        if torch.is_grad_enabled():
            count = target_counter(self.model)
            of_batch = None if count is None else lambda part: count(part[1])
            parts = divide((args, kwargs), self.num_parts, of_batch)

            def step(part: tuple[Any, Any]) -> torch.Tensor:
                return loss_of_output(self.model(*part[0], **part[1]), type(self.model).__name__)

            loss = self.forward_backward(step, [part for part, *_ in parts], [share for _, share, _ in parts])
            return PipelineOutput(loss=loss)
        return self.model(*args, **kwargs)

    def forward_backward(
        self, step: Callable[[Any], torch.Tensor], batches: Sequence[Any], shares: Sequence[float] | None = None
    ) -> torch.Tensor:
        """Run micro-batches forward and backward, and accumulate gradients. Collective.

        Args:
            step: Calls the model once and returns the loss of a micro-batch.
            batches: Micro-batches.
            shares: Weights of the losses. Default: None, equal weights.

        Returns:
            The mean of the weighted loss over the data-parallel ranks (0-dim). Its `backward` has no effect.
        """
        losses: list[torch.Tensor] = []
        weights = [1 / len(batches)] * len(batches) if shares is None else shares
        kind = self.pipeline.links.device.type
        drawn = int(torch.randint(2**62, ()))  # makes random numbers differ between calls

        def compute(stage: int, carry: torch.Tensor | None, i: int) -> torch.Tensor:
            def call() -> Any:
                context = self.precision.forward_context(kind)
                if context is None:
                    return step(batches[i])
                with context:
                    return step(batches[i])

            seed = hash((self.base_seed, drawn, i))
            output: torch.Tensor = self.pipeline.compute_stage(stage, carry, call, seed=seed)
            if stage < self.pipeline.last:
                return output
            loss = full_output(output) * weights[i]
            losses.append(loss.detach())
            return torch.stack([loss])

        with torch.autocast(kind, enabled=False):  # for backward; forwards enter their own context
            self.runner.run([shape_of(batch) for batch in batches], compute)
        self.sum_shared()
        mine = float(torch.stack(losses).sum()) if self.processes.rank == self.source else 0.0
        of_ranks = self.processes.gather_object((self.source, mine))
        sources = {source for source, _ in of_ranks}
        mean = sum(of_ranks[source][1] for source in sources) / len(sources)
        return torch.tensor(mean, device=self.pipeline.links.device).requires_grad_()


def loss_of_output(output: object, name: str) -> torch.Tensor:
    """Return the loss in a model's output.

    Raises:
        TaskError: There is none.
    """
    found = output
    if isinstance(output, dict):
        found = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        found = output[0]
    if not isinstance(found, torch.Tensor) or found.numel() != 1:
        raise TaskError(
            f"{name} returned no loss. A call of a model that is divided into pipeline stages also runs backward. Pass "
            "labels, so that the model returns its loss, or call accelerator.forward_backward with a function that "
            "computes the loss of a micro-batch."
        )
    return found.reshape(())
