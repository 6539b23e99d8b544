"""Training of pipeline stages on several ranks. Further ranks shard each stage and split its layers."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.optim import Optimizer

from trainwright.checkpoint.format.optimizer import load_named_optimizer_state
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.process import Topology
from trainwright.core.rng import rng_state, set_rng_state
from trainwright.strategies.engine import Models, Optimizers, Prepared, PreparedModel, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.build import discard_weights, materialize, widen
from trainwright.strategies.fsdp.parallelize import ParallelModel, Sharding
from trainwright.strategies.fsdp.state import ShardedState
from trainwright.strategies.fsdp.strategy import FSDPEngine, FSDPStrategy
from trainwright.strategies.megatron.pipelined_loop import PipelineLoop
from trainwright.strategies.megatron.runner import PipelineRunner, ranks_of_stages
from trainwright.strategies.megatron.staged_model import Pipeline, StageLinks
from trainwright.strategies.megatron.stages import find_stages, free_module, layers_of, own_parameters
from trainwright.strategies.megatron.state import PipelineState, TensorStages
from trainwright.strategies.megatron.step import PipelineStep
from trainwright.strategies.shards import local_shard
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.units import replace_parameters


@dataclass(frozen=True)
class PipelineOptions:
    """Options of a pipeline. For the meanings see `MegatronStrategy`, and `find_stages` for `split_points`."""

    pp: int
    stages_per_rank: int
    num_micro_batches: int
    schedule: str
    split_points: Sequence[str] | None


class PipelineEngine(FSDPEngine):
    """Engine that trains pipeline stages on several ranks. Further ranks shard each stage and split its layers.

    `FSDPEngine` shards the stages of this rank as it shards a full model.

    Args:
        strategy, settings: See `Engine`.
        options: Options of the pipeline.

    Attributes:
        pipeline: The stages of the model. Set by `prepare`.
    """

    mesh: DeviceMesh
    state: PipelineState
    pipeline: Pipeline

    def __init__(self, strategy: FSDPStrategy, settings: EngineSettings, *, options: PipelineOptions) -> None:
        super().__init__(strategy, settings)
        self._options = options
        # Set by `_find_stages`: the model that `prepare` received, and the stages of its tensors.
        self._model: nn.Module
        self._tensor_stages: TensorStages
        # Changes of the model. `_unwrap` undoes the last one first: the calls of modules, then the wrappers of layers.
        self._undo_pipeline = ExitStack()

    def start(self, topology: Topology) -> None:
        # Without the argument, the last stage would store the outputs of all micro-batches.
        if "return_outputs" not in inspect.signature(PipelineScheduleSingle.step).parameters:
            raise ConfigurationError(
                f"pp={self._options.pp} needs a newer torch than {torch.__version__}, whose pipeline schedules have no "
                "argument return_outputs. Torch 2.13 was tested."
            )
        super().start(topology)

    # Model and optimizers

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        """Divide a model into stages, and let the optimizers step those of this rank. Collective.

        The Trainer passes `roots`. Without them, the model belongs to a user-written loop.

        Raises:
            ConfigurationError: Pipelines do not support the loop or the model.
        """
        if not roots:
            self._check_loop(models, plan)
        elif optimizers is not None:
            self._warn_of_idle_stages(plan)
        self._check_before(models, optimizers)
        prepared: list[PreparedModel] = []
        for model in models:  # at most one: the task, or the model of a loop (see `_check_loop`)
            if roots:
                self._divide(model)
                prepared.append(PreparedModel.unchanged(model))  # a step runs the stages
            else:
                prepared.append(self._prepare_for_loop(model))
        return Prepared(prepared, self._over_shards(optimizers))

    def _check_loop(self, models: Sequence[nn.Module], plan: TrainingPlan) -> None:
        has_several_models = len(models) + len(self.gradients.models) > 1
        if has_several_models or plan.accumulate_grad_batches > 1 or self.precision.scaled:
            raise ConfigurationError(
                f"{type(self.strategy).__name__}(pp={self._options.pp}) supports only one model in a user-written "
                "loop, with gradient_accumulation_steps=1 and without 'fp16'. Use num_micro_batches instead of "
                "gradient accumulation, and 'bf16'."
            )

    def _warn_of_idle_stages(self, plan: TrainingPlan) -> None:
        num = plan.accumulate_grad_batches * self._options.num_micro_batches
        if num < self._options.pp:
            warnings.warn(
                f"A step has {num} micro-batch(es), fewer than the pp={self._options.pp} pipeline stages, so some "
                "stages are idle. Increase MegatronStrategy(num_micro_batches=) or Trainer(accumulate_grad_batches=) "
                f"to a multiple of {self._options.pp}.",
                TrainwrightWarning,
                stacklevel=2,
            )

    def _prepare_for_loop(self, model: nn.Module) -> PreparedModel:
        """Divide the model of a user-written loop, whose optimizers already hold its parameters. Collective."""
        old_parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        if self.precision.autocast_dtype is not None:
            widen(old_parameters.values())
        self._divide(model)
        # Plain names, because recomputed layers are wrapped now.
        new_parameters = {plain_name(name): parameter for name, parameter in model.named_parameters()}
        for name, old in old_parameters.items():
            self._replaced[old] = new_parameters[name]  # `_over_shards` replaces them in the optimizers
        loop = PipelineLoop(model, self.pipeline, self._runner(), self.precision, self._options.num_micro_batches)
        return PreparedModel(call=loop, attributes=model, run_group=loop.forward_backward)

    def _sharding(self) -> Sharding | None:
        # Without data-parallel ranks, FSDP is not used.
        shape = self.strategy.mesh_shape(self.settings)
        is_sharded = shape.dp_replicate * shape.dp_shard * shape.cp > 1
        return super()._sharding() if is_sharded else None

    def _divide(self, model: nn.Module) -> None:
        """Divide a model into stages, and keep those of this rank. Collective.

        Each step needs the results of the steps before:

        1. `_find_stages` needs all layers on every rank.
        2. `_build_weights` builds the weights of all stages, and frees those of other ranks.
        3. `_shard` replaces the parameters of this rank's stages by shards.
        4. `_narrow_in_no_stage` and `_count_norm_once` refer to the parameters that the model has after step 3.
        5. `Pipeline.install` changes the calls of modules, and hides the parameters of other ranks, which the steps
           above still read.
        6. `_align_generators` comes after step 2, in which `reset_parameters` draws random numbers.
        """
        self._find_stages(model)
        own_stages = nn.ModuleList(self.pipeline.modules[stage] for stage in self.pipeline.links.own)
        self._build_weights(model, own_stages)
        sharded = self._shard(model, own_stages)
        self.pipeline.release = sharded.reshard
        self._narrow_in_no_stage(model)
        self._count_norm_once(model, sharded)
        self._undo_pipeline.callback(self.pipeline.install())
        self._align_generators()

    def _find_stages(self, model: nn.Module) -> None:
        """Wrap recomputed layers, and find the stages of a model and of its tensors. Not collective."""
        self._model = model
        options = self._options
        rank_of_stage = ranks_of_stages(options.schedule, options.pp, options.stages_per_rank)
        num_stages = len(rank_of_stage)
        links = StageLinks(self.mesh["pp"].get_group(), rank_of_stage, self.device)
        # Wrap first, so that the stages contain the wrappers.
        recomputed = self._recomputed()
        recomputed_layers: list[nn.Module] = []
        if self.strategy.activation_checkpointing:
            recomputed_layers.extend(layers_of(model, num_stages).values())
        recomputed.wrap(model, recomputed_layers)
        self._undo_pipeline.callback(recomputed.unwrap)
        stages = find_stages(model, num_stages, options.split_points)
        self.pipeline = Pipeline(model, stages, links)
        self._tensor_stages = TensorStages.of(model, self.pipeline.modules)

    def _build_weights(self, model: nn.Module, own_stages: nn.ModuleList) -> None:
        """Build the weights of all stages, one stage at a time, and free those of other ranks. Collective."""
        kept = {id(parameter) for parameter in own_stages.parameters()}
        names_to_reset = self._building.names_to_reset(model, self.processes)
        for module in self.pipeline.modules:
            # Every rank builds every stage: `materialize` is collective.
            materialize(model, module, names_to_reset, self.device)
            if module.index not in self.pipeline.links.own:
                free_module(model, module, kept)
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if self._tensor_stages.is_in_no_stage(name):
                tensor.data = tensor.data.to(self.device).contiguous()
                dist.broadcast(tensor.detach(), src=0)

    def _shard(self, model: nn.Module, own_stages: nn.ModuleList) -> ParallelModel:
        """Shard the stages of this rank and split their layers. Collective."""
        # The list holds the old parameters, so that no other object gets their ids.
        old_parameters = list(own_parameters(own_stages))
        # Without a `MetaBuilding`, `_parallelize` builds no weights and wraps no recomputed layers: `_build_weights`
        # and `_find_stages` have done so.
        sharded = self._parallelize(model, list(own_stages), None)
        # Sharding replaces parameters in the modules of this rank's stages. Replace tied ones in other stages, too.
        new_by_id: dict[int, nn.Parameter] = {}
        for module, key, old in old_parameters:
            new_by_id[id(old)] = module.get_parameter(key)
        replace_parameters(model, new_by_id)
        return sharded

    def _narrow_in_no_stage(self, model: nn.Module) -> None:
        """Cast parameters in no stage to the dtype to which FSDP casts the parameters of stages in forwards."""
        dtype = self.precision.autocast_dtype
        if dtype is None or self._sharding() is None:
            return
        ids_in_no_stage: set[int] = set()
        for name, parameter in model.named_parameters():
            if self._tensor_stages.is_in_no_stage(name):
                ids_in_no_stage.add(id(parameter))
        places: list[tuple[nn.Module, str]] = []  # a tied parameter has several places
        for module, key, parameter in own_parameters(model):
            if id(parameter) in ids_in_no_stage:
                places.append((module, key))
        self.pipeline.narrow(dtype, places)

    def _count_norm_once(self, model: nn.Module, sharded: ParallelModel) -> None:
        """Let the gradient norm count parameters in several stages or in no stage only once. Not collective.

        After `_sum_shared`, several ranks have the gradient of such a parameter. The rank of the stage that owns the
        parameter counts it.
        """
        for name, parameter in model.named_parameters():
            is_on_several_ranks = name in self._tensor_stages.ties or self._tensor_stages.is_in_no_stage(name)
            if is_on_several_ranks and self._tensor_stages.owner(name) not in self.pipeline.links.own:
                sharded.counted[id(parameter)] = False

    def _align_generators(self) -> None:
        """Set the random generators of this rank to those of the first rank that reads its batches. Collective.

        With different generators, ranks that read the same batches could compute different inputs and targets.
        """
        ranks = self.data_ranks
        first_reader = ranks.members[ranks.reader * ranks.parts]
        states = self.processes.gather_object(rng_state(self.device))
        set_rng_state(states[first_reader], self.device)

    @contextmanager
    def no_sync(self, prepared: Callable[..., Any]) -> Iterator[None]:
        yield  # the call of the model has already averaged the gradients

    # Parts

    def make_step(self, parts: StepParts) -> Step:
        return PipelineStep(self._over_sequences(parts), self._runner(), self._options.num_micro_batches)

    def _runner(self) -> PipelineRunner:
        shape = self.strategy.mesh_shape(self.settings)
        # Coordinates of the rank that provides the losses of this rank's pipeline: the first tensor-parallel rank of
        # the last stage.
        loss_source = shape.coordinates(self.processes.rank)
        loss_source["pp"] = self.pipeline.links.ranks[-1]
        loss_source["tp"] = 0
        return PipelineRunner(
            self._options.schedule,
            self.pipeline,
            self.gradients.models[0].synchronize,
            self._sum_shared,
            processes=self.processes,
            ranks=self.data_ranks,
            source=next(rank for rank in range(shape.size) if shape.coordinates(rank) == loss_source),
        )

    def _sum_shared(self) -> None:
        """Complete the gradients of parameters that are in several stages or in no stage. Collective."""
        parameters = dict(self._model.named_parameters())
        in_no_stage: list[nn.Parameter] = []
        for name, parameter in parameters.items():
            if self._tensor_stages.is_in_no_stage(name) and parameter.requires_grad:
                in_no_stage.append(parameter)
        if in_no_stage:
            self._sum_in_no_stage(in_no_stage)
        for name, stages in self._tensor_stages.ties.items():
            self._sum_tied(parameters[name], stages)

    def _sum_in_no_stage(self, parameters: Sequence[nn.Parameter]) -> None:
        """Sum the gradients of parameters in no stage over stages, and average them over data-parallel ranks.

        FSDP averages only the gradients of parameters in stages. Every rank steps a parameter in no stage, so every
        rank needs the same gradient. Each stage computes a part of it: positions that are added before the layers have
        a gradient in the first stage, a scale after the layers has one in the last stage.
        """
        has_gradient = [int(parameter.grad is not None) for parameter in parameters]
        by_rank = self.processes.gather_integers(has_gradient)
        by_parameter = zip(*by_rank, strict=True)
        ranks = self.data_ranks
        for parameter, has_gradient_on_ranks in zip(parameters, by_parameter, strict=True):
            if not any(has_gradient_on_ranks):
                continue  # optimizers skip an unused parameter, whose gradient is None
            gradient = _grad_shard(parameter)  # zeros in stages that do not use the parameter
            dist.all_reduce(gradient, group=self.pipeline.links.group)
            if ranks.group is not None:
                dist.all_reduce(gradient, group=ranks.group)
                gradient /= ranks.size

    def _sum_tied(self, parameter: nn.Parameter, stages: Sequence[int]) -> None:
        """Sum the gradients of a parameter in several stages on the rank of the first stage, and send back the sum."""
        links = self.pipeline.links
        first = stages[0]
        # Rank → one of its stages. A rank with several of the stages has added their gradients, and sends them once.
        other_ranks: dict[int, int] = {}
        for stage in stages:
            if links.ranks[stage] != links.ranks[first]:
                other_ranks[links.ranks[stage]] = stage
        if links.rank == links.ranks[first]:
            # Receive from all ranks first, because only then the sum is complete.
            for stage in other_ranks.values():
                _grad_shard(parameter).add_(links.receive(stage))
            for stage in other_ranks.values():
                links.send(_grad_shard(parameter), stage)
        elif links.rank in other_ranks:
            links.send(_grad_shard(parameter), first)
            _grad_shard(parameter).copy_(links.receive(first))

    def _state_of(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        names: Mapping[torch.Tensor, str] | None = None,
        make: Callable[..., ShardedState] = PipelineState,
    ) -> ShardedState:
        make = partial(
            make, links=self.pipeline.links, tensor_stages=self._tensor_stages, mesh=self.mesh, processes=self.processes
        )
        return super()._state_of(module, optimizers, names, make)

    def begin_evaluation(self) -> None:
        """Broadcast buffers over data-parallel ranks, and buffers in no stage from the rank of the last stage.

        Collective.
        """
        group = self.data_ranks.group
        if group is not None:
            for buffer in self.task.buffers():
                if not buffer.is_meta:
                    dist.broadcast(local_shard(buffer), group=group, group_src=0)
        links = self.pipeline.links
        for name, buffer in self.task.named_buffers():
            if self._tensor_stages.is_in_no_stage(name):
                dist.broadcast(buffer, links.global_rank(-1), group=links.group)

    # End of a stage of the run

    def unshard(self) -> None:
        self.begin_save()
        self._unwrap()  # first, so that the task has parameters instead of the placeholders of `Pipeline.install`
        task = self.task
        weights = self.strategy.weights_after_stage
        if weights == "none":
            discard_weights(task)
            return
        optimizer_states = self.state.optimizer_states()
        keep = self.is_main or weights == "all"
        full: dict[str, torch.Tensor] = {}
        for name, tensor in [*task.named_parameters(), *task.named_buffers()]:
            full[name] = self.state.collect(name, tensor, keep=keep)

        # The dict holds the old parameters, so that no new tensor gets one of their ids.
        old_parameters = dict(task.named_parameters())
        new_by_id: dict[int, nn.Parameter] = {}
        for name, old in old_parameters.items():
            new_by_id[id(old)] = nn.Parameter(full[name], requires_grad=old.requires_grad)
        replace_parameters(task, new_by_id)
        # By id, because several modules may share a buffer.
        full_buffers = {id(buffer): full[name] for name, buffer in task.named_buffers()}
        for module in task.modules():
            for key, buffer in list(module.named_buffers(recurse=False)):
                module._buffers[key] = full_buffers[id(buffer)]

        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in task.named_parameters()}
        for optimizer, state in zip(self.optimizers, optimizer_states, strict=True):
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [new_by_id[id(parameter)] for parameter in group["params"]]
            if self.is_main:
                load_named_optimizer_state(optimizer, state, names)

    def _unwrap(self) -> None:
        self._undo_pipeline.close()  # has no effect the second time
        super()._unwrap()


def _grad_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a gradient, after setting a missing gradient to zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_shard(parameter.grad)
