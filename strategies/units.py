"""Units of a model: the modules that are sharded, offloaded or compiled separately."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest

WrapPolicy = str | type[nn.Module] | Collection[str | type[nn.Module]] | Callable[..., Any]
"""Choice of units: module classes, their names, or a function that returns True for a module that is a unit. Also a
policy of `torch.distributed.fsdp.wrap`: `ModuleWrapPolicy({Block})` or `partial(size_based_auto_wrap_policy, …)`."""

LARGE_NUM_PARAMS = 100_000_000

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@runtime_checkable
class NamesUnits(Protocol):
    """A model that defines its units, as every task does; see `TaskModule.shard_units`."""

    def shard_units(self) -> Iterable[nn.Module] | None:
        """Return the units, or None if the strategy's arguments define them."""


def find_units(task: nn.Module, policy: WrapPolicy | None, min_num_params: int | None) -> list[nn.Module]:
    """Return the units of a model. Nested units come before the units that contain them.

    A module that shares parameters or submodules with the rest of the model is not a unit, because a tied weight must
    be gathered once. Its parameters belong to the module that contains all users of the tied weight. Submodules of
    `nn.MultiheadAttention` are not units either, because their weights are used without a call.

    Args:
        task: A model or task. If `policy` and `min_num_params` are None, its units are the result of `shard_units`, or
            the modules whose class is in `_no_split_modules` of a transformers model.
        policy: See `WrapPolicy`. Not used with `min_num_params`.
        min_num_params: Minimum number of parameters of a unit, without parameters of nested units.

    Raises:
        ConfigurationError: No module has a requested class, a module of it has no forward, an entry of the policy has
            another type, or a unit is not a module of the task.
    """
    if min_num_params is not None:
        wanted = _by_size(task, min_num_params)
    elif policy is not None:
        wanted = {id(module) for module in matching(task, policy, "auto_wrap_policy")}
    else:
        wanted = {id(module) for module in _chosen_by_task(task)}
    wanted.discard(id(task))
    for module in task.modules():
        if _is_read(module):
            wanted -= {id(part) for part in module.modules() if part is not module}
    # Sets of ids instead of modules and parameters: the same sets hold both, and a parameter's `==` is elementwise.
    parents = _parents(task)
    units: list[nn.Module] = []
    taken: set[int] = set()  # nested units, and their modules and parameters
    for module in _inner_first(task):
        if id(module) not in wanted:
            continue
        inside = {id(part) for part in module.modules()}
        members = inside | {id(parameter) for parameter in module.parameters()}
        members -= taken
        is_shared = False
        for part in members - {id(module)}:
            # A module without parameters has no entry: it may be shared, because nothing of it is gathered.
            if not parents.get(part, inside) <= inside:
                is_shared = True
        if not is_shared:
            units.append(module)
            taken |= members | {id(module)}
    return units


def _parents(task: nn.Module) -> dict[int, set[int]]:
    """Return the id of each parameter and module with parameters, with the ids of the modules directly around it."""
    parents: dict[int, set[int]] = {}
    for module in task.modules():
        for parameter in module.parameters(recurse=False):
            parents.setdefault(id(parameter), set()).add(id(module))
        for child in module.children():
            if any(True for _ in child.parameters()):  # the truth of a parameter is its value
                parents.setdefault(id(child), set()).add(id(module))
    return parents


def matching(task: nn.Module, policy: WrapPolicy, argument: str) -> list[nn.Module]:
    """Return the task's modules that a policy selects.

    Args:
        task: The task.
        policy: The policy.
        argument: Name of the argument for error messages.

    Raises:
        ConfigurationError: The policy has another type, no module has the class, or a module has no forward.
    """
    modules = [module for module in task.modules() if module is not task]
    if hasattr(policy, "_lambda_fn"):
        policy = policy._lambda_fn  # torch's CustomPolicy is not callable
    if callable(policy) and not isinstance(policy, type):
        if "recurse" in inspect.signature(policy).parameters:
            return _by_torch_policy(task, policy)
        return [module for module in modules if policy(module)]
    entries: list[Any] = [policy]
    if isinstance(policy, Collection) and not isinstance(policy, str):
        entries = list(policy)
    selected: list[nn.Module] = []
    for entry in entries:
        if isinstance(entry, str):
            same = [module for module in modules if type(module).__name__ == entry]
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            same = [module for module in modules if isinstance(module, entry)]
        else:
            raise ConfigurationError(
                f"{argument} holds {entry!r}. Write classes of modules, their names, or a function of a module."
            )
        problem = None
        if not same:
            problem = "no module of the task has this class"
        elif any(isinstance(module, _WITHOUT_FORWARD) for module in same):
            problem = "it has no forward"
        if problem is not None:
            known = sorted({type(module).__name__ for module in modules if not isinstance(module, _WITHOUT_FORWARD)})
            name = entry if isinstance(entry, str) else entry.__name__
            raise ConfigurationError(
                f"{argument}: {name!r}: {problem}.{nearest(name, known)} Known: {', '.join(known)}."
            )
        selected += same
    return selected


def _chosen_by_task(task: nn.Module) -> list[nn.Module]:
    if not isinstance(task, NamesUnits):
        block_names = set(getattr(task, "_no_split_modules", None) or ())  # of a transformers model
        return [module for module in task.modules() if type(module).__name__ in block_names]
    units = list(task.shard_units() or [])
    inside = {id(module) for module in task.modules()}
    for unit in units:
        if not isinstance(unit, nn.Module) or id(unit) not in inside or isinstance(unit, _WITHOUT_FORWARD):
            raise ConfigurationError(
                f"{type(task).__name__}.shard_units returned {type(unit).__name__}, which is not a module of the task "
                "with a forward. Return its blocks, for example list(self.blocks)."
            )
    return units


def _is_read(module: nn.Module) -> bool:
    """Return whether a module uses the weights of its submodules without calling them."""
    return isinstance(module, nn.MultiheadAttention)


def _by_size(task: nn.Module, min_num_params: int) -> set[int]:
    """Return the ids of the innermost modules that have the minimum number of parameters, without nested units."""
    selected: set[int] = set()

    def outside_of_units(module: nn.Module) -> dict[int, int]:
        """Return the sizes of a module's parameters that are in no unit by their ids, so that tied ones count once."""
        is_read = _is_read(module)
        sizes = {id(parameter): parameter.numel() for parameter in module.parameters(recurse=is_read)}
        if not is_read:
            for child in module.children():
                sizes |= outside_of_units(child)
        may_be_unit = module is not task and not isinstance(module, _WITHOUT_FORWARD)
        if may_be_unit and sum(sizes.values()) >= min_num_params:
            selected.add(id(module))
            return {}
        return sizes

    outside_of_units(task)
    return selected


def _by_torch_policy(task: nn.Module, policy: Callable[..., Any]) -> list[nn.Module]:
    """Return the units that a policy of FSDP1 selects: `policy(module, recurse, nonwrapped_numel)`."""
    units: list[nn.Module] = []

    def num_in_units(module: nn.Module) -> int:
        """Return the number of a module's parameters that are in units."""
        total = sum(parameter.numel() for parameter in module.parameters())
        # The policy is called twice: whether to look at the children, and then about the rest of the module.
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        in_children = sum(num_in_units(child) for child in module.children())
        may_be_unit = module is not task and not isinstance(module, _WITHOUT_FORWARD)
        if may_be_unit and policy(module=module, recurse=False, nonwrapped_numel=total - in_children):
            units.append(module)
            return total
        return in_children

    num_in_units(task)
    return units


def check_can_be_sharded(task: nn.Module) -> None:
    """Check that all parameters and their gradients can be sharded.

    Raises:
        ConfigurationError: A parameter is a scalar, or has sparse gradients.
    """
    scalars = [name for name, parameter in task.named_parameters() if not parameter.dim()]
    if scalars:
        raise ConfigurationError(
            f"{type(task).__name__}'s parameter {scalars[0]} is a scalar and cannot be sharded. Use "
            "nn.Parameter(torch.ones(1)) instead of nn.Parameter(torch.tensor(1.0))."
        )
    check_no_sparse(task)


def check_no_shards(model: nn.Module, is_shard: Callable[[nn.Parameter], bool]) -> None:
    """Raise a ConfigurationError if a model holds shards of an earlier run."""
    if any(map(is_shard, model.parameters())):
        raise ConfigurationError(
            f"{type(model).__name__} still holds shards of a run that failed or has not ended. Create a new one, and "
            "load a checkpoint to continue."
        )


def check_no_sparse(task: nn.Module) -> None:
    """Check that no layer has sparse gradients, which torch cannot shard.

    Raises:
        ConfigurationError: A layer has sparse gradients.
    """
    for name, module in task.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigurationError(
                f"{type(task).__name__}'s {name} has sparse=True, but sparse gradients cannot be sharded. Remove "
                "sparse=True, or use strategy='ddp'."
            )


def check_compilable(units: list[nn.Module]) -> None:
    """Check that there are units to compile.

    Raises:
        ConfigurationError: No units were found.
    """
    if not units:
        raise ConfigurationError(
            "compile= compiles each unit of a sharded model, but the task has none. Define shard_units in it, pass "
            "FSDPStrategy(auto_wrap_policy=…), or remove compile=."
        )


def check_blocks(task: nn.Module, blocks: list[nn.Module]) -> None:
    """Check that there are repeated blocks to compile.

    Args:
        task: The task.
        blocks: The result of `repeated_blocks`.

    Raises:
        ConfigurationError: The model has no repeated blocks.
    """
    if not blocks:
        raise ConfigurationError(
            "compile='regional' compiles the elements of each ModuleList with several modules of one class, but "
            f"{type(task).__name__} has none. Use compile=True, or keep the repeated blocks in a ModuleList."
        )


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the elements of each outermost ModuleList with several modules of one class."""
    children = list(model.children())
    if isinstance(model, nn.ModuleList) and len(children) > 1 and len(set(map(type, children))) == 1:
        return children
    return [block for child in children for block in repeated_blocks(child)]


def compile_blocks(blocks: Iterable[nn.Module], options: Mapping[str, Any]) -> list[nn.Module]:
    """Compile modules in place, so that parameter names do not change. Skip modules that are compiled already.

    Returns:
        The modules that this call has compiled. Their attribute `_compiled_call_impl` is set.
    """
    uncompiled = [block for block in blocks if block._compiled_call_impl is None]
    for block in uncompiled:
        if type(block).forward.__module__.startswith("torch."):
            block._compiled_call_impl = partial(_call_compiled, block, torch.compile(block.forward, **options))
        else:
            block.compile(**options)
    return uncompiled


def _call_compiled(module: nn.Module, forward: Callable[..., Any], *args: object, **kwargs: object) -> Any:
    """Call a layer of torch. In torch 2.13, `Module.compile` has no effect on such layers.

    The compiler skips forwards that are defined in torch's files, unless the forward itself is compiled.
    """
    vars(module)["forward"] = forward
    try:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch has no types here
    finally:
        vars(module).pop("forward", None)


def is_compiled_module(module: nn.Module) -> bool:
    """Return whether a module is the result of `torch.compile`."""
    return "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx")


def has_compiled_regions(module: nn.Module) -> bool:
    """Return whether a module, or a module in it, is the result of `torch.compile`."""
    return any(map(is_compiled_module, module.modules()))


def warn_of_large_rest(task: nn.Module, units: list[nn.Module], num_shards: int) -> None:
    """Warn if most parameters of a large model are in no unit. Every rank gathers those together. Not collective.

    Args:
        task: The model, on any device.
        units: The result of `find_units`.
        num_shards: Number of ranks over which the model is sharded.
    """
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    rest = sum(parameter.numel() for parameter in task.parameters() if id(parameter) not in inside)
    total = sum(parameter.numel() for parameter in task.parameters())
    is_large = rest > LARGE_NUM_PARAMS and rest > total / 2
    if num_shards > 1 and is_large:
        warnings.warn(
            f"{rest:,} of {type(task).__name__}'s {total:,} parameters are in no unit, and every rank gathers them for "
            "the full step. Define shard_units in the task, for example to return self.blocks, or pass "
            "FSDPStrategy(auto_wrap_policy='Block') or min_num_params.",
            TrainwrightWarning,
            stacklevel=2,
        )


def _inner_first(module: nn.Module, seen: set[int] | None = None) -> Iterator[nn.Module]:
    seen = set() if seen is None else seen
    if id(module) in seen:
        return
    seen.add(id(module))
    for child in module.children():
        yield from _inner_first(child, seen)
    yield module


def replace_module(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replace a module by another module everywhere in `root`."""
    for parent in list(root.modules()):
        if parent is new:  # which may contain the old module
            continue
        for name, child in list(parent._modules.items()):
            if child is old:
                parent._modules[name] = new


def replace_parameters(root: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Replace parameters of all modules in `root`, including tied ones.

    Args:
        root: The model.
        new: id of a parameter → the parameter that replaces it.
    """
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in new:
                module._parameters[name] = new[id(parameter)]


class ModuleTraces:
    """Record of a model's modules before a library changes them in place."""

    def __init__(self, root: nn.Module) -> None:
        self._before = [(module, type(module), set(vars(module)), hook_keys(module)) for module in root.modules()]
        self._added: list[tuple[nn.Module, set[str], set[tuple[str, int]]]] = []

    def modules(self) -> Iterator[nn.Module]:
        """Yield the recorded modules."""
        return (module for module, *_ in self._before)

    def record_changes(self) -> None:
        """Record which attributes and hooks the library has added. Call this before anything else adds more."""
        self._added = []
        for module, _, names, hooks in self._before:
            self._added.append((module, set(vars(module)) - names, hook_keys(module) - hooks))

    def remove(self) -> None:
        """Restore classes, and remove the attributes and hooks that `record_changes` has found. Keep parameters."""
        for module, cls, *_ in self._before:
            module.__class__ = cls
        for module, names, hooks in self._added:
            for name in names:
                vars(module).pop(name, None)
            for table, key in hooks:
                vars(module)[table].pop(key, None)


def hook_keys(module: nn.Module) -> set[tuple[str, int]]:
    """Return the hooks of a module as pairs of hook table and key."""
    keys: set[tuple[str, int]] = set()
    for name, table in vars(module).items():
        if "_hooks" in name and isinstance(table, dict):
            keys.update((name, key) for key in table)
    return keys
