"""Pipelines in user-written training loops. In training, a call of the model runs forward and backward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import TaskError
from trainwright.strategies.megatron.runner import PipelineRunner
from trainwright.strategies.megatron.staged_model import Pipeline
from trainwright.strategies.megatron.step import divide, target_counter
from trainwright.strategies.precision import Precision
from trainwright.strategies.shards import full_output


class PipelineOutput(dict[str, Any]):
    """Result of a call of a model in training. Entries can also be read as attributes.

    Attributes:
        loss: Mean over the batches of all data-parallel ranks (0-dim). `loss.backward()` has no effect on the model,
            because the call has already computed the gradients.
    """

    loss: torch.Tensor

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        raise AttributeError(
            f"{name!r}: a model that is divided into pipeline stages returns only its loss in training. Call it under "
            "torch.no_grad() for its full output."
        )


@dataclass(frozen=True, slots=True)
class PipelineLoop:
    """Callable that a user-written loop calls instead of a model that is divided into pipeline stages.

    Attributes:
        model: The user's model.
        pipeline: Pipeline of the model.
        runner: Runner of the pipeline.
        precision: Precision of forwards.
        num_parts: Number of micro-batches into which a call divides its arguments.
    """

    model: nn.Module
    pipeline: Pipeline
    runner: PipelineRunner
    precision: Precision
    num_parts: int

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Return the model's output. In training, run forward and backward, and return a `PipelineOutput`. Collective.

        In training, arguments are divided into micro-batches along the first dimension of their tensors. The loss is
        the mean over all labels for transformers models, and over all rows for other models.
        """
        # While a stage is computed, a function of `forward_backward` calls the model.
        if self.pipeline.is_computing or not torch.is_grad_enabled():
            return self.model(*args, **kwargs)
        count = target_counter(self.model)
        # Labels are keyword arguments.
        count_targets = None if count is None else lambda arguments: count(arguments[1])
        parts = divide((args, kwargs), self.num_parts, count_targets)

        def step(arguments: tuple[Any, Any]) -> torch.Tensor:
            part_args, part_kwargs = arguments
            return loss_of_output(self.model(*part_args, **part_kwargs), type(self.model).__name__)

        loss = self.forward_backward(step, [part.data for part in parts], [part.weight for part in parts])
        return PipelineOutput(loss=loss)

    def forward_backward(
        self, step: Callable[[Any], torch.Tensor], batches: Sequence[Any], shares: Sequence[float] | None = None
    ) -> torch.Tensor:
        """Run micro-batches forward and backward, and accumulate gradients. Collective.

        Args:
            step: Function of a micro-batch that calls the model once and returns the loss.
            batches: Micro-batches.
            shares: Weights of the losses in the mean over the micro-batches. They add up to 1. Default: None, which
                uses equal weights.

        Returns:
            The mean of the weighted loss over the data-parallel ranks (0-dim), on every rank. Its `backward` has no
            effect on the model.

        Raises:
            TaskError: `step` did not call the model, or called it twice.
        """
        losses: list[torch.Tensor] = []  # of the micro-batches, weighted; empty on ranks without the last stage
        weights = shares
        if weights is None:
            weights = [1 / len(batches)] * len(batches)
        device = self.pipeline.links.device

        def call(i: int, _is_last: bool) -> torch.Tensor:
            with self.precision.forward_context(device.type) or nullcontext():
                return step(batches[i])

        def weigh(output: torch.Tensor, i: int) -> torch.Tensor:
            loss = full_output(output) * weights[i]
            losses.append(loss.detach())
            return loss

        step_number = int(torch.randint(2**62, ()))  # random, so that dropout differs between calls
        with torch.autocast(device.type, enabled=False):  # for backward; forwards enter their own context
            self.runner.run(batches, call, weigh, step_number)
        loss_of_rank = 0.0
        if losses:
            loss_of_rank = float(torch.stack(losses).sum())
        # For each rank: (the rank of its pipeline that has the loss, its own loss). Each pipeline counts once.
        gathered = self.runner.processes.gather_object((self.runner.source, loss_of_rank))
        sources = {source for source, _ in gathered}
        mean = sum(gathered[source][1] for source in sources) / len(sources)
        return torch.tensor(mean, device=device).requires_grad_()


def loss_of_output(output: object, name: str) -> torch.Tensor:
    """Return the loss in a model's output: the output itself, its entry `"loss"`, or its first element.

    Args:
        output: A tensor, dict, tuple or list.
        name: Class name of the model, for the error.

    Raises:
        TaskError: The output has no loss, or the loss has several elements.
    """
    loss = output
    if isinstance(output, dict):
        loss = output.get("loss")
    elif isinstance(output, (tuple, list)) and output:
        loss = output[0]
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise TaskError(
            f"{name} returned no loss. A call of a model that is divided into pipeline stages also runs backward. Pass "
            "labels, so that the model returns its loss, or call accelerator.forward_backward with a function that "
            "computes the loss of a micro-batch."
        )
    return loss.reshape(())
