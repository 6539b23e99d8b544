"""Data parallelism: every process has a full replica of the task, and gradients are averaged while backward runs."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Join, Joinable
from torch.nn.parallel import DistributedDataParallel

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.core.names.known_arguments import known_options
from trainwright.core.task import TaskModule
from trainwright.strategies.capabilities import OF_LIGHTNING, refuse_removed
from trainwright.strategies.ddp.comm_hooks import (
    CommHook,
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    Hook,
)
from trainwright.strategies.ddp.replicas import (
    any_trained,
    broadcast_from_main,
    check_can_be_alone,
    flat_gradients,
    frozen_parameters,
    unused_parameters,
)
from trainwright.strategies.engine import Engine, Models, Optimizers, Prepared, PreparedModel, TrainingPlan
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.steps.binding import StepModule
from trainwright.strategies.steps.manual_step import ManualStep
from trainwright.strategies.steps.step import AutomaticStep, Step, StepParts
from trainwright.strategies.strategy import DataParallel, ParallelEngine, StrategyOutline

_REMOVED = {
    **OF_LIGHTNING,
    "start_method": "the Trainer starts processes in one way, which works in scripts and in notebooks",
    "model_averaging_period": "LocalSGDStrategy(local_sgd_steps=…) averages the replicas every so many steps",
    "init_sync": "rank 0's weights always go to all ranks",
    "dim": "the data loader shards batches over ranks",
    "check_reduction": "torch checks every reduction itself",
    "process_group": "all processes of the run take part",
    "device_mesh": "all processes of the run take part; FSDPStrategy(device_mesh=…) has groups",
    "mixed_precision": "use Trainer(precision=…)",
}


@known_options(refuse_removed("DDPStrategy", _REMOVED))
@dataclass(frozen=True, kw_only=True, repr=False)
class DDPStrategy(DataParallel):
    """Strategy that trains one replica per process with torch's DistributedDataParallel.

    Args:
        find_unused_parameters: Search for the parameters that a step does not use, in every step. Default: False.
        static_graph: Every step uses the same parameters in the same order. Default: False.
        bucket_cap_mb: Size of the gradient buckets in MiB. Default: None, torch's default.
        gradient_as_bucket_view: Gradients are views of the buckets, which saves the memory of a copy. Default: True.
        broadcast_buffers: Copy rank 0's buffers to the other ranks before every training forward. Default: True.
        ddp_comm_hook, ddp_comm_wrapper, ddp_comm_state: `hook`, `wrapper` and `state` of the `CommHook`.
        sync_each_batch: Average gradients after every micro-batch of a step, not only after the last. Default: False.
        timeout, hang_timeout, process_group_backend: See `DataParallel`.
        sync_batchnorm: Convert BatchNorm layers to SyncBatchNorm (not on the CPU). Default: False.

    Raises:
        ConfigurationError: A value, an option or a communication hook is unknown.
    """

    find_unused_parameters: bool = False
    static_graph: bool = False
    bucket_cap_mb: float | None = None
    gradient_as_bucket_view: bool = True
    broadcast_buffers: bool = True
    ddp_comm_hook: Hook | DDPCommunicationHookType | str | None = None
    ddp_comm_wrapper: Callable[[Hook], Hook] | DDPCommunicationHookType | str | None = None
    ddp_comm_state: Any = None
    sync_each_batch: bool = False
    sync_batchnorm: bool = False

    comm_hook: CommHook = field(init=False, compare=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._set(comm_hook=CommHook(self.ddp_comm_hook, self.ddp_comm_wrapper, self.ddp_comm_state))

    @property
    def ddp_options(self) -> dict[str, Any]:
        """Arguments of DistributedDataParallel."""
        options: dict[str, Any] = {
            "find_unused_parameters": self.find_unused_parameters,
            "static_graph": self.static_graph,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
        }
        if not self.broadcast_buffers:  # torch 2.13 has deprecated it, and warns if it is passed
            options["broadcast_buffers"] = False
        if self.bucket_cap_mb is not None:
            options["bucket_cap_mb"] = self.bucket_cap_mb
        return options

    @classmethod
    def from_kwargs(cls, kwargs: DistributedDataParallelKwargs, **arguments: Any) -> Self:
        """Create the strategy from Hugging Face Accelerate's options and further arguments.

        Raises:
            ConfigurationError: See `DistributedDataParallelKwargs.to_arguments` and `CommHook`.
        """
        return cls(**kwargs.to_arguments(), **arguments)

    def check(self, settings: EngineSettings) -> None:
        super().check(settings)
        if self.sync_batchnorm and settings.device_type == "cpu":
            raise ConfigurationError(
                "sync_batchnorm=True, but torch's SyncBatchNorm does not run on the CPU. Remove it, or use "
                "GroupNorm or LayerNorm."
            )

    def outline(self, task: TaskModule | None, settings: EngineSettings) -> StrategyOutline:
        return replace(super().outline(task, settings), shards=1, reduces=self.comm_hook.is_plain, peak="ddp")

    def engine(self, settings: EngineSettings) -> Engine:
        return DDPEngine(self, settings)


class DDPEngine(ParallelEngine):
    """Engine that replicates models, and averages gradients while backward runs.

    Attributes:
        comm_hook, ddp_options: See `DDPStrategy`.
        _replica: What a Trainer's training steps call. None with manual optimization, for tasks without trained
            parameters, in evaluations and in user-written loops.
        _unrecorded: Replicas with a static graph that torch 2.13 has not recorded yet. Their first backward must
            synchronize.
        _bucket_order: See `BucketOrder`.
        _frozen: Parameters that were frozen when the replica was created. Its buckets do not contain them.
        _wrapped_step: With frozen parameters, the training step that `_run_thawed` calls. `_wrap` sets it.
    """

    strategy: DDPStrategy

    def __init__(self, strategy: DDPStrategy, settings: EngineSettings) -> None:
        super().__init__(strategy, settings)
        self.comm_hook = strategy.comm_hook
        self.ddp_options = strategy.ddp_options
        self._replica: DistributedDataParallel | None = None
        self._unrecorded: WeakSet[DistributedDataParallel] = WeakSet()
        self._bucket_order = BucketOrder()
        self._frozen: list[nn.Parameter] = []
        self._wrapped_step: Any = None

    def prepare(self, models: Models, optimizers: Optimizers, plan: TrainingPlan, roots: Models = ()) -> Prepared:
        """Wrap each model with trained parameters in DistributedDataParallel. Collective.

        All ranks start with the weights and buffers of rank 0.
        """
        placed = super().prepare(models, optimizers, plan, roots)
        is_training = optimizers is not None
        prepared = []
        for model, root in zip(models, roots or models, strict=True):
            call: nn.Module = model
            is_trained = any(parameter.requires_grad for parameter in model.parameters())
            if is_training and is_trained and self._averages_in_backward:
                call = self._new_replica(root)  # copies rank 0's weights to all ranks
            else:
                broadcast_from_main(model)
            prepared.append(PreparedModel(call=call, attributes=model))
        return Prepared(prepared, placed.optimizers)

    def _place(self, model: nn.Module) -> None:
        if self.strategy.sync_batchnorm:
            nn.SyncBatchNorm.convert_sync_batchnorm(model)  # type: ignore[no-untyped-call]  # torch has no types here
        super()._place(model)

    @property
    def _averages_in_backward(self) -> bool:
        """False with manual optimization, in which any number of backwards may follow a forward."""
        task: TaskModule | None = vars(self).get("task")  # not in a user-written loop
        return task is None or task.automatic_optimization

    def _set_calls(self, model: PreparedModel, root: StepModule) -> None:
        """Set what a Trainer's steps call: a replica in training.

        Evaluation steps call the task itself, without broadcasting buffers: ranks may evaluate different numbers of
        batches.
        """
        super()._set_calls(model, root)
        self._replica = model.call if isinstance(model.call, DistributedDataParallel) else None
        if self._replica is not None and self._reorders_buckets:
            self._bucket_order.record(self._replica, self.task)
        self._frozen = frozen_parameters(self.task) if self._averages_in_backward else []
        self._wrapped_step = self._training_call or root
        if self._frozen:
            self._training_call = self._run_thawed

    def _wrap(self) -> None:
        """Wrap the training step in DistributedDataParallel. Collective: copies rank 0's weights to all ranks."""
        root = StepModule(self.task)
        replica = self._new_replica(root)
        self._set_calls(PreparedModel(call=replica, attributes=self.task, evaluate=self._eval_call), root)

    def _run_thawed(self, *args: object) -> Any:
        """Run a step. If a parameter was unfrozen, first replace the replica by one that averages its gradients."""
        if any_trained(self._frozen):
            self._unwrap()
            self._wrap()
        return self._wrapped_step(*args)

    def _new_replica(self, module: nn.Module) -> DistributedDataParallel:
        replica = DistributedDataParallel(module, **self.ddp_options)
        self.comm_hook.register(replica)
        if self.ddp_options["static_graph"]:
            self._unrecorded.add(replica)
        return replica

    def _may_skip_sync(self, replica: DistributedDataParallel) -> bool:
        """Return whether the next backward of a replica may keep its gradients local.

        Return False at the first call for a replica with a static graph, and count its graph as recorded from then on.
        """
        is_recorded = replica not in self._unrecorded
        self._unrecorded.discard(replica)
        return is_recorded

    def no_sync(self, prepared: Callable[..., Any]) -> AbstractContextManager[Any]:
        if isinstance(prepared, DistributedDataParallel) and self._may_skip_sync(prepared):
            return prepared.no_sync()
        return nullcontext()

    @contextmanager
    def sync_next_backward(self, prepared: Callable[..., Any]) -> Iterator[None]:
        if not isinstance(prepared, DistributedDataParallel):
            yield
            return
        if self.ddp_options["find_unused_parameters"]:
            raise ConfigurationError(
                "trigger_sync_in_backward() does not work with find_unused_parameters=True, which searches for unused "
                "parameters in a forward outside of no_sync(). Run the forward of the last backward outside of "
                "no_sync(), or remove find_unused_parameters."
            )
        synced = prepared.require_backward_grad_sync
        prepared.require_backward_grad_sync = True
        prepared.reducer.prepare_for_backward([])  # as a synchronizing forward does
        try:
            yield
        finally:
            prepared.require_backward_grad_sync = synced

    def join(self, prepared: Sequence[object]) -> AbstractContextManager[Any] | None:
        joinable = [model for model in prepared if isinstance(model, Joinable)]
        if not joinable or self.processes.world_size == 1:
            return None
        return Join(joinable)

    @property
    def _reorders_buckets(self) -> bool:
        """True if the order in the replica's buckets affects results, and `BucketOrder` can reproduce it.

        With two ranks the order of summation does not matter.
        """
        options = self.ddp_options
        is_plain = not options["static_graph"] and not options["find_unused_parameters"]
        return is_plain and self.comm_hook.power_sgd is None and self.data_ranks.size > 2

    def begin_evaluation(self) -> None:
        # A training forward starts with rank 0's buffers, but then updates them on each rank. With manual optimization,
        # there is no replica that starts with them.
        if self.ddp_options.get("broadcast_buffers", True):
            for buffer in self.task.buffers():
                dist.broadcast(buffer, src=0)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if self.comm_hook.power_sgd is not None and self.is_main:
            warnings.warn(
                "PowerSGD is reset: a checkpoint does not contain each rank's compression errors. The next losses "
                "differ from those of an uninterrupted run, and start_powerSGD_iter counts from this step.",
                TrainwrightWarning,
                stacklevel=2,
            )
        super().load_state_dict(state)
        if self._replica is not None and self._reorders_buckets:
            self._bucket_order.replay(self._replica, self.task, state.get("bucket_order", ()))

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self._bucket_order.names:
            state["bucket_order"] = self._bucket_order.names
        return state

    def make_step(self, parts: StepParts) -> Step:
        if not self.task.automatic_optimization:
            return ManualStep(parts, self._average_gradients)
        if not self.strategy.sync_each_batch:
            parts = replace(parts, synchronize=self._synchronize)
        return AutomaticStep(parts)

    def _synchronize(self, last: bool) -> None:
        if self._replica is not None:
            self._replica.require_backward_grad_sync = last or not self._may_skip_sync(self._replica)

    def explain_error(self, error: BaseException, model: nn.Module) -> Exception | None:
        return unused_parameters(error, model)

    @contextmanager
    def _alone(self) -> Iterator[Engine]:
        check_can_be_alone(self.task)
        had_replica = self._replica is not None
        if had_replica:
            self.step.discard_gradients()  # gradients may be views of the replica's buckets
            self._unwrap()
        with super()._alone() as single:
            yield single
        if had_replica:
            self._wrap()

    def _average_gradients(self) -> None:
        """Average all gradients over ranks, with one all-reduce per dtype.

        Averaging again does not change averaged gradients. A step may therefore have any number of backward passes,
        over any part of the parameters.
        """
        for flat in flat_gradients(self.task.parameters()):
            dist.all_reduce(flat.values)
            flat.write_mean(self.data_ranks.size)

    def _unwrap(self) -> None:
        """Destroy the replica, and remove its hooks from the parameters."""
        replica = self._replica
        self._replica = None
        self._wrapped_step = None
        self._bucket_order.stop()
        if replica is not None:
            # The replica is part of a reference cycle, which the garbage collector frees at any time. The cycle must
            # not hold the last reference to the process group. In a forked worker of a loader, freeing a gloo group
            # crashes or hangs, because it waits for threads that do not exist there. Freed by the reducer, it can
            # deadlock, because it waits for a thread while holding the GIL (torch 2.13).
            del replica.logger, replica.reducer, replica.process_group

    def close(self) -> None:
        self._unwrap()
        super().close()


class BucketOrder:
    """The order of gradients in a replica's first synchronizing backward.

    After the first step, DistributedDataParallel rebuilds its buckets in this order. Over three or more ranks, the
    position of a gradient in a bucket determines the order of summation, and so the last bits of the sum. Checkpoints
    contain the order of gradients. Before its first step, a resumed run reproduces this order with a backward of zeros.

    Attributes:
        names: Names of the parameters; complete after the first step.
        _handles: Handles of the hooks that record the order, one for each parameter. Empty when nothing is recorded.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self._handles: list[Any] = []

    def record(self, replica: DistributedDataParallel, task: TaskModule) -> None:
        """Record the order of gradients in the next synchronizing backward. The hooks are removed afterwards."""
        self.stop()
        self.names = []
        for name, parameter in task.named_parameters():
            if parameter.requires_grad:
                hook = partial(self._append, replica, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]  # torch has no types here

    def _append(self, replica: DistributedDataParallel, name: str, parameter: torch.Tensor) -> None:
        if not replica.require_backward_grad_sync:  # a micro-batch before the last one, which fills no buckets
            return
        self.names.append(name)
        is_complete = len(self.names) == len(self._handles)
        if is_complete:
            self.stop()

    def stop(self) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def replay(self, replica: DistributedDataParallel, task: TaskModule, names: Sequence[str]) -> None:
        """Run a backward of zeros in the order `names`, in which the next forward then builds buckets. Collective.

        Does nothing if `names` are not the names of all trained parameters.
        """
        trained = {name: parameter for name, parameter in task.named_parameters() if parameter.requires_grad}
        if set(names) != set(trained):
            return
        self.stop()
        self.names = list(names)
        replica("named_parameters")  # a forward, which prepares the replica for a backward
        for name in names:
            torch.autograd.backward(trained[name], torch.zeros_like(trained[name]))
        for parameter in trained.values():
            parameter.grad = None
