"""Fully sharded data parallelism with torch's `fully_shard` (FSDP2): every rank keeps a piece of each tensor.

Parameters, gradients and the optimizers' states lie in pieces on the ranks. A unit of the model (see
`TaskModule.shard_units`) is gathered when it is called and freed again; its gradients are averaged over the ranks and
cut while backward runs. Source: Zhao et al., "PyTorch FSDP" (2023); Rajbhandari et al., "ZeRO" (2020).
"""

from __future__ import annotations

import datetime
import gc
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, Self

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
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.duration import Duration
from trainwright.core.errors import ConfigurationError
from trainwright.core.process import Topology
from trainwright.core.run import Run
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.data_parallel import DataParallel
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.build import MetaBuilding
from trainwright.strategies.fsdp.layers.check import check_plan
from trainwright.strategies.fsdp.layers.plan import Plan, check_tp_size
from trainwright.strategies.fsdp.make_whole import end_pieces
from trainwright.strategies.fsdp.mesh import AXES, data_group, forget_groups, make_mesh, mesh_shape
from trainwright.strategies.fsdp.options import (
    AFTER_STAGE,
    RESHARDING,
    check_arguments,
    check_optimizers,
    mixed_precision_policy,
    offload_flag,
    one_of,
    read_fsdp_config,
    recomputed_modules,
    refuse_removed,
    sharding_strategy_name,
)
from trainwright.strategies.fsdp.parallelize import ParallelModel, Sharding, parallelize
from trainwright.strategies.fsdp.recompute import Recomputed, SavePolicy
from trainwright.strategies.fsdp.sharded_gradients import ShardScaler, clip_pieces
from trainwright.strategies.fsdp.state import ShardedState, step_one_by_one
from trainwright.strategies.fsdp.step import ShardedStep
from trainwright.strategies.shards import local_piece
from trainwright.strategies.state import state_dict_type_name
from trainwright.strategies.steps.gradients import GradientClip
from trainwright.strategies.steps.step import Step, StepParts
from trainwright.strategies.strategy import MakeOptimizers
from trainwright.strategies.units import (
    WrapPolicy,
    check_can_be_cut,
    check_compilable,
    find_units,
    warn_of_large_rest,
)


class FSDPStrategy(DataParallel):
    """Trains one model that lies in pieces on all processes.

    Args:
        sharding_strategy: `"FULL_SHARD"`; `"SHARD_GRAD_OP"`: what a forward has gathered stays until its backward;
            `"HYBRID_SHARD"`: cut within groups of ranks, replicated over them; `"HYBRID_SHARD_ZERO2"`: both;
            `"NO_SHARD"`: replicated. Also torch's `ShardingStrategy`.
        device_mesh: (replicas, ranks that share one model); by default a replica on each node for `"HYBRID_SHARD"`,
            and one over all ranks for `"FULL_SHARD"` and `"SHARD_GRAD_OP"`.
        auto_wrap_policy: which modules are units: classes or their names, a function of a module, or a policy of
            `torch.distributed.fsdp.wrap`; what the task's `shard_units` returns unless told.
        min_num_params: instead: every part with so many parameters that lie in no unit within it.
        reshard_after_forward: True, False, or into how many pieces a unit is cut between its forward and its backward;
            None: as `sharding_strategy` says.
        mixed_precision: torch's policy, or FSDP1's; with the precisions `"16-mixed"` and `"bf16-mixed"`, by default,
            parameters are gathered in that dtype and gradients averaged in float32.
        cpu_offload: pieces, and with them the optimizers' steps and states, stay on the host.
        activation_checkpointing: units whose activations are computed anew in backward: True for all of them, a number
            n for every n-th, or classes, names or a function, as in `auto_wrap_policy`.
        activation_checkpointing_policy: the same under Lightning's name.
        activation_checkpointing_save: operators whose results are kept within them, such as `["aten.mm"]`, or torch's
            policy function `(context, operator, *args, **kwargs) -> CheckpointPolicy`.
        forward_prefetch: how many of the next units are gathered ahead, for models that call them in their order.
        sync_each_batch: gradients are averaged and cut after every micro-batch, not after a step's last one alone: more
            is communicated, and no rank keeps whole gradients in between.
        meta_init: `TaskModule.configure_model` runs on the device `meta`, so that no rank holds the whole model; each
            module's `reset_parameters` says how it begins, and a checkpoint is read piece by piece.
        cpu_ram_efficient_loading: it runs there on all ranks but rank 0, whose values everybody gets unit by unit.
        weights_after_stage: which ranks have whole weights on their hosts when a stage is over: `"all"`; `"main"`: rank
            0 alone; `"none"`: the checkpoints alone have them.
        state_dict_type: `"sharded"`: each rank writes its pieces of a checkpoint; `"full"`: rank 0 gathers the whole on
            its host and writes it.
        tp: over how many ranks, next to each other, layers are split (see `TensorParallelStrategy`); the others see
            different data.
        tensor_parallel_plan: which layers; what the task's `tensor_parallel_plan` returns unless told.
        timeout, hang_timeout, process_group_backend: see `DDPStrategy`.
        removed: none; FSDP1's further options raise an error that says what has become of them.

    Raises:
        ConfigurationError: a value or an argument that is unknown, or two that exclude each other.
    """

    capabilities = Capabilities(
        gradients="sharded",
        manual_optimization=False,
        lockstep_evaluation=True,
        whole_weights=False,
        lone_steps=False,
        closures=False,
        inference_mode=False,  # torch 2.13 keeps the memory of weights that were gathered in it
    )

    def __init__(
        self,
        *,
        sharding_strategy: str | ShardingStrategy = "FULL_SHARD",
        device_mesh: tuple[int, int] | None = None,
        auto_wrap_policy: WrapPolicy | None = None,
        min_num_params: int | None = None,
        reshard_after_forward: bool | int | None = None,
        mixed_precision: MixedPrecisionPolicy | MixedPrecision | None = None,
        cpu_offload: bool | CPUOffload | OffloadPolicy | None = False,
        activation_checkpointing: bool | int | WrapPolicy | None = False,
        activation_checkpointing_policy: WrapPolicy | None = None,
        activation_checkpointing_save: SavePolicy | None = None,
        forward_prefetch: int = 0,
        sync_each_batch: bool = False,
        meta_init: bool = False,
        cpu_ram_efficient_loading: bool = False,
        weights_after_stage: str = "all",
        state_dict_type: str = "sharded",
        tp: int = 1,
        tensor_parallel_plan: Plan | None = None,
        timeout: float | datetime.timedelta | Duration | str | None = None,
        hang_timeout: float | datetime.timedelta | Duration | str | None = "auto",
        process_group_backend: str | None = None,
        **removed: Any,
    ) -> None:
        super().__init__(timeout=timeout, hang_timeout=hang_timeout, process_group_backend=process_group_backend)
        arguments = tuple(name for name in inspect.signature(FSDPStrategy).parameters if name != "removed")
        refuse_removed(removed, arguments)
        self.sharding_strategy = sharding_strategy_name(sharding_strategy)
        check_arguments(
            self.sharding_strategy,
            device_mesh,
            auto_wrap_policy,
            min_num_params,
            reshard_after_forward,
            forward_prefetch,
        )
        self.device_mesh = device_mesh
        self.auto_wrap_policy = auto_wrap_policy
        self.min_num_params = min_num_params
        self.reshard_after_forward = reshard_after_forward
        self.mixed_precision = mixed_precision_policy(mixed_precision)
        self.cpu_offload = offload_flag(cpu_offload)
        self.activation_checkpointing = recomputed_modules(activation_checkpointing, activation_checkpointing_policy)
        self.forward_prefetch = forward_prefetch
        self.sync_each_batch = sync_each_batch
        self.weights_after_stage = one_of("weights_after_stage", weights_after_stage, AFTER_STAGE)
        self._building = MetaBuilding(everywhere=meta_init, others=cpu_ram_efficient_loading)
        self.state_dict_type = state_dict_type_name(state_dict_type)
        self.tp = check_tp_size(tp)
        self.tensor_parallel_plan = tensor_parallel_plan
        self._recomputed = Recomputed(self.activation_checkpointing, activation_checkpointing_save)
        self._mesh: DeviceMesh | None = None
        self._model: ParallelModel | None = None

    @classmethod
    def from_config(cls, config: Mapping[str, Any], **arguments: Any) -> Self:
        """Make the strategy from Hugging Face Accelerate's `fsdp_config` and from further arguments of its own.

        Raises:
            ConfigurationError: see `read_fsdp_config`.
        """
        return cls(**read_fsdp_config(config), **arguments)

    def configure(self, settings: EngineSettings) -> None:
        super().configure(settings)
        self._mesh_shape()

    def _mesh_shape(self) -> tuple[int, int]:
        return mesh_shape(
            self.sharding_strategy,
            self.device_mesh,
            tp=self.tp,
            num_nodes=self.num_nodes,
            devices_per_node=len(self.device_indices),
        )

    def setup(self, topology: Topology) -> None:
        super().setup(topology)
        self._mesh = mesh = make_mesh(self.device_type, *self._mesh_shape(), self.tp)
        if self.tp > 1:
            group = data_group(mesh) if self.processes.world_size > self.tp else None
            self.data_ranks = DataRanks.of(self.processes, per_batch=self.tp, group=group)

    # Model and optimizers

    def check_task(self, task: TaskModule) -> None:
        if overrides(task, "configure_model", TaskModule):
            return  # what it builds is not there yet
        check_can_be_cut(task)
        units = find_units(task, self.auto_wrap_policy, self.min_num_params)
        if self.compile_options is not None:
            check_compilable(units)
        if self.tp > 1:
            check_plan(task, self.tensor_parallel_plan, dict(zip(AXES, (*self._mesh_shape(), self.tp), strict=True)))

    def prepare(self, task: TaskModule, make_optimizers: MakeOptimizers | None) -> list[Optimizer]:
        if any(isinstance(parameter, DTensor) for parameter in task.parameters()):
            raise ConfigurationError(
                f"{type(task).__name__}'s weights are pieces of what a run had that failed. Build the task anew, and "
                "pass ckpt_path to go on."
            )
        optimizers = super().prepare(task, make_optimizers)
        check_optimizers(optimizers, self.precision)
        step_one_by_one(optimizers)
        if self.scaler is not None:
            self.scaler = ShardScaler(self.device.type)
        model = self._model
        assert model is not None  # made in `_place`
        self._training_call, self._eval_call = model.training_call, model.evaluate
        self.state = ShardedState(
            task,
            optimizers,
            self.device,
            is_main=self.is_main,
            model=model,
            building=self._building,
            writes_pieces=self.state_dict_type == "sharded" and self.processes.world_size > 1,
        )
        return optimizers

    def _compile(self, module: nn.Module) -> Callable[..., Any]:
        return module  # units are compiled one by one, before they are cut

    def _build(self, task: TaskModule) -> None:
        with self._building.context(task, self.processes):
            super()._build(task)

    def _place(self, task: TaskModule) -> None:
        check_can_be_cut(task)
        assert self._mesh is not None  # made in `setup`
        units = find_units(task, self.auto_wrap_policy, self.min_num_params)
        warn_of_large_rest(task, units, self._mesh_shape()[1])
        self._model = parallelize(
            task,
            units,
            self._mesh,
            plan=self.tensor_parallel_plan,
            recomputed=self._recomputed,
            compile_options=self.compile_options,
            building=self._building,
            sharding=self._sharding(),
            ranks=self.data_ranks,
            device=self.device,
            context=lambda: self.precision.forward_context(self.device.type),
        )

    def _sharding(self) -> Sharding | None:
        told = self.reshard_after_forward
        return Sharding(
            reshard=self.sharding_strategy in RESHARDING if told is None else told,
            reshard_root=told,
            precision=self.precision,
            mixed_precision=self.mixed_precision,
            cpu_offload=self.cpu_offload,
            prefetch=self.forward_prefetch,
        )

    # The step

    def attach(self, run: Run, hooks: HookTable, sink: MetricBuffer, *, counts_items: bool = True) -> None:
        self._building.check(self.task)
        super().attach(run, hooks, sink, counts_items=counts_items)

    def make_step(self, parts: StepParts) -> Step:
        assert self._model is not None  # made in `prepare`
        if not self.sync_each_batch:
            parts = replace(parts, synchronize=self._model.synchronize)
        return ShardedStep(parts, self._model)

    @torch.no_grad()
    def clip_parameters(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        assert self._model is not None  # made in `prepare`
        found = [(local_piece(p.grad), counts) for p, counts in self._model.counted(parameters) if p.grad is not None]
        return clip_pieces(found, clip, self.device)

    # Evaluation, saves and the end

    def begin_evaluation(self) -> None:
        for buffer in self.task.buffers():
            dist.broadcast(local_piece(buffer), src=0)

    def begin_save(self) -> None:
        if self._model is not None and self._model.usage is not None:
            self._model.usage.check()

    def make_whole(self) -> None:
        self.begin_save()
        self._take_apart()
        weights, is_main = self.weights_after_stage, self.is_main
        end_pieces(self.task, self.optimizers, self.device, weights=weights, is_main=is_main)

    def _take_apart(self) -> None:
        """Take everything but the pieces themselves off the task. Not collective."""
        self._drop_step()
        if self._model is not None:
            self._model.take_apart()
        self._training_call = self._eval_call = None

    def teardown(self) -> None:
        self._take_apart()
        mesh, self._mesh, self._model = self._mesh, None, None
        if mesh is not None:
            self.data_ranks = replace(self.data_ranks, group=None)
            forget_groups(mesh)
            del mesh
            gc.collect()  # what held the pieces are reference cycles, which must not be the last to hold a group
        super().teardown()
