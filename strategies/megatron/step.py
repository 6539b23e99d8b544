"""One optimizer step of a pipeline: a schedule runs all micro-batches of a group through the stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from trainwright.core.errors import ConfigurationError
from trainwright.core.state import Group, SkipRestOfEpoch
from trainwright.core.tree import iterate_tensors
from trainwright.loggers.metric_buffer import DivertedCall
from trainwright.loggers.metric_slot import is_metric_object
from trainwright.processes.process_group import Processes
from trainwright.strategies.megatron.staged_model import Pipeline
from trainwright.strategies.shards import local_piece, whole_output
from trainwright.strategies.steps.binding import outputs_of
from trainwright.strategies.steps.gradients import loss_of, without_loss
from trainwright.strategies.steps.step import AutomaticStep, StepParts

Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of the tensors of a micro-batch."""

_MOST_SCHEDULES = 8  # that are kept: each has buffers for its activations


class PipelineSchedules:
    """Torch's schedules, each for one number and one shape of micro-batches.

    Args:
        name: Of torch, such as `"1f1b"`.
        pipeline: Runs the stages.
    """

    def __init__(self, name: str, pipeline: Pipeline) -> None:
        self.name, self._pipeline = name, pipeline
        self._made: dict[tuple[int, Shape], Any] = {}
        # Shape of a micro-batch → the inputs and outputs of this rank's stages, on the device `meta`.
        self.known: dict[Shape, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def find(self, num: int, shape: Shape) -> Any:
        """Return the schedule for `num` micro-batches of a shape; None if torch has none. Not collective."""
        key = (num, shape)
        if shape not in self.known or (made := self._made.pop(key, self._make(*key))) is None:
            return None
        self._made[key] = made
        while len(self._made) > _MOST_SCHEDULES:
            del self._made[next(iter(self._made))]
        return made

    def _make(self, num: int, shape: Shape) -> Any:
        if (num, shape) in self._made:
            return None
        pipeline, wire = self._pipeline, self._pipeline.wire
        num_ranks = wire.group.size()
        if num < (num_ranks if self.name == "1f1b" else 1):
            return None
        found = self.known[shape]
        stages = [
            PipelineStage(
                pipeline.modules[i],
                i,
                pipeline.last + 1,
                wire.device,
                input_args=found[i][0],
                output_args=found[i][1],
                group=wire.group,
            )
            for i in wire.own
        ]
        make: Any = get_schedule_class(self.name)
        return make(stages[0], num, loss_fn=lambda output, target: output, scale_grads=False)


class PipelineStep(AutomaticStep):
    """Runs the micro-batches of a group through the stages, forward and backward.

    The first group with micro-batches of a shape runs them one after the other, which finds the shapes of the
    activations; so does a group of several shapes, or of fewer micro-batches than the schedule needs.

    Args:
        parts: Of the engine.
        pipeline: Of the task.
        schedules: Of the pipeline.
        processes: Of the run.
        source: The global rank whose losses and logged values count: the last stage of this rank's pipeline.
        base_seed: The same on every rank that works on the same data.
        synchronize: Told before each backward of a stage whether gradients are averaged in it.
        sum_shared: Completes the gradients of what is not one stage's alone.
    """

    def __init__(
        self,
        parts: StepParts,
        pipeline: Pipeline,
        schedules: PipelineSchedules,
        processes: Processes,
        *,
        source: int,
        base_seed: int,
        synchronize: Callable[[bool], None],
        sum_shared: Callable[[], None],
    ) -> None:
        super().__init__(parts)
        if parts.hooks.on_before_backward or self._backward is not None:
            raise ConfigurationError(
                f"{type(self.task).__name__} or a callback has on_before_backward or a backward of its own, and a "
                "pipeline's schedule runs backward. Remove it, or use strategy='fsdp'."
            )
        self._pipeline, self._schedules, self._processes = pipeline, schedules, processes
        self._source, self._base_seed, self._synchronize_all, self._sum_shared = (
            source,
            base_seed,
            synchronize,
            sum_shared,
        )
        self._batches: list[Any] = []
        self._weights: Sequence[Any] = ()
        self._first_idx = 0
        self._logged: list[list[DivertedCall]] = []
        self._outputs: dict[int, Any] = {}
        self._losses: dict[int, torch.Tensor] = {}

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        hooks, sink, num = self.hooks, self.sink, len(group.batches)
        if not self._zeroed:
            self._zero_gradients(group.first_idx)
        weights = group.weights if self._items is None else self._weigh_items(group)
        self._weights = [1 / num] * num if weights is None else list(weights)
        self._batches, self._first_idx = [], group.first_idx
        for i, batch in enumerate(group.batches):
            group.index = i
            batch = batch if self._transfer is None else self._transfer(batch)
            sink.batch = batch
            for hook in hooks.on_train_batch_start:
                if hook(self.run, self.task, batch, group.first_idx + i) == -1:
                    raise SkipRestOfEpoch
            self._batches.append(batch)
        self._logged, self._outputs, self._losses = [[] for _ in range(num)], {}, {}
        self._pipeline.run = self._run_stage
        try:
            self._run_schedule(num)
        finally:
            self._pipeline.run, sink.diverted = None, None
        self._sum_shared()
        if self._complete is not None:
            self._complete()
        for hook in hooks.on_after_backward:
            hook(self.run, self.task)
        total = self._tell_all(group)
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        self._loss, self._last_idx, self._zeroed = total, group.first_idx + num - 1, False
        return total

    def _run_schedule(self, num: int) -> None:
        shapes = {self._shape(batch) for batch in self._batches}
        schedule = self._schedules.find(num, next(iter(shapes))) if len(shapes) == 1 else None
        if schedule is None:
            self._run_one_by_one(num)
            return
        indices, pipeline = torch.arange(num), self._pipeline
        self._synchronize_all(False)
        options: dict[str, Any] = {"micro_batch": indices}
        if pipeline.last in pipeline.wire.own:
            options |= {"target": indices, "losses": []}
        try:
            schedule.step(*((indices,) if 0 in pipeline.wire.own else ()), return_outputs=False, **options)
        except RuntimeError as error:
            # Torch describes an error of a stage in one of its own.
            if isinstance(error.__cause__, Exception) and "failed to run forward" in str(error):
                raise error.__cause__ from None
            raise

    def _run_one_by_one(self, num: int) -> None:
        """Run all micro-batches forward and then backward, exchanging their shapes."""
        pipeline, wire = self._pipeline, self._pipeline.wire
        held: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = []
        inputs: dict[int, torch.Tensor] = {}

        def compute(stage: int, carry: torch.Tensor) -> torch.Tensor:
            inputs[stage] = carry.detach().requires_grad_(stage > 0 and carry.is_floating_point())
            output: torch.Tensor = pipeline.modules[stage](inputs[stage], torch.tensor([len(held)]))
            return output

        for i in range(num):
            held.append([(stage, inputs[stage], output) for stage, output in pipeline.through(compute)])
            self._schedules.known[self._shape(self._batches[i])] = {
                stage: (_like(carry, num_inputs=stage), _like(output)) for stage, carry, output in held[-1]
            }
        for i in range(num):
            gradient: torch.Tensor | None = None
            for stage, carry, output in reversed(held[i]):
                if stage < pipeline.last and wire.ranks[stage + 1] != wire.rank:
                    gradient = wire.receive(stage + 1)
                self._synchronize_all(i == num - 1)
                torch.autograd.backward(output, None if stage == pipeline.last else gradient)
                gradient = carry.grad
                if stage and wire.ranks[stage - 1] != wire.rank:
                    wire.send(torch.zeros_like(carry) if gradient is None else gradient, stage - 1)
            held[i] = []

    def _shape(self, batch: object) -> Shape:
        return tuple((tuple(tensor.shape), tensor.dtype) for tensor in iterate_tensors(batch))

    def _run_stage(self, stage: int, carry: torch.Tensor | None, i: int) -> torch.Tensor:
        """Compute a stage for one micro-batch: its output, or in the last stage its weighted loss, of shape (1,)."""
        batch, idx, is_last = self._batches[i], self._first_idx + i, stage == self._pipeline.last
        self.sink.batch = batch
        self.sink.diverted = self._logged[i] if is_last else []
        seed = hash((self._base_seed, self.run.state.step, i))

        def call() -> Any:
            if self._context is None:
                return self._training_step(batch, idx)
            with self._context:
                return self._training_step(batch, idx)

        output = self._pipeline.compute_stage(stage, carry, call, seed=seed)
        self.sink.diverted = None
        if not is_last:
            found: torch.Tensor = output
            return found
        loss = loss_of(output, type(self.task).__name__)
        if loss is None:
            raise without_loss(type(self.task).__name__, self.parts.rank)
        loss = whole_output(loss) * self._weights[i]
        self._outputs[i], self._losses[i] = outputs_of(output), loss.detach()
        return torch.stack([loss if self.scaler is None else self.scaler.scale(loss)])

    def _tell_all(self, group: Group) -> torch.Tensor:
        """Give every rank of the pipeline the losses and the logged values of the last stage. Collective."""
        own = None
        if self.parts.rank == self._source:
            own = ([self._losses[i].item() for i in range(len(self._batches))], _on_host(self._logged))
        losses, logged = self._processes.gather_object(own)[self._source]
        device, last = self.parts.device, len(losses) - 1
        for i, calls in enumerate(logged):
            group.index, self.sink.batch = i, self._batches[i]
            for call in calls:
                call.repeat(self.sink)
            if self.hooks.on_train_batch_end:
                weight = self._weights[i]
                shown = {"loss": torch.as_tensor(losses[i] / weight if weight else 0.0, device=device)}
                group.last_output, group.last_batch = self._outputs.get(i, shown), self._batches[i]
                if i < last:
                    self.end_batch(group)
        self.sink.batch = None
        self._batches, self._outputs = [], {}
        return torch.tensor(losses, dtype=torch.float64).sum().float().to(device)


def _like(tensor: torch.Tensor, *, num_inputs: int = 1) -> torch.Tensor:
    """Return a tensor on the device `meta` as torch's schedules describe an activation."""
    if not num_inputs:
        return torch.empty(1, dtype=torch.int64, device="meta")  # the index of a micro-batch
    return torch.empty_like(local_piece(tensor.detach()), device="meta").requires_grad_(tensor.is_floating_point())


def _on_host(logged: list[list[DivertedCall]]) -> list[list[DivertedCall]]:
    """Return logged values as numbers. Waits for the device."""
    found: list[list[DivertedCall]] = []
    for calls in logged:
        found.append([])
        for call in calls:
            if is_metric_object(call.value):
                raise ConfigurationError(
                    f"log({call.name!r}) in a training step was given a metric object, which only the last stage of "
                    "the pipeline has updated. Log a number there, and the metric object in validation_step."
                )
            found[-1].append(call._replace(value=call.value.item()) if isinstance(call.value, torch.Tensor) else call)
    return found
