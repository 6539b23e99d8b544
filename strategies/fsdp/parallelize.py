"""Conversion of a model to the shards that this rank trains: `parallelize`, and its result `ParallelModel`."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import get_process_group_ranks
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import loss_parallel

from trainwright.core.errors import TaskError
from trainwright.core.tree import map_tensors
from trainwright.processes.process_group import Processes
from trainwright.strategies.data_ranks import DataRanks
from trainwright.strategies.experts.layers import DividedExperts
from trainwright.strategies.fsdp.build import MetaBuilding, materialize
from trainwright.strategies.fsdp.float8_gather import Float8Gather
from trainwright.strategies.fsdp.layers.known_models import find_plan
from trainwright.strategies.fsdp.layers.plan import GivenPlan, SplitLayers
from trainwright.strategies.fsdp.outside import OutsideSteps
from trainwright.strategies.fsdp.recompute import Recomputed
from trainwright.strategies.fsdp.unit_state import parameter_groups, reset_iteration
from trainwright.strategies.mesh import data_axes
from trainwright.strategies.precision import Precision
from trainwright.strategies.shards import counts_here, full_output
from trainwright.strategies.units import ModuleTraces, check_compilable, compile_blocks


class ShardTraces(ModuleTraces):
    """Record of modules before `fully_shard`. `remove` also removes hooks that `fully_shard` adds in the first step."""

    def remove(self) -> None:
        super().remove()
        for module in self.modules():
            _module_state_mapping.pop(module, None)  # otherwise the next stage could not shard it again
            # Torch's tables of hooks: `_forward_hooks`, `_backward_pre_hooks` and others, by the hook's number.
            tables = [value for name, value in vars(module).items() if "_hooks" in name and isinstance(value, dict)]
            added: set[int] = set()
            for table in tables:
                added.update(key for key, hook in table.items() if _is_of_fsdp(hook))
            # Remove the keys from all tables: `_forward_hooks_with_kwargs`, for example, maps them to True.
            for table in tables:
                for key in added:
                    table.pop(key, None)


def _is_of_fsdp(hook: object) -> bool:
    """Return whether a hook is a function of torch's FSDP."""
    for wrapper in ("hook", "func"):  # attributes of torch's hook wrappers and of partials
        hook = getattr(hook, wrapper, hook)
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


_NUM_FIRST_STEPS = 3  # steps that are always compared
_PERIOD_STEPS = 64  # steps between later comparisons


class Usage:
    """Check that all ranks compute gradients of the same parameters, with a checksum over all steps.

    `fully_shard` reduces the existing gradients of a unit as one flat vector. If a gradient is missing on one rank, the
    vectors of the ranks do not match. torch 2.13 does not report this.

    Args:
        model: The model.
        processes: All processes.
        peers: The ranks whose checksums must be equal, in the same order on each of them. Every rank is in one group of
            peers, such as the ranks of one pipeline stage.
    """

    def __init__(self, model: nn.Module, processes: Processes, peers: Sequence[int]) -> None:
        self._model = model
        self._processes = processes
        self._peers = peers
        self._parameters = dict(model.named_parameters())
        self._checksum = 0  # over the unused parameters of all steps so far
        self._num_steps = 0

    def record(self) -> None:
        """Record a step after its last backward. Collective on the host in the first 3 steps and every 64th step.

        Raises:
            TaskError: See `check`.
        """
        unused = bytes([p.grad is None for p in self._parameters.values()])
        # The checksum continues that of earlier steps, so that a difference is found at the next comparison.
        self._checksum = zlib.crc32(unused, self._checksum)
        self._num_steps += 1
        if self._num_steps <= _NUM_FIRST_STEPS or self._num_steps % _PERIOD_STEPS == 0:
            self.check()

    def check(self) -> None:
        """Compare the checksums of each group of peers. If any differ, every rank raises a TaskError. Collective."""
        # Every rank compares with the first of its peers. `first_peers` and `checksums` contain one value per rank.
        first_peers: list[int] = []
        checksums: list[int] = []
        for first_peer, checksum in self._processes.gather_integers([self._peers[0], self._checksum]):
            first_peers.append(first_peer)
            checksums.append(checksum)
        different = [rank for rank, first in enumerate(first_peers) if checksums[rank] != checksums[first]]
        if not different:
            return
        unused_here = [name for name, parameter in self._parameters.items() if parameter.grad is None]
        unused_by_rank = self._processes.gather_object(unused_here)
        # The error describes the first group of peers that differ.
        reported_group = first_peers[different[0]]
        unused = {rank: unused_by_rank[rank] for rank, first in enumerate(first_peers) if first == reported_group}
        raise TaskError(
            f"{type(self._model).__name__} used different parameters on different ranks{_example(unused)}. This "
            "makes the reduced gradients wrong: under FSDP, each step must use the same parameters on every rank. "
            "Call the same units, and add 0 * parameter.sum() to the loss for parameters that a batch does not "
            "use. Or use strategy='ddp_find_unused_parameters_true'."
        )


def _example(unused: Mapping[int, list[str]]) -> str:
    """Return the end of a clause that names a parameter that one rank used and another did not.

    Args:
        unused: Rank → names of the parameters without a gradient in the last step.

    Returns:
        Text that starts with a colon. Empty if the ranks differ in an earlier step only.
    """
    for rank, names in unused.items():
        for name in names:
            for other, names_of_other in unused.items():
                if name not in names_of_other:
                    return f": in the last step rank {other} used {name}, and rank {rank} did not"
    return ""


def fsdp_precision(
    precision: Precision, policy: MixedPrecisionPolicy | None, *, is_root: bool = False
) -> MixedPrecisionPolicy:
    """Return the mixed precision policy of a unit or of the root: the user's `policy`, or else the precision's."""
    if policy is not None:
        return policy
    # The root does not cast inputs, so that targets keep their precision. Autocast casts where needed.
    reduce_dtype = None
    if precision.autocast_dtype is not None:
        reduce_dtype = torch.float32  # sums over many ranks lose too much in 16 bits
    return MixedPrecisionPolicy(
        param_dtype=precision.autocast_dtype, reduce_dtype=reduce_dtype, cast_forward_inputs=not is_root
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """Options of `fully_shard` for units and for the root, which holds the other parameters.

    Attributes:
        reshard: `reshard_after_forward` of units; see `FSDPStrategy`.
        reshard_root: `reshard_after_forward` of the root. None selects torch's default.
        precision: Precision of the run.
        mixed_precision: A torch policy. None derives it from `precision`.
        cpu_offload: Keep shards on the host.
        prefetch: Number of units that are gathered ahead of their use.
    """

    reshard: bool | int
    reshard_root: bool | int | None
    precision: Precision
    mixed_precision: MixedPrecisionPolicy | None
    cpu_offload: bool
    prefetch: int

    @property
    def parameter_dtype(self) -> torch.dtype | None:
        """The data type of gathered parameters. None is the data type of the shards."""
        return fsdp_precision(self.precision, self.mixed_precision).param_dtype

    def apply(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        is_root: bool,
        ignored: Sequence[nn.Parameter] = (),
    ) -> None:
        """Shard the full parameters of a unit or of the root, except for those in `ignored`. Collective."""
        policy = fsdp_precision(self.precision, self.mixed_precision, is_root=is_root)
        offload: OffloadPolicy = OffloadPolicy()
        if self.cpu_offload:  # torch 2.13 pins memory only where an accelerator can read it
            offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        reshard = self.reshard_root if is_root else self.reshard
        fully_shard(
            module,
            mesh=mesh,
            reshard_after_forward=reshard,
            mp_policy=policy,
            offload_policy=offload,
            ignored_params=set(ignored) or None,
        )

    def prefetch_units(self, units: list[Any]) -> None:
        """Make each unit gather the next `prefetch` units in its forward."""
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + self.prefetch])


def parallelize(
    model: nn.Module,
    roots: Sequence[nn.Module],
    units: list[nn.Module],
    mesh: DeviceMesh,
    *,
    plan: GivenPlan | None,
    recomputed: Recomputed,
    compile_options: Mapping[str, Any] | None,
    building: MetaBuilding | None,
    sharding: Sharding | None,
    experts: DividedExperts | None,
    ranks: DataRanks,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any] | None],
) -> ParallelModel:
    """Convert a model to this rank's shards of rank 0's values. Collective.

    The order matters. The model is already built, possibly on the device `meta`. This function finds the layers to
    split, wraps modules for activation checkpointing, and compiles units. Then it initializes, splits and shards one
    part (unit or root) after the other. No device ever holds more than its shards and one full part.

    Args:
        model: The model, whose modules are changed in place.
        roots: The outermost modules whose forwards are called: the model or a module around it, or several modules
            around parts of it.
        units: The parts that are gathered separately, inner ones first.
        mesh: All axes of the run, by name.
        plan: The strategy's argument `tensor_parallel_plan`, used if the mesh has the axis `tp`.
        recomputed: Wraps modules for activation checkpointing.
        compile_options: Arguments of `torch.compile`. None disables compilation.
        building: Initializes `roots`. None means that `roots` are already initialized.
        sharding: Options of sharding over the data-parallel `ranks`. None disables sharding.
        experts: Divides the experts of the model. `sharding` then shards the other parameters. None for a model
            without divided experts.
        ranks: The data-parallel ranks.
        device: Device of the shards in the forward.
        context: Creates the context of a forward outside of a step. It returns None for no context.

    Raises:
        ConfigurationError: The plan or another option does not fit the model.
    """
    # Undoes the steps below if a later one raises. Otherwise `ParallelModel.unwrap` undoes them.
    with ExitStack() as undo:
        layers = None
        if "tp" in (mesh.mesh_dim_names or ()):
            layers = SplitLayers(model, find_plan(model, plan, mesh), mesh["tp"], nn.ModuleList(roots))
        undo.callback(recomputed.unwrap)
        units = recomputed.wrap(model, units)
        if compile_options is not None:
            check_compilable(units)
            for unit in compile_blocks(units, compile_options):
                undo.callback(vars(unit).pop, "_compiled_call_impl", None)
        traces = ShardTraces(nn.ModuleList(roots))
        # Callbacks run in reverse order: experts, hooks of fully_shard, split layers, compilation, recomputation. Those
        # that are added below run before them.
        if layers is not None:
            undo.callback(layers.undo)
        undo.callback(traces.remove)
        if experts is not None:
            undo.callback(experts.undo)
        names_to_reset = [] if building is None else building.names_to_reset(model, ranks.processes)
        # Inner parts first: fully_shard ignores parameters that an inner part already shards.
        for part in (*units, *roots):
            if building is not None:
                materialize(model, part, names_to_reset, device)
            if layers is not None:
                layers.split(part)
            ignored = () if experts is None else experts.divide(part)
            if sharding is not None:
                sharding.apply(part, data_axes(mesh), device, is_root=part in roots, ignored=ignored)
        gather = None
        if sharding is not None:
            sharding.prefetch_units(units)
            if sharding.precision.fp8_all_gather:
                gather = Float8Gather(roots[0], units)
                undo.callback(gather.undo)
        traces.record_changes()  # before `OutsideSteps` adds hooks, which it removes itself
        outputs_split = None
        if layers is not None:
            outputs_split = layers.splits_loss
            if layers.splits_loss:
                undo.enter_context(loss_parallel())
        if sharding is not None and building is not None:
            undo.enter_context(OutsideSteps(roots[0], units, context).gathered(model))
        return ParallelModel(
            model, roots, units, mesh, ranks, undo.pop_all(), gather, experts, outputs_split=outputs_split
        )


class ParallelModel:
    """A sharded model. `unwrap` removes everything except the shards.

    Args:
        model: The model.
        roots, units, mesh, ranks, experts: See `parallelize`.
        undo: Undoes the conversion of the model.
        gather: All-gather of fp8 layers in float8. None disables it.
        outputs_split: True if a forward leaves its outputs sharded, as DTensors; see `LossParallel`. False if it does
            not. None without split layers, whose outputs contain no DTensors.

    Attributes:
        root: The outermost module, which a step calls. The first of `roots`. None after `unwrap`.
        mesh: All axes of the run. None after `unwrap`.
        is_wrapped: False once `unwrap` was called.
        usage: The check that all ranks use the same parameters. None if all ranks see the same data, and after
            `unwrap`.
        counted: id of a parameter → True if a sum over all ranks includes this rank's shard of the parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        roots: Sequence[nn.Module],
        units: list[nn.Module],
        mesh: DeviceMesh,
        ranks: DataRanks,
        undo: ExitStack,
        gather: Float8Gather | None,
        experts: DividedExperts | None,
        *,
        outputs_split: bool | None,
    ) -> None:
        self.root: Any = roots[0]
        self._roots: list[Any] = list(roots)
        self.mesh: DeviceMesh | None = mesh
        if ranks.group is None:  # of all ranks
            peers: Sequence[int] = range(ranks.processes.world_size)
        else:
            peers = get_process_group_ranks(ranks.group)
        self.usage = Usage(model, ranks.processes, peers) if ranks.size > 1 else None
        self.is_wrapped = True
        self._units: list[Any] = units
        self._undo = undo
        self._gather = gather
        self._experts = experts
        self._outputs_split = outputs_split
        self.counted = {id(p): counts_here(p, mesh) for p in model.parameters()}
        self._is_sharded = isinstance(self.root, FSDPModule)
        # Set by `synchronize`: True if the next backward reduces gradients. Always True without FSDP.
        self._syncs = True
        # True from the `synchronize` before the last backward of a step to `end_group` or `forget_sums`: the backward
        # may not have reduced the sums of earlier micro-batches yet.
        self._may_have_sums = False
        # Without FSDP, the split parameters and their placements, for `_redistribute_gradients`. `fully_shard` itself
        # gives gradients the placements of its parameters.
        self._split: list[tuple[DTensor, tuple[Placement, ...]]] = []
        if not self._is_sharded:
            for parameter in model.parameters():
                if isinstance(parameter, DTensor) and parameter.requires_grad:
                    self._split.append((parameter, parameter.placements))

    # Steps

    @property
    def training_call(self) -> Any:
        """Function that runs a forward of the root in training."""
        return self._run_unsharded if self._outputs_split else self.root

    def _run_unsharded(self, *args: object, **kwargs: object) -> Any:
        """Run a forward, and convert DTensors in the output to full tensors. Collective."""
        output = self.root(*args, **kwargs)
        return output if self._outputs_split is None else map_tensors(full_output, output)

    def evaluate(self, *args: object, **kwargs: object) -> Any:
        """Run a forward without a backward, and free the gathered parameters. Collective."""
        output = self._run_unsharded(*args, **kwargs)
        self.reshard()
        return output

    def reshard(self) -> None:
        """Free the gathered parameters after a forward without a backward. Not collective."""
        if self._is_sharded:
            for module in (*self._roots, *self._units):
                module.reshard()

    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run the forward of the model of a user-written loop. Collective."""
        if torch.is_grad_enabled():
            return self._run_unsharded(*args, **kwargs)
        return self.evaluate(*args, **kwargs)

    def synchronize(self, last: bool) -> None:
        """Make the next backward reduce-scatter gradients if it is the last one of a step. Not collective.

        Args:
            last: False makes it accumulate full gradients on this rank.
        """
        if last is not self._syncs and self._is_sharded:
            self._syncs = last
            for root in self._roots:
                root.set_requires_gradient_sync(last)
                root.set_is_last_backward(last)
        self._may_have_sums = last

    @property
    def holds_sums(self) -> bool:
        """True if there may be accumulated gradients that have not been reduced over the ranks."""
        return self._may_have_sums or not self._syncs

    def end_group(self) -> None:
        """Complete the gradients after the last backward of a step, and check their `usage`. Collective."""
        self._may_have_sums = False
        if self._gather is not None:
            self._gather.forget_scales()
        if self._experts is not None:
            self._experts.average_replicas()
        self._redistribute_gradients()
        if self.usage is not None:
            self.usage.record()

    def shards_of_gathered(self) -> dict[int, torch.Tensor]:
        """Return the shard of each parameter that a forward has gathered, by the id of the gathered one."""
        shards: dict[int, torch.Tensor] = {}
        for sharded in self._sharded_parameters():
            gathered = _gathered(sharded)
            if gathered is not None:
                shards[id(gathered)] = sharded.sharded_param
        return shards

    def sums(self) -> Iterator[tuple[set[int], torch.Tensor]]:
        """Yield accumulated gradients that have not been reduced over the ranks. Not collective.

        The ids of the sharded and of the gathered parameter are yielded with each gradient, because optimizers and
        models refer to different ones. Without a gathered parameter, the second id is that of None, which no parameter
        has.
        """
        for sharded in self._sharded_parameters():
            gathered = _gathered(sharded)
            ids = {id(sharded.sharded_param), id(gathered)}
            # With a reduce_dtype, torch moves sums of this type from `grad` to `unsharded_accumulated_grad`.
            if sharded.unsharded_accumulated_grad is not None:
                yield ids, sharded.unsharded_accumulated_grad
            if gathered is not None and gathered.grad is not None:
                yield ids, gathered.grad

    def reduced(self) -> Iterator[tuple[set[int], torch.Tensor]]:
        """Yield gradients that have been reduced over the ranks, also of parameters that are gathered now.

        The ids of the sharded and of the gathered parameter are yielded with each gradient; see `sums`. Not collective.
        """
        for sharded in self._sharded_parameters():
            parameter = sharded.sharded_param
            if parameter.grad is not None:
                yield {id(parameter), id(_gathered(sharded))}, parameter.grad

    def forget_sums(self) -> None:
        """Discard accumulated gradients that have not been reduced over the ranks. Not collective.

        In torch 2.13, `FSDPModule.reset_iter_state` does not discard the gradients of gathered parameters, although its
        docstring says so.
        """
        if self._is_sharded:
            for root in self._roots:
                reset_iteration(root)
        for sharded in self._sharded_parameters():
            sharded.unsharded_accumulated_grad = None
            gathered = _gathered(sharded)
            if gathered is not None:
                gathered.grad = None
        self._may_have_sums = False

    def _sharded_parameters(self) -> Iterator[Any]:
        """Yield torch's records of the sharded parameters."""
        if self._is_sharded:
            for module in (*self._roots, *self._units):
                for group in parameter_groups(module):
                    yield from group.fsdp_params

    def _redistribute_gradients(self) -> None:
        """Redistribute each gradient to the placements of its parameter. Used without FSDP.

        Gradients of norms over a split sequence are partial sums, which one all-reduce adds up. The gradient of torch's
        split embedding is full on every rank and would be counted several times.
        """
        by_dtype: dict[torch.dtype, list[Any]] = {}
        for parameter, placements in self._split:
            grad: Any = parameter.grad
            if grad is None or grad.placements == placements:
                continue
            # The mesh of split layers has one axis.
            is_partial_sum = grad.placements[0].is_partial() and placements[0].is_replicate()
            if is_partial_sum:
                by_dtype.setdefault(grad.dtype, []).append(parameter)
            else:
                parameter.grad = grad.redistribute(placements=placements)
        # One all-reduce of a flat vector per data type, instead of one per norm.
        for parameters in by_dtype.values():
            parts = [parameter.grad.to_local() for parameter in parameters]
            flat = torch.cat([part.reshape(-1) for part in parts])
            dist.all_reduce(flat, group=parameters[0].device_mesh.get_group())
            summed = torch.split(flat, [part.numel() for part in parts])
            for parameter, shard in zip(parameters, summed, strict=True):
                parameter.grad = DTensor.from_local(
                    shard.view(parameter.shape), parameter.device_mesh, parameter.placements, run_check=False
                )

    # The end

    def until_unwrapped(self, context: AbstractContextManager[object]) -> None:
        """Enter a context, which `unwrap` exits. Not collective."""
        self._undo.enter_context(context)

    def unwrap(self) -> None:
        """Remove everything except the shards from the model. Not collective."""
        if not self.is_wrapped:
            return
        self.is_wrapped = False
        self.reshard()
        self._undo.close()
        # Shards and process groups must be freed even if references to this object remain.
        self.root = None
        self.mesh = None
        self.usage = None
        self._gather = None
        self._experts = None
        self._roots = []
        self._units = []


def _gathered(sharded: Any) -> torch.Tensor | None:
    """Return the gathered parameter of one of torch's records. None before the first all-gather."""
    return getattr(sharded, "_unsharded_param", None)
