"""Apply a tensor-parallel plan: match its patterns, check names and widths, and split the layers."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.strategies.fsdp.layers.styles import (
    STYLES,
    Conv1DRowwise,
    DivideAttributes,
    FusedColwise,
    SplitEmbedding,
    SplitParameters,
    is_conv1d,
)
from trainwright.strategies.steps.fp8 import MULTIPLE, is_converted
from trainwright.strategies.units import hook_keys


def check_tp_size(tp: object) -> int:
    """Return `tp`. Raise an error if it is not valid."""
    if isinstance(tp, bool) or not isinstance(tp, int) or tp < 1:
        raise ConfigurationError(f"tp={tp!r}: use the number of ranks that split layers, such as 2.")
    return tp


def need_divisible(tp: int, **counts: int) -> None:
    """Check that counts, such as a number of heads, are divisible by the size of a tensor-parallel group.

    Raises:
        ConfigurationError: A count is not divisible. The message lists possible sizes.
    """
    for name, count in counts.items():
        if count % tp:
            raise ConfigurationError(
                f"{name}={count} is not divisible by tp={tp}. Use tp={_divisors(count)}, or a multiple of {tp} for "
                f"{name}."
            )


def _divisors(count: int) -> str:
    """Return the smallest divisors above 1 as text, such as "2 or 3 or 4 or 6" for 12."""
    divisors = [str(n) for n in range(2, count + 1) if count % n == 0]
    return " or ".join(divisors[:4]) or "1"


Plan = Mapping[str, Any]
"""Pattern of module names → the name of a style (see `STYLES`), a torch `ParallelStyle`, or several of them."""
GivenPlan = Plan | Callable[[nn.Module, DeviceMesh], Plan | None]
"""A plan, or a function that returns one for a model and the run's mesh."""


class _SplitModule(NamedTuple):
    """A module whose layers were split, with the data to undo it."""

    module: nn.Module
    attributes: dict[str, Any]  # public attributes before the split
    added_hooks: set[tuple[str, int]]  # see `hook_keys`


class SplitLayers:
    """Division of a task's layers according to a plan. `undo` removes everything except the shards.

    Args:
        task: The task, whose model is built. The constructor only checks it.
        plan: See `Plan`. Patterns match the full names of `named_modules`. `*` matches any characters except dots.
        mesh: The axis over which layers are split, 1-D.
        root: The part of the task whose layers this rank splits. A tied weight outside of `root` belongs to another
            pipeline stage. Default: the task.

    Attributes:
        splits_loss: The plan has a style that leaves logits sharded; see `LossParallel`.

    Raises:
        ConfigurationError: A pattern matches no module, a style is unknown or does not support the layer, or a width is
            not divisible.
    """

    def __init__(self, task: nn.Module, plan: Plan, mesh: DeviceMesh, root: nn.Module | None = None) -> None:
        self._task = task
        self._mesh = mesh
        self._styles: dict[int, list[ParallelStyle]] = {}  # id of a module that is not split yet → its styles
        self._split_modules: list[_SplitModule] = []
        modules = dict(task.named_modules())
        for pattern, value in plan.items():
            for module in _matching(modules, pattern):
                entries = value if isinstance(value, (list, tuple)) else [value]
                styles = [_style(entry, module, pattern) for entry in entries]
                self._styles.setdefault(id(module), []).extend(styles)
        for name, module in modules.items():
            for style in self._styles.get(id(module), ()):
                _check_width(name, module, style, mesh.size())
        modules_of_root = set((task if root is None else root).modules())
        self._ties: list[list[_Use]] = []  # for each tied parameter its uses within `root`
        for uses in _ties(task):
            self._ties.append([use for use in uses if use.module in modules_of_root])
        self.splits_loss = False
        for styles in self._styles.values():
            if any(_leaves_split(style) for style in styles):
                self.splits_loss = True

    def split(self, part: nn.Module) -> None:
        """Split those layers in a module that have not been split yet. Not collective.

        The weights must be full and equal on every rank. Tied weights remain tied.

        Raises:
            ConfigurationError: The plan splits the uses of a tied weight in different ways.
        """
        for module in list(part.modules()):
            styles = self._styles.pop(id(module), None)
            if styles is None:
                continue
            former_hooks = hook_keys(module)
            attributes = {name: value for name, value in vars(module).items() if not name.startswith("_")}
            is_trained = {name: p.requires_grad for name, p in module.named_parameters(recurse=False)}
            for style in styles:
                parallelize_module(module, self._mesh, style, src_data_rank=None)
            for name, requires_grad in is_trained.items():  # torch 2.13's SequenceParallel sets requires_grad=True
                module.get_parameter(name).requires_grad_(requires_grad)
            self._split_modules.append(_SplitModule(module, attributes, hook_keys(module) - former_hooks))
            _free_full_weights(module)
        self._tie_again()

    def narrow(self) -> None:
        """Replace parameters by uninitialized tensors of a shard's shape, to estimate the memory of a rank.

        Used instead of `split` for a model on the device `meta`, without process groups.
        """
        narrowed: dict[nn.Parameter, nn.Parameter] = {}  # full parameter → its shard, so that a tied weight stays tied

        def narrow(module: nn.Module, name: str, dim: int) -> None:
            full = module.get_parameter(name)
            if full not in narrowed:
                narrowed[full] = _narrower(full, dim, self._mesh.size())
            setattr(module, name, narrowed[full])

        for module in self._task.modules():
            for style in self._styles.pop(id(module), ()):
                if isinstance(style, DivideAttributes):
                    for name in style.names:
                        vars(module)[name] = getattr(module, name) // self._mesh.size()
                if isinstance(style, SplitParameters):
                    for name in style.names:
                        narrow(module, name, 0)
                dims = _split_dims(module, style)
                if dims is None:
                    continue
                narrow(module, "weight", dims[0])
                splits_output = isinstance(style, (FusedColwise, ColwiseParallel))
                if splits_output and getattr(module, "bias", None) is not None:
                    narrow(module, "bias", 0)
                if is_conv1d(module):
                    vars(module)["nf"] = module.get_parameter("weight").shape[1]

    def undo(self) -> None:
        """Remove hooks and attributes. Parameters remain shards. Not collective."""
        for module, attributes, added_hooks in reversed(self._split_modules):
            for name in list(vars(module)):
                if not name.startswith("_") and name not in attributes:  # such as `forward`
                    del vars(module)[name]
            vars(module).update(attributes)  # such as the number of heads
            vars(module).pop("_distribute_module_applied", None)  # with this mark, torch refuses to split it again
            for table, key in added_hooks:
                vars(module)[table].pop(key, None)
        self._split_modules = []

    def _tie_again(self) -> None:
        """Make tied weights one parameter again. A split has replaced the parameter in each module by another shard."""
        for uses in self._ties:
            parameters: list[Any] = [use.module._parameters[use.name] for use in uses]
            shards = [parameter for parameter in parameters if isinstance(parameter, DTensor)]
            if not shards or all(parameter is parameters[0] for parameter in parameters):
                continue
            is_split_alike = all(shard.placements == shards[0].placements for shard in shards)
            all_are_split = len(shards) == len(parameters)
            if not all_are_split or not is_split_alike:
                raise ConfigurationError(
                    f"{' and '.join(use.full_name for use in uses)} are one tied weight, which the tensor-parallel "
                    "plan splits in different ways. Split all of them or none. For example, use 'embedding' for the "
                    "embedding and 'colwise_gathered' for the layer that computes logits."
                )
            for use in uses:
                use.module._parameters[use.name] = parameters[0]


class _Use(NamedTuple):
    """A module's use of a tied parameter."""

    module: nn.Module
    name: str  # in the module
    full_name: str  # in the task


def _narrower(parameter: nn.Parameter, dim: int, ranks: int) -> nn.Parameter:
    """Return an uninitialized parameter with the shape of rank 0's shard."""
    shape = list(parameter.shape)
    shape[dim] = math.ceil(shape[dim] / ranks)  # rank 0 has the most rows
    return nn.Parameter(parameter.new_empty(shape))


def _leaves_split(style: ParallelStyle) -> bool:
    """Return whether a layer's output is a DTensor sharded by classes. Only `cross_entropy` can use such outputs."""
    return isinstance(style, ColwiseParallel) and not style.use_local_output and style.output_layouts == (Shard(-1),)


def _matching(modules: Mapping[str, nn.Module], pattern: str) -> list[nn.Module]:
    """Return the modules whose names match a pattern, part by part. Raise an error if there are none."""
    patterns = pattern.split(".")
    matching = []
    for name, module in modules.items():
        parts = name.split(".")
        if len(parts) == len(patterns) and all(map(fnmatchcase, parts, patterns)):
            matching.append(module)
    if not matching:
        raise ConfigurationError(
            f"the tensor-parallel plan names {pattern!r}, which matches no module of the task."
            f"{nearest(pattern, _generic(modules))} See its named_modules()."
        )
    return matching


def _generic(modules: Mapping[str, nn.Module]) -> list[str]:
    """Return the names of modules. Names with `*` instead of numbers come first."""
    return [*sorted({starred(name) for name in modules if name}), *(name for name in modules if name)]


def with_stars(model: nn.Module) -> list[str]:
    """Return the names of a model's modules in order, with `*` instead of numbers as in plans."""
    return list(dict.fromkeys(starred(name) for name, _ in model.named_modules()))


def starred(name: str) -> str:
    """Return the name of a module with `*` instead of numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))


def _style(entry: object, module: nn.Module, pattern: str) -> ParallelStyle:
    """Return the style object of a plan's entry for a module. Raise an error if it does not exist."""
    if isinstance(entry, ParallelStyle):
        if is_conv1d(module) and isinstance(entry, (ColwiseParallel, RowwiseParallel)):
            raise ConfigurationError(
                f"the tensor-parallel plan gives {pattern!r} torch's {type(entry).__name__}, which does not support "
                "Conv1D. Use 'colwise', 'fused_colwise' or 'rowwise'."
            )
        return entry
    if entry not in STYLES:
        raise ConfigurationError(
            f"the tensor-parallel plan gives {pattern!r} the style {entry!r}, which is unknown."
            f"{nearest(str(entry), STYLES)} Known: {', '.join(STYLES)}, and torch's ParallelStyle objects."
        )
    return STYLES[entry](module)


def _check_width(name: str, module: nn.Module, style: ParallelStyle, ranks: int) -> None:
    """Raise an error if a style cannot split a layer evenly, or needs an attribute that is not divisible."""
    if isinstance(style, DivideAttributes):
        need_divisible(ranks, **{f"{name}.{key}": getattr(module, key) for key in style.names})
        return
    dims = _split_dims(module, style)
    if dims is None:
        return
    dim, blocks = dims
    if dim < 0:
        raise ConfigurationError(
            f"the tensor-parallel plan splits {name} with {type(style).__name__}, which does not support "
            f"{type(module).__name__}. Use a style that fits the layer: linear layers, embeddings and Conv1D can be "
            "split."
        )
    width = module.get_parameter("weight").shape[dim]
    if width % (blocks * ranks) and not _may_be_uneven(style):
        of = f" of {blocks} blocks" if blocks > 1 else ""
        raise ConfigurationError(
            f"{name}: its width {width}{of} is not divisible by tp={ranks}. Use a width that is a multiple of "
            f"{blocks * ranks} ({width + blocks * ranks - width % (blocks * ranks)}), or remove it from the plan."
        )
    if is_converted(module) and width // ranks % MULTIPLE:
        raise ConfigurationError(
            f"{name}: its width of {width} is {width // ranks} on each of tp={ranks} ranks, and fp8 needs multiples "
            f"of {MULTIPLE}. Leave it in bf16 with Fp8(skip={name!r}), or use a smaller tp."
        )


def _may_be_uneven(style: ParallelStyle) -> bool:
    """Return whether ranks may hold different numbers of rows, as in a vocabulary whose outputs are gathered."""
    gathers = isinstance(style, ColwiseParallel) and style.output_layouts == (Replicate(),)
    return gathers or isinstance(style, (SplitEmbedding, SplitParameters))


def _split_dims(module: nn.Module, style: ParallelStyle) -> tuple[int, int] | None:
    """Return the dimension of the weight that a style splits, and the number of blocks.

    The dimension is -1 if the style cannot split the layer. The result is None for unknown styles.
    """
    # Weights are (outputs, inputs) in a Linear, (inputs, outputs) in a Conv1D and (rows, width) in an Embedding.
    if is_conv1d(module):
        kind = "Conv1D"
    elif isinstance(module, nn.Linear):
        kind = "Linear"
    elif isinstance(module, nn.Embedding):
        kind = "Embedding"
    else:
        kind = "other"
    if isinstance(style, FusedColwise):
        return {"Conv1D": 1, "Linear": 0}.get(kind, -1), style.blocks
    if isinstance(style, Conv1DRowwise):
        return {"Conv1D": 0}.get(kind, -1), 1
    if isinstance(style, SplitEmbedding):
        return {"Embedding": 0}.get(kind, -1), 1
    if isinstance(style, ColwiseParallel):
        return {"Linear": 0, "Embedding": 1}.get(kind, -1), 1
    if isinstance(style, RowwiseParallel):
        return {"Linear": 1, "Embedding": 0}.get(kind, -1), 1
    return None


def _ties(task: nn.Module) -> list[list[_Use]]:
    """Return all uses of each tied parameter."""
    uses: dict[nn.Parameter, list[_Use]] = {}
    for path, module in task.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                uses.setdefault(parameter, []).append(_Use(module, name, prefix + name))
    return [uses_of_one for uses_of_one in uses.values() if len(uses_of_one) > 1]


def _free_full_weights(module: nn.Module) -> None:
    """Replace shards that are views of full weights by copies, so that the full weights are freed."""
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor
            # The storage of a view is that of the full weight, which is larger.
            if local.untyped_storage().nbytes() > local.numel() * local.element_size():
                with torch.no_grad():
                    parameter._local_tensor = local.clone(memory_format=torch.contiguous_format)
