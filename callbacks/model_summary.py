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
_NUM_HEADINGS_WITHOUT_EXAMPLE = 6
_OWN_PARAMETERS = "(own parameters)"  # row of the task's parameters that belong to no child module


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
        layers: the rows, in the order of `named_modules`. The last row may be for parameters of the task itself.
        num_params: elements of all parameters. Shared parameters count once, sharded parameters with all shards.
        num_trainable: the same for parameters that require gradients.
        param_bytes, buffer_bytes: sizes of all parameters and of all buffers.
        num_modules_training, num_modules_eval: modules in each mode, without the task itself.
        flops: floating-point operations of one forward; None without an example input.
        has_lazy: True if some parameters have no shape yet. They count as 0.
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
        return [layer for layer in self.layers if layer.name != _OWN_PARAMETERS]

    def rows(self) -> list[tuple[str, ...]]:
        """Return the table's cells, headings first. FLOPs and sizes are omitted without an example input."""
        num_columns = len(_HEADINGS) if self.flops is not None else _NUM_HEADINGS_WITHOUT_EXAMPLE
        rows = [_HEADINGS[:num_columns]]
        for index, layer in enumerate(self.layers):
            cells = (
                str(index),
                layer.name,
                layer.kind,
                readable(layer.num_params),
                readable(layer.num_trainable),
                "train" if layer.training else "eval",
                readable(layer.flops or 0),
                str(_known(layer.in_size)),
                str(_known(layer.out_size)),
            )
            rows.append(cells[:num_columns])
        return rows

    def totals(self) -> list[str]:
        """Return the lines below the table."""
        sizes = f"{self.param_bytes / 1e6:,.3f} MB"
        if self.buffer_bytes:
            sizes += f", and {self.buffer_bytes / 1e6:,.3f} MB of buffers"
        lines = [
            f"{readable(self.num_trainable):>8} trainable parameters",
            f"{readable(self.num_params - self.num_trainable):>8} non-trainable parameters",
            f"{readable(self.num_params):>8} parameters in total, {sizes}",
            f"{self.num_modules_training:>8} modules in training mode, {self.num_modules_eval} in evaluation mode",
        ]
        if self.flops is not None:
            lines.append(f"{readable(self.flops):>8} FLOPs in one forward of the example input")
        if self.has_lazy:
            lines.append("Lazy parameters have no shape before the first forward: they count as 0.")
        return lines

    def __str__(self) -> str:
        rows = self.rows()
        if len(rows) == 1:  # the headings
            return "\n".join(self.totals())
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            lines.append(" | ".join(cells).rstrip())
        rule = "-" * max(map(len, lines))
        return "\n".join([lines[0], rule, *lines[1:], rule, *self.totals()])


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
    example = getattr(task, "example_input_array", None)
    sizes: dict[str, tuple[Any, Any]] = {}  # name of a module → shapes of its input and output
    flops: dict[str, int] = {}
    summary = TaskSummary()
    if example is not None:
        flops = _run_example(task, example, modules, sizes)
        summary.flops = flops.get("Global", 0)  # the counter's name for the whole forward
    root = type(task).__name__
    for name, module in modules.items():
        num_params, num_trainable = _count(module.parameters())
        kind = own_class(module).__name__
        layer = LayerSummary(name, kind, num_params, num_trainable, module.training)
        if example is not None:
            layer.flops = flops.get(f"{root}.{name}", 0)
        if name in sizes:
            layer.in_size, layer.out_size = sizes[name]
        summary.layers.append(layer)
    num_own, num_own_trainable = _count(task.parameters(recurse=False))
    if num_own and max_depth != 0:
        summary.layers.append(LayerSummary(_OWN_PARAMETERS, "Parameter", num_own, num_own_trainable, task.training))
    summary.num_params, summary.num_trainable = _count(task.parameters())
    summary.param_bytes = _bytes(task.parameters())
    summary.buffer_bytes = _bytes(task.buffers())
    children = [module for module in task.modules() if module is not task]
    summary.num_modules_training = sum(module.training for module in children)
    summary.num_modules_eval = len(children) - summary.num_modules_training
    summary.has_lazy = any(map(is_lazy, task.parameters()))
    return summary


class ModelSummary(Callback):
    """Callback that prints a summary of the task when `fit` begins, as a table in a terminal, else as plain text.

    Args:
        max_depth: levels of children to list; -1 all, 0 none (totals only). Default: 1.

    Raises:
        ConfigurationError: `max_depth` is not an integer of at least -1.
    """

    def __init__(self, max_depth: int = 1) -> None:
        _check_depth(max_depth)
        self.max_depth = max_depth

    def on_fit_start(self, trainer: Run, task: TaskModule) -> None:
        # With an example input every rank takes part: under a sharded strategy the forward is collective.
        if not trainer.is_global_zero and task.example_input_array is None:
            return
        summary = summarize(task, self.max_depth)
        if trainer.is_global_zero:
            trainer.print(_in_colour(summary) if on_terminal() else str(summary))


def readable(number: int) -> str:
    """Format a count with a unit: 1234567 → `"1.2 M"`."""
    value = float(number)
    for unit in ("", " K", " M", " B", " T"):
        if value < 999.95 or unit == " T":  # with one decimal, 999.95 would become 1,000.0
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

    # The first parameter stands for all: the example gets its device and, for floating-point inputs, its dtype.
    parameter = next(task.parameters(), None)
    device = torch.device("cpu")
    float_dtype = None
    if parameter is not None:
        device = parameter.device
        if parameter.is_floating_point():
            float_dtype = parameter.dtype
    example = move(example, device, float_dtype=float_dtype)
    handles = []
    for name, module in modules.items():
        if not isinstance(module, torch.jit.ScriptModule):  # it does not support hooks
            handles.append(module.register_forward_hook(partial(_record, sizes, name), with_kwargs=True))
    counter = FlopCounterMode(display=False)
    rng_device = None if device.type == "meta" else device  # a meta device has no generator
    try:
        with evaluating(task), isolate_rng(rng_device), counter:
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
    """Forward hook that stores the shapes of a module's first call."""
    in_sizes = [_size(argument) for argument in (*args, *kwargs.values())]
    if not in_sizes:
        in_size: Any = None
    elif len(in_sizes) == 1:
        in_size = in_sizes[0]
    else:
        in_size = in_sizes
    sizes.setdefault(name, (in_size, _size(output)))


def _size(value: object) -> Any:
    if isinstance(value, torch.Tensor):
        return list(value.shape)
    if isinstance(value, Mapping):
        return {key: _size(element) for key, element in value.items()}
    if isinstance(value, (list, tuple)):
        return [_size(element) for element in value]
    return "?"


def _known(size: Any) -> Any:
    return "?" if size is None else size


def _count(parameters: Iterable[torch.Tensor]) -> tuple[int, int]:
    """Return the number of elements, and that of the trainable ones."""
    num_params = 0
    num_trainable = 0
    for parameter in parameters:
        if is_lazy(parameter):
            continue
        size = full_numel(parameter)
        num_params += size
        if parameter.requires_grad:
            num_trainable += size
    return num_params, num_trainable


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
