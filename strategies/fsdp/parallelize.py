"""From a task to the pieces that this rank trains: one ordered function, and what it has made."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import loss_parallel

from trainwright.core.task import TaskModule
from trainwright.core.tree import map_tensors
from trainwright.strategies.data_ranks import DataRanks, metrics_over
from trainwright.strategies.fsdp.build import MetaBuilding, materialize
from trainwright.strategies.fsdp.layers.plan import Plan, SplitLayers
from trainwright.strategies.fsdp.layers.ready import find_plan
from trainwright.strategies.fsdp.mesh import data_axes
from trainwright.strategies.fsdp.outside import OutsideSteps
from trainwright.strategies.fsdp.recompute import Recomputed
from trainwright.strategies.fsdp.sharded_gradients import Usage
from trainwright.strategies.precision import Precision
from trainwright.strategies.shards import counts_here, whole_output
from trainwright.strategies.steps.binding import StepModule
from trainwright.strategies.units import check_compilable


class ShardTraces:
    """Remembers modules as they were before `fully_shard`, whose class, attributes and hooks it changes in place.

    Args:
        root: the outermost module that will be sharded.
    """

    def __init__(self, root: nn.Module) -> None:
        self._before = [(module, type(module), set(vars(module))) for module in root.modules()]
        self._added: list[tuple[nn.Module, set[str]]] = []

    def note(self) -> None:
        """Take note of the attributes that have come; called right after sharding, before the user adds any."""
        self._added = [(module, set(vars(module)) - names) for module, _, names in self._before]

    def remove(self) -> None:
        """Put classes back and take attributes and hooks off. Parameters stay as they are. Not collective."""
        for module, cls, _ in self._before:
            module.__class__ = cls
            _module_state_mapping.pop(module, None)  # or it could not be sharded again, in the next stage
            _remove_hooks(module)
        for module, names in self._added:
            for name in names:
                vars(module).pop(name, None)


def _remove_hooks(module: nn.Module) -> None:
    tables = {name: table for name, table in vars(module).items() if "_hooks" in name and isinstance(table, dict)}
    gone = {key for table in tables.values() for key, hook in table.items() if _is_of_fsdp(hook)}
    for table in tables.values():
        for key in gone:
            table.pop(key, None)


def _is_of_fsdp(hook: Any) -> bool:
    for wrapper in ("hook", "func"):  # torch's own around hooks that take the module, and partials
        hook = getattr(hook, wrapper, hook)
    return str(getattr(hook, "__module__", "")).startswith("torch.distributed.fsdp")


def forget_sums(modules: Iterable[Any]) -> None:
    """Drop what backward passes have added up in sharded modules without averaging it over ranks. Not collective.

    `FSDPModule.reset_iter_state` says that it does so; in torch 2.13 it leaves the gradients of whole parameters.
    """
    for module in modules:
        for group in module._get_fsdp_state()._fsdp_param_groups:
            for sharded in group.fsdp_params:
                sharded.unsharded_accumulated_grad = None
                gathered = getattr(sharded, "_unsharded_param", None)
                if gathered is not None:
                    gathered.grad = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharding:
    """How units, and what is around them, are cut over the ranks that see different data.

    Attributes:
        reshard: of a unit after its forward; see `FSDPStrategy`.
        reshard_root: of what is in no unit.
        precision: of the run.
        mixed_precision: torch's own policy instead; None: what the precision says.
        cpu_offload: pieces stay on the host.
        prefetch: how many of the next units are gathered ahead.
    """

    reshard: bool | int
    reshard_root: bool | int | None
    precision: Precision
    mixed_precision: MixedPrecisionPolicy | None
    cpu_offload: bool
    prefetch: int

    def apply(self, module: nn.Module, mesh: DeviceMesh, device: torch.device, *, is_root: bool) -> None:
        """Cut what is left whole in a unit, or in the root. Collective."""
        policy = self.mixed_precision
        if policy is None:
            # Autocast decides about inputs: a step's targets keep their precision. Units get what autocast made.
            narrow = self.precision.autocast_dtype
            wide = None if narrow is None else torch.float32
            policy = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=wide, cast_forward_inputs=not is_root)
        offload: OffloadPolicy = OffloadPolicy()
        if self.cpu_offload:  # torch 2.13 pins memory only where an accelerator can read it
            offload = CPUOffloadPolicy(pin_memory=device.type != "cpu")
        reshard = self.reshard_root if is_root else self.reshard
        fully_shard(module, mesh=mesh, reshard_after_forward=reshard, mp_policy=policy, offload_policy=offload)

    def prefetch_units(self, units: list[Any]) -> None:
        """Have each unit gather those that follow it."""
        for i, unit in enumerate(units):
            unit.set_modules_to_forward_prefetch(units[i + 1 : i + 1 + self.prefetch])


def parallelize(
    task: TaskModule,
    units: list[nn.Module],
    mesh: DeviceMesh,
    *,
    plan: Plan | None,
    recomputed: Recomputed,
    compile_options: Mapping[str, Any] | None,
    building: MetaBuilding,
    sharding: Sharding | None,
    ranks: DataRanks,
    device: torch.device,
    context: Callable[[], AbstractContextManager[Any] | None],
) -> ParallelModel:
    """Turn a task into this rank's pieces, with rank 0's values. Collective.

    The order matters: the task's `configure_model` has run, maybe on the device `meta`. Layers to be split are found;
    activations to be computed anew are wrapped; units are compiled; then each part, one after the other, gets memory
    and values, is split, and cut. No device ever holds more than its pieces and one whole part.

    Args:
        task: changed in place.
        units: its parts that are gathered one by one, inner ones first.
        mesh: all the axes of the run, by name.
        plan: the strategy's argument; used where the mesh has the axis `tp`.
        recomputed: wraps what is computed anew.
        compile_options: of units; None: they are not compiled.
        building: knows what was built on `meta`.
        sharding: None: nothing is cut over ranks that see different data.
        ranks: those.
        device: where it is trained.
        context: makes the context of a forward outside of a step.

    Raises:
        ConfigurationError: a plan, a policy or an option that does not fit the task; nothing has been cut then.
    """
    with ExitStack() as undo:  # whatever a later part cannot follow is taken off again
        layers = None
        if "tp" in (mesh.mesh_dim_names or ()):
            layers = SplitLayers(task, find_plan(task, plan, mesh), mesh["tp"])
        undo.callback(recomputed.unwrap)
        units = recomputed.wrap(task, units)
        if compile_options is not None:
            check_compilable(units)
            undo.callback(_take_compiled_off, units)
            for unit in units:
                unit.compile(**compile_options)
        root = StepModule(task)
        traces = ShardTraces(root)
        if layers is not None:
            undo.callback(layers.undo)
        undo.callback(traces.remove)
        built = building.names_to_reset(task, ranks.processes)
        for part in (*units, root):
            materialize(task, part, built, device)
            if layers is not None:
                layers.split(part)
            if sharding is not None:
                sharding.apply(part, data_axes(mesh), device, is_root=part is root)
        if sharding is not None:
            sharding.prefetch_units(units)
        traces.note()
        splits_loss = False
        if layers is not None:
            undo.enter_context(metrics_over(task, ranks))
            splits_loss = layers.splits_loss
            if splits_loss:
                undo.enter_context(loss_parallel())
        if sharding is not None:
            undo.enter_context(OutsideSteps(root, units, context).served(task))
        outputs_split = None if layers is None else splits_loss
        return ParallelModel(task, root, units, mesh, ranks, undo.pop_all(), outputs_split=outputs_split)


def _take_compiled_off(units: list[nn.Module]) -> None:
    for unit in units:
        vars(unit).pop("_compiled_call_impl", None)


class ParallelModel:
    """A task in pieces: runs its steps, and takes everything but the pieces off it again.

    Args:
        task, units, mesh, ranks: see `parallelize`.
        root: the outermost module.
        undo: takes off again what was put around the modules.
        outputs_split: whether layers are split so that training outputs are in pieces; None: no layer is split.

    Attributes:
        is_together: False once `take_apart` was called.
        usage: compares which parameters ranks have used; None where all see the same data.
    """

    def __init__(
        self,
        task: TaskModule,
        root: StepModule,
        units: list[nn.Module],
        mesh: DeviceMesh,
        ranks: DataRanks,
        undo: ExitStack,
        *,
        outputs_split: bool | None,
    ) -> None:
        self.root: Any = root
        self.mesh: DeviceMesh | None = mesh
        self.usage = Usage(task, ranks.processes) if ranks.size > 1 else None
        self.is_together = True
        self._units: list[Any] = units
        self._undo, self._outputs_split = undo, outputs_split
        self._counted = {id(p): counts_here(p, mesh) for p in task.parameters()}
        self._is_sharded = isinstance(root, FSDPModule)
        self._syncs, self._sums = True, False

    # Steps

    @property
    def training_call(self) -> Any:
        """What runs a training step: `call(name, *args)`."""
        return self._run_whole if self._outputs_split else self.root

    def _run_whole(self, name: str | Callable[..., Any], *args: Any) -> Any:
        """Run a step, and make whole what its output has in pieces."""
        output = self.root(name, *args)
        return output if self._outputs_split is None else map_tensors(whole_output, output)

    def evaluate(self, name: str | Callable[..., Any], *args: Any) -> Any:
        """Run an evaluation step, and free what it has gathered: whoever looks now shall see the true parameters."""
        output = self._run_whole(name, *args)
        if self._is_sharded:
            for module in (self.root, *self._units):
                module.reshard()  # no backward will
        return output

    def counted(self, parameters: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, bool]]:
        """Yield the parameters, each with whether its piece counts here in a sum over all ranks."""
        for parameter in parameters:
            yield parameter, self._counted[id(parameter)]

    def synchronize(self, last: bool) -> None:
        """Say whether gradients are averaged and cut in the backward to come. Not collective."""
        if last is not self._syncs:
            self._syncs = last
            self.root.set_requires_gradient_sync(last)
            self.root.set_is_last_backward(last)
        self._sums = last

    @property
    def holds_sums(self) -> bool:
        """Whether a group of several micro-batches was left before its last backward was over."""
        return self._sums or not self._syncs

    def end_group(self) -> None:
        """Take note that the gradients of a group are there. Collective, on the host, in some steps."""
        self._sums = False
        if self.usage is not None:
            self.usage.note()

    def forget_sums(self) -> None:
        """Drop what a group that was left has added up without averaging it. Not collective."""
        self.root.reset_iter_state()
        forget_sums((self.root, *self._units))
        self._sums = False

    # The end

    def take_apart(self) -> None:
        """Take everything but the pieces themselves off the task. Not collective."""
        if not self.is_together:
            return
        self.is_together = False
        if self._is_sharded:
            for module in (self.root, *self._units):
                module.reshard()
        self._undo.close()
        self.root = self.mesh = self.usage = None
        self._units = []


def laid_out(task: nn.Module) -> list[tuple[nn.Parameter, Any]]:
    """Return the trained parameters that are split, with how they lie on the ranks."""
    return [(p, p.placements) for p in task.parameters() if isinstance(p, DTensor) and p.requires_grad]
