"""Megatron-style parallelism: pipeline stages, split layers and shards on one mesh of ranks."""

from __future__ import annotations

import datetime
import itertools
import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.optim import Optimizer

from trainwright.checkpoint.format.optimizer import load_named_optimizer_state
from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.names.known_arguments import known_arguments
from trainwright.core.rng import rng_state, set_rng_state
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.processes.devices import DistributedType
from trainwright.processes.process_group import Processes
from trainwright.strategies.capabilities import Capabilities, refuse_removed
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine import Engine, MakeOptimizers, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.build import check_full, discard_weights, materialize, widen
from trainwright.strategies.fsdp.layers.known_models import sequence_parallel_plan
from trainwright.strategies.fsdp.layers.plan import GivenPlan
from trainwright.strategies.fsdp.options import check_optimizers, check_sizes, one_of
from trainwright.strategies.fsdp.parallelize import Sharding
from trainwright.strategies.fsdp.state import ShardedState
from trainwright.strategies.fsdp.strategy import FSDPEngine, FSDPStrategy
from trainwright.strategies.megatron.pipelined_loop import PipelineLoop
from trainwright.strategies.megatron.runner import SCHEDULES, PipelineRunner, ranks_of_stages
from trainwright.strategies.megatron.staged_model import Pipeline, StageModule, Wire
from trainwright.strategies.megatron.stages import drop, find_stages, layers_of, own_parameters
from trainwright.strategies.megatron.state import PipelineState, owners_of
from trainwright.strategies.megatron.step import PipelineStep
from trainwright.strategies.mesh import MeshShape
from trainwright.strategies.shards import local_piece
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.units import WrapPolicy, replace_parameters

_MATRIX_PRODUCTS = ("aten.mm", "aten.addmm")
_STRICT_PLAN = partial(sequence_parallel_plan, strict=True)
_POSSIBLE_PLAN = partial(sequence_parallel_plan, strict=False)


class MegatronStrategy(FSDPStrategy):
    """Trains one model that is divided over ranks in several ways at once.

    Its layers are divided into `pp` stages of a pipeline, each layer is split over `tp` ranks, and what a rank then
    holds of the parameters, gradients and states of optimizers is sharded over `dp_shard` ranks. The model is written
    for one process. The product of all sizes is the number of processes.

    A step calls the model once. Each stage runs the step up to its layers, and the last one runs it to its end: what
    `training_step` draws from torch's generators before it calls the model is the same in every stage. Ranks that read
    the same batches start with the generators of the first of them.

    Args:
        pp: Stages of the pipeline. Default: 1.
        tp: Ranks that split each layer (see `FSDPStrategy`). Default: 1.
        cp, sp: Ranks that split the sequences of a batch (see `FSDPStrategy`). Default: 1.
        dp_shard: Ranks that shard a stage and see different data; None: as many as the other sizes leave.
        dp_replicate: Replicas of the model, which see different data. Default: 1.
        num_micro_batches: Micro-batches into which each batch is divided along its first dimension. Those of all
            batches of an optimizer step (`accumulate_grad_batches`) run through the pipeline together. Default: 1.
        schedule: Order in which stages compute micro-batches, one of torch's schedules: `"1f1b"`, `"gpipe"`, and with
            several stages on each rank `"interleaved1f1b"`, `"loopedbfs"`, `"interleavedzerobubble"`,
            `"zbvzerobubble"` and `"dualpipev"`. Default: `"1f1b"`.
        virtual_stages: Stages on each rank, so that the pipeline has `pp * virtual_stages`; None: 1, or 2 if the
            schedule needs several.
        recompute: `"full"`: layers keep their inputs only and are computed again in backward; `"selective"`: they keep
            the results of matrix products, and the rest is computed again; None: nothing is.
        distributed_optimizer: Shard what ranks with different data hold; False: they hold replicas, unless `dp_shard`
            is given. Default: True.
        sequence_parallel: Norms and residuals of split layers work on a part of the sequence on each of the `tp` ranks,
            in transformers' Llama, Mistral and Qwen models (see `ready_plan`). `"auto"`: in those models; True: another
            model is an error. Default: False.
        split_points: Names of the layers with which the second and each further stage begin. Default: None, which asks
            the task's `pipeline_stages`, and otherwise divides the parameters evenly.
        tensor_parallel_plan: See `FSDPStrategy`.
        auto_wrap_policy: Units that are sharded one by one; see `FSDPStrategy`.
        weights_after_stage, state_dict_type: See `FSDPStrategy`.
        timeout, hang_timeout, process_group_backend: See `DDPStrategy`.

    Raises:
        ConfigurationError: A size or a schedule is unknown; when the run is configured, the product of the sizes is not
            the number of processes.
    """

    distributed_type: ClassVar[DistributedType | None] = DistributedType.MEGATRON_LM
    capabilities = Capabilities(
        gradients="sharded",
        manual_optimization=False,
        lockstep_evaluation=True,
        whole_weights=False,
        weight_averages=False,
        lone_steps=False,
        closures=False,
        inference_mode=False,
        trials=False,
        late_groups=False,
        converted_layers=False,
    )

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
        tensor_parallel_plan: GivenPlan | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        weights_after_stage: str = "main",
        state_dict_type: str = "sharded",
        timeout: float | datetime.timedelta | Duration | str | None = None,
        hang_timeout: float | datetime.timedelta | Duration | str | None = "auto",
        process_group_backend: str | None = None,
    ) -> None:
        super().__init__(
            tp=tp,
            cp=cp,
            sp=sp,
            tensor_parallel_plan=_plan(sequence_parallel, tp, tensor_parallel_plan),
            auto_wrap_policy=auto_wrap_policy,
            activation_checkpointing=recompute is not None,
            activation_checkpointing_save=_MATRIX_PRODUCTS if recompute == "selective" else None,
            weights_after_stage=weights_after_stage,
            state_dict_type=state_dict_type,
            timeout=timeout,
            hang_timeout=hang_timeout,
            process_group_backend=process_group_backend,
        )
        counts = {"pp": pp, "dp_shard": dp_shard, "dp_replicate": dp_replicate}
        check_sizes(**counts, num_micro_batches=num_micro_batches, virtual_stages=virtual_stages)
        self.schedule = one_of("schedule", schedule.lower(), tuple(SCHEDULES))
        if recompute is not None:
            one_of("recompute", recompute, ("full", "selective"))
        if pp == 1 and (num_micro_batches > 1 or split_points is not None or (virtual_stages or 1) > 1):
            raise ConfigurationError(
                "num_micro_batches, split_points and virtual_stages are those of a pipeline, and pp=1. Leave them out, "
                "or use Trainer(accumulate_grad_batches=…)."
            )
        each = SCHEDULES[self.schedule]
        self.virtual_stages = virtual_stages or each or 2
        if self.virtual_stages != (each or max(2, self.virtual_stages)):
            raise ConfigurationError(
                f"schedule={self.schedule!r} takes {each or 'several'} stage(s) on each rank, and "
                f"virtual_stages={virtual_stages}. Leave virtual_stages out, or choose another schedule."
            )
        self.pp, self.dp_shard, self.dp_replicate = pp, dp_shard, dp_replicate
        self.num_micro_batches, self.distributed_optimizer = num_micro_batches, distributed_optimizer
        self.split_points = None if split_points is None else list(split_points)

    def mesh_shape(self, settings: EngineSettings) -> MeshShape:
        split = self.cp * self.sp
        world, fixed = settings.num_processes, self.pp * self.tp * split * self.dp_replicate
        shards = world // fixed if self.dp_shard is None else self.dp_shard
        if fixed * shards != world or not shards:
            sizes = f"pp={self.pp}, tp={self.tp}, cp={self.cp}, sp={self.sp}, dp_replicate={self.dp_replicate}"
            product = fixed * (self.dp_shard or 1)
            others = f"or choose {' or '.join(self._nearest(world))} for {world} process{'es' * (world > 1)}."
            below, above = world // product * product, -(-world // product) * product
            nearby = " or ".join(str(size) for size in dict.fromkeys((below, above)) if size)
            raise ConfigurationError(
                f"MegatronStrategy({sizes}, dp_shard={self.dp_shard}) takes {product} process(es) or a multiple, and "
                f"the run has {world}. Start {nearby}, {others}"
                if self.dp_shard is None
                else f"MegatronStrategy({sizes}, dp_shard={self.dp_shard}) takes {product} processes, and the run has "
                f"{world}. Start {product}, {others}"
            )
        replicas = self.dp_replicate
        if not self.distributed_optimizer and self.dp_shard is None:
            replicas, shards = replicas * shards, 1
        return MeshShape(pp=self.pp, dp_replicate=replicas, dp_shard=shards, cp=split, tp=self.tp)

    def _nearest(self, world: int) -> list[str]:
        """Return the sizes of the two meshes of a number of ranks that differ least from this one."""
        given = (self.pp, self.tp, self.cp * self.sp, self.dp_replicate, self.dp_shard or 1)
        divisors = [size for size in range(1, world + 1) if world % size == 0]
        splits = divisors if given[2] > 1 else [1]
        meshes = [
            (*sizes, world // math.prod(sizes))
            for sizes in itertools.product(divisors, divisors, splits, divisors)
            if world % math.prod(sizes) == 0
        ]

        def difference(mesh: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
            changes = [abs(math.log2(new / old)) for new, old in zip(mesh, given, strict=True)]
            return 4 * sum(changes[:-1]) + changes[-1], mesh  # shards are changed before the other sizes

        names = ("pp", "tp", "sp" if self.sp > 1 else "cp", "dp_replicate", "dp_shard")
        return [
            ", ".join(f"{name}={size}" for name, size in zip(names, mesh, strict=True) if size > 1) or "pp=1"
            for mesh in sorted(meshes, key=difference)[:2]
        ]

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if self.pp > 1 and settings.compile_options is not None:
            raise ConfigurationError("compile=True is not supported with pp > 1. Leave it out, or use pp=1.")

    def check_task(self, task: TaskModule, settings: EngineSettings) -> None:
        super().check_task(task, settings)
        if self.pp > 1 and not overrides(task, "configure_model", TaskModule):
            find_stages(task, self.pp * self.virtual_stages, self.split_points)

    def engine(self, settings: EngineSettings) -> Engine:
        return (PipelineEngine if self.pp > 1 else FSDPEngine)(self, settings)


class PipelineEngine(FSDPEngine):
    """Trains the stages of a model on several ranks, each of them sharded and split over others."""

    strategy: MegatronStrategy
    mesh: DeviceMesh
    state: PipelineState

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None, plan: TrainingPlan) -> list[Optimizer]:
        num = plan.accumulate_grad_batches * self.strategy.num_micro_batches
        if make_optimizers is not None and num < self.strategy.pp:
            warnings.warn(
                f"A step has {num} micro-batch(es), fewer than the pp={self.strategy.pp} stages of the pipeline, which "
                "wait for each other. Pass MegatronStrategy(num_micro_batches=), or Trainer(accumulate_grad_batches=), "
                f"so that it has several times {self.strategy.pp}.",
                TrainwrightWarning,
                stacklevel=2,
            )
        optimizers = super().prepare(task, make_optimizers, plan)
        self._training_call = self._eval_call = None  # the pipeline calls its stages
        return optimizers

    def _sharding(self) -> Sharding | None:
        shape = self.strategy.mesh_shape(self.settings)
        return super()._sharding() if shape.dp_replicate * shape.dp_shard * shape.cp > 1 else None

    def _place(self, task: TaskModule) -> None:
        self._divide(task)

    def _divide(self, task: nn.Module) -> None:
        """Divide a model into stages, and keep this rank's. Collective."""
        self._model = task
        given, group = self.strategy, self.mesh["pp"].get_group()
        wire = Wire(group, ranks_of_stages(given.schedule, given.pp, given.virtual_stages), self.device)
        recomputed = self._recomputed()
        recomputed.wrap(task, layers_of(task, len(wire.ranks)) if given.activation_checkpointing else [])
        stages = find_stages(task, len(wire.ranks), given.split_points)
        self.pipeline = pipeline = Pipeline(task, stages, wire)
        self._owners, self._everywhere = owners_of(task, pipeline.modules)
        self._ties = _find_ties(task, pipeline.modules)
        own = nn.ModuleList(pipeline.modules[i] for i in wire.own)
        kept = {id(p) for p in own.parameters()}
        built = self._building.names_to_reset(task, self.processes)
        for module in pipeline.modules:
            materialize(task, module, built, self.device)
            if module.index not in wire.own:
                drop(task, module, kept)
        _materialize_rest(task, self._everywhere, self.device)
        before = {id(p): (p, module, key) for module, key, p in own_parameters(own)}
        model = self._parallelize(task, list(own), None)
        # What is sharded is another parameter: tied places outside of this rank's stage get it, too.
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
            if self._owners[plain_name(name)] not in wire.own:
                model.counted[id(parameters[name])] = False
        _share_generators(self.processes, self.data_ranks, self.device)

    # User-written loops

    def prepare_models(
        self, models: Sequence[nn.Module], optimizers: Sequence[Optimizer], plan: TrainingPlan
    ) -> list[Callable[..., Any]]:
        """Divide a model into stages. Collective."""
        if len(models) + len(self.gradients.models) > 1 or plan.accumulate_grad_batches > 1 or self.precision.scaled:
            raise ConfigurationError(
                f"{type(self.strategy).__name__}(pp={self.strategy.pp}) trains one model in a user-written loop, with "
                "gradient_accumulation_steps=1 and without 'fp16'. Use num_micro_batches, and 'bf16'."
            )
        check_optimizers(optimizers, self.precision)
        found: list[Callable[..., Any]] = []
        for model in models:
            check_full(model)
            before = {plain_name(name): p for name, p in model.named_parameters()}
            if self.precision.autocast_dtype is not None:
                widen(before.values())
            self._divide(model)
            after = {plain_name(name): p for name, p in model.named_parameters()}  # recomputed layers are wrapped
            for name, old in before.items():
                self._replaced[old] = after[name]
            loop = PipelineLoop(
                model=model,
                pipeline=self.pipeline,
                runner=self._runner(),
                precision=self.precision,
                processes=self.processes,
                ranks=self.data_ranks,
                source=self._source(),
                base_seed=self._base_seed(),
                num_parts=self.strategy.num_micro_batches,
                sum_shared=lambda: self._sum_shared(self.pipeline.wire),
            )
            found.append(loop)
            self.run_group = loop.forward_backward
        for optimizer in optimizers:
            self.adopt_optimizer(optimizer)
        return found

    @contextmanager
    def no_sync(self, prepared: Callable[..., Any]) -> Iterator[None]:
        yield  # a call of the model has averaged already

    # Parts

    def make_step(self, parts: StepParts) -> Step:
        wire = self.pipeline.wire
        return PipelineStep(
            self._over_sequences(parts),
            self.pipeline,
            self._runner(),
            self.processes,
            source=self._source(),
            base_seed=self._base_seed,
            num_parts=self.strategy.num_micro_batches,
            sum_shared=lambda: self._sum_shared(wire),
        )

    def _runner(self) -> PipelineRunner:
        synchronize = self.gradients.models[0].synchronize
        processes = self.processes if self.data_ranks.size > 1 else None
        return PipelineRunner(self.strategy.schedule, self.pipeline, synchronize, processes)

    def _base_seed(self) -> int:
        """Return a seed that is the same on every rank with the same data. Collective."""
        seed: int = self.processes.broadcast_object(torch.initial_seed())
        return seed + self.data_ranks.rank

    def _source(self) -> int:
        """Return the global rank whose losses count in this rank's pipeline: of ranks that split layers the first."""
        shape = self.strategy.mesh_shape(self.settings)
        place = {**shape.coordinates(self.processes.rank), "pp": self.pipeline.wire.ranks[-1], "tp": 0}
        return next(rank for rank in range(shape.size) if shape.coordinates(rank) == place)

    def _sum_shared(self, wire: Wire) -> None:
        """Complete the gradients of parameters that several stages or no stage holds. Collective."""
        around = [p.grad for n, p in self._model.named_parameters() if n in self._everywhere and p.grad is not None]
        for grad in around if self.data_ranks.group is not None else ():
            dist.all_reduce(grad, group=self.data_ranks.group)  # no module that is sharded holds them
            grad /= self.data_ranks.size
        parameters = dict(self._model.named_parameters()) if self._ties else {}
        for name, stages in self._ties.items():
            parameter, first = parameters[name], stages[0]
            others = {wire.ranks[stage]: stage for stage in stages if wire.ranks[stage] != wire.ranks[first]}
            if wire.rank == wire.ranks[first]:
                for stage in others.values():
                    _piece(parameter).add_(wire.receive(stage))
                for stage in others.values():
                    wire.send(_piece(parameter), stage)
            elif wire.rank in others:
                wire.send(_piece(parameter), first)
                _piece(parameter).copy_(wire.receive(first))

    def _state_of(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        names: Mapping[torch.Tensor, str] | None = None,
        make: Callable[..., ShardedState] = PipelineState,
    ) -> ShardedState:
        wire, owners, processes = self.pipeline.wire, self._owners, self.processes
        make = partial(make, wire=wire, owners=owners, mesh=self.mesh, processes=processes)
        return super()._state_of(module, optimizers, names, make)

    def begin_evaluation(self) -> None:
        """Make all ranks share the buffers of one. Collective."""
        group = self.data_ranks.group
        if group is not None:
            for buffer in self.task.buffers():
                if not buffer.is_meta:
                    dist.broadcast(local_piece(buffer), group=group, group_src=0)
        wire = self.pipeline.wire
        for name, buffer in self.task.named_buffers():
            if plain_name(name) in self._everywhere:
                dist.broadcast(buffer, wire.global_rank(-1), group=wire.group)

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
        for owner, key, name in _places(task):
            owner._buffers[key] = values[name]
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
    """Return the argument `tensor_parallel_plan` of FSDPStrategy."""
    if not sequence_parallel:
        return given
    if tp == 1 or given is not None:
        raise ConfigurationError("sequence_parallel=True needs tp above 1, and no tensor_parallel_plan.")
    return _STRICT_PLAN if sequence_parallel is True else _POSSIBLE_PLAN


def _find_ties(task: nn.Module, modules: Sequence[StageModule]) -> dict[str, list[int]]:
    """Return the stages of each parameter that several of them hold, by its first name."""
    found: dict[str, list[int]] = {}
    for name, parameter in task.named_parameters():
        stages = [module.index for module in modules if any(parameter is other for other in module.parameters())]
        if len(stages) > 1:
            found[name] = stages
    return found


def _materialize_rest(task: nn.Module, names: Collection[str], device: torch.device) -> None:
    """Give what belongs to no stage, which every rank holds, memory and rank 0's values. Collective."""
    for name, tensor in [*task.named_parameters(), *task.named_buffers()]:
        if plain_name(name) in names:
            tensor.data = tensor.data.to(device).contiguous()
            dist.broadcast(tensor.detach(), src=0)


def _share_generators(processes: Processes, ranks: DataRanks, device: torch.device) -> None:
    """Give the generators of ranks that read the same batches the states of the first of them. Collective.

    Otherwise stages would compute different inputs and targets if the ranks have other seeds.
    """
    states = processes.gather_object(rng_state(device))
    set_rng_state(states[ranks.members[ranks.reader * ranks.parts]], device)


def _piece(parameter: torch.Tensor) -> torch.Tensor:
    """Return this rank's piece of a gradient; of zeros where there is none."""
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    return local_piece(parameter.grad)


def _places(task: nn.Module) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield where each buffer is: module, key and whole name."""
    for prefix, module in task.named_modules():
        for key, buffer in module.named_buffers(recurse=False):
            name = f"{prefix}.{key}" if prefix else key
            if buffer is not None:
                yield module, key, name
