"""Pipeline-parallel inference: each process runs one stage of the model, and batches are split into chunks."""

# The stages of strategies/megatron cannot serve here: they run the model's own forward on every rank and send one
# tensor from layer to layer. A split point of `prepare_pippy` may be any module, also one with a residual connection
# around it, whose value would be NaN on the next rank. Nor can torch's `PipelineStage` (2.13): a later stage that reads
# an argument of the model needs it on its own rank, and here only the first process has the arguments. So the model is
# traced, and each stage passes on every value that a later stage needs.

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

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
    """Convert a model to a pipeline for inference. Each process runs one stage. Batches are split into chunks.

    Call this function on every process with the same model. The weights must be on the CPU. Each process moves its
    stage to its device. The model is traced (`torch.distributed.pipelining.pipeline`), so its control flow must not
    depend on values of tensors. A transformers model is traced with `use_cache=False`.

    Afterwards, `model(*args)` is collective and accepts batches of any size. Only the arguments of the first process
    are used. Other processes may omit the arguments. A batch that does not fill its last chunk is padded with its last
    sample, and the padding is removed from the result. The last process returns the result, and other processes return
    None. With `gather_output`, every process returns the result.

    Args:
        model: A model in evaluation mode. It is changed in place.
        split_points: Names of the first modules of all stages except the first stage. The number of stages is the
            number of processes. `"auto"` or None chooses stages of similar size.
        no_split_module_classes: Names of classes that `"auto"` does not split.
        example_args: Example arguments, with the batch in the first dimension of each tensor. Later calls may differ
            only in the size of the batch.
        example_kwargs: Example keyword arguments. Later calls must pass the same names.
        num_chunks: Number of chunks into which the example's batch is split. Batches of later calls are split into
            chunks of the same size. Default: the number of processes.
        gather_output: Send the result to all processes.

    Returns:
        The model. Its attribute `hf_split_points` contains the names of the modules that begin a stage.

    Raises:
        ConfigurationError: No example is passed, fewer than two processes run, `num_chunks` is below 1, a module is
            unknown, the number of stages is wrong, the tensors of the example have no common batch size, or the model
            returns a tensor without a batch dimension.
    """
    if not example_args and not example_kwargs:
        raise ConfigurationError("prepare_pippy traces the model: pass example_args or example_kwargs.")
    _init_process_group()
    world = dist.get_world_size()
    num_chunks = world if num_chunks is None else num_chunks
    if num_chunks < 1:
        raise ConfigurationError(f"num_chunks={num_chunks}, expected at least 1.")
    args = tuple(example_args or ())
    kwargs = dict(example_kwargs or {})
    chunk_size = math.ceil(_batch_size(args, kwargs) / num_chunks)
    points = _split_points(model, split_points, no_split_module_classes, world)
    chunk_args = _resized(args, chunk_size)
    chunk_kwargs = _resized(kwargs, chunk_size)
    model.forward = _Pipeline(model, points, chunk_args, chunk_kwargs, chunk_size, bool(gather_output))
    model.hf_split_points = points  # type: ignore[assignment]  # modules type attributes as tensors
    return model


def _init_process_group() -> None:
    """Initialize a process group if the script has not: gloo for the CPU, else the accelerator's backend."""
    if dist.is_initialized():
        return
    # `PartialState` initializes the process group.
    if PartialState().num_processes < 2:
        raise ConfigurationError(
            "a pipeline needs several processes. Start the script with torchrun --nproc-per-node N, or use "
            "dispatch_model, which runs a model on several devices in one process."
        )


def _batch_size(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """Return the common batch size of all tensors. Raise ConfigurationError if they have none."""
    sizes = {len(leaf) for leaf in pytree.tree_leaves((args, dict(kwargs))) if _has_batch(leaf)}
    if len(sizes) != 1:
        raise ConfigurationError(
            f"the arguments have {'no tensors' if not sizes else f'batches of {sorted(sizes)}'}; a pipeline splits "
            "all tensors along the first dimension. Pass tensors with the same batch size."
        )
    return int(sizes.pop())


def _has_batch(value: object) -> bool:
    """Return whether an argument is split into chunks. Other arguments are passed with every chunk."""
    return isinstance(value, torch.Tensor) and value.dim() > 0


def _resized(values: object, size: int) -> Any:
    """Truncate tensors to `size` samples, or pad them with their last sample."""

    def resize(value: Any) -> Any:
        if not _has_batch(value) or len(value) == size:
            return value
        if len(value) > size:
            return value[:size]
        return torch.cat([value, value[-1:].expand(size - len(value), *value.shape[1:])])

    return pytree.tree_map(resize, values)


def _split_points(
    model: nn.Module, split_points: str | Sequence[str] | None, no_split_module_classes: list[str] | None, world: int
) -> list[str]:
    """Return the names of the first modules of all stages except the first stage. Raise if they are invalid."""
    if isinstance(split_points, str) and split_points != "auto":
        raise ConfigurationError(f"split_points={split_points!r}, expected 'auto' or a list of names of modules.")
    is_automatic = not isinstance(split_points, (list, tuple))
    if isinstance(split_points, (list, tuple)):
        points = list(split_points)
    else:
        points = _even_points(model, no_split_module_classes, world)
    names = [name for name, _ in model.named_modules()]
    for point in points:
        if point not in names or not point:
            raise ConfigurationError(f"split_points: the model has no module {point!r}.{nearest(point, names)}")
    if len(points) != world - 1:
        advice = "The model is too small: use fewer processes." if is_automatic else f"Pass {world - 1} names."
        raise ConfigurationError(
            f"{len(points)} split points make {len(points) + 1} stages for {world} processes. {advice}"
        )
    return points


def _even_points(model: nn.Module, no_split_module_classes: list[str] | None, world: int) -> list[str]:
    """Return the first modules of later stages, for stages of similar size. Fewer if the model has too few modules."""
    outline = read_outline(model, no_split_module_classes=no_split_module_classes)
    modules = dict(model.named_modules())
    bytes_before: dict[str, int] = {}  # module that may begin a stage → bytes of the modules before it
    total = 0  # bytes of the layers so far
    index = 0
    while index < len(outline.names):
        module = modules.get(outline.names[index])  # None for a tensor
        is_called = module is not None and not isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if total and is_called and outline.sizes_bytes[index]:
            bytes_before[outline.names[index]] = total
        if outline.is_layer[index]:
            total += outline.sizes_bytes[index]
            index = outline.ends[index]
        else:
            index += 1
    points: list[str] = []
    for rank in range(1, world):
        reached = bytes_before[points[-1]] if points else 0
        later = [name for name, num_bytes in bytes_before.items() if reached < num_bytes < total]
        ideal = total * rank / world
        if later:  # min returns the outermost of the modules with the same bytes before them
            points.append(min(later, key=lambda name: abs(bytes_before[name] - ideal)))
    return points


class _Pipeline:
    """The forward of a model that runs as a pipeline.

    A leaf is a tensor or other value in nested arguments or a nested result, in the order of `pytree.tree_leaves`.

    Args:
        model: The model.
        points: The first modules of all stages except the first stage.
        args: Example arguments of one chunk.
        kwargs: Example keyword arguments of one chunk.
        chunk_size: Number of samples in a chunk.
        gather_output: Send the result to all processes.

    Attributes:
        names: The keyword arguments in the order of the example.
        example: `(args, kwargs)`, with which calls are compared.
        structure: The structure of the model's result.
        stage: The stage that this process runs.
    """

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

        self.rank = dist.get_rank()
        self.world = dist.get_world_size()
        self.device = PartialState().device
        self.chunk_size = chunk_size
        self.gather_output = gather_output
        self.names = list(kwargs)
        self.example = (args, kwargs)
        with torch.no_grad(), _without_cache(model), _recorded_result(model) as results:
            traced = pipeline(model, args, kwargs, split_spec=dict.fromkeys(points, SplitPoint.BEGINNING))
        # Tracing calls the model's forward, at least once.
        self.structure = pytree.tree_structure(results[-1])
        _check_result(pytree.tree_leaves(results[-1]), chunk_size)
        self.stage = _Stage(traced.split_gm, self.rank, self.device)

    @torch.no_grad()
    def __call__(self, *args: object, **kwargs: object) -> Any:
        """Run a batch through all stages. Collective. Return None on ranks without the result."""
        size = self._broadcast_size(args, kwargs)
        num_chunks = math.ceil(size / self.chunk_size)
        inputs: list[Any] = []
        if self.rank == 0:
            padded_size = num_chunks * self.chunk_size
            inputs = [_resized(leaf, padded_size) for leaf in self._leaves_like_example(args, kwargs)]
        chunks = []  # the leaves of the result of each chunk; empty except on the last rank
        for index in range(num_chunks):
            chunk_inputs = [_chunk(leaf, index, num_chunks) for leaf in inputs]
            chunks.append(self.stage.run(chunk_inputs))
        self.stage.finish()
        has_result = self.rank == self.world - 1
        leaves: list[Any] = []
        if has_result:
            leaves = [self._concatenated(parts, size) for parts in zip(*chunks, strict=True)]
        if self.gather_output:
            leaves = self._broadcast_result(leaves)
        if has_result or self.gather_output:
            return self._unflatten(leaves)
        return None

    def _concatenated(self, parts: Sequence[Any], size: int) -> Any:
        """Concatenate one leaf of the chunks' results, without the padding."""
        if not isinstance(parts[0], torch.Tensor):
            return parts[0]
        rows_per_sample = len(parts[0]) // self.chunk_size  # 2 if the model returns two rows for each sample
        return torch.cat(list(parts))[: size * rows_per_sample]

    def _leaves_like_example(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
        """Return the leaves of nested arguments. Raise if more than the batch size differs from the example."""
        example_leaves, structure = pytree.tree_flatten(self.example)
        if set(kwargs) != set(self.names) or len(args) != len(self.example[0]):
            raise ConfigurationError(
                f"called with {len(args)} positional arguments and the keywords {sorted(kwargs)}. The example had "
                f"{len(self.example[0])} and {self.names}: pass the same."
            )
        try:
            leaves = structure.flatten_up_to((args, {name: kwargs[name] for name in self.names}))
        except ValueError as error:
            raise ConfigurationError(f"the arguments have another structure than the example's: {error}") from error
        for leaf, example_leaf in zip(leaves, example_leaves, strict=True):
            signature = _signature(leaf)
            expected = _signature(example_leaf)
            if signature != expected:
                raise ConfigurationError(
                    f"called with {signature} where the example had {expected}. The pipeline was traced with the "
                    "example; only the batch size may differ. Prepare another copy of the model for other arguments."
                )
        return leaves

    def _broadcast_size(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """Return the batch size of rank 0's arguments. Collective. Raise on every rank if they are invalid."""
        size = 0
        error = None
        if self.rank == 0:
            try:
                self._leaves_like_example(args, kwargs)
                size = _batch_size(args, kwargs)
            except ConfigurationError as raised:
                error = raised
        # A size of 0 stands for an error: all ranks must take part in the broadcast before one of them raises.
        sent_size = torch.tensor([size], device=self.device)
        dist.broadcast(sent_size, src=0)
        if error is not None:
            raise error
        if int(sent_size) == 0:
            raise ConfigurationError(
                "the arguments on the first process of the pipeline are invalid; see the error of that process."
            )
        return int(sent_size)

    def _broadcast_result(self, leaves: list[Any]) -> list[Any]:
        """Send a result from the last process to all. Collective."""
        last = self.world - 1
        sent: list[Any] = [[_header(leaf) for leaf in leaves]]
        dist.broadcast_object_list(sent, src=last, device=self.device)
        received: list[Any] = []
        for index, header in enumerate(sent[0]):
            if not isinstance(header, _TensorHeader):
                received.append(header)
                continue
            if self.rank == last:
                tensor = leaves[index].contiguous()
            else:
                tensor = torch.empty(header.shape, dtype=header.dtype, device=self.device)
            dist.broadcast(tensor, src=last)
            received.append(tensor)
        return received

    def _unflatten(self, leaves: list[Any]) -> Any:
        """Return the leaves of a result in the structure that the model returns.

        If the traced graph returns another number of leaves, they are returned as a tuple, or a single leaf as it is.
        """
        if len(leaves) == self.structure.num_leaves:
            return pytree.tree_unflatten(leaves, self.structure)
        return leaves[0] if len(leaves) == 1 else tuple(leaves)


class _TensorHeader(NamedTuple):
    """The properties of a tensor that a process needs to receive it."""

    shape: tuple[int, ...]
    dtype: torch.dtype


def _header(leaf: object) -> object:
    """Return the header of a tensor. Return other leaves unchanged."""
    if isinstance(leaf, torch.Tensor):
        return _TensorHeader(tuple(leaf.shape), leaf.dtype)
    return leaf


def _signature(value: object) -> str:
    """Return the properties of an argument that a traced graph depends on: dtype and shape, or the value."""
    if isinstance(value, torch.Tensor):
        shape = ", ".join(["batch", *map(str, value.shape[1:])]) if value.dim() else ""
        return f"{value.dtype} ({shape})"
    return repr(value)


def _check_result(leaves: Sequence[Any], chunk_size: int) -> None:
    """Raise if a result cannot be concatenated from the results of chunks."""
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor) and (not leaf.dim() or len(leaf) % chunk_size):
            raise ConfigurationError(
                f"the model returns a tensor of shape {tuple(leaf.shape)} for {chunk_size} samples. The results of "
                "chunks are concatenated along the first dimension, which must be the batch. Return a value per "
                "sample, such as a loss without reduction, or do not return this tensor."
            )


def _chunk(value: Any, index: int, num_chunks: int) -> Any:
    return value.chunk(num_chunks)[index] if _has_batch(value) else value


class _Stage:
    """One stage of a traced model. It receives values that this or later stages use, and sends values for later ones.

    For example, if the third stage uses an argument of the model, the first stage sends it to the second one, which
    sends it on.

    Args:
        traced: The graph that calls all stages.
        rank: The number of the stage.
        device: The device of the stage.

    Attributes:
        call: The node that calls this stage.
        inputs: The nodes of the model's arguments.
        unpacking: The nodes that unpack the results of the call.
        output: The node of the model's result.
        receives: The nodes whose values the previous stage sends. Empty for the first stage.
        sends: The nodes whose values this stage sends to the next one.
    """

    def __init__(self, traced: torch.fx.GraphModule, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.device = device
        nodes = list(traced.graph.nodes)
        calls = [node for node in nodes if node.op == "call_module"]
        self.is_last = rank == len(calls) - 1
        self.module = traced.get_submodule(str(calls[rank].target)).to(device)
        self.call = calls[rank]
        # The nodes of this stage are its call, and those that unpack its results.
        begin = nodes.index(self.call)
        end = len(nodes) if self.is_last else nodes.index(calls[rank + 1])
        self.inputs = [node for node in nodes if node.op == "placeholder"]
        self.output = nodes[-1]
        self.unpacking = [node for node in nodes[begin:end] if node.op == "call_function"]
        self.receives = _needed_after(nodes, begin - 1)
        self.sends = _needed_after(nodes, end - 1)
        # Headers are sent once, with the first chunk: all chunks have the same size.
        self._received: list[_TensorHeader] | None = None  # of each received tensor. None before the first chunk.
        self._sent_headers = False
        # Sends since `finish`, each with its tensor, which must exist until the send has ended.
        self._pending: list[Any] = []

    def run(self, inputs: list[Any]) -> list[torch.Tensor]:
        """Run one chunk. Only the first stage uses `inputs`. Only the last stage returns a result."""
        if self.rank == 0:
            moved = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.to(self.device), inputs)
            values: dict[Any, Any] = dict(zip(self.inputs, moved, strict=True))  # node → value
        else:
            values = self._receive()
        values[self.call] = self.module(*torch.fx.node.map_arg(self.call.args, values.__getitem__))
        for node in self.unpacking:
            values[node] = node.target(*torch.fx.node.map_arg(node.args, values.__getitem__))
        if not self.is_last:
            self._send([values[node] for node in self.sends])
            return []
        return pytree.tree_leaves(torch.fx.node.map_arg(self.output.args, values.__getitem__))

    def finish(self) -> None:
        """Wait until all sends have completed."""
        for work, _ in self._pending:
            work.wait()
        self._pending.clear()

    def _receive(self) -> dict[Any, Any]:
        """Receive the values of the nodes in `receives` for one chunk."""
        if self._received is None:
            headers: list[Any] = [None]
            dist.recv_object_list(headers, src=self.rank - 1, device=self.device)
            self._received = headers[0]
        buffers = [torch.empty(one.shape, dtype=one.dtype, device=self.device) for one in self._received]
        for buffer in buffers:
            dist.recv(buffer, src=self.rank - 1)
        return dict(zip(self.receives, buffers, strict=True))

    def _send(self, values: list[torch.Tensor]) -> None:
        """Start to send the values of the nodes in `sends`. `finish` waits for the end."""
        if not self._sent_headers:
            headers = [[_header(value) for value in values]]
            dist.send_object_list(headers, dst=self.rank + 1, device=self.device)
            self._sent_headers = True
        for value in values:
            sent = value.contiguous()
            self._pending.append((dist.isend(sent, dst=self.rank + 1), sent))


def _needed_after(nodes: list[torch.fx.Node], last: int) -> list[torch.fx.Node]:
    """Return the nodes up to index `last` that a later node uses, in order."""
    later = set(nodes[last + 1 :])
    return [node for node in nodes[: last + 1] if later & set(node.users)]


@contextlib.contextmanager
def _without_cache(model: nn.Module) -> Iterator[None]:
    """Disable the KV cache of a transformers model, because stages can send only tensors."""
    caching: list[Any] = []
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if getattr(config, "use_cache", False):  # False for later modules with the same config
            caching.append(config)
            config.use_cache = False
    try:
        yield
    finally:
        for config in caching:
            config.use_cache = True


@contextlib.contextmanager
def _recorded_result(model: nn.Module) -> Iterator[list[Any]]:
    """Yield a list that receives the results of the model's forward."""
    replaced = model.__dict__.get("forward")  # an assigned forward, or None for the forward of the class
    forward = model.forward
    results: list[Any] = []

    def record(*args: object, **kwargs: object) -> Any:
        result = forward(*args, **kwargs)
        results.append(result)
        return result

    model.forward = functools.wraps(forward)(record)  # torch.export reads the signature
    try:
        yield results
    finally:
        if replaced is None:
            del model.forward
        else:
            model.forward = replaced
