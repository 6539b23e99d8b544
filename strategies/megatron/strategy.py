"""Megatron-style parallelism: pipeline stages, tensor parallelism and sharding on one mesh of ranks."""

from __future__ import annotations

import datetime
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining.schedules import PipelineScheduleSingle
from torch.optim import Optimizer

from trainwright.checkpoint.format.optimizer import load_named_optimizer_state
from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.names.known_arguments import known_arguments
from trainwright.core.process import Topology
from trainwright.core.rng import rng_state, set_rng_state
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.processes.devices import DistributedType
from trainwright.strategies.capabilities import Capabilities, refuse_removed
from trainwright.strategies.engine import Engine, Models, Optimizers, Prepared, PreparedModel, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.build import discard_weights, materialize, widen
from trainwright.strategies.fsdp.layers.known_models import sequence_parallel_plan
from trainwright.strategies.fsdp.layers.plan import GivenPlan
from trainwright.strategies.fsdp.options import check_sizes, one_of
from trainwright.strategies.fsdp.parallelize import Sharding
from trainwright.strategies.fsdp.recompute import SavePolicy
from trainwright.strategies.fsdp.state import ShardedState
from trainwright.strategies.fsdp.strategy import FSDPEngine, FSDPStrategy
from trainwright.strategies.megatron.core_engine import MegatronCoreEngine, check_options
from trainwright.strategies.megatron.core_model import find_model, shape_of
from trainwright.strategies.megatron.pipelined_loop import PipelineLoop
from trainwright.strategies.megatron.runner import SCHEDULES, PipelineRunner, ranks_of_stages
from trainwright.strategies.megatron.staged_model import Pipeline, StageLinks
from trainwright.strategies.megatron.stages import find_stages, free_module, layers_of, own_parameters
from trainwright.strategies.megatron.state import PipelineState, owners_of
from trainwright.strategies.megatron.step import PipelineStep
from trainwright.strategies.mesh import MeshShape, nearest_meshes
from trainwright.strategies.shards import local_shard
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.strategy import StrategyOutline
from trainwright.strategies.units import WrapPolicy, replace_parameters

_MATRIX_PRODUCTS = ("aten.mm", "aten.addmm")
_STRICT_PLAN = partial(sequence_parallel_plan, strict=True)
_POSSIBLE_PLAN = partial(sequence_parallel_plan, strict=False)


@dataclass(frozen=True, init=False, repr=False)
class MegatronStrategy(FSDPStrategy):
    """Strategy that trains one model with several kinds of parallelism at once.

    The model is divided into `pp` pipeline stages. `tp` ranks split each layer. `dp_shard` ranks shard the resulting
    parameters, gradients and optimizer states. The model is written for one process. The number of processes is the
    product of all sizes.

    A step calls the model once. Each stage runs the step up to its layers, and the last stage runs it to the end.
    Random numbers that `training_step` draws before it calls the model are the same in every stage. Ranks that read the
    same batches start with equal states of torch's generators.

    Args:
        pp: Number of pipeline stages. Default: 1.
        tp: Number of ranks that split each layer (see `FSDPStrategy`). Default: 1.
        cp, sp: Number of ranks that split the sequences of a batch (see `FSDPStrategy`). Default: 1.
        dp_shard: Number of ranks that shard a stage and see different data. Default: None, the number of processes
            divided by the other sizes.
        dp_replicate: Number of replicas of the model, which see different data. Default: 1.
        num_micro_batches: Number of micro-batches into which each batch is divided along its first dimension. The
            micro-batches of all batches of an optimizer step (`accumulate_grad_batches`) run through the pipeline
            together. Default: 1.
        schedule: One of torch's schedules, which determines the order in which stages compute micro-batches: `"1f1b"`,
            `"gpipe"`, and with several stages per rank `"interleaved1f1b"`, `"loopedbfs"`, `"interleavedzerobubble"`,
            `"zbvzerobubble"` and `"dualpipev"`. Default: `"1f1b"`.
        virtual_stages: Number of stages per rank. The pipeline has `pp * virtual_stages` stages. Default: None, which
            means 2 if the schedule needs several stages per rank, and 1 otherwise.
        recompute: `"full"`: layers store only their inputs and are recomputed in backward. `"selective"`: layers also
            store the results of matrix products. Default: None, which disables recomputation.
        distributed_optimizer: Shard parameters, gradients and optimizer states over data-parallel ranks. False
            replicates them, unless `dp_shard` is set. Default: True.
        sequence_parallel: The `tp` ranks also split norms and residuals along the sequence. Supported for transformers'
            Llama, Mistral and Qwen models (see `ready_plan`). With other models, True raises an error and `"auto"` has
            no effect. Default: False.
        split_points: Names of the first layers of all stages except the first stage. Default: None, which uses the
            task's `pipeline_stages`, or divides the parameters evenly.
        engine: `"megatron-core"` trains a causal language model of transformers with megatron-core's GPTModel and
            distributed optimizer. It supports only `tp`, `dp_shard` and `recompute`. Default: `"torch"`.
        tensor_parallel_plan: See `FSDPStrategy`.
        auto_wrap_policy: Units that are sharded separately; see `FSDPStrategy`.
        weights_after_stage, state_dict_type: See `FSDPStrategy`.
        timeout, hang_timeout, process_group_backend: See `DataParallel`.

    Raises:
        ConfigurationError: A size or the schedule is invalid. At the start of a run: the product of the sizes is not
            the number of processes.
    """

    distributed_type: ClassVar[DistributedType | None] = DistributedType.MEGATRON_LM
    capabilities = Capabilities(
        gradients="sharded",
        manual_optimization=False,
        lockstep_evaluation=True,
        full_weights=False,
        weight_averages=False,
        independent_steps=False,
        closures=False,
        inference_mode=False,
        trials=False,
        late_groups=False,
        converted_layers=False,
    )

    pp: int = 1
    dp_shard: int | None = None
    dp_replicate: int = 1
    num_micro_batches: int = 1
    schedule: str = "1f1b"
    virtual_stages: int | None = None
    recompute: str | None = None
    distributed_optimizer: bool = True
    sequence_parallel: bool | str = False
    split_points: Sequence[str] | None = None
    library: str = field(default="torch", metadata={"argument": "engine"})
    # `recompute` sets them.
    activation_checkpointing: bool = field(default=False, init=False)
    activation_checkpointing_save: SavePolicy | None = field(default=None, init=False)

    # A field cannot have the name `engine`, which is also the name of a method.
    @known_arguments(refuse_removed("MegatronStrategy", {}))
    def __init__(
        self,
        *,
        pp: int = 1,
        tp: int = 1,
        cp: int = 1,
        sp: int = 1,
        dp_shard: int | None = None,
        dp_replicate: int = 1,
        num_micro_batches: int = 1,
        schedule: str = "1f1b",
        virtual_stages: int | None = None,
        recompute: str | None = None,
        distributed_optimizer: bool = True,
        sequence_parallel: bool | str = False,
        split_points: Sequence[str] | None = None,
        engine: str = "torch",
        tensor_parallel_plan: GivenPlan | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        weights_after_stage: str = "main",
        state_dict_type: str = "sharded",
        timeout: float | datetime.timedelta | Duration | str | None = None,
        hang_timeout: float | datetime.timedelta | Duration | str | None = "auto",
        process_group_backend: str | None = None,
    ) -> None:
        self._set(pp=pp, tp=tp, cp=cp, sp=sp, dp_shard=dp_shard, dp_replicate=dp_replicate)
        self._set(num_micro_batches=num_micro_batches, schedule=schedule, virtual_stages=virtual_stages)
        self._set(recompute=recompute, distributed_optimizer=distributed_optimizer)
        self._set(sequence_parallel=sequence_parallel, split_points=split_points, library=engine)
        self._set(tensor_parallel_plan=tensor_parallel_plan, auto_wrap_policy=auto_wrap_policy)
        self._set(weights_after_stage=weights_after_stage, state_dict_type=state_dict_type)
        self._set(timeout=timeout, hang_timeout=hang_timeout, process_group_backend=process_group_backend)
        self.__post_init__()

    def __post_init__(self) -> None:
        one_of("recompute", self.recompute or "full", ("full", "selective"))
        self._set(
            schedule=one_of("schedule", self.schedule.lower(), tuple(SCHEDULES)),
            split_points=None if self.split_points is None else list(self.split_points),
            activation_checkpointing=self.recompute is not None,
            activation_checkpointing_save=_MATRIX_PRODUCTS if self.recompute == "selective" else None,
        )
        super().__post_init__()
        _plan(self.sequence_parallel, self.tp, self.tensor_parallel_plan)  # checks them
        check_sizes(pp=self.pp, dp_shard=self.dp_shard, dp_replicate=self.dp_replicate)
        check_sizes(num_micro_batches=self.num_micro_batches, virtual_stages=self.virtual_stages)
        divides = self.num_micro_batches > 1 or self.split_points is not None or (self.virtual_stages or 1) > 1
        if self.pp == 1 and divides:
            raise ConfigurationError(
                "num_micro_batches, split_points and virtual_stages need a pipeline, and pp=1. Remove them, or use "
                "Trainer(accumulate_grad_batches=…)."
            )
        needed = SCHEDULES[self.schedule]
        if self.stages_per_rank != (needed or max(2, self.stages_per_rank)):
            raise ConfigurationError(
                f"schedule={self.schedule!r} needs {needed or 'several'} stage(s) on each rank, and "
                f"virtual_stages={self.virtual_stages}. Remove virtual_stages, or choose another schedule."
            )
        if one_of("engine", self.library, ("torch", "megatron-core")) != "torch":
            self._set(capabilities=replace(self.capabilities, gradients="hidden", owns_optimizer_step=True))

    @property
    def stages_per_rank(self) -> int:
        """Number of pipeline stages on each rank."""
        return self.virtual_stages or SCHEDULES[self.schedule] or 2

    @property
    def split_plan(self) -> GivenPlan | None:
        return _plan(self.sequence_parallel, self.tp, self.tensor_parallel_plan)

    def mesh_shape(self, settings: EngineSettings) -> MeshShape:
        split = self.cp * self.sp
        world, fixed = settings.num_processes, self.pp * self.tp * split * self.dp_replicate
        shards = world // fixed if self.dp_shard is None else self.dp_shard
        if fixed * shards != world or not shards:
            sizes = f"pp={self.pp}, tp={self.tp}, cp={self.cp}, sp={self.sp}, dp_replicate={self.dp_replicate}"
            product = fixed * (self.dp_shard or 1)
            nearest = nearest_meshes(world, self.pp, self.tp, (self.cp, self.sp), self.dp_replicate, self.dp_shard or 1)
            others = f"or choose {' or '.join(nearest)} for {world} process{'es' * (world > 1)}."
            needed, fitting = f"{product} processes", [product]
            if self.dp_shard is None:
                needed = f"{product} process(es) or a multiple"
                fitting = [size for size in (world // product * product, -(-world // product) * product) if size]
            raise ConfigurationError(
                f"MegatronStrategy({sizes}, dp_shard={self.dp_shard}) needs {needed}, and the run has {world}. Start "
                f"{' or '.join(map(str, dict.fromkeys(fitting)))}, {others}"
            )
        replicas = self.dp_replicate
        if not self.distributed_optimizer and self.dp_shard is None:
            replicas, shards = replicas * shards, 1
        return MeshShape(pp=self.pp, dp_replicate=replicas, dp_shard=shards, cp=split, tp=self.tp)

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if self.library != "torch":
            check_options(self.changed_options, settings)
        if self.pp > 1 and settings.compile_options is not None:
            raise ConfigurationError("compile=True is not supported with pp > 1. Remove compile, or use pp=1.")

    def check_task(self, task: TaskModule, settings: EngineSettings) -> None:
        if self.library != "torch":
            if not overrides(task, "configure_model", TaskModule):
                shape_of(find_model(task), self.tp)
            return
        super().check_task(task, settings)
        if self.pp > 1 and not overrides(task, "configure_model", TaskModule):
            find_stages(task, self.pp * self.stages_per_rank, self.split_points)

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        return (
            super().outline(task, settings) if self.library == "torch" else StrategyOutline(self.mesh_shape(settings))
        )

    def engine(self, settings: EngineSettings) -> Engine:
        if self.library != "torch":
            return MegatronCoreEngine(self, settings, shape=self.mesh_shape(settings), recompute=self.recompute)
        return (PipelineEngine if self.pp > 1 else FSDPEngine)(self, settings)


class PipelineEngine(FSDPEngine):
    """Engine that trains pipeline stages on several ranks. Further ranks shard each stage and split its layers."""

    strategy: MegatronStrategy
    mesh: DeviceMesh
    state: PipelineState

    def start(self, topology: Topology) -> None:
        if "return_outputs" not in inspect.signature(PipelineScheduleSingle.step).parameters:
            raise ConfigurationError(
                f"pp={self.strategy.pp} needs a newer torch than {torch.__version__}, whose pipeline schedules have no "
                "argument return_outputs. Torch 2.13 was tested."
            )
        super().start(topology)

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        """Divide a model into stages, and let the optimizers step those of this rank. Collective."""
        if not roots:
            self._check_loop(models, plan)
        elif optimizers is not None:
            self._warn_of_idle_stages(plan)
        self._check_before(models, optimizers)
        found: list[PreparedModel] = []
        for model in models:
            if roots:
                self._divide(model)
                found.append(PreparedModel.unchanged(model))  # a step runs the stages
                continue
            before = {plain_name(name): p for name, p in model.named_parameters()}
            if self.precision.autocast_dtype is not None:
                widen(before.values())
            self._divide(model)
            after = {plain_name(name): p for name, p in model.named_parameters()}  # recomputed layers are wrapped
            for name, old in before.items():
                self._replaced[old] = after[name]
            found.append(self._looped(model))
        return Prepared(found, self._over_shards(optimizers))

    def _check_loop(self, models: Sequence[nn.Module], plan: TrainingPlan) -> None:
        if len(models) + len(self.gradients.models) > 1 or plan.accumulate_grad_batches > 1 or self.precision.scaled:
            raise ConfigurationError(
                f"{type(self.strategy).__name__}(pp={self.strategy.pp}) supports only one model in a user-written "
                "loop, with gradient_accumulation_steps=1 and without 'fp16'. Use num_micro_batches instead of "
                "gradient accumulation, and 'bf16'."
            )

    def _warn_of_idle_stages(self, plan: TrainingPlan) -> None:
        num = plan.accumulate_grad_batches * self.strategy.num_micro_batches
        if num < self.strategy.pp:
            warnings.warn(
                f"A step has {num} micro-batch(es), fewer than the pp={self.strategy.pp} pipeline stages, so some "
                "stages are idle. Increase MegatronStrategy(num_micro_batches=) or Trainer(accumulate_grad_batches=) "
                f"to a multiple of {self.strategy.pp}.",
                TrainwrightWarning,
                stacklevel=2,
            )

    def _looped(self, model: nn.Module) -> PreparedModel:
        """Return what a user-written loop calls: a function that runs all stages."""
        loop = PipelineLoop(model, self.pipeline, self._runner(), self.precision, self.strategy.num_micro_batches)
        return PreparedModel(call=loop, attributes=model, run_group=loop.forward_backward)

    def _sharding(self) -> Sharding | None:
        shape = self.strategy.mesh_shape(self.settings)
        return super()._sharding() if shape.dp_replicate * shape.dp_shard * shape.cp > 1 else None

    def _divide(self, task: nn.Module) -> None:
        """Divide a model into stages, and keep those of this rank. Collective."""
        self._model = task
        given, group = self.strategy, self.mesh["pp"].get_group()
        links = StageLinks(group, ranks_of_stages(given.schedule, given.pp, given.stages_per_rank), self.device)
        recomputed = self._recomputed()
        recomputed.wrap(
            task, list(layers_of(task, len(links.ranks)).values()) if given.activation_checkpointing else []
        )
        stages = find_stages(task, len(links.ranks), given.split_points)
        self.pipeline = pipeline = Pipeline(task, stages, links)
        self._owners, self._everywhere, self._ties = owners_of(task, pipeline.modules)
        own = nn.ModuleList(pipeline.modules[i] for i in links.own)
        kept = {id(p) for p in own.parameters()}
        built = self._building.names_to_reset(task, self.processes)
        for module in pipeline.modules:
            materialize(task, module, built, self.device)
            if module.index not in links.own:
                free_module(task, module, kept)
        for name, tensor in [*task.named_parameters(), *task.named_buffers()]:
            if plain_name(name) in self._everywhere:
                tensor.data = tensor.data.to(self.device).contiguous()
                dist.broadcast(tensor.detach(), src=0)
        before = {id(p): (p, module, key) for module, key, p in own_parameters(own)}
        model = self._parallelize(task, list(own), None)
        # Sharding replaces parameters: update tied ones in modules of other stages, too.
        replace_parameters(task, {i: module.get_parameter(key) for i, (_, module, key) in before.items()})
        pipeline.release = model.reshard
        narrow = self.precision.autocast_dtype
        if narrow is not None and self._sharding() is not None:
            loose = [p for name, p in task.named_parameters() if name in self._everywhere]
            places = [(module, key) for module, key, p in own_parameters(task) if any(p is other for other in loose)]
            pipeline.narrow(narrow, places)
        self._undo_pipeline = ExitStack()
        self._undo_pipeline.callback(recomputed.unwrap)
        self._undo_pipeline.callback(pipeline.install())
        parameters = dict(task.named_parameters())
        for name in self._ties:
            if self._owners[plain_name(name)] not in links.own:
                model.counted[id(parameters[name])] = False
        # With different generators, ranks that read the same batches could compute different inputs and targets.
        states, ranks = self.processes.gather_object(rng_state(self.device)), self.data_ranks
        set_rng_state(states[ranks.members[ranks.reader * ranks.parts]], self.device)

    @contextmanager
    def no_sync(self, prepared: Callable[..., Any]) -> Iterator[None]:
        yield  # the call of the model has already averaged the gradients

    # Parts

    def make_step(self, parts: StepParts) -> Step:
        return PipelineStep(self._over_sequences(parts), self._runner(), self.strategy.num_micro_batches)

    def _runner(self) -> PipelineRunner:
        shape = self.strategy.mesh_shape(self.settings)
        # Losses come from the first tensor-parallel rank of the last stage.
        place = {**shape.coordinates(self.processes.rank), "pp": self.pipeline.links.ranks[-1], "tp": 0}
        return PipelineRunner(
            self.strategy.schedule,
            self.pipeline,
            self.gradients.models[0].synchronize,
            self._sum_shared,
            processes=self.processes,
            ranks=self.data_ranks,
            source=next(rank for rank in range(shape.size) if shape.coordinates(rank) == place),
        )

    def _sum_shared(self) -> None:
        """Complete the gradients of parameters that are in several stages or in no stage. Collective."""
        links = self.pipeline.links
        around = [p.grad for n, p in self._model.named_parameters() if n in self._everywhere and p.grad is not None]
        for grad in around if self.data_ranks.group is not None else ():
            dist.all_reduce(grad, group=self.data_ranks.group)  # they are in no sharded module
            grad /= self.data_ranks.size
        parameters = dict(self._model.named_parameters()) if self._ties else {}
        for name, stages in self._ties.items():
            parameter, first = parameters[name], stages[0]
            others = {links.ranks[stage]: stage for stage in stages if links.ranks[stage] != links.ranks[first]}
            if links.rank == links.ranks[first]:
                for stage in others.values():
                    _grad_shard(parameter).add_(links.receive(stage))
                for stage in others.values():
                    links.send(_grad_shard(parameter), stage)
            elif links.rank in others:
                links.send(_grad_shard(parameter), first)
                _grad_shard(parameter).copy_(links.receive(first))

    def _state_of(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        names: Mapping[torch.Tensor, str] | None = None,
        make: Callable[..., ShardedState] = PipelineState,
    ) -> ShardedState:
        links, owners, processes = self.pipeline.links, self._owners, self.processes
        make = partial(make, links=links, owners=owners, mesh=self.mesh, processes=processes)
        return super()._state_of(module, optimizers, names, make)

    def begin_evaluation(self) -> None:
        """Broadcast buffers over data-parallel ranks, and buffers in no stage from the rank of the last stage."""
        group = self.data_ranks.group
        if group is not None:
            for buffer in self.task.buffers():
                if not buffer.is_meta:
                    dist.broadcast(local_shard(buffer), group=group, group_src=0)
        links = self.pipeline.links
        for name, buffer in self.task.named_buffers():
            if plain_name(name) in self._everywhere:
                dist.broadcast(buffer, links.global_rank(-1), group=links.group)

    def unshard(self) -> None:
        self.begin_save()
        self._unwrap()
        task, weights, state = self.task, self.strategy.weights_after_stage, self.state
        if weights == "none":
            discard_weights(task)
            return
        keep = self.is_main or weights == "all"
        states = state.optimizer_states()
        values = {
            name: state.collect(name, tensor, keep=keep)
            for name, tensor in [*task.named_parameters(), *task.named_buffers()]
        }
        old = dict(task.named_parameters())
        new = {id(p): nn.Parameter(values[name], requires_grad=p.requires_grad) for name, p in old.items()}
        replace_parameters(task, new)
        buffers = {id(buffer): values[name] for name, buffer in task.named_buffers()}
        for module in task.modules():
            module._buffers |= {key: buffers[id(b)] for key, b in module.named_buffers(recurse=False)}
        names: dict[torch.Tensor, str] = {p: name for name, p in task.named_parameters()}
        for optimizer, found in zip(self.optimizers, states, strict=True):
            optimizer.state.clear()
            for group in optimizer.param_groups:
                group["params"] = [new[id(p)] for p in group["params"]]
            if self.is_main:
                load_named_optimizer_state(optimizer, found, names)

    def _unwrap(self) -> None:
        undo: ExitStack | None = vars(self).pop("_undo_pipeline", None)
        if undo is not None:
            undo.close()
        super()._unwrap()


def _plan(sequence_parallel: bool | str, tp: int, given: GivenPlan | None) -> GivenPlan | None:
    """Return the plan for `FSDPStrategy`: the user's (`given`), or built-in plans for `sequence_parallel`."""
    if not sequence_parallel:
        return given
    if tp == 1 or given is not None:
        raise ConfigurationError(
            f"sequence_parallel=True needs tp above 1 and no tensor_parallel_plan, but tp={tp}. Remove "
            "sequence_parallel or the plan, or increase tp."
        )
    return _STRICT_PLAN if sequence_parallel is True else _POSSIBLE_PLAN


def _grad_shard(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a gradient, after setting a missing gradient to zeros."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_shard(parameter.grad)
