"""Forward and backward of micro-batches in the stages of a pipeline, with one of torch's schedules."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

IN_A_V = ("zbvzerobubble", "dualpipev")
"""Schedules with the first and the last stage on one rank."""

_MOST_SCHEDULES = 8  # cached schedules, each of which holds activation buffers


def shape_of(batch: object) -> Shape:
    """Return the shapes and dtypes of the tensors of a micro-batch."""
    return tuple((tuple(tensor.shape), tensor.dtype) for tensor in iterate_tensors(batch))


def ranks_of_stages(schedule: str, num_ranks: int, num_each: int) -> list[int]:
    """Return each stage's rank in the process group of a pipeline."""
    rounds = [list(range(num_ranks)) for _ in range(num_each)]
    if schedule in IN_A_V:
        rounds[1].reverse()
    return [rank for one in rounds for rank in one]


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
        self._name, self._pipeline, self._synchronize, self._sum_shared = schedule, pipeline, synchronize, sum_shared
        self.processes, self.source, self._ranks = processes, source, ranks
        self._base_seed: int | None = None
        self._made: dict[tuple[int, Shape], Any] = {}
        # Shape of a micro-batch → the inputs and outputs of this rank's stages, on the device `meta`.
        self._known: dict[Shape, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}

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
        pipeline, before = self._pipeline, self._pipeline.run
        if self._base_seed is None:  # a resumed run has now restored its generators
            self._base_seed = self.processes.broadcast_object(torch.initial_seed()) + self._ranks.rank

        def compute(stage: int, carry: torch.Tensor | None, i: int) -> torch.Tensor:
            is_last, seed = stage == pipeline.last, hash((self._base_seed, step, i))
            output: Any = pipeline.compute_stage(stage, carry, lambda: call(i, is_last), seed=seed)
            return torch.stack([weigh(output, i)]) if is_last else output

        shapes = [shape_of(batch) for batch in batches]
        pipeline.run = compute
        try:
            schedule = self._find(len(shapes), shapes[0]) if len(set(shapes)) == 1 else None
            # Data-parallel ranks call collectives in the same order only if all of them use the schedule.
            without = schedule is None
            if self.processes.any(without) if self._ranks.size > 1 else without:
                self._run_one_by_one(shapes)
            else:
                self._run_schedule(schedule, len(shapes))
        finally:
            pipeline.run = before
        self._sum_shared()

    def _run_schedule(self, schedule: Any, num: int) -> None:
        indices, own = torch.arange(num), self._pipeline.links.own
        self._synchronize(False)  # the schedule averages at its end
        options: dict[str, Any] = {"micro_batch": indices}
        if self._pipeline.last in own:
            options |= {"target": indices, "losses": []}
        try:
            schedule.step(*((indices,) if 0 in own else ()), return_outputs=False, **options)
        except RuntimeError as error:
            # Torch wraps the error of a stage.
            if isinstance(error.__cause__, Exception) and "failed to run forward" in str(error):
                raise error.__cause__ from None
            raise

    def _find(self, num: int, shape: Shape) -> Any:
        """Return torch's schedule for `num` micro-batches. None if `shape` is new or the schedule lacks `num`."""
        if shape not in self._known:
            return None
        made = self._made.pop((num, shape), None) or self._make(num, self._known[shape])
        if made is not None:
            self._made[num, shape] = made
            if len(self._made) > _MOST_SCHEDULES:
                del self._made[next(iter(self._made))]
        return made

    def _make(self, num: int, found: dict[int, tuple[torch.Tensor, torch.Tensor]]) -> Any:
        pipeline, links = self._pipeline, self._pipeline.links
        stages = [
            PipelineStage(pipeline.modules[i], i, pipeline.last + 1, links.device, *found[i], group=links.group)
            for i in links.own
        ]
        make: Any = get_schedule_class(self._name)
        if num < (links.group.size() if self._name == "1f1b" else len(stages) if self._name == "dualpipev" else 1):
            return None
        try:
            of_stages = stages[0] if SCHEDULES[self._name] == 1 else stages
            return make(of_stages, num, loss_fn=lambda output, target: output, scale_grads=False)
        except ValueError:  # unsupported number of micro-batches
            return None

    def _run_one_by_one(self, shapes: Sequence[Shape]) -> None:
        pipeline, links = self._pipeline, self._pipeline.links
        held: list[list[tuple[int, torch.Tensor, torch.Tensor]]] = []
        inputs: dict[int, torch.Tensor] = {}

        def compute(stage: int, carry: torch.Tensor) -> torch.Tensor:
            inputs[stage] = carry.detach().requires_grad_(stage > 0 and carry.is_floating_point())
            output: torch.Tensor = pipeline.modules[stage](inputs[stage], torch.tensor([len(held)]))
            return output

        for shape in shapes:
            held.append([(stage, inputs[stage], output) for stage, output in pipeline.through(compute)])
            self._known[shape] = {stage: (_like(carry, stage), _like(out)) for stage, carry, out in held[-1]}
        for i in range(len(shapes)):
            gradient: torch.Tensor | None = None
            for stage, carry, output in reversed(held[i]):
                if stage < pipeline.last and links.ranks[stage + 1] != links.rank:
                    gradient = links.receive(stage + 1)
                self._synchronize(i == len(shapes) - 1)
                torch.autograd.backward(output, None if stage == pipeline.last else gradient)
                gradient = carry.grad
                if stage and links.ranks[stage - 1] != links.rank:
                    links.send(torch.zeros_like(carry) if gradient is None else gradient, stage - 1)
            held[i] = []


def _like(tensor: torch.Tensor, num_inputs: int = 1) -> torch.Tensor:
    """Return a `meta` tensor that describes an activation for torch's schedules. `num_inputs=0` is for stage 0."""
    if not num_inputs:
        return torch.empty(1, dtype=torch.int64, device="meta")  # the index of a micro-batch
    return torch.empty_like(local_shard(tensor.detach()), device="meta").requires_grad_(tensor.is_floating_point())
