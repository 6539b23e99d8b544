"""Apply a tensor-parallel plan: match its patterns, check names and widths, and split the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Any

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
    found = [str(n) for n in range(2, count + 1) if count % n == 0]
    return " or ".join(found[:4]) or "1"


Plan = Mapping[str, Any]
"""Pattern of module names → the name of a style (see `STYLES`), a torch `ParallelStyle`, or several of them."""
GivenPlan = Plan | Callable[[nn.Module, DeviceMesh], Plan | None]
"""A plan, or a function that returns one for a model and the run's mesh."""


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
    """

    def __init__(self, task: nn.Module, plan: Plan, mesh: DeviceMesh, root: nn.Module | None = None) -> None:
        self._task = task
        self._mesh = mesh
        self._styles: dict[int, list[ParallelStyle]] = {}
        self._split_modules: list[tuple[nn.Module, dict[str, Any], set[tuple[str, int]]]] = []
        modules = dict(task.named_modules())
        for pattern, wanted in plan.items():
            for module in _matching(modules, pattern):
                entries = wanted if isinstance(wanted, (list, tuple)) else [wanted]
                styles = [_style(entry, module, pattern) for entry in entries]
                self._styles.setdefault(id(module), []).extend(styles)
        for name, module in modules.items():
            for style in self._styles.get(id(module), ()):
                _check_width(name, module, style, mesh.size())
        inside = set((task if root is None else root).modules())
        self._ties = [[place for place in places if place[0] in inside] for places in _ties(task)]
        self.splits_loss = any(_leaves_split(style) for styles in self._styles.values() for style in styles)

    def split(self, part: nn.Module) -> None:
        """Split those layers in a module that have not been split yet. Not collective.

        The weights must be full and equal on every rank. Tied weights remain tied.
        """
        for module in list(part.modules()):
            styles = self._styles.pop(id(module), None)
            if styles is None:
                continue
            before = hook_keys(module)
            plain = {name: value for name, value in vars(module).items() if not name.startswith("_")}
            trained = {key: p.requires_grad for key, p in module.named_parameters(recurse=False)}
            for style in styles:
                parallelize_module(module, self._mesh, style, src_data_rank=None)
            for key, wanted in trained.items():  # torch 2.13's SequenceParallel sets requires_grad=True
                module.get_parameter(key).requires_grad_(wanted)
            self._split_modules.append((module, plain, hook_keys(module) - before))
            _own_memory(module)
        self._tie_again()

    def narrow(self) -> None:
        """Replace parameters by uninitialized tensors of a shard's shape, to estimate the memory of a rank."""
        narrowed: dict[nn.Parameter, nn.Parameter] = {}  # a tied weight stays tied

        def narrow(module: nn.Module, name: str, dim: int) -> None:
            full = module.get_parameter(name)
            if full not in narrowed:
                narrowed[full] = _narrower(full, dim, self._mesh.size())
            setattr(module, name, narrowed[full])

        for module in self._task.modules():
            for style in self._styles.pop(id(module), ()):
                if isinstance(style, DivideAttributes):
                    vars(module).update({name: getattr(module, name) // self._mesh.size() for name in style.names})
                if isinstance(style, SplitParameters):
                    for name in style.names:
                        narrow(module, name, 0)
                dims = _split_dims(module, style)
                if dims is None:
                    continue
                narrow(module, "weight", dims[0])
                if getattr(module, "bias", None) is not None and isinstance(style, (FusedColwise, ColwiseParallel)):
                    narrow(module, "bias", 0)
                if is_conv1d(module):
                    vars(module)["nf"] = module.get_parameter("weight").shape[1]

    def undo(self) -> None:
        """Remove hooks and attributes. Parameters remain shards. Not collective."""
        for module, plain, hooks in reversed(self._split_modules):
            for name in [name for name in vars(module) if not name.startswith("_") and name not in plain]:
                del vars(module)[name]
            vars(module).update(plain)
            vars(module).pop("_distribute_module_applied", None)
            for table, key in hooks:
                vars(module)[table].pop(key, None)
        self._split_modules = []

    def _tie_again(self) -> None:
        for places in self._ties:
            found: list[Any] = [module._parameters[key] for module, key, _ in places]
            shards = [parameter for parameter in found if isinstance(parameter, DTensor)]
            if not shards or all(parameter is found[0] for parameter in found):
                continue
            if len(shards) < len(found) or any(shard.placements != shards[0].placements for shard in shards):
                raise ConfigurationError(
                    f"{' and '.join(name for *_, name in places)} are one tied weight, which the tensor-parallel plan "
                    "splits in different ways. Split all of them or none. For example, use 'embedding' for the "
                    "embedding and 'colwise_gathered' for the layer that computes logits."
                )
            for module, key, _ in places:
                module._parameters[key] = found[0]


def _narrower(parameter: nn.Parameter, dim: int, ranks: int) -> nn.Parameter:
    shape = [-(-size // ranks) if i == dim else size for i, size in enumerate(parameter.shape)]
    return nn.Parameter(torch.empty_like(parameter, memory_format=torch.contiguous_format).new_empty(shape))


def _leaves_split(style: ParallelStyle) -> bool:
    """Return whether a layer's output is a DTensor sharded by classes. Only `cross_entropy` can use such outputs."""
    return isinstance(style, ColwiseParallel) and not style.use_local_output and style.output_layouts == (Shard(-1),)


def _matching(modules: Mapping[str, nn.Module], pattern: str) -> list[nn.Module]:
    parts = pattern.split(".")
    found = [
        module
        for name, module in modules.items()
        if len(own := name.split(".")) == len(parts) and all(map(fnmatchcase, own, parts))
    ]
    if not found:
        raise ConfigurationError(
            f"the tensor-parallel plan names {pattern!r}, which matches no module of the task."
            f"{nearest(pattern, _generic(modules))} See its named_modules()."
        )
    return found


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
    """Check that a style can split a layer evenly."""
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
    linear = isinstance(module, nn.Linear)
    embedding = isinstance(module, nn.Embedding)
    if isinstance(style, FusedColwise):
        return (1 if is_conv1d(module) else 0 if linear else -1), style.blocks
    if isinstance(style, Conv1DRowwise):
        return (0 if is_conv1d(module) else -1), 1
    if isinstance(style, SplitEmbedding):
        return (0 if embedding else -1), 1
    if isinstance(style, ColwiseParallel):
        return (0 if linear else 1 if embedding else -1), 1
    if isinstance(style, RowwiseParallel):
        return (1 if linear else 0 if embedding else -1), 1
    return None


def _ties(task: nn.Module) -> list[list[tuple[nn.Module, str, str]]]:
    """Return all uses of each tied parameter: the module, the name in the module, and the name in the task."""
    places: dict[int, list[tuple[nn.Module, str, str]]] = {}
    for name, module in task.named_modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                places.setdefault(id(parameter), []).append((module, key, f"{name}.{key}" if name else key))
    return [found for found in places.values() if len(found) > 1]


def _own_memory(module: nn.Module) -> None:
    """Replace shards that are views of full weights by copies, so that the full weights are freed."""
    for parameter in module.parameters(recurse=False):
        if isinstance(parameter, DTensor):
            local = parameter._local_tensor
            if local.untyped_storage().nbytes() > local.numel() * local.element_size():
                with torch.no_grad():
                    parameter._local_tensor = local.clone(memory_format=torch.contiguous_format)
