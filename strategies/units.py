"""Which parts of a model are cut and gathered one at a time."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, Protocol, runtime_checkable

from torch import nn

from trainwright.core.errors import ConfigurationError, TrainwrightWarning, nearest

WrapPolicy = str | type[nn.Module] | Collection[str | type[nn.Module]] | Callable[..., Any]
"""Classes of modules or their names, or a function that says yes to a module; also a policy of `torch.distributed.
fsdp.wrap`, such as `ModuleWrapPolicy({Block})` or `partial(size_based_auto_wrap_policy, min_num_params=10**6)`."""

LARGE_NUM_PARAMS = 100_000_000

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)


@runtime_checkable
class NamesUnits(Protocol):
    """A model that names its units, as every task does; see `TaskModule.shard_units`."""

    def shard_units(self) -> Iterable[nn.Module] | None:
        """Return the units; None: the strategy's arguments define them."""


def find_units(task: nn.Module, policy: WrapPolicy | None, min_num_params: int | None) -> list[nn.Module]:
    """Return the modules that are sharded by themselves, inner ones before those around them.

    Parts that share parameters, or modules with parameters, with what lies outside of them are left to whatever
    surrounds both: a tied weight must be gathered as one. So are the parts of `nn.MultiheadAttention`, which reads
    their weights and calls none of them.

    Args:
        task: A model or task. With `policy` and `min_num_params` None, its units are what its `shard_units` returns,
            or modules of the classes that a model of transformers names in `_no_split_modules`.
        policy: which modules.
        min_num_params: modules with so many parameters that lie in no unit within them.

    Raises:
        ConfigurationError: a class that no module has, or something that is no module of the task.
    """
    if min_num_params is not None:
        wanted = _by_size(task, min_num_params)
    elif policy is not None:
        wanted = {id(module) for module in matching(task, policy, "auto_wrap_policy")}
    else:
        wanted = {id(module) for module in _own_choice(task)}
    wanted -= {
        id(part) for module in task.modules() if _is_read(module) for part in module.modules() if part is not module
    }
    owners: dict[int, set[int]] = {}  # of a parameter, or of a module that has some: the modules that it lies in
    for module in task.modules():
        parts = [
            *module.parameters(recurse=False),
            *(c for c in module.children() if any(True for _ in c.parameters())),
        ]
        for part in parts:
            owners.setdefault(id(part), set()).add(id(module))
    found: list[nn.Module] = []
    taken: set[int] = set()  # what lies in a unit within: that one gathers it, wherever it is called
    for module in _inner_first(task):
        if id(module) in wanted and module is not task:
            inside = {id(part) for part in module.modules()}
            own = {id(part) for part in [*module.parameters(), *module.modules()]} - taken - {id(module)}
            if all(owners.get(part, inside) <= inside for part in own):
                found.append(module)
                taken |= own | {id(module)}
    return found


def matching(task: nn.Module, policy: WrapPolicy, argument: str) -> list[nn.Module]:
    """Return the task's modules that a policy names.

    Raises:
        ConfigurationError: naming `argument`: a class that no module has, or a module without a forward.
    """
    modules = [module for module in task.modules() if module is not task]
    if hasattr(policy, "_lambda_fn"):
        policy = policy._lambda_fn  # torch's CustomPolicy, which is no function itself
    if callable(policy) and not isinstance(policy, type):
        if "recurse" in inspect.signature(policy).parameters:
            return _by_torch_policy(task, policy)
        return [module for module in modules if policy(module)]
    entries = list(policy) if isinstance(policy, Collection) and not isinstance(policy, str) else [policy]
    found: list[nn.Module] = []
    for entry in entries:
        if isinstance(entry, str):
            same = [module for module in modules if type(module).__name__ == entry]
        elif isinstance(entry, type) and issubclass(entry, nn.Module):
            same = [module for module in modules if isinstance(module, entry)]
        else:
            raise ConfigurationError(
                f"{argument} holds {entry!r}. Write classes of modules, their names, or a function of a module."
            )
        if not same or any(isinstance(module, _WITHOUT_FORWARD) for module in same):
            known = sorted({type(module).__name__ for module in modules if not isinstance(module, _WITHOUT_FORWARD)})
            name = entry if isinstance(entry, str) else entry.__name__
            what = "no module of the task is one" if not same else "it has no forward to gather its weights in"
            raise ConfigurationError(
                f"{argument}: {name!r}: {what}.{nearest(name, known)} There are: {', '.join(known)}."
            )
        found += same
    return found


def _own_choice(task: nn.Module) -> list[nn.Module]:
    if not isinstance(task, NamesUnits):
        # Classes of blocks, as models of transformers name them.
        blocks = set(getattr(task, "_no_split_modules", None) or ())
        return [module for module in task.modules() if type(module).__name__ in blocks]
    units = list(task.shard_units() or [])
    inside = {id(module) for module in task.modules()}
    for unit in units:
        if not isinstance(unit, nn.Module) or id(unit) not in inside or isinstance(unit, _WITHOUT_FORWARD):
            raise ConfigurationError(
                f"{type(task).__name__}.shard_units returned {type(unit).__name__}, which is no part of the task with "
                "a forward of its own. Return its blocks, for example list(self.blocks)."
            )
    return units


def _is_read(module: nn.Module) -> bool:
    """Tell whether a module computes with the weights of its parts without calling these."""
    return isinstance(module, nn.MultiheadAttention)


def _by_size(task: nn.Module, least: int) -> set[int]:
    found: set[int] = set()

    def left_of(module: nn.Module) -> dict[int, int]:
        left = {id(p): p.numel() for p in module.parameters(recurse=_is_read(module))}
        for child in () if _is_read(module) else module.children():
            left |= left_of(child)
        if module is not task and not isinstance(module, _WITHOUT_FORWARD) and sum(left.values()) >= least:
            found.add(id(module))
            return {}
        return left

    left_of(task)
    return found


def _by_torch_policy(task: nn.Module, policy: Callable[..., Any]) -> list[nn.Module]:
    """Ask a policy in the form of FSDP1: `policy(module, recurse, nonwrapped_numel)`."""
    found: list[nn.Module] = []

    def taken(module: nn.Module) -> int:
        """Return how many of a module's parameters have come into units."""
        total = sum(parameter.numel() for parameter in module.parameters())
        if not policy(module=module, recurse=True, nonwrapped_numel=total):
            return 0
        inside = sum(taken(child) for child in module.children())
        eligible = module is not task and not isinstance(module, _WITHOUT_FORWARD)
        if eligible and policy(module=module, recurse=False, nonwrapped_numel=total - inside):
            found.append(module)
            return total
        return inside

    taken(task)
    return found


def check_can_be_cut(task: nn.Module) -> None:
    """Check that every parameter has a dimension to be cut along, and a gradient that is cut as it is.

    Raises:
        ConfigurationError: one has none.
    """
    scalars = [name for name, parameter in task.named_parameters() if not parameter.dim()]
    if scalars:
        raise ConfigurationError(
            f"{type(task).__name__}'s parameter {scalars[0]} has no dimension that could be cut. Give it one: "
            "nn.Parameter(torch.ones(1)) instead of nn.Parameter(torch.tensor(1.0))."
        )
    check_no_sparse(task)


def check_no_shards(model: nn.Module, is_shard: Callable[[nn.Parameter], bool]) -> None:
    """Check that a model does not hold shards of an earlier run, which raises a ConfigurationError."""
    if any(map(is_shard, model.parameters())):
        raise ConfigurationError(
            f"{type(model).__name__} still holds shards of a run that failed or has not ended. Create a new one, and "
            "load a checkpoint to continue."
        )


def check_no_sparse(task: nn.Module) -> None:
    """Check that no layer makes sparse gradients, which torch cannot cut into pieces.

    Raises:
        ConfigurationError: one does.
    """
    for name, module in task.named_modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ConfigurationError(
                f"{type(task).__name__}'s {name} has sparse=True, and sparse gradients cannot be cut into pieces. "
                "Leave sparse out, or use strategy='ddp'."
            )


def check_compilable(units: list[nn.Module]) -> None:
    """Check that there is something to compile.

    Raises:
        ConfigurationError: there is no unit.
    """
    if not units:
        raise ConfigurationError(
            "compile compiles each unit of a sharded model, and the task has none. Define shard_units in it, or "
            "pass FSDPStrategy(auto_wrap_policy=…); or leave compile out."
        )


def repeated_blocks(model: nn.Module) -> list[nn.Module]:
    """Return the elements of each outermost ModuleList that holds several modules of one class."""
    children = list(model.children())
    if isinstance(model, nn.ModuleList) and len(children) > 1 and len(set(map(type, children))) == 1:
        return children
    return [block for child in children for block in repeated_blocks(child)]


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is the result of `torch.compile`."""
    return "_orig_mod" in module._modules and hasattr(module, "dynamo_ctx")


def warn_of_large_rest(task: nn.Module, units: list[nn.Module], num_pieces: int) -> None:
    """Warn when most of a large model lies in no unit, so that every rank gathers it whole. Not collective.

    Args:
        task: the model, on any device.
        units: what `find_units` returned.
        num_pieces: ranks that share the model; on one nothing is gathered.
    """
    inside = {id(parameter) for unit in units for parameter in unit.parameters()}
    rest = sum(parameter.numel() for parameter in task.parameters() if id(parameter) not in inside)
    total = sum(parameter.numel() for parameter in task.parameters())
    if num_pieces > 1 and rest > LARGE_NUM_PARAMS and 2 * rest > total:
        warnings.warn(
            f"{rest:,} of {type(task).__name__}'s {total:,} parameters lie in no unit and are gathered on every rank "
            "for the whole step. Define shard_units in the task, for example to return self.blocks, or pass "
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
    """Put a module into the place of another one, wherever it is a child within `root`."""
    for parent in list(root.modules()):
        if parent is not new:
            for name, child in list(parent._modules.items()):
                if child is old:
                    parent._modules[name] = new


def replace_parameters(root: nn.Module, new: dict[int, nn.Parameter]) -> None:
    """Put parameters into the places of others, tied ones into all of them.

    Args:
        root: whose modules are looked through.
        new: by the id of the parameter that each stands in for.
    """
    for module in root.modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and id(parameter) in new:
                module._parameters[name] = new[id(parameter)]


class ModuleTraces:
    """Remembers the modules of a model as they were before a library changed them in place."""

    def __init__(self, root: nn.Module) -> None:
        self._before = [(module, type(module), set(vars(module)), hook_keys(module)) for module in root.modules()]
        self._added: list[tuple[nn.Module, set[str], set[tuple[str, int]]]] = []

    def modules(self) -> Iterator[nn.Module]:
        """Yield the modules."""
        return (module for module, *_ in self._before)

    def note(self) -> None:
        """Record the attributes and hooks that the library has added; called before the user adds any."""
        self._added = [(m, set(vars(m)) - names, hook_keys(m) - hooks) for m, _, names, hooks in self._before]

    def remove(self) -> None:
        """Restore classes, and remove attributes and hooks. Parameters stay as they are. Not collective."""
        for module, cls, *_ in self._before:
            module.__class__ = cls
        for module, names, hooks in self._added:
            for name in names:
                vars(module).pop(name, None)
            for table, key in hooks:
                vars(module)[table].pop(key, None)


def hook_keys(module: nn.Module) -> set[tuple[str, int]]:
    """Return the hooks of a module: the name of the table and the key of each."""
    tables = {name: table for name, table in vars(module).items() if "_hooks" in name and isinstance(table, dict)}
    return {(name, key) for name, table in tables.items() for key in table}
