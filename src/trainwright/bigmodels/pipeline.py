"""Run a model that is larger than a device on several: a stage in each process, and batches that flow in chunks."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils import _pytree as pytree

from trainwright.bigmodels.maps.sizes import read_outline
from trainwright.core.errors import ConfigurationError, nearest
from trainwright.processes.partial_state import PartialState


def prepare_pippy(
    model: nn.Module,
    split_points: str | list[str] | None = "auto",
    no_split_module_classes: list[str] | None = None,
    example_args: tuple[Any, ...] | None = (),
    example_kwargs: dict[str, Any] | None = None,
    num_chunks: int | None = None,
    gather_output: bool | None = False,
) -> nn.Module:
    """Make a model run as a pipeline for inference: one stage on each process, batches cut into chunks.

    The model is traced (`torch.distributed.pipelining.pipeline`), so that its path may not depend on values; a model
    of transformers is traced without its cache of keys and values, as with `use_cache=False`. Every
    process calls this with the same model, whose weights are on the CPU, and keeps its stage on its device.

    Afterwards `model(*args)` takes batches of any size: the first process's arguments count, the others may leave them
    out or pass the same. A batch that is no multiple of a chunk is filled up with its last sample, and the result cut.
    The result is on the last process and None elsewhere, or with `gather_output` everywhere. Each forward is
    collective.

    Args:
        model: in evaluation mode; is changed.
        split_points: names of the modules that begin a stage, one fewer than there are processes; `"auto"` finds some
            that give stages of equal size.
        no_split_module_classes: names of classes that lie in one stage whole, for `"auto"`.
        example_args: arguments as the model will get them, tensors with the batch first. Later batches have the same
            shapes but for the batch.
        example_kwargs: the same by name; every call then passes the same names.
        num_chunks: how many chunks the example's batch is cut into, the number of processes unless given.
        gather_output: send the result to all processes.

    Returns:
        The model; its `hf_split_points` are the names that begin a stage.

    Raises:
        ConfigurationError: no example, unknown modules, too few stages, or arguments that are no multiple of a batch.
    """
    if not example_args and not example_kwargs:
        raise ConfigurationError("prepare_pippy needs example_args or example_kwargs to trace the model with.")
    _join()
    world = dist.get_world_size()
    num_chunks = world if num_chunks is None else num_chunks
    if num_chunks < 1:
        raise ConfigurationError(f"num_chunks={num_chunks}, expected at least 1.")
    args, kwargs = tuple(example_args or ()), dict(example_kwargs or {})
    size = math.ceil(_batch_size(args, kwargs) / num_chunks)
    points = _split_points(model, split_points, no_split_module_classes, world)
    run = _Pipeline(model, points, _resized(args, size), _resized(kwargs, size), size, bool(gather_output))
    model.forward = run
    model.hf_split_points = points  # type: ignore[assignment]  # modules type attributes as tensors
    return model


def _join() -> None:
    """Open a process group where the script has not: gloo for the CPU, the accelerator's own otherwise."""
    if dist.is_initialized():
        return
    if PartialState().num_processes < 2:
        raise ConfigurationError(
            "a pipeline takes several processes. Start the script with torchrun --nproc-per-node N, or use "
            "dispatch_model, which runs a model over several devices in one process."
        )


def _batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    sizes = {len(leaf) for leaf in pytree.tree_leaves((args, dict(kwargs))) if _has_batch(leaf)}
    if len(sizes) != 1:
        raise ConfigurationError(
            f"the arguments have {'no tensors' if not sizes else f'batches of {sorted(sizes)}'}; a pipeline cuts all "
            "of them along their first dimension, which must be the same."
        )
    return int(sizes.pop())


def _has_batch(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _resized(values: Any, size: int) -> Any:
    """Cut tensors to `size` samples, or fill them up with their last one."""

    def resize(value: Any) -> Any:
        if not _has_batch(value) or len(value) == size:
            return value
        if len(value) > size:
            return value[:size]
        return torch.cat([value, value[-1:].expand(size - len(value), *value.shape[1:])])

    return pytree.tree_map(resize, values)


def _split_points(
    model: nn.Module, asked: str | Sequence[str] | None, no_split_module_classes: list[str] | None, world: int
) -> list[str]:
    if isinstance(asked, str) and asked != "auto":
        raise ConfigurationError(f"split_points={asked!r}, expected 'auto' or a list of names of modules.")
    names_given = list(asked) if isinstance(asked, (list, tuple)) else None
    points = _even_points(model, no_split_module_classes, world) if names_given is None else names_given
    names = [name for name, _ in model.named_modules()]
    for point in points:
        if point not in names or not point:
            raise ConfigurationError(f"split_points: the model has no module {point!r}.{nearest(point, names)}")
    if len(points) != world - 1:
        raise ConfigurationError(
            f"{len(points)} split points make {len(points) + 1} stages, and there are {world} processes: one each. "
            + ("The model has too few modules to split." if names_given is None else f"Name {world - 1}.")
        )
    return points


def _even_points(model: nn.Module, no_split_module_classes: list[str] | None, world: int) -> list[str]:
    """Return where each next stage begins, for stages as even as modules allow; fewer where there is no such place."""
    outline = read_outline(model, no_split_module_classes=no_split_module_classes)
    modules = dict(model.named_modules())
    before: dict[str, int] = {}  # module that may begin a stage → bytes of all that comes before it
    done, index = 0, 0
    while index < len(outline.names):
        module = modules.get(outline.names[index])
        is_called = module is not None and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if done and is_called and outline.sizes_bytes[index]:
            before[outline.names[index]] = done
        if outline.whole[index]:
            done += outline.sizes_bytes[index]
            index = outline.ends[index]
        else:
            index += 1
    points: list[str] = []
    for rank in range(1, world):
        reached = before[points[-1]] if points else 0
        later = [name for name, done_bytes in before.items() if reached < done_bytes < done]
        if later:  # the outermost of those that begin at one place comes first
            points.append(min(later, key=lambda name: abs(before[name] - done * rank / world)))
    return points


class _Pipeline:
    """What stands for the forward of a model that is run as a pipeline."""

    def __init__(
        self,
        model: nn.Module,
        points: list[str],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        chunk_size: int,
        gather_output: bool,
    ) -> None:
        from torch.distributed.pipelining import SplitPoint, pipeline

        self.rank, self.world, self.device = dist.get_rank(), dist.get_world_size(), PartialState().device
        self.chunk_size, self.gather_output, self.names = chunk_size, gather_output, list(kwargs)
        self.example = (args, kwargs)
        with torch.no_grad(), _without_cache(model), _recorded_result(model) as results:
            traced = pipeline(model, args, kwargs, split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
        self.structure = pytree.tree_structure(results[-1])
        _check_result(pytree.tree_leaves(results[-1]), chunk_size)
        self.stage = _Stage(traced.split_gm, self.rank, self.device)

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a batch through all stages. Collective."""
        size = self._agree_on_size(args, kwargs)
        num_chunks = math.ceil(size / self.chunk_size)
        inputs: list[Any] = []
        if self.rank == 0:
            leaves = self._leaves_like_example(args, kwargs)
            inputs = [_resized(leaf, num_chunks * self.chunk_size) for leaf in leaves]
        chunks = [self.stage.run([_chunk(leaf, i, num_chunks) for leaf in inputs]) for i in range(num_chunks)]
        self.stage.finish()
        has_result = self.rank == self.world - 1
        leaves = [self._joined(pieces, size) for pieces in zip(*chunks, strict=True)] if has_result else []
        if self.gather_output:
            leaves = self._spread(leaves)
        return self._restore(leaves) if has_result or self.gather_output else None

    def _joined(self, pieces: Sequence[Any], size: int) -> Any:
        """Return a part of the result for the whole batch, from those of its chunks."""
        if not isinstance(pieces[0], torch.Tensor):
            return pieces[0]
        return torch.cat(list(pieces))[: size * (len(pieces[0]) // self.chunk_size)]

    def _leaves_like_example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return what is in the arguments, in the order of the example's, which they must be like but for the batch."""
        wanted, structure = pytree.tree_flatten(self.example)
        if set(kwargs) != set(self.names) or len(args) != len(self.example[0]):
            raise ConfigurationError(
                f"called with {len(args)} arguments and {sorted(kwargs)} by name, the example had "
                f"{len(self.example[0])} and {self.names}."
            )
        try:
            found = structure.flatten_up_to((args, {name: kwargs[name] for name in self.names}))
        except ValueError as error:
            raise ConfigurationError(f"called with arguments of another form than the example's: {error}") from error
        for value, like in zip(found, wanted, strict=True):
            if (got := _kind(value)) != (expected := _kind(like)):
                raise ConfigurationError(
                    f"called with {got} where the example had {expected}: the pipeline was made for that. Only the "
                    "batch may be of another size; for other arguments prepare another copy of the model."
                )
        return found

    def _agree_on_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Tell all processes how many samples the first one was called with; an error there is one everywhere."""
        size, error = 0, None
        if self.rank == 0:
            try:
                self._leaves_like_example(args, kwargs)
                size = _batch_size(args, kwargs)
            except ConfigurationError as raised:
                size, error = 0, raised
        told = torch.tensor([size], device=self.device)
        dist.broadcast(told, src=0)
        if error is not None:
            raise error
        if int(told) == 0:
            raise ConfigurationError(
                "the first process of the pipeline was called with what it cannot take; see its error."
            )
        return int(told)

    def _spread(self, leaves: list[Any]) -> list[Any]:
        """Send a result from the last process to all. Collective."""
        last = self.world - 1
        told: list[Any] = [[_told(leaf) for leaf in leaves]]
        dist.broadcast_object_list(told, src=last, device=self.device)
        found: list[Any] = []
        for i, (is_tensor, *what) in enumerate(told[0]):
            if is_tensor:
                shape, dtype = what
                at_last = self.rank == last
                what = [leaves[i].contiguous() if at_last else torch.empty(shape, dtype=dtype, device=self.device)]
                dist.broadcast(what[0], src=last)
            found.append(what[0])
        return found

    def _restore(self, leaves: list[Any]) -> Any:
        """Return parts of a result as the model returns them."""
        if len(leaves) == self.structure.num_leaves:
            return pytree.tree_unflatten(leaves, self.structure)
        return leaves[0] if len(leaves) == 1 else tuple(leaves)


def _told(leaf: Any) -> tuple[Any, ...]:
    """Return what other processes need to receive a part of a result: its shape and dtype, or itself."""
    return (True, tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else (False, leaf)


def _kind(value: Any) -> str:
    """Say what a traced graph takes for given: all of a tensor but its batch and values, and other values."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(["batch", *map(str, value.shape[1:])]) if value.dim() else ""
        return f"{value.dtype} ({shape})"
    return repr(value)


def _check_result(leaves: Sequence[Any], chunk_size: int) -> None:
    """Refuse a result that cannot be put together from those of chunks."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (not leaf.dim() or len(leaf) % chunk_size):
            raise ConfigurationError(
                f"the model returns a tensor of shape {tuple(leaf.shape)} for {chunk_size} samples: it has no batch "
                "in its first dimension, along which the results of chunks are joined. Return it by sample, as a loss "
                "without its mean, or leave it out."
            )


def _chunk(value: Any, index: int, num_chunks: int) -> Any:
    return value.chunk(num_chunks)[index] if _has_batch(value) else value


class _Stage:
    """One stage of a traced model: takes what earlier ones have for it and for later ones, and passes that on.

    Args:
        traced: the graph of calls of all stages.
        rank: which stage, and which process.
        device: that it runs on.
    """

    def __init__(self, traced: torch.fx.GraphModule, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        nodes = list(traced.graph.nodes)
        calls = [node for node in nodes if node.op == "call_module"]
        self.is_last = rank == len(calls) - 1
        self.module = traced.get_submodule(str(calls[rank].target)).to(device)
        self.call = calls[rank]
        # Those that run here: the call, and what picks its results apart.
        begin = nodes.index(self.call)
        end = len(nodes) if self.is_last else nodes.index(calls[rank + 1])
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.output = nodes[-1]
        self.here = [node for node in nodes[begin:end] if node.op == "call_function"]
        self.receives = _needed_after(nodes, begin - 1)
        self.sends = _needed_after(nodes, end - 1)
        self._received: list[Any] | None = None  # shape and dtype of each, once they are known
        self._told = False
        self._pending: list[Any] = []

    def run(self, inputs: list[Any]) -> list[torch.Tensor]:
        """Run one chunk. `inputs` counts on the first stage; the result is there on the last one."""
        if self.rank == 0:
            moved = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), inputs)
            values: dict[Any, Any] = dict(zip(self.inputs, moved, strict=True))
        else:
            values = self._receive()
        values[self.call] = self.module(*torch.fx.node.map_arg(self.call.args, values.__getitem__))
        for node in self.here:
            values[node] = node.target(*torch.fx.node.map_arg(node.args, values.__getitem__))
        if not self.is_last:
            self._send([values[node] for node in self.sends])
            return []
        return pytree.tree_leaves(torch.fx.node.map_arg(self.output.args, values.__getitem__))

    def finish(self) -> None:
        """Wait until everything that was sent has left."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _receive(self) -> dict[Any, Any]:
        if self._received is None:
            told: list[Any] = [None]
            dist.recv_object_list(told, src=self.rank - 1, device=self.device)
            self._received = told[0]
        buffers = [torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in self._received]
        for buffer in buffers:
            dist.recv(buffer, src=self.rank - 1)
        return dict(zip(self.receives, buffers, strict=True))

    def _send(self, values: list[torch.Tensor]) -> None:
        if not self._told:
            told = [[(tuple(value.shape), value.dtype) for value in values]]
            dist.send_object_list(told, dst=self.rank + 1, device=self.device)
            self._told = True
        for value in values:
            sent = value.contiguous()
            self._pending.append((dist.isend(sent, dst=self.rank + 1), sent))  # kept until it has left


def _needed_after(nodes: list[torch.fx.Node], last: int) -> list[torch.fx.Node]:
    """Return those of the first nodes, up to index `last`, that a later one uses, in order."""
    later = set(nodes[last + 1 :])
    return [node for node in nodes[: last + 1] if later & set(node.users)]


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Have a model of transformers keep no keys and values: what a forward returns crosses processes as tensors."""
    configs = {id(config): config for module in model.modules() if (config := getattr(module, "config", None))}
    caching = [config for config in configs.values() if getattr(config, "use_cache", False)]
    for config in caching:
        config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


@contextlib.contextmanager
def _recorded_result(model: nn.Module) -> Iterator[list[Any]]:
    """Note what the model's forward returns while it is traced, in the list that is handed out."""
    own, forward = model.__dict__.get("forward"), model.forward
    found: list[Any] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        found.append(result)
        return result

    model.forward = functools.wraps(forward)(record)  # export reads its signature
    try:
        yield found
    finally:
        if own is None:
            del model.forward
        else:
            model.forward = own
