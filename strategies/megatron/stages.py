"""Division of a model into the stages of a pipeline."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.signatures import method_of
from trainwright.core.task import TaskModule
from trainwright.strategies.units import replace_parameters

Stages = list[list[nn.Module]]
"""The modules of each stage, in the order of their calls."""


def find_stages(task: nn.Module, num_stages: int, split_points: Sequence[str] | None) -> Stages:
    """Return the modules of each stage, in the order of their calls. Not collective.

    `split_points` determines the stages. If it is None, the task's `pipeline_stages` does, unless it returns None. By
    default, the layers are those of `layers_of`, and are divided so that the largest stage has as few parameters as
    possible, without embeddings. Modules with parameters that are registered before the layers belong to the first
    stage, and those that are registered after the layers to the last stage. Other modules, such as
    those that contain the layers, belong to no stage, nor do their own parameters (see `is_in_no_stage`).

    Args:
        task: A task or model, whose layers exist.
        num_stages: At least 2.
        split_points: Names of the first layers of all stages except the first stage. None if the user has passed none.

    Raises:
        ConfigurationError: The model has too few layers, or the description of the stages is invalid.
    """
    if split_points is None and isinstance(task, TaskModule):
        stages_of_task = method_of(task, "pipeline_stages")()
        if stages_of_task is not None:
            return _checked(task, [list(stage) for stage in stages_of_task], num_stages)
    _refuse_two_stacks(task, num_stages)
    named = layers_of(task, num_stages)
    layers = list(named.values())
    before, after = _around(task, layers)
    if split_points is None:
        weights = [_weight([layer]) for layer in layers]
        starts = _balanced(weights, _weight(before), _weight(after), num_stages)
    else:
        starts = _starts(split_points, list(named), num_stages)
    bounds = [0, *starts, len(layers)]  # 6 layers, starts [2, 4]: [0, 2, 4, 6]
    stages = [layers[start:stop] for start, stop in itertools.pairwise(bounds)]
    stages[0] = [*before, *stages[0]]
    stages[-1] = [*stages[-1], *after]
    return stages


def _around(task: nn.Module, layers: Sequence[nn.Module]) -> tuple[list[nn.Module], list[nn.Module]]:
    """Return the modules with parameters that are registered before the layers, and those after them.

    Each is as large as possible without containing a layer: an embedding block is one module, not its parts.
    """
    in_layers: set[int] = set()  # ids of the layers and of modules in them
    for layer in layers:
        in_layers.update(id(module) for module in layer.modules())
    containers = {id(module) for module in task.modules() if _contains(module, layers[0])}
    added_ids: set[int] = set()  # ids of modules in `before` and `after`, and of modules in them
    before: list[nn.Module] = []
    after: list[nn.Module] = []
    passed_layers = False
    for module in task.modules():  # in the order of registration, a module before the modules in it
        if id(module) in in_layers:
            passed_layers = True
            continue
        if id(module) in containers or id(module) in added_ids:
            continue
        has_parameters = next(module.parameters(), None) is not None
        if has_parameters:
            if passed_layers:
                after.append(module)
            else:
                before.append(module)
            added_ids.update(id(part) for part in module.modules())
    return before, after


def _contains(module: nn.Module, part: nn.Module) -> bool:
    return any(each is part for each in module.modules())


def _checked(task: nn.Module, stages: Stages, num_stages: int) -> Stages:
    """Return the stages of a task's `pipeline_stages`, or raise an error if they are invalid."""
    name = f"{type(task).__name__}.pipeline_stages"
    if len(stages) != num_stages or not all(stages):
        raise ConfigurationError(
            f"{name} returned {len(stages)} stage(s), {sum(map(bool, stages))} of them with modules, but the pipeline "
            f"has {num_stages}. Return a list of modules for each stage."
        )
    modules = list(itertools.chain.from_iterable(stages))
    ids_in_task = {id(module) for module in task.modules()}
    if any(id(module) not in ids_in_task for module in modules):
        raise ConfigurationError(
            f"{name} returned a module that is not in the task. Return modules of {type(task).__name__}."
        )
    part_ids = {id(module) for module in modules}
    parameter_ids: set[int] = set()  # of the parameters in stages
    for module in modules:
        parameter_ids.update(id(parameter) for parameter in module.parameters())
    omitted: list[str] = []
    for prefix, module in task.named_modules():
        contains_parts = not part_ids.isdisjoint(id(inner) for inner in module.modules())
        if contains_parts:
            continue  # a module around parts may have parameters of its own, which are then in no stage
        for key, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in parameter_ids:
                omitted.append(plain_name(f"{prefix}.{key}".lstrip(".")))
    if omitted:
        raise ConfigurationError(f"{name} does not include {', '.join(omitted[:5])}. Add each module to a stage.")
    return stages


def _refuse_two_stacks(task: nn.Module, num_stages: int) -> None:
    """Raise an error for encoder-decoder models of transformers."""
    for module in task.modules():
        config = getattr(module, "config", None)
        if getattr(config, "is_encoder_decoder", False) is True and hasattr(module, "decoder"):
            raise ConfigurationError(
                f"{type(module).__name__} has an encoder and a decoder, and every layer of the decoder reads the "
                f"encoder's output. A pipeline of pp={num_stages} stages sends only the output of one layer to the "
                f"next. Use pp=1 with tp={num_stages}, or dp_shard={num_stages}."
            )


class _Stack(NamedTuple):
    """A container of layers."""

    is_list_of_one_class: bool
    num_parameters: int
    name: str
    container: nn.Module


def layers_of(task: nn.Module, num_stages: int) -> dict[str, nn.Module]:
    """Return the layers of a model by name.

    They are the children of a ModuleList whose children have one class, or else of another ModuleList or Sequential.
    Among several, the one with the most parameters is used.

    Raises:
        ConfigurationError: The model has fewer than `num_stages` layers.
    """
    stacks: list[_Stack] = []
    short_stacks: dict[str, int] = {}  # name of a stack of fewer layers than stages → the number of its layers
    for name, module in task.named_modules():
        if not isinstance(module, (nn.ModuleList, nn.Sequential)):
            continue
        if any(name.startswith(f"{stack}.") for stack in short_stacks):
            continue  # a container inside of a layer
        children = list(module.children())
        has_one_class = len(set(map(type, children))) == 1
        if len(children) >= num_stages:
            is_list_of_one_class = has_one_class and isinstance(module, nn.ModuleList)
            num_parameters = sum(parameter.numel() for parameter in module.parameters())
            stacks.append(_Stack(is_list_of_one_class, num_parameters, name, module))
        elif has_one_class and len(children) > 1:
            short_stacks[name] = len(children)
    if not stacks:
        short_text = "".join(f" {plain_name(name)} has {count}." for name, count in short_stacks.items())
        raise ConfigurationError(
            f"{type(task).__name__} has no ModuleList or Sequential of at least {num_stages} layers that a pipeline of "
            f"{num_stages} stages could divide.{short_text} Use fewer stages, or define pipeline_stages() in the task."
        )
    best = max(stacks, key=lambda stack: (stack.is_list_of_one_class, stack.num_parameters))
    layers: dict[str, nn.Module] = {}
    for name, child in best.container.named_children():
        layers[plain_name(f"{best.name}.{name}".lstrip("."))] = child
    return layers


def _starts(split_points: Sequence[str], names: list[str], num_stages: int) -> list[int]:
    """Return the indices of the layers in `split_points`, or raise an error if they are invalid."""
    if len(split_points) != num_stages - 1:
        raise ConfigurationError(
            f"split_points={list(split_points)!r} divide a model into {len(split_points) + 1} stages, but the pipeline "
            f"has {num_stages}. Pass {num_stages - 1} name(s): the first layer of every stage except the first stage."
        )
    for name in split_points:
        if name not in names:
            raise ConfigurationError(
                f"split_points: {name!r} is not a layer.{nearest(name, names)} Layers: {', '.join(names)}."
            )
    starts = [names.index(name) for name in split_points]
    if starts != sorted(set(starts)) or starts[0] == 0:
        raise ConfigurationError(
            f"split_points={list(split_points)!r} are not in the order of the layers, or a stage has no layers. Use "
            "distinct names in order, without the first layer."
        )
    return starts


def _weight(modules: Iterable[nn.Module]) -> int:
    """Return the number of parameters, without embeddings, because a lookup takes little time."""
    parts_by_id: dict[int, nn.Module] = {}  # each part once
    for module in modules:
        for part in module.modules():
            parts_by_id[id(part)] = part
    total = 0
    for part in parts_by_id.values():
        if not isinstance(part, nn.Embedding):
            total += sum(parameter.numel() for parameter in part.parameters(recurse=False))
    return total


def _balanced(weights: list[int], before: int, after: int, num_stages: int) -> list[int]:
    """Divide layers with these weights (see `_weight`) so that the largest stage is as small as possible.

    `before` and `after` are the weights of further modules in the first and in the last stage. Return the indices of
    the first layers of all stages except the first stage.
    """
    # totals[i] is the weight of the layers before layer i.
    totals = list(itertools.accumulate(weights, initial=0))

    @cache
    def divide(stop: int, num: int) -> tuple[int, tuple[int, ...]]:
        """Divide the layers before `stop` into `num` stages.

        Return the weight of the largest stage, and the indices of the first layers as `_balanced` does.
        """
        if num == 1:
            return before + totals[stop], ()
        extra = after if num == num_stages else 0
        divisions: list[tuple[int, tuple[int, ...]]] = []
        for start in range(num - 1, stop):  # first layer of the last of these stages
            largest_before, starts = divide(start, num - 1)
            last = totals[stop] - totals[start] + extra
            divisions.append((max(largest_before, last), (*starts, start)))
        return min(divisions, key=lambda division: division[0])

    _, starts = divide(len(weights), num_stages)
    return list(starts)


def own_parameters(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the owning submodule, the name in the submodule, and the parameter, for each parameter of a module."""
    for owner in module.modules():
        for key, parameter in owner.named_parameters(recurse=False):
            yield owner, key, parameter


def free_module(task: nn.Module, module: nn.Module, kept: set[int]) -> None:
    """Replace a module's tensors by `meta` tensors.

    Args:
        task: The task, in which other modules may share the parameters.
        module: A module of the task.
        kept: ids of parameters that are not replaced. All buffers are replaced.
    """
    meta_by_id: dict[int, nn.Parameter] = {}
    for parameter in module.parameters():
        if id(parameter) not in kept:
            empty = torch.empty_like(parameter, device="meta")
            meta_by_id[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
    replace_parameters(task, meta_by_id)
    for owner in module.modules():
        for key, buffer in owner.named_buffers(recurse=False):
            owner._buffers[key] = torch.empty_like(buffer, device="meta")
