"""Forward and backward of micro-batches in the stages of a pipeline, with one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from trainwright.core.tree import iterate_tensors
from trainwright.processes.process_group import Processes
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.megatron.staged_model import Pipeline
from trainwright.strategies.shards import local_shard

Shape = tuple[tuple[tuple[int, ...], torch.dtype], ...]
"""Shapes and dtypes of the tensors of a micro-batch."""

SCHEDULES = {
    "1f1b": 1,
    "gpipe": 1,
    "interleaved1f1b": None,
    "loopedbfs": None,
    "interleavedzerobubble": None,
    "zbvzerobubble": 2,
    "dualpipev": 2,
}
"""Torch's name of a schedule → the number of stages on each rank. None: 2 or more."""

_IN_A_V = ("zbvzerobubble", "dualpipev")
"""Schedules with the first and the last stage on one rank."""

_MAX_SCHEDULES = 8  # cached schedules, each of which holds activation buffers


def shape_of(batch: object) -> Shape:
    """Return the shapes and dtypes of the tensors of a micro-batch."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in iterate_tensors(batch))


def ranks_of_stages(schedule: str, num_ranks: int, stages_per_rank: int) -> list[int]:
    """Return each stage's rank in the process group of a pipeline."""
    # 4 stages on 2 ranks: 0, 1, 0, 1. In a V: 0, 1, 1, 0.
    ranks: list[int] = []
    for i in range(stages_per_rank):
        is_backwards = schedule in _IN_A_V and i == 1
        ranks.extend(reversed(range(num_ranks)) if is_backwards else range(num_ranks))
    return ranks


@dataclass
class _StageResult:
    """Tensors of one stage's forward on a micro-batch, for its backward.

    Attributes:
        stage: Index of the stage.
        carry: Output of the previous stage, detached. Its `grad` is set by the backward. Empty in the first stage.
        output: Output of the stage. In the last stage, the weighted loss, of shape (1,).
    """

    stage: int
    carry: torch.Tensor
    output: torch.Tensor


class PipelineRunner:
    """Runner of an optimizer step's micro-batches in the stages of a pipeline.

    The schedule needs the shapes of activations. Micro-batches therefore run one after the other in three cases: a
    shape occurs for the first time, the shapes differ, or the schedule does not support the number of micro-batches.

    Args:
        schedule: One of `SCHEDULES`.
        pipeline: The pipeline, which computes the stages.
        synchronize: Called before each backward with True if the backward must average gradients over ranks.
        sum_shared: Function that completes the gradients of parameters in several stages or in no stage.
        processes: Processes of the run.
        ranks: Data-parallel ranks of the run.
        source: Global rank of the last stage of this rank's pipeline. It provides losses and logged values.

    Attributes:
        processes, source: The arguments.
    """

    def __init__(
        self,
        schedule: str,
        pipeline: Pipeline,
        synchronize: Callable[[bool], None],
        sum_shared: Callable[[], None],
        *,
        processes: Processes,
        ranks: DataRanks,
        source: int,
    ) -> None:
        self.processes = processes
        self.source = source
        self._name = schedule
        self._pipeline = pipeline
        self._synchronize = synchronize
        self._sum_shared = sum_shared
        self._ranks = ranks
        # Seed that differs between data-parallel ranks, and is equal in all stages. None before the first `run`.
        self._base_seed: int | None = None
        # (number of micro-batches, shape of a micro-batch) → torch's schedule. The most recently used one is last.
        self._schedules: dict[tuple[int, Shape], Any] = {}
        # Shape of a micro-batch → stage of this rank → its input and output, on the device `meta`.
        self._activations: dict[Shape, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

    def run(
        self,
        batches: Sequence[Any],
        call: Callable[[int, bool], Any],
        weigh: Callable[[Any, int], torch.Tensor],
        step: int,
    ) -> None:
        """Run micro-batches forward and backward. Collective.

        Args:
            batches: The micro-batches.
            call: Function that calls the model once. Its arguments are the index of a micro-batch, and True in the last
                stage.
            weigh: Function of the result of `call` in the last stage and the index of a micro-batch. Returns the
                weighted loss (0-dim).
            step: A number that differs between optimizer steps. The seeds of random numbers depend on it.
        """
        pipeline = self._pipeline
        outer_run = pipeline.run
        # Set here, not in `__init__`, because a resumed run restores its generators in between.
        if self._base_seed is None:
            self._base_seed = self.processes.broadcast_object(torch.initial_seed()) + self._ranks.rank

        def compute(stage: int, carry: torch.Tensor | None, i: int) -> torch.Tensor:
            is_last = stage == pipeline.last
            seed = hash((self._base_seed, step, i))
            output: Any = pipeline.compute_stage(stage, carry, lambda: call(i, is_last), seed=seed)
            if is_last:
                output = torch.stack([weigh(output, i)])  # of shape (1,)
            activation: torch.Tensor = output
            return activation

        shapes = [shape_of(batch) for batch in batches]
        pipeline.run = compute
        try:
            schedule = None
            have_equal_shapes = len(set(shapes)) == 1
            if have_equal_shapes:
                schedule = self._schedule_for(len(shapes), shapes[0])
            # Data-parallel ranks call collectives in the same order only if all of them use the schedule.
            is_one_by_one = schedule is None
            if self._ranks.size > 1:
                is_one_by_one = self.processes.any(is_one_by_one)
            if is_one_by_one:
                self._run_one_by_one(shapes)
            else:
                self._run_schedule(schedule, len(shapes))
        finally:
            pipeline.run = outer_run
        self._sum_shared()

    def _run_schedule(self, schedule: Any, num: int) -> None:
        """Run `num` micro-batches with one of torch's schedules."""
        own = self._pipeline.links.own
        # The schedule divides tensors into micro-batches. It gets indices instead of data: the "input" and "target" of
        # a micro-batch are its index, by which a stage finds the data.
        indices = torch.arange(num)
        args = (indices,) if 0 in own else ()  # the input of the first stage
        options: dict[str, Any] = {"micro_batch": indices}
        if self._pipeline.last in own:
            options |= {"target": indices, "losses": []}
        self._synchronize(False)  # the schedule averages at its end
        try:
            schedule.step(*args, return_outputs=False, **options)
        except RuntimeError as error:
            # Torch wraps the error of a stage. Raise the error itself, such as a TaskError.
            if isinstance(error.__cause__, Exception) and "failed to run forward" in str(error):
                raise error.__cause__ from None
            raise

    def _schedule_for(self, num: int, shape: Shape) -> Any:
        """Return torch's schedule for `num` micro-batches of a shape.

        Return None if the shape is new, or the schedule does not support this number of micro-batches.
        """
        if shape not in self._activations:
            return None
        schedule = self._schedules.pop((num, shape), None)
        if schedule is None:
            schedule = self._make_schedule(num, self._activations[shape])
        if schedule is not None:
            self._schedules[num, shape] = schedule  # was popped, so it is now last
            if len(self._schedules) > _MAX_SCHEDULES:
                least_recent = next(iter(self._schedules))
                del self._schedules[least_recent]
        return schedule

    def _make_schedule(self, num: int, activations: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        """Return a schedule for `num` micro-batches, or None if it does not support this number.

        `activations` contains the input and the output of each of this rank's stages, on the device `meta`.
        """
        pipeline = self._pipeline
        links = pipeline.links
        stages: list[PipelineStage] = []
        for i in links.own:
            stage_input, output = activations[i]
            module = pipeline.modules[i]
            num_stages = pipeline.last + 1
            stages.append(PipelineStage(module, i, num_stages, links.device, stage_input, output, group=links.group))
        schedule_class: Any = get_schedule_class(self._name)
        takes_one_stage = SCHEDULES[self._name] == 1
        try:
            return schedule_class(
                stages[0] if takes_one_stage else stages,
                num,
                loss_fn=lambda output, target: output,
                scale_grads=False,  # `weigh` has already divided the losses
            )
        except ValueError:  # unsupported number of micro-batches
            return None

    def _run_one_by_one(self, shapes: Sequence[Shape]) -> None:
        """Run the forwards of all micro-batches, then their backwards. Store the shapes of activations."""
        results: list[list[_StageResult]] = []
        for i, shape in enumerate(shapes):
            results.append(self._forward(i))
            self._activations[shape] = {}
            for result in results[i]:
                self._activations[shape][result.stage] = (_input_on_meta(result), _on_meta(result.output))
        for i in range(len(shapes)):
            self._backward(results[i], is_last=i == len(shapes) - 1)
            results[i] = []  # frees the activations

    def _forward(self, i: int) -> list[_StageResult]:
        """Run the forward of micro-batch `i` in this rank's stages."""
        pipeline = self._pipeline
        carries: dict[int, torch.Tensor] = {}

        def compute(stage: int, carry: torch.Tensor) -> Any:
            needs_gradient = stage > 0 and carry.is_floating_point()  # the previous stage's backward starts with it
            carries[stage] = carry.detach().requires_grad_(needs_gradient)
            return pipeline.modules[stage](carries[stage], torch.tensor([i]))

        return [_StageResult(stage, carries[stage], output) for stage, output in pipeline.through(compute)]

    def _backward(self, results: Sequence[_StageResult], *, is_last: bool) -> None:
        """Run the backward of a micro-batch in this rank's stages.

        Args:
            results: Results of the forward.
            is_last: True for the last micro-batch, whose backward averages gradients.
        """
        pipeline = self._pipeline
        links = pipeline.links
        gradient: torch.Tensor | None = None  # of the stage's output; None in the last stage
        for result in reversed(results):
            stage = result.stage
            if stage < pipeline.last and links.ranks[stage + 1] != links.rank:
                gradient = links.receive(stage + 1)
            self._synchronize(is_last)
            torch.autograd.backward(result.output, gradient)
            gradient = result.carry.grad
            if stage > 0 and links.ranks[stage - 1] != links.rank:
                if gradient is None:  # the stage does not use its input
                    gradient = torch.zeros_like(result.carry)
                links.send(gradient, stage - 1)


def _input_on_meta(result: _StageResult) -> torch.Tensor:
    if result.stage == 0:
        return torch.empty(1, dtype=torch.int64, device="meta")  # the index of a micro-batch
    return _on_meta(result.carry)


def _on_meta(activation: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the device `meta` from which torch's schedules read the shape and dtype."""
    described = torch.empty_like(local_shard(activation.detach()), device="meta")
    return described.requires_grad_(activation.is_floating_point())
