"""One optimizer step of a pipeline: a schedule runs all micro-batches in the stages."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
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


@dataclass
class _MicroBatch:
    """A micro-batch of a step: a part of one of the batches. Ranks with the last stage also store its results.

    Attributes:
        data: The rows of the batch, on the device. If sequences are split, this rank's part of the rows' sequences.
        batch_index: Index of its batch in the group.
        weight: Weight of its loss in the loss of the group: a number, or a 0-dim tensor for tasks with `num_items`.
        row_weight: Weight of one of its rows in the mean of a logged value, relative to other rows. 0 for padding.
        sequence_share: Weight of this rank's part of the sequences in the mean over the ranks that split them. 1 if
            sequences are not split.
        logged: Calls of `log` in the last stage. They are repeated on every rank after the step.
        output: Result of `training_step`, as `outputs_of` returns it. None on ranks without the last stage.
        loss: Weighted loss (0-dim, detached). None on ranks without the last stage.
    """

    data: Any
    batch_index: int
    weight: Any
    row_weight: float
    sequence_share: float
    logged: list[DivertedCall] = field(default_factory=list)
    output: dict[str, Any] | None = None
    loss: torch.Tensor | None = None


class PipelineStep(AutomaticStep):
    """Step that runs the forward and backward of its micro-batches in the stages of a pipeline.

    Each batch of a group is divided into `num_parts` micro-batches, and those of all batches run through the stages
    together. Example: 2 batches of 6 rows and 3 parts are 6 micro-batches of 2 rows. Every rank calls `training_step`,
    but only ranks with the last stage compute the loss and logged values. The other ranks receive them after the step.

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
        self._runner = runner
        self._num_parts = num_parts
        # Number of items over which the loss of a part averages. None counts rows.
        self._count = self._items or target_counter(self.task)
        # The current group: index of its first batch in the epoch, and its micro-batches. Set by `forward_backward` and
        # read by the functions that the runner calls with the index of a micro-batch.
        self._first_idx = 0
        self._micro_batches: list[_MicroBatch] = []

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        # The schedule runs forwards and backwards alternately, so old gradients are freed before the first forward.
        if not self._zeroed:
            self._zero_gradients(group.first_idx)
        batches = self._start_batches(group)
        self._first_idx = group.first_idx
        self._micro_batches = self._divide(group, batches)
        try:
            self._runner.run(
                [micro_batch.data for micro_batch in self._micro_batches],
                self._call,
                self._weigh,
                self.run.state.step,
            )
        finally:
            self.sink.diverted = None  # `_call` sets it
        if self._complete is not None:
            self._complete()
        for hook in self.hooks.on_after_backward:
            hook(self.run, self.task)
        total = self._share_results(group, batches)
        if self._scale is not None:
            for optimizer in self.optimizers:
                self._scale.unscale(optimizer)
        self._loss = total
        self._last_idx = group.first_idx + len(batches) - 1
        self._zeroed = False
        return total

    def _start_batches(self, group: Group) -> list[Any]:
        """Move the batches of a group to the device, and call `on_train_batch_start` for each."""
        batches: list[Any] = []
        for i, batch in enumerate(group.batches):
            group.index = i
            if self._transfer is not None:
                batch = self._transfer(batch)
            self.sink.batch = batch
            for hook in self.hooks.on_train_batch_start:
                if hook(self.run, self.task, batch, group.first_idx + i) == -1:
                    raise SkipRestOfEpoch
            batches.append(batch)
        return batches

    def _divide(self, group: Group, batches: list[Any]) -> list[_MicroBatch]:
        """Divide batches into micro-batches, and compute the weights of their losses."""
        micro_batches: list[_MicroBatch] = []
        full_sequences: list[Any] = []  # the data of micro-batches before their sequences are split
        for batch_index, batch in enumerate(batches):
            batch_weight = 1 / len(batches) if group.weights is None else group.weights[batch_index]
            is_padding = not batch_weight
            for part in divide(batch, self._num_parts, self._count):
                full_sequences.append(part.data)
                data = part.data
                sequence_share = 1.0
                if self.parts.split is not None:
                    data, sequence_share = self.parts.split(part.data)
                row_weight = 0.0 if is_padding else part.row_weight * sequence_share
                micro_batches.append(
                    _MicroBatch(data, batch_index, batch_weight * part.weight, row_weight, sequence_share)
                )
        if self._items is not None:
            # The weights by items replace those by rows, of which `_weigh_items` only reads which are 0 (padding).
            row_weights = [micro_batch.weight for micro_batch in micro_batches]
            weights_by_items = self._weigh_items(Group(full_sequences, group.first_idx, weights=row_weights))
            for micro_batch, item_weight in zip(micro_batches, weights_by_items, strict=True):
                micro_batch.weight = item_weight
        if self.parts.split is not None:
            for micro_batch in micro_batches:
                micro_batch.weight = micro_batch.weight * micro_batch.sequence_share
        return micro_batches

    def _call(self, i: int, is_last: bool) -> Any:
        """Run the training step on micro-batch `i`. Store logged values in the last stage (`is_last`)."""
        micro_batch = self._micro_batches[i]
        self.sink.batch = micro_batch.data
        self.sink.diverted = micro_batch.logged if is_last else []
        # Metric objects count a micro-batch once: in the last stage. The step of another stage ends inside of the
        # model's call, and a rank may run the step for several stages. Padding does not count.
        updates_metrics = is_last and micro_batch.row_weight > 0
        metrics_context = nullcontext() if updates_metrics else self._without_counting()
        with self._context or nullcontext(), metrics_context:
            return self._training_step(micro_batch.data, self._first_idx + micro_batch.batch_index)

    def _weigh(self, output: Any, i: int) -> torch.Tensor:
        """Return the weighted and scaled loss of micro-batch `i` for its backward, and store its results."""
        micro_batch = self._micro_batches[i]
        loss = loss_of(output, type(self.task).__name__)
        if loss is None:
            raise without_loss(type(self.task).__name__, self.parts.rank)
        weighted: torch.Tensor = full_output(loss) * micro_batch.weight
        micro_batch.output = outputs_of(output)
        micro_batch.loss = weighted.detach()
        if self._scale is None:
            return weighted
        # As in AutomaticStep, the scale changes in `optimizer_step`.
        return self._scale.scale(weighted, starts_group=False)

    def _share_results(self, group: Group, batches: list[Any]) -> torch.Tensor:
        """Share the losses and logged values of the last stage with every rank of the pipeline. Collective.

        Log the values, and call `on_train_batch_end` for all batches but the last. Blocks on the device.

        Returns:
            The sum of the weighted losses on the device (0-dim).
        """
        own_results = None
        if self.parts.rank == self._runner.source:
            own_losses: list[float] = []
            own_logged: list[list[DivertedCall]] = []
            for micro_batch in self._micro_batches:
                assert micro_batch.loss is not None  # this rank has the last stage
                own_losses.append(micro_batch.loss.item())
                own_logged.append(_on_host(micro_batch.logged))
            own_results = (own_losses, own_logged)
        # One loss and one list of logged values for each micro-batch.
        losses, logged = self._runner.processes.gather_object(own_results)[self._runner.source]
        last_index = len(batches) - 1
        for batch_index, batch in enumerate(batches):
            parts: list[int] = []  # indices of the batch's micro-batches
            for i, micro_batch in enumerate(self._micro_batches):
                if micro_batch.batch_index == batch_index:
                    parts.append(i)
            for i in parts:
                self.sink.batch = self._micro_batches[i].data
                self.sink.share = self._micro_batches[i].row_weight
                for call in logged[i]:
                    call.repeat(self.sink)
            if self.hooks.on_train_batch_end:
                group.index = batch_index
                group.last_batch = batch
                group.last_output = self._output_of(parts, losses)
                if batch_index < last_index:  # the loop calls it for the last one, after the optimizer step
                    self.end_batch(group)
        self.sink.batch = None
        self._micro_batches = []
        # Summed in float64, so that the sum is rounded once.
        return torch.tensor(losses, dtype=torch.float64).sum().float().to(self.parts.device)

    def _output_of(self, parts: list[int], losses: list[float]) -> dict[str, Any]:
        """Return the `outputs` of a batch for `on_train_batch_end`.

        They are the result of `training_step` if the batch was not divided and this rank has the last stage. Otherwise
        they contain only the mean loss of the batch.

        Args:
            parts: Indices of the batch's micro-batches.
            losses: Weighted losses of all micro-batches.
        """
        output = self._micro_batches[parts[0]].output
        if len(parts) == 1 and output is not None:
            return output
        weight = float(sum(self._micro_batches[i].weight for i in parts))
        mean = 0.0  # of padding, which has no weight
        if weight:
            mean = sum(losses[i] for i in parts) / weight
        return {"loss": torch.as_tensor(mean, device=self.parts.device)}


def target_counter(model: nn.Module) -> Callable[[Any], torch.Tensor | None] | None:
    """Return a function that counts the targets of a batch, or None if no transformers model computes the loss.

    The loss of transformers averages over targets, not over rows. The function returns None for a batch without labels.
    """
    for module in model.modules():
        shifts = shifts_labels(module)
        if shifts is not None:
            return partial(count_targets, shifts=shifts)
    return None


@dataclass(frozen=True)
class Part:
    """A part of a batch.

    Attributes:
        data: The batch with some of its rows.
        weight: Weight of the part's mean loss in the mean loss of the batch. The weights of all parts add up to 1.
        row_weight: Weight of one row in the mean of the batch, relative to equal rows. 1 if all rows count equally.
    """

    data: Any
    weight: float = 1.0
    row_weight: float = 1.0


def divide(batch: object, num: int, count: Callable[[Any], Any] | None = None) -> list[Part]:
    """Divide a batch into up to `num` parts along the first dimension of its tensors.

    Tensors of other lengths are not divided: each part has the full tensor.

    Args:
        batch: Any tree of tensors.
        num: Number of parts. A batch with fewer rows has one part for each row.
        count: Returns the number of items that the loss of a part averages over, or None if it is unknown. Blocks on
            the device. Default: None, which counts rows.

    Returns:
        The parts in order.
    """
    if num == 1:
        return [Part(batch)]
    size = batch_size(batch)
    bounds = [size * i // num for i in range(num + 1)]  # 5 rows in 3 parts: 0, 1, 3, 5
    parts: list[Part] = []  # weighted by rows
    for begin, end in itertools.pairwise(bounds):
        if end > begin:  # 2 rows in 3 parts: one part has no rows
            rows = map_tensors(partial(_rows, size=size, begin=begin, end=end), batch)
            parts.append(Part(rows, (end - begin) / size))
    if count is None:
        return parts
    counts = [count(part.data) for part in parts]
    if any(num_items is None for num_items in counts):
        return parts
    total = sum(map(float, counts))
    if not total:
        return parts
    # 3 and 1 targets in two parts of 2 rows: the parts weigh 3/4 and 1/4, and their rows 3/2 and 1/2.
    parts_by_items: list[Part] = []
    for part, num_items in zip(parts, counts, strict=True):
        weight = float(num_items) / total
        parts_by_items.append(Part(part.data, weight, weight / part.weight))
    return parts_by_items


def _rows(tensor: torch.Tensor, *, size: int, begin: int, end: int) -> torch.Tensor:
    has_rows = tensor.dim() > 0 and len(tensor) == size
    return tensor[begin:end] if has_rows else tensor


def _on_host(logged: list[DivertedCall]) -> list[DivertedCall]:
    """Return calls of `log` with numbers instead of tensors. Blocks on the device.

    Raises:
        ConfigurationError: A value is a metric object.
    """
    on_host: list[DivertedCall] = []
    for call in logged:
        if is_metric_object(call.value):
            raise ConfigurationError(
                f"log({call.name!r}) in a training step received a metric object, which only the last stage of the "
                "pipeline has updated. Log a number there, and the metric object in validation_step."
            )
        value = call.value.item() if isinstance(call.value, torch.Tensor) else call.value
        on_host.append(call._replace(value=value))
    return on_host
