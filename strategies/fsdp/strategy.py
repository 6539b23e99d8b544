"""Fully sharded data parallelism with torch's `fully_shard` (FSDP2): every rank keeps a piece of each tensor.

Parameters, gradients and the optimizers' states lie in pieces on the ranks. A unit of the model (see
`TaskModule.shard_units`) is gathered when it is called and freed again; its gradients are averaged over the ranks and
cut while backward runs. Source: Zhao et al., "PyTorch FSDP" (2023); Rajbhandari et al., "ZeRO" (2020).
"""

from __future__ import annotations

import datetime
import gc
import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffload,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.optim import Optimizer

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.duration import Duration
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.core.hidden_names import plain_name
from trainwright.core.run import Run
from trainwright.core.signatures import overrides
from trainwright.core.state import Group
from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.strategies.capabilities import Capabilities
from trainwright.strategies.data_parallel import DataParallel
from trainwright.strategies.data_ranks import metrics_over
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.fsdp.build import MetaBuilding, materialize
from trainwright.strategies.fsdp.clip import clip_pieces
from trainwright.strategies.fsdp.ending import check_not_given_up, end_pieces
from trainwright.strategies.fsdp.mesh import AXES, data_axes, forget_groups, make_mesh, mesh_shape
from trainwright.strategies.fsdp.optimizers import check_optimizers, forget_one_by_one, step_one_by_one
from trainwright.strategies.fsdp.options import (
    AFTER_STAGE,
    RESHARDING,
    check_arguments,
    mixed_precision_policy,
    offload_flag,
    one_of,
    read_fsdp_config,
    recomputed_modules,
    refuse_removed,
    sharding_strategy_name,
)
from trainwright.strategies.fsdp.outside import OutsideSteps
from trainwright.strategies.fsdp.recompute import Recomputed, SavePolicy
from trainwright.strategies.fsdp.scaler import ShardScaler
from trainwright.strategies.fsdp.traces import ShardTraces, forget_sums
from trainwright.strategies.fsdp.usage import Usage
from trainwright.strategies.gradients import GradientClip
from trainwright.strategies.saves_pieces import state_dict_type_name
from trainwright.strategies.shards import counts_here, local_piece, pieces_of, whole_output
from trainwright.strategies.step_module import StepModule
from trainwright.strategies.strategy import MakeOptimizers
from trainwright.strategies.tensor_parallel.check import check_plan
from trainwright.strategies.tensor_parallel.plan import Plan, SplitLayers
from trainwright.strategies.tensor_parallel.ready import find_plan
from trainwright.strategies.tensor_parallel.sizes import check_tp_size
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
    _usage: Usage | None = None  # where ranks see different data

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
        self._layers: SplitLayers | None = None
        self._undo = ExitStack()
        self._mesh: DeviceMesh | None = None
        self._root: Any = None
        self._units: list[Any] = []
        self._traces: ShardTraces | None = None
        self._recomputed = Recomputed(self.activation_checkpointing, activation_checkpointing_save)
        self._syncs, self._sums = True, False

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

    @property
    def dp_rank(self) -> int:
        return self.processes.rank // self.tp

    @property
    def data_ranks(self) -> Sequence[int]:
        return range(0, self.processes.world_size, self.tp)

    def _data_group(self) -> Any:
        if self.tp == 1:
            return None
        assert self._mesh is not None  # made when the task was prepared
        axes = data_axes(self._mesh)
        return axes.get_group() if axes.ndim == 1 else axes._flatten("dp").get_group()

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
        check_optimizers(task, optimizers, self.precision)
        step_one_by_one(optimizers)
        if self._scaler is not None:
            self._scaler = ShardScaler(self.device.type)
        self._step, self._eval_step = self._root, self._evaluate
        if self._layers is not None:
            self._undo.enter_context(metrics_over(task, self._data_group() if self.dp_size > 1 else None))
            if self._layers.splits_loss:
                self._undo.enter_context(loss_parallel())
                self._step = self._run_whole
        return optimizers

    def _compile(self, module: nn.Module) -> Callable[..., Any]:
        return module  # units are compiled one by one, before they are cut

    def _build(self, task: TaskModule) -> None:
        with self._building.context(task, self.processes):
            super()._build(task)

    def _place(self, task: TaskModule) -> None:
        """Cut the model, one unit after the other, with rank 0's values. Collective.

        No device ever holds more than its pieces and one whole unit.
        """
        check_can_be_cut(task)
        self._mesh = mesh = make_mesh(self.device_type, *self._mesh_shape(), self.tp)
        if self.tp > 1:
            self._layers = SplitLayers(task, find_plan(task, self.tensor_parallel_plan, mesh), mesh["tp"])
        units = find_units(task, self.auto_wrap_policy, self.min_num_params)
        warn_of_large_rest(task, units, self._mesh_shape()[1])
        units = self._recomputed.wrap(task, units)
        if self.compile_options is not None:
            self._compile_units(units)
        root = StepModule(task)
        self._root, self._units = root, [*units]
        built = self._building.names_to_reset(task, self.processes)
        self._traces = ShardTraces(root)
        for part in (*units, root):
            materialize(task, part, built, self.device)
            if self._layers is not None:
                self._layers.split(part)
            self._shard(part)
        self._traces.note()
        self._counted = {id(p): counts_here(p, mesh) for p in task.parameters()}
        self._usage = Usage(task, self.processes) if self.dp_size > 1 else None
        if isinstance(root, FSDPModule):
            outside = OutsideSteps(root, units, lambda: self.precision.forward_context(self.device.type))
            self._undo.enter_context(outside.served(task))

    def _reshard_units(self) -> bool | int:
        if self.reshard_after_forward is not None:
            return self.reshard_after_forward
        return self.sharding_strategy in RESHARDING

    def _shard(self, module: nn.Module) -> None:
        """Cut what is left whole in a unit, or in the root, over the data-parallel ranks. Collective."""
        is_root = module is self._root
        reshard = None if is_root and self.reshard_after_forward is None else self._reshard_units()
        policy = self.mixed_precision
        if policy is None:
            # Autocast decides about inputs: a step's targets keep their precision. Units get what autocast made.
            policy = MixedPrecisionPolicy(
                param_dtype=self.precision.autocast_dtype,
                reduce_dtype=None if self.precision.autocast_dtype is None else torch.float32,
                cast_forward_inputs=not is_root,
            )
        offload: OffloadPolicy = OffloadPolicy()
        if self.cpu_offload:  # torch 2.13 pins memory only where an accelerator can read it
            offload = CPUOffloadPolicy(pin_memory=self.device.type != "cpu")
        assert self._mesh is not None  # made before
        fully_shard(
            module,
            mesh=data_axes(self._mesh),
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload,
        )
        if is_root:
            for i, sharded in enumerate(self._units):
                sharded.set_modules_to_forward_prefetch(self._units[i + 1 : i + 1 + self.forward_prefetch])

    def _compile_units(self, units: list[nn.Module]) -> None:
        check_compilable(units)
        for unit in units:
            unit.compile(**(self.compile_options or {}))

    def attach(self, run: Run, hooks: HookTable, sink: Any, *, counts_items: bool = True) -> None:
        self._building.check(self.task)
        super().attach(run, hooks, sink, counts_items=counts_items)

    # The step

    def forward_backward(self, group: Group) -> torch.Tensor | None:
        total = super().forward_backward(group)
        if self._usage is not None:
            self._usage.note()
        return total

    def _synchronizing(self, last: bool) -> AbstractContextManager[Any]:
        if self.sync_each_batch:
            return nullcontext()
        if last is not self._syncs:
            self._syncs = last
            self._root.set_requires_gradient_sync(last)
            self._root.set_is_last_backward(last)
        return self._ending_sum() if last else nullcontext()

    @contextmanager
    def _ending_sum(self) -> Iterator[None]:
        self._sums = True
        yield
        self._sums = False

    def discard_gradients(self) -> None:
        super().discard_gradients()
        if self._sums or not self._syncs:  # a group was left before its last backward: it has a sum that is still whole
            self._root.reset_iter_state()
            forget_sums((self._root, *self._units))
            self._synchronizing(True)
            self._sums = False

    @torch.no_grad()
    def clip_parameters(self, parameters: Iterable[torch.Tensor], clip: GradientClip) -> torch.Tensor | None:
        found = [(local_piece(p.grad), self._counted[id(p)]) for p in parameters if p.grad is not None]
        return clip_pieces(found, clip, self.device)

    def _gradient_values(self, grad: torch.Tensor) -> torch.Tensor:
        return local_piece(grad)

    # Evaluation

    def begin_evaluation(self) -> None:
        for buffer in self.task.buffers():
            dist.broadcast(local_piece(buffer), src=0)

    def _evaluate(self, name: str, *args: Any) -> Any:
        output = self._run_whole(name, *args)
        self._free_gathered()
        return output

    def _run_whole(self, name: str, *args: Any) -> Any:
        """Run a step, and make whole what its output has in pieces."""
        output = self._root(name, *args)
        return output if self._layers is None else map_tensors(whole_output, output)

    def _free_gathered(self) -> None:
        """Free what a forward has gathered: no backward will, and whoever looks now shall see the true parameters."""
        for module in (self._root, *self._units):
            module.reshard()

    # State

    @property
    def saves_pieces(self) -> bool:
        return self.state_dict_type == "sharded" and self._root is not None and self.processes.world_size > 1

    def in_pieces(self, state: Any) -> Any:
        assert self._mesh is not None  # made when the task was prepared
        return pieces_of(state, self._mesh)

    def _to_save(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.saves_pieces else self.whole_tensor(tensor)

    def model_state(self) -> dict[str, Any]:
        check_not_given_up(self.task)
        known: dict[int, Any] = {}  # tied weights are one tensor, also in a checkpoint
        found = {}
        for name, value in self.task.state_dict(keep_vars=True).items():
            if isinstance(value, torch.Tensor):
                if id(value) not in known:
                    known[id(value)] = self._to_save(value).detach()
                value = known[id(value)]
            found[name] = value
        return found

    def load_model_state(self, state: Mapping[str, Any], strict: bool = True) -> tuple[list[str], list[str]]:
        own = {plain_name(name): value for name, value in self.task.state_dict().items()}
        missing, left_over = super().load_model_state(
            {name: self.cut_like(value, own.get(plain_name(name))) for name, value in state.items()}, strict=strict
        )
        self._building.note_missing(missing)
        return missing, left_over

    def optimizer_states(self) -> list[dict[str, Any]]:
        states = super().optimizer_states()
        for optimizer, state in zip(self.optimizers, states, strict=True):
            forget_one_by_one(optimizer, state)
        return [map_tensors(self._to_save, state) for state in states]

    def load_optimizer_state(self, optimizer: Optimizer, state: Mapping[str, Any]) -> None:
        own = {plain_name(name): parameter for parameter, name in self._parameter_names().items()}
        pieces = {}
        for name, values in state.get("state", {}).items():
            pieces[name] = {key: self.cut_like(value, own.get(plain_name(name))) for key, value in values.items()}
            for key, value in pieces[name].items():
                cut = isinstance(own.get(plain_name(name)), DTensor)
                if cut and isinstance(value, torch.Tensor) and value.dim() and not isinstance(value, DTensor):
                    raise CheckpointError(
                        f"{type(optimizer).__name__} keeps {key!r} of shape {tuple(value.shape)} for {name!r}, which "
                        "has another shape, so that it cannot be cut into pieces. Use strategy='ddp', or start the "
                        "optimizer anew with allow_missing=['optimizer']."
                    )
        super().load_optimizer_state(optimizer, {**state, "state": pieces})
        step_one_by_one([optimizer])

    # The end

    def begin_save(self) -> None:
        if self._usage is not None:
            self._usage.check()

    def make_whole(self) -> None:
        self.begin_save()
        self._take_apart()
        weights, is_main = self.weights_after_stage, self.is_main
        end_pieces(self.task, self.optimizers, self.device, weights=weights, is_main=is_main)

    def _take_apart(self) -> None:
        """Take everything but the pieces themselves off the task. Not collective."""
        traces, self._traces = self._traces, None
        if traces is not None:
            for module in (self._root, *self._units):
                if isinstance(module, FSDPModule):
                    module.reshard()
                if self.compile_options is not None:
                    vars(module).pop("_compiled_call_impl", None)
            traces.remove()
        self._undo.close()
        layers, self._layers = self._layers, None
        if layers is not None:
            layers.undo()
        self._recomputed.unwrap()
        self._root, self._units, self._usage = None, [], None
        self._step = self._eval_step = None

    def teardown(self) -> None:
        self._take_apart()
        mesh, self._mesh = self._mesh, None
        if mesh is not None:
            forget_groups(mesh)
            del mesh
            gc.collect()  # what held the pieces are reference cycles, which must not be the last to hold a group
        super().teardown()
