"""One optimizer step of a pipeline: a schedule runs all micro-batches in the stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.core.state import Group, SkipRestOfEpoch
from trainwright.core.tree import batch_size, map_tensors
from trainwright.loggers.metric_buffer import DivertedCall
from trainwright.loggers.metric_slot import is_metric_object
from trainwright.strategies.context.labels import count_targets, shifts_labels
from trainwright.strategies.megatron.runner import PipelineRunner
from trainwright.strategies.shards import full_output
from trainwright.strategies.steps.binding import outputs_of
from trainwright.strategies.steps.gradients import loss_of, without_loss
from trainwright.strategies.steps.step import AutomaticStep, StepParts


class PipelineStep(AutomaticStep):
    """Step that runs the forward and backward of its micro-batches in the stages of a pipeline.

    Args:
        parts: See `StepParts`.
        runner: Runner of the task's pipeline.
        num_parts: Number of micro-batches into which each batch is divided along its first dimension.
    """

    def __init__(self, parts: StepParts, runner: PipelineRunner, num_parts: int) -> None:
        super().__init__(parts)
        if parts.hooks.on_before_backward or self._backward is not None:
            raise ConfigurationError(
                f"{type(self.task).__name__} or a callback defines on_before_backward or backward, but the schedule "
                "of a pipeline runs backward. Remove it, or use strategy='fsdp'."
            )
        self._runner, self._num_parts = runner, num_parts
        self._count = self._items or target_counter(self.task)
        self._batch_indices: list[int] = []  # for each micro-batch: the index of its batch in the step
        self._batches: list[Any] = []
        self._weights: Sequence[Any] = ()
        self._shares: list[float] = []  # for each micro-batch: the weight of a row in the mean of a logged value
        self._first_idx = 0
        self._logged: list[list[DivertedCall]] = []
        self._outputs: dict[int, Any] = {}
        self._losses: dict[int, torch.Tensor] = {}

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        hooks, sink = self.hooks, self.sink
        if not self._zeroed:
            self._zero_gradients(group.first_idx)
        batches: list[Any] = []
        for i, batch in enumerate(group.batches):
            group.index = i
            batch = batch if self._transfer is None else self._transfer(batch)
            sink.batch = batch
            for hook in hooks.on_train_batch_start:
                if hook(self.run, self.task, batch, group.first_idx + i) == -1:
                    raise SkipRestOfEpoch
            batches.append(batch)
        self._divide(group, batches)
        self._first_idx = group.first_idx
        self._logged, self._outputs, self._losses = [[] for _ in self._batches], {}, {}
        try:
            self._runner.run(self._batches, self._call, self._weigh, self.run.state.step)
        finally:
            sink.diverted = None
        if self._complete is not None:
            self._complete()
        for hook in hooks.on_after_backward:
            hook(self.run, self.task)
        total = self._share_results(group, batches)
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        self._loss, self._last_idx, self._zeroed = total, group.first_idx + len(batches) - 1, False
        return total

    def _divide(self, group: Group, batches: list[Any]) -> None:
        """Divide batches into micro-batches, and compute the weights of their losses."""
        self._batches, self._batch_indices, self._shares, full, weights, of_ranks = [], [], [], [], [], []
        for i, batch in enumerate(batches):
            weight = 1 / len(batches) if group.weights is None else group.weights[i]
            for part, share, of_row in divide(batch, self._num_parts, self._count):
                full.append(part)
                weights.append(weight * share)
                part, of_rank = (part, 1.0) if self.parts.split is None else self.parts.split(part)
                self._batches.append(part)
                self._batch_indices.append(i)
                of_ranks.append(of_rank)
                self._shares.append(of_row * of_rank if weight else 0.0)  # 0: padding
        self._weights = weights
        if self._items is not None:
            self._weights = self._weigh_items(Group(full, group.first_idx, weights=weights))
        if self.parts.split is not None:
            self._weights = [each * share for each, share in zip(self._weights, of_ranks, strict=True)]

    def _call(self, i: int, is_last: bool) -> Any:
        """Run the training step on a micro-batch. Keep logged values only in the last stage."""
        self.sink.batch, self.sink.diverted = self._batches[i], self._logged[i] if is_last else []
        # The other stages stop in the model's call, and a rank may have several of them.
        counting = nullcontext() if is_last and self._shares[i] else self._without_counting()
        with self._context or nullcontext(), counting:
            return self._training_step(self._batches[i], self._first_idx + self._batch_indices[i])

    def _weigh(self, output: Any, i: int) -> torch.Tensor:
        """Return the weighted and scaled loss of a micro-batch."""
        loss = loss_of(output, type(self.task).__name__)
        if loss is None:
            raise without_loss(type(self.task).__name__, self.parts.rank)
        loss = full_output(loss) * self._weights[i]
        self._outputs[i], self._losses[i] = outputs_of(output), loss.detach()
        weighted: torch.Tensor = loss if self.scaler is None else self.scaler.scale(loss)
        return weighted

    def _share_results(self, group: Group, batches: list[Any]) -> torch.Tensor:
        """Send the losses and logged values of the last stage to every rank of the pipeline. Collective."""
        mine = None
        if self.parts.rank == self._runner.source:
            mine = ([self._losses[i].item() for i in range(len(self._batches))], _on_host(self._logged))
        losses, logged = self._runner.processes.gather_object(mine)[self._runner.source]
        device, last = self.parts.device, len(group.batches) - 1
        for index in range(len(group.batches)):
            parts = [i for i, other in enumerate(self._batch_indices) if other == index]
            for i in parts:
                self.sink.batch, self.sink.share = self._batches[i], self._shares[i]
                for call in logged[i]:
                    call.repeat(self.sink)
            if self.hooks.on_train_batch_end:
                weight = float(sum(self._weights[i] for i in parts))
                mean = sum(losses[i] for i in parts) / weight if weight else 0.0
                own = self._outputs.get(parts[0]) if len(parts) == 1 else None
                group.index, group.last_batch = index, batches[index]
                group.last_output = {"loss": torch.as_tensor(mean, device=device)} if own is None else own
                if index < last:
                    self.end_batch(group)
        self.sink.batch = None
        self._batches, self._outputs = [], {}
        return torch.tensor(losses, dtype=torch.float64).sum().float().to(device)


def target_counter(model: nn.Module) -> Callable[[Any], torch.Tensor | None] | None:
    """Return a function that counts the targets of a batch, or None if no transformers model computes the loss."""
    shifts = next((found for module in model.modules() if (found := shifts_labels(module)) is not None), None)
    return None if shifts is None else partial(count_targets, shifts=shifts)


def divide(batch: object, num: int, count: Callable[[Any], Any] | None = None) -> list[tuple[Any, float, float]]:
    """Divide a batch into up to `num` parts along the first dimension of its tensors.

    Tensors of other lengths are not divided: each part has the full tensor.

    Args:
        count: Returns the number of items that the loss of a part averages over, or None if it is unknown. Blocks on
            the device. Default: None, which counts rows.

    Returns:
        For each part: the part, its weight in the mean loss of the batch, and the weight of one row relative to the
        weight of a row in the full batch.
    """
    if num == 1:
        return [(batch, 1.0, 1.0)]
    size = batch_size(batch)
    bounds = [size * i // num for i in range(num + 1)]
    slices = [(begin, end) for begin, end in itertools.pairwise(bounds) if end > begin]

    def rows(begin: int, end: int) -> Any:
        return map_tensors(lambda tensor: tensor[begin:end] if tensor.dim() and len(tensor) == size else tensor, batch)

    parts = [rows(begin, end) for begin, end in slices]
    shares = [(end - begin) / size for begin, end in slices]
    counts: list[Any] = [None] if count is None else [count(part) for part in parts]
    if any(each is None for each in counts) or not (total := sum(map(float, counts))):
        return [(part, share, 1.0) for part, share in zip(parts, shares, strict=True)]
    weights = [float(each) / total for each in counts]
    return [(part, w, w / share) for part, w, share in zip(parts, weights, shares, strict=True)]


def _on_host(logged: list[list[DivertedCall]]) -> list[list[DivertedCall]]:
    """Return logged values as numbers. Blocks on the device."""
    for call in itertools.chain(*logged):
        if is_metric_object(call.value):
            raise ConfigurationError(
                f"log({call.name!r}) in a training step received a metric object, which only the last stage of the "
                "pipeline has updated. Log a number there, and the metric object in validation_step."
            )

    def number(value: Any) -> Any:
        return value.item() if isinstance(value, torch.Tensor) else value

    return [[call._replace(value=number(call.value)) for call in calls] for calls in logged]
