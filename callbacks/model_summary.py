"""Summaries of a model: layers, parameters, sizes, FLOPs."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from io import StringIO
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.measures import evaluating
from trainwright.core.process import on_terminal
from trainwright.core.rng import isolate_rng
from trainwright.core.run import Run
from trainwright.core.task import TaskModule
from trainwright.core.tree import full_numel, move, own_class

_HEADINGS = ("", "Name", "Type", "Params", "Trainable", "Mode", "FLOPs", "In sizes", "Out sizes")
_OWN = "(own parameters)"


@dataclass(slots=True)
class LayerSummary:
    """Row of a summary.

    Attributes:
        name: path of the module in the task.
        kind: its class.
        num_params: elements of all parameters of the module and its children. Shared parameters count once.
        num_trainable: the same for parameters that require gradients.
        training: True in training mode.
        flops: floating-point operations of one forward; None without an example input.
        in_size, out_size: shapes at the first call of the module with the example input; None if not called.
    """

    name: str
    kind: str
    num_params: int
    num_trainable: int
    training: bool
    flops: int | None = None
    in_size: Any = None
    out_size: Any = None


@dataclass(slots=True)
class TaskSummary:
    """Result of `summarize`. `str` returns a table of the layers and the totals.

    Attributes:
        layers: the rows, in the order of `named_modules`.
        num_params: elements of all parameters. Shared parameters count once, sharded parameters with all shards.
        num_trainable: the same for parameters that require gradients.
        param_bytes, buffer_bytes: sizes of all parameters and of all buffers.
        num_modules_training, num_modules_eval: modules in each mode, without the task itself.
        flops: floating-point operations of one forward; None without an example input.
        has_lazy: some parameters have no shape yet and count as 0.
    """

    layers: list[LayerSummary] = field(default_factory=list)
    num_params: int = 0
    num_trainable: int = 0
    param_bytes: int = 0
    buffer_bytes: int = 0
    num_modules_training: int = 0
    num_modules_eval: int = 0
    flops: int | None = None
    has_lazy: bool = False

    @property
    def layer_names(self) -> list[str]:
        """Paths of the listed modules."""
        return [layer.name for layer in self._modules()]

    @property
    def layer_types(self) -> list[str]:
        """Class names of the listed modules."""
        return [layer.kind for layer in self._modules()]

    @property
    def param_nums(self) -> list[int]:
        """Numbers of parameters of the listed modules."""
        return [layer.num_params for layer in self._modules()]

    @property
    def in_sizes(self) -> list[Any]:
        """Input shapes of the listed modules; `"?"` for a module that was not called."""
        return [_known(layer.in_size) for layer in self._modules()]

    @property
    def out_sizes(self) -> list[Any]:
        """Output shapes of the listed modules; `"?"` for a module that was not called."""
        return [_known(layer.out_size) for layer in self._modules()]

    @property
    def total_parameters(self) -> int:
        """The same as `num_params`."""
        return self.num_params

    @property
    def trainable_parameters(self) -> int:
        """The same as `num_trainable`."""
        return self.num_trainable

    @property
    def model_size(self) -> float:
        """Size of all parameters in MB (1,000,000 bytes)."""
        return self.param_bytes / 1e6

    @property
    def total_flops(self) -> int:
        """The same as `flops`; 0 without an example input."""
        return self.flops or 0

    def _modules(self) -> list[LayerSummary]:
        return [layer for layer in self.layers if layer.name != _OWN]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's cells, headings first. FLOPs and sizes are omitted without an example input."""
        width = len(_HEADINGS) if self.flops is not None else 6
        rows = [_HEADINGS[:width]]
        for index, layer in enumerate(self.layers):
            counts = (readable(layer.num_params), readable(layer.num_trainable))
            mode = "train" if layer.training else "eval"
            sizes = (str(_known(layer.in_size)), str(_known(layer.out_size)))
            cells = (str(index), layer.name, layer.kind, *counts, mode, readable(layer.flops or 0), *sizes)
            rows.append(cells[:width])
        return rows

    def totals(self) -> list[str]:
        """Return the lines below the table."""
        lines = [
            f"{readable(self.num_trainable):>8} trainable parameters",
            f"{readable(self.num_params - self.num_trainable):>8} non-trainable parameters",
            f"{readable(self.num_params):>8} parameters in total, {self.param_bytes / 1e6:,.3f} MB"
            + (f", and {self.buffer_bytes / 1e6:,.3f} MB of buffers" if self.buffer_bytes else ""),
            f"{self.num_modules_training:>8} modules in training mode, {self.num_modules_eval} in evaluation mode",
        ]
        if self.flops is not None:
            lines.append(f"{readable(self.flops):>8} FLOPs in one forward of the example input")
        if self.has_lazy:
            lines.append("Lazy parameters have no shape before the first forward: they count as 0.")
        return lines

    def __str__(self) -> str:
        rows = self.rows()
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        rule = "-" * max(len(line) for line in lines)
        return "\n".join([lines[0], rule, *lines[1:], rule, *self.totals()] if len(rows) > 1 else self.totals())


def summarize(task: nn.Module, max_depth: int = 1) -> TaskSummary:
    """Return a summary of the modules of `task`.

    With an `example_input_array` (a tensor, a tuple of arguments, or a dict of keyword arguments) one forward is run
    for sizes and FLOPs: without gradients, in evaluation mode, on the task's device. Modes and random generators are
    restored afterwards. Under a sharded strategy the call is collective.

    Args:
        task: any module.
        max_depth: levels of children to list; -1 all, 0 none (totals only). Default: 1.

    Raises:
        ConfigurationError: `max_depth` is not an integer of at least -1.
    """
    _check_depth(max_depth)
    modules = dict(_listed(task, max_depth))
    training = {name: module.training for name, module in modules.items()}
    example = getattr(task, "example_input_array", None)
    sizes: dict[str, tuple[Any, Any]] = {}
    flops: dict[str, int] = {}
    if example is not None:
        flops = _run_example(task, example, modules, sizes)
    found = TaskSummary(flops=flops.get("Global", 0) if example is not None else None)
    root = type(task).__name__
    for name, module in modules.items():
        count, trainable = _count(module.parameters())
        in_size, out_size = sizes.get(name, (None, None))
        kind = own_class(module).__name__
        layer = LayerSummary(name, kind, count, trainable, training[name], flops.get(f"{root}.{name}", 0))
        layer.in_size = in_size
        layer.out_size = out_size
        found.layers.append(layer)
    own, own_trainable = _count(task.parameters(recurse=False))
    if own and max_depth != 0:
        found.layers.append(LayerSummary(_OWN, "Parameter", own, own_trainable, task.training))
    found.num_params, found.num_trainable = _count(task.parameters())
    found.param_bytes = _bytes(task.parameters())
    found.buffer_bytes = _bytes(task.buffers())
    below = [module for module in task.modules() if module is not task]
    found.num_modules_training = sum(module.training for module in below)
    found.num_modules_eval = len(below) - found.num_modules_training
    found.has_lazy = any(is_lazy(tensor) for tensor in task.parameters())
    return found


class ModelSummary(Callback):
    """Callback that prints a summary of the task when `fit` begins, as a table in a terminal, else as plain text.

    Args:
        max_depth: levels of children to list; -1 all, 0 none (totals only). Default: 1.

    Raises:
        ConfigurationError: `max_depth` below -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        _check_depth(max_depth)
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        # With an example input every rank takes part: under a sharded strategy the forward is collective.
        if trainer.is_global_zero or task.example_input_array is not None:
            summary = summarize(task, self.max_depth)
            if trainer.is_global_zero:
                trainer.print(_in_colour(summary) if on_terminal() else str(summary))


def readable(number: int) -> str:
    """Format a count with a unit: 1234567 → `"1.2 M"`."""
    value = float(number)
    for unit in ("", " K", " M", " B", " T"):
        if value < 999.95 or unit == " T":
            return f"{number}" if not unit else f"{value:,.1f}{unit}"
        value /= 1000
    raise AssertionError("unreachable: the last unit takes everything")


def _check_depth(max_depth: int) -> None:
    if not isinstance(max_depth, int) or max_depth < -1:
        raise ConfigurationError(f"max_depth={max_depth!r}: write -1 (all), 0 (totals only) or more levels.")


def _listed(task: nn.Module, max_depth: int) -> Iterator[tuple[str, nn.Module]]:
    for name, module in task.named_modules():
        if name and (max_depth == -1 or name.count(".") < max_depth):
            yield name, module


def _run_example(
    task: nn.Module, example: object, modules: Mapping[str, nn.Module], sizes: dict[str, tuple[Any, Any]]
) -> dict[str, int]:
    """Run one forward, fill in `sizes` and return FLOPs by module path below the root's class name."""
    from torch.utils.flop_counter import FlopCounterMode

    tensor = next(task.parameters(), None)
    device = tensor.device if tensor is not None else torch.device("cpu")
    floating = tensor.dtype if tensor is not None and tensor.is_floating_point() else None
    example = move(example, device, float_dtype=floating)
    handles = [
        module.register_forward_hook(partial(_record, sizes, name), with_kwargs=True)
        for name, module in modules.items()
        if not isinstance(module, torch.jit.ScriptModule)  # it does not support hooks
    ]
    counter = FlopCounterMode(display=False)
    try:
        with evaluating(task), isolate_rng(device if device.type != "meta" else None), counter:
            if isinstance(example, Mapping):
                task(**example)
            elif isinstance(example, (tuple, list)):
                task(*example)
            else:
                task(example)
    finally:
        for handle in handles:
            handle.remove()
    return {str(name): int(sum(counts.values())) for name, counts in counter.get_flop_counts().items()}


def _record(
    sizes: dict[str, tuple[Any, Any]],
    name: str,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: object,
) -> None:
    given = [*args, *kwargs.values()]
    if not given:
        in_size: Any = None
    elif len(given) == 1:
        in_size = _size(given[0])
    else:
        in_size = [_size(one) for one in given]
    sizes.setdefault(name, (in_size, _size(output)))


def _size(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, Mapping):
        return {key: _size(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [_size(one) for one in value]
    return "?"


def _known(size: Any) -> Any:
    return "?" if size is None else size


def _count(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    sized = [tensor for tensor in parameters if not is_lazy(tensor)]
    return sum(full_numel(t) for t in sized), sum(full_numel(t) for t in sized if t.requires_grad)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    return sum(full_numel(tensor) * tensor.element_size() for tensor in tensors if not is_lazy(tensor))


def _in_colour(summary: TaskSummary) -> str:
    console_module = require_package("rich.console", purpose="ModelSummary in a terminal")
    table_module = require_package("rich.table", purpose="ModelSummary in a terminal")
    rows = summary.rows()
    console = console_module.Console(file=StringIO(), force_terminal=True, width=shutil.get_terminal_size().columns)
    if len(rows) > 1:
        table = table_module.Table(header_style="bold")
        for heading in rows[0]:
            table.add_column(heading, justify="right" if heading in ("Params", "Trainable", "FLOPs") else "left")
        for row in rows[1:]:
            table.add_row(*row)
        console.print(table, markup=False)
    console.print("\n".join(summary.totals()), markup=False, highlight=False)
    return str(console.file.getvalue().rstrip("\n"))
