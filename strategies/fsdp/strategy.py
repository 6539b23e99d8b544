"""Fully sharded data parallelism with torch's `fully_shard` (FSDP2).

Each rank stores one shard of every parameter, gradient and optimizer state. The parameters of a unit of the model (see
`TaskModule.shard_units`) are gathered for its forward and backward and then freed. Backward averages the gradients of a
unit over the ranks and shards them. Source: Zhao et al., "PyTorch FSDP" (2023); Rajbhandari et al., "ZeRO" (2020).
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.errors import ConfigurationError
from trainwright.core.names.known_arguments import known_options
from trainwright.core.process import Topology
from trainwright.core.run import Run
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.processes.devices import DistributedType
from trainwright.strategies.capabilities import Capabilities, refuse_removed
from trainwright.strategies.context.attention import Kind
from trainwright.strategies.context.sequences import SplitSequences, check_heads
from trainwright.strategies.engine import (
    Engine,
    Models,
    Optimizers,
    Prepared,
    PreparedModel,
    TrainingPlan,
    create_optimizers,
)
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.experts.layers import DividedExperts, check_ep_size, check_experts, check_mesh
from trainwright.strategies.fsdp.build import MetaBuilding, check_full, unshard_task, widen
from trainwright.strategies.fsdp.layers.known_models import check_plan
from trainwright.strategies.fsdp.layers.plan import GivenPlan, check_tp_size
from trainwright.strategies.fsdp.options import (
    AFTER_STAGE,
    REMOVED,
    RESHARDING,
    check_arguments,
    check_optimizers,
    check_sequence_ranks,
    mesh_shape,
    mixed_precision_policy,
    offload_flag,
    one_of,
    read_fsdp_config,
    recomputed_modules,
    sharding_strategy_name,
)
from trainwright.strategies.fsdp.parallelize import ParallelModel, Sharding, fsdp_precision, parallelize
from trainwright.strategies.fsdp.recompute import Recomputed, SavePolicy
from trainwright.strategies.fsdp.sharded_gradients import ShardedGradients
from trainwright.strategies.fsdp.state import ShardedState, disable_foreach
from trainwright.strategies.mesh import MeshShape, data_group, forget_groups
from trainwright.strategies.shards import local_shard
from trainwright.strategies.state import FullState, shard_like, state_dict_type_name
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.strategy import DataParallel, ParallelEngine, StrategyOutline
from trainwright.strategies.units import (
    WrapPolicy,
    check_can_be_sharded,
    check_compilable,
    find_units,
    warn_of_large_rest,
)


@known_options(refuse_removed("FSDPStrategy", REMOVED, of="FSDP2"))
@dataclass(frozen=True, kw_only=True, repr=False)
class FSDPStrategy(DataParallel):
    """Strategy that shards the parameters, gradients and optimizer states of one model over all processes.

    Args:
        sharding_strategy: `"FULL_SHARD"`, or `"SHARD_GRAD_OP"`, which keeps gathered parameters from the forward until
            the backward. `"HYBRID_SHARD"` and `"HYBRID_SHARD_ZERO2"` do the same within groups of ranks, and replicate
            the model over the groups. `"NO_SHARD"` only replicates the model. Values of torch's `ShardingStrategy` are
            accepted, too.
        device_mesh: (number of replicas, ranks per replica). Default: one replica per node for `"HYBRID_SHARD"` and
            `"HYBRID_SHARD_ZERO2"`, and one replica for `"FULL_SHARD"` and `"SHARD_GRAD_OP"`. `"NO_SHARD"` does not
            accept it.
        auto_wrap_policy: The modules that are units: classes or their names, a function of a module, or a policy of
            `torch.distributed.fsdp.wrap`. Default: the result of the task's `shard_units`.
        min_num_params: Alternative to `auto_wrap_policy`. Every module with at least this number of parameters is a
            unit. Parameters of nested units do not count.
        reshard_after_forward: True, False, or the number of ranks over which a unit is sharded between its forward and
            its backward. Default: None, which follows `sharding_strategy`.
        mixed_precision: Torch's policy for FSDP2 or FSDP1. Default: `"16-mixed"` gathers parameters in float16 and
            `"bf16-mixed"` in bfloat16. Both average gradients in float32.
        cpu_offload: Keep shards on the host, and step the optimizers there.
        activation_checkpointing: Modules whose activations are recomputed in backward. True: all units. A number n:
            every n-th unit. Classes, names or a function: modules, as in `auto_wrap_policy`. Default: False, no module.
        activation_checkpointing_policy: Lightning's name of `activation_checkpointing`.
        activation_checkpointing_save: Operators whose results are stored in recomputed units, such as `["aten.mm"]`, or
            torch's policy function `(context, operator, *args, **kwargs) -> CheckpointPolicy`.
        forward_prefetch: Number of units that are gathered before they are called. The model must call units in order.
        sync_each_batch: Average and shard gradients after every micro-batch, not only after the last one of a step.
            This needs more communication, but ranks do not store full gradients between micro-batches.
        meta_init: Run `TaskModule.configure_model` on the device `meta`, so that no rank holds the full model. The
            `reset_parameters` of each module initializes it, and ranks read only their shards of a checkpoint.
        cpu_ram_efficient_loading: Run `configure_model` on `meta` on all ranks except rank 0, which broadcasts its
            values one unit at a time.
        weights_after_stage: Ranks that have full weights on the host after a stage. `"main"`: only rank 0. `"all"`:
            every rank, which needs host memory for one copy per rank. `"none"`: no rank. Only checkpoints then contain
            the weights.
        state_dict_type: `"sharded"`: each rank writes its shards of a checkpoint. `"full"`: rank 0 gathers full tensors
            on its host and writes them.
        tp: Number of consecutive ranks that split layers (see `TensorParallelStrategy`). Each group of `tp` ranks sees
            different data.
        cp: Number of consecutive ranks that split the sequences of each batch. Attention sends keys and values around a
            ring. The ranks hold shards, too. See `TaskModule.split_sequences`.
        sp: Like `cp`, but attention exchanges heads, as in DeepSpeed Ulysses. `cp` or `sp` must be 1.
        tensor_parallel_plan: The layers to split. Default: the result of the task's `tensor_parallel_plan`.
        ep: Number of ranks over which the experts of a mixture-of-experts model are divided. The ranks see different
            data and exchange tokens. The number of ranks that shard a replica must be divisible by `ep`. Default: 1.
        timeout, hang_timeout, process_group_backend: See `DataParallel`.

    Raises:
        ConfigurationError: An argument is unknown or invalid, or two arguments exclude each other.
    """

    distributed_type: ClassVar[DistributedType | None] = DistributedType.FSDP
    capabilities = Capabilities(
        gradients="sharded",
        manual_optimization=False,
        lockstep_evaluation=True,
        full_weights=False,
        independent_steps=False,
        closures=False,
        inference_mode=False,  # torch 2.13 does not free weights that were gathered in inference mode
    )

    sharding_strategy: str | ShardingStrategy = "FULL_SHARD"
    device_mesh: tuple[int, int] | None = None
    auto_wrap_policy: WrapPolicy | None = None
    min_num_params: int | None = None
    reshard_after_forward: bool | int | None = None
    mixed_precision: MixedPrecisionPolicy | MixedPrecision | None = None
    cpu_offload: bool | CPUOffload | OffloadPolicy | None = False
    activation_checkpointing: bool | int | WrapPolicy | None = False
    activation_checkpointing_policy: WrapPolicy | None = None
    activation_checkpointing_save: SavePolicy | None = None
    forward_prefetch: int = 0
    sync_each_batch: bool = False
    meta_init: bool = False
    cpu_ram_efficient_loading: bool = False
    weights_after_stage: str = "main"
    state_dict_type: str = "sharded"
    tp: int = 1
    cp: int = 1
    sp: int = 1
    tensor_parallel_plan: GivenPlan | None = None
    ep: int = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        recomputed = recomputed_modules(self.activation_checkpointing, self.activation_checkpointing_policy)
        Recomputed(recomputed, self.activation_checkpointing_save)  # checks them
        self._set(
            sharding_strategy=sharding_strategy_name(self.sharding_strategy),
            mixed_precision=mixed_precision_policy(self.mixed_precision),
            cpu_offload=offload_flag(self.cpu_offload),
            activation_checkpointing=recomputed,
            activation_checkpointing_policy=None,  # another name of activation_checkpointing
            state_dict_type=state_dict_type_name(self.state_dict_type),
        )
        check_arguments(
            str(self.sharding_strategy),
            self.device_mesh,
            self.auto_wrap_policy,
            self.min_num_params,
            self.reshard_after_forward,
            self.forward_prefetch,
        )
        one_of("weights_after_stage", self.weights_after_stage, AFTER_STAGE)
        if self.meta_init and self.cpu_ram_efficient_loading:
            raise ConfigurationError(
                "meta_init=True builds the model without values on every rank, and cpu_ram_efficient_loading=True on "
                "all but rank 0. Remove one of them."
            )
        self._check_sizes()

    def _check_sizes(self) -> None:
        """Check `tp`, `cp`, `sp` and `ep`."""
        check_tp_size(self.tp)
        check_sequence_ranks(self.cp, self.sp)
        check_ep_size(self.ep, self.tp)

    @property
    def split_plan(self) -> GivenPlan | None:
        """The layers that tensor parallelism splits. None selects the result of the task's `tensor_parallel_plan`."""
        return self.tensor_parallel_plan

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **arguments: Any) -> Self:
        """Create the strategy from Hugging Face Accelerate's `fsdp_config` (see `read_fsdp_config`) and arguments."""
        return cls(**read_fsdp_config(config), **arguments)

    # Before a run

    def mesh_shape(self, settings: EngineSettings) -> MeshShape:
        """Return the mesh of a run.

        Raises:
            ConfigurationError: The size of the mesh differs from the number of processes.
        """
        return check_mesh(self.ep, self._shape(settings, self.tp))

    def _shape(self, settings: EngineSettings, tp: int) -> MeshShape:
        return mesh_shape(
            str(self.sharding_strategy),
            self.device_mesh,
            tp=tp,
            cp=self.cp * self.sp,
            num_nodes=settings.num_nodes,
            devices_per_node=len(settings.device_indices),
        )

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        can_split_converted = self.mesh_shape(settings).tp == 1 or settings.precision.splits_converted
        self.check_converts(settings, can_split_converted)
        if self.cp * self.sp > 1 and settings.compile_options is not None:
            raise ConfigurationError(
                f"compile=True is not supported with cp={self.cp}, sp={self.sp}: ranks communicate within attention. "
                "Remove compile."
            )
        if self.ep > 1 and self.cpu_offload:
            raise ConfigurationError(
                f"ep={self.ep} with cpu_offload=True: divided experts stay on the device. Remove one of them."
            )
        obstacle = self._obstacle_to_float8_gather()
        if settings.precision.fp8_all_gather and obstacle is not None:
            raise ConfigurationError(
                f"fp8_all_gather=True with {obstacle}: weights are not gathered in float8 with it. Remove one of them."
            )

    def _obstacle_to_float8_gather(self) -> str | None:
        """Return the argument with which `Float8Gather` does not work. None if all are fine."""
        if self.cpu_offload:
            return f"cpu_offload={self.cpu_offload!r}"
        if type(self.reshard_after_forward) is int:  # a number of ranks; not a bool
            return f"reshard_after_forward={self.reshard_after_forward!r}"
        return None

    def check_task(self, task: TaskModule, settings: EngineSettings) -> None:
        if overrides(task, "configure_model", TaskModule):
            return  # the layers do not exist yet
        check_can_be_sharded(task)
        units = find_units(task, self.auto_wrap_policy, self.min_num_params)
        if settings.compile_options is not None:
            check_compilable(units)
        shape = self.mesh_shape(settings)
        if self.sp > 1:
            check_heads(task, self.sp, shape.tp)
        if self.ep > 1:
            check_experts(task, self.ep, shape.dp_shard * shape.cp)
        if shape.tp > 1:
            check_plan(task, self.split_plan, shape.lengths)

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        shape = self.mesh_shape(settings)
        policy = fsdp_precision(settings.precision, mixed_precision_policy(self.mixed_precision))
        units: tuple[nn.Module, ...] = ()
        if task is not None:
            units = tuple(find_units(task, self.auto_wrap_policy, self.min_num_params))
        # The estimate of memory needs parameters that are divided by rows only and stay on the device.
        shards = None
        peak = None
        only_rows_are_divided = shape.tp == shape.pp == self.ep == 1
        if only_rows_are_divided and not self.cpu_offload:
            shards = shape.dp_shard * shape.cp
            frees_units = self.reshard_after_forward is None and self.sharding_strategy in RESHARDING
            peak = "fsdp" if frees_units else None
        return StrategyOutline(shape, units, shards, policy.param_dtype, policy.reduce_dtype, reduces=True, peak=peak)

    def engine(self, settings: EngineSettings) -> Engine:
        return FSDPEngine(self, settings)


class FSDPEngine(ParallelEngine):
    """Engine that shards models over data-parallel ranks, and splits layers over tensor-parallel ranks."""

    strategy: FSDPStrategy
    gradients: ShardedGradients
    mesh: DeviceMesh | None

    def __init__(self, strategy: FSDPStrategy, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self._building = MetaBuilding(everywhere=strategy.meta_init, others=strategy.cpu_ram_efficient_loading)
        self.gradients = ShardedGradients(self.device)
        # Full parameter of a user-written loop's model → its sharded parameter. A dict would compare tensors by value.
        self._replaced: Any = WeakIdKeyDictionary()

    def start(self, topology: Topology) -> None:
        super().start(topology)
        self.gradients = ShardedGradients(self.device)
        shape = self.strategy.mesh_shape(self.settings)
        self.mesh = shape.device_mesh(self.settings.device_type, shards=self._sharding() is not None)
        group = None  # the group of all ranks; unused with one data-parallel rank
        num_data_ranks = shape.dp_replicate * shape.dp_shard * shape.cp
        if 1 < num_data_ranks < shape.size:
            group = data_group(self.mesh)
        self.data_ranks = shape.data_ranks(self.processes, group)
        if shape.cp > 1:
            kind: Kind = "ring" if self.strategy.cp > 1 else "ulysses"
            self.sequences = SplitSequences(shape.sequence_group(), kind)

    # Model and optimizers

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        """Shard models, and let the optimizers step the shards. Collective.

        In a user-written loop with mixed precision, trained parameters in bfloat16 or float16 are first converted to
        float32.
        """
        self._check_before(models, optimizers)
        prepared: list[PreparedModel] = []
        if roots:  # of a Trainer
            # The full parameters are not stored in a list, so that each is freed once it is sharded.
            for model, root in zip(models, roots, strict=True):
                sharded = self._parallelize(model, [root], self._building)
                prepared.append(PreparedModel(sharded.training_call, attributes=model, evaluate=sharded.evaluate))
            return Prepared(prepared, self._over_shards(optimizers))

        for model in models:
            full_parameters = list(model.parameters())  # the optimizers of a user-written loop refer to them
            if self.precision.autocast_dtype is not None:
                widen(full_parameters)
            sharded = self._parallelize(model, [model], self._building)
            self._replaced.update(zip(full_parameters, model.parameters(), strict=True))
            prepared.append(PreparedModel(call=sharded, attributes=model))
        return Prepared(prepared, self._over_shards(optimizers))

    def _check_before(self, models: Sequence[nn.Module], optimizers: Optimizers) -> None:
        """Check what can be checked before a model is changed."""
        if not callable(optimizers):
            check_optimizers(optimizers or [], self.precision)
        for model in models:
            check_full(model)
            check_can_be_sharded(model)

    def _over_shards(self, optimizers: Optimizers) -> list[Optimizer]:
        """Return the optimizers, which step the shards. Create them if a function is passed."""
        created = create_optimizers(optimizers)
        for optimizer in created:
            self._refer_to_shards(optimizer)
        # Again after `_check_before`: optimizers of torchao need shards of equal size, which exist only now.
        check_optimizers(created, self.precision)
        return created

    def make_state(
        self, models: nn.Module, optimizers: Sequence[Optimizer], names: Mapping[torch.Tensor, str] | None = None
    ) -> FullState:
        if not self.gradients.models:  # `prepare` has not sharded a model
            return super().make_state(models, optimizers, names)
        return self._state_of(models, optimizers, names)

    def _state_of(
        self,
        module: nn.Module,
        optimizers: Sequence[Optimizer],
        names: Mapping[torch.Tensor, str] | None = None,
        make: Callable[..., ShardedState] = ShardedState,
    ) -> ShardedState:
        return make(
            module,
            optimizers,
            self.device,
            is_main=self.is_main,
            model=self.gradients.models[0],
            building=self._building,
            writes_shards=self.strategy.state_dict_type == "sharded" and self.processes.world_size > 1,
            names=names,
        )

    def _compile(self, module: Callable[..., Any]) -> Callable[..., Any]:
        return module  # `parallelize` compiles each unit before it shards it

    def _build(self, task: TaskModule) -> None:
        with self._building.context(task, self.processes):
            super()._build(task)

    def _parallelize(
        self, model: nn.Module, roots: Sequence[nn.Module], building: MetaBuilding | None
    ) -> ParallelModel:
        """Shard a model, or the parts of it within `roots`. Collective.

        Args:
            building: Initializes `roots`. None if `roots` are already initialized and have activation checkpointing.
        """
        check_can_be_sharded(model)
        assert self.mesh is not None  # made in `start`
        strategy = self.strategy
        modules_of_roots = {module for root in roots for module in root.modules()}
        units = find_units(model, strategy.auto_wrap_policy, strategy.min_num_params)
        units = [unit for unit in units if unit in modules_of_roots]
        warn_of_large_rest(model, units, strategy.mesh_shape(self.settings).dp_shard)
        recomputed = Recomputed(False, None) if building is None else self._recomputed()
        sharding = self._sharding()
        experts = None
        if strategy.ep > 1 and sharding is not None:
            experts = DividedExperts(model, strategy.ep, self.mesh, self.data_ranks, sharding.parameter_dtype)
        parallel_model = parallelize(
            model,
            roots,
            units,
            self.mesh,
            plan=strategy.split_plan,
            recomputed=recomputed,
            compile_options=self.settings.compile_options,
            building=building,
            sharding=sharding,
            experts=experts,
            ranks=self.data_ranks,
            device=self.device,
            context=lambda: self.precision.forward_context(self.device.type),
        )
        if self.sequences is not None:
            parallel_model.until_unwrapped(self.sequences.models(model))
        self.gradients.models.append(parallel_model)
        return parallel_model

    def _recomputed(self) -> Recomputed:
        return Recomputed(self.strategy.activation_checkpointing or False, self.strategy.activation_checkpointing_save)

    def _sharding(self) -> Sharding | None:
        """Return the options of `fully_shard`. None in an engine that only splits layers."""
        strategy = self.strategy
        reshard = strategy.reshard_after_forward
        if reshard is None:
            reshard = strategy.sharding_strategy in RESHARDING
        return Sharding(
            reshard=reshard,
            reshard_root=strategy.reshard_after_forward,
            precision=self.precision,
            mixed_precision=mixed_precision_policy(strategy.mixed_precision),
            cpu_offload=offload_flag(strategy.cpu_offload),
            prefetch=strategy.forward_prefetch,
        )

    # The step

    def attach(self, trainer: Run, hooks: HookTable, sink: MetricBuffer, *, counts_items: bool = True) -> None:
        self._building.check(self.task)
        super().attach(trainer, hooks, sink, counts_items=counts_items)

    def make_step(self, parts: StepParts) -> Step:
        parts = self._over_sequences(parts)
        # Without `synchronize`, every backward reduces gradients.
        if not self.strategy.sync_each_batch:
            parts = replace(parts, synchronize=self.gradients.models[0].synchronize)
        return super().make_step(parts)

    def _over_sequences(self, parts: StepParts) -> StepParts:
        if self.sequences is None or parts.run.stage == "predict":  # predictions are for full sequences
            return parts
        return self.sequences.step_parts(parts)

    # User-written loops

    def compile_model(self, model: nn.Module, prepared: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(prepared, ParallelModel):
            return prepared  # its units are compiled
        return super().compile_model(model, prepared)

    def _refer_to_shards(self, optimizer: Optimizer) -> None:
        """Let an optimizer and its state refer to the shards of the parameters that it was created with."""
        for group in optimizer.param_groups:
            group["params"] = [self._replaced.get(p, p) for p in group["params"]]
        for old in [p for p in optimizer.state if p in self._replaced]:
            new = self._replaced[old]
            state = optimizer.state.pop(old)
            optimizer.state[new] = {key: shard_like(value, new) for key, value in state.items()}
        disable_foreach([optimizer])

    @contextmanager
    def no_sync(self, prepared: Callable[..., Any]) -> Iterator[None]:
        if not isinstance(prepared, ParallelModel):
            yield
            return
        prepared.synchronize(False)
        try:
            yield
        finally:
            prepared.synchronize(True)

    @contextmanager
    def sync_next_backward(self, prepared: Callable[..., Any]) -> Iterator[None]:
        if isinstance(prepared, ParallelModel):
            prepared.synchronize(True)
        yield

    # Evaluation, saves and the end

    def begin_evaluation(self) -> None:
        # Buffers such as running means differ between ranks, which see different data, so rank 0's are sent to all.
        for buffer in self.task.buffers():
            dist.broadcast(local_shard(buffer), src=0)

    def begin_save(self) -> None:
        for model in self.gradients.models:
            if model.usage is not None:
                model.usage.check()

    def unshard(self) -> None:
        self.begin_save()
        self._unwrap()
        unshard_task(
            self.task,
            self.optimizers,
            self.device,
            weights=self.strategy.weights_after_stage,
            is_main=self.processes.rank == 0,
        )

    def _unwrap(self) -> None:
        """Remove everything except the shards from the task. Not collective."""
        self._drop_step()
        for model in self.gradients.models:
            model.unwrap()
        self._training_call = None
        self._eval_call = None

    def close(self) -> None:
        self._unwrap()
        # Every reference to the mesh and its process groups must be gone before `super().close()` destroys the groups.
        mesh = self.mesh
        self.mesh = None
        self.gradients.models.clear()
        if mesh is not None:
            self.data_ranks = replace(self.data_ranks, group=None)
            forget_groups(mesh)
            del mesh
            gc.collect()  # reference cycles around the shards must not hold the last reference to a process group
        super().close()
