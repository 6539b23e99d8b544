"""Operations on tensors and objects across the processes of a script, with Accelerate's names.

The functions traverse lists, tuples (also named ones), mappings and dataclasses, and exchange every tensor separately.
Call a collective function on every process, in the same order and with the same structure. It uses the processes of
`PartialState`, which is created if needed. A single process does not communicate. A collective function first compares
operations, shapes and dtypes of all processes on the host, by a hash. If they differ, every process raises an error
that lists the calls of all processes. torch's backends would crash, hang or return wrong values.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, ParamSpec

import torch
import torch.distributed as dist

from trainwright.core.errors import (
    CannotPadNestedTensorWarning,
    ConfigurationError,
    DistributedOperationException,
    unknown,
)
from trainwright.core.tree import is_container, iterate_tensors, named_leaves, rebuild
from trainwright.processes.partial_state import PartialState
from trainwright.processes.process_group import Processes

P = ParamSpec("P")

_REDUCTIONS = ("mean", "sum", "max", "none")
_UNEQUAL_LENGTHS_HINT = "For unequal lengths there are accelerator.gather_for_metrics and pad_across_processes."


def is_torch_tensor(tensor: object) -> bool:
    """Return whether an object is a tensor."""
    return isinstance(tensor, torch.Tensor)


def recursively_apply(
    func: Callable[..., Any],
    data: object,
    *args: object,
    test_type: Callable[[Any], bool] = is_torch_tensor,
    error_on_other_type: bool = False,
    **kwargs: object,
) -> Any:
    """Return `data` with `func` applied to its leaves. Containers keep their types. Not collective.

    Args:
        func: called as `func(leaf, *args, **kwargs)`.
        data: nested lists, tuples, mappings and dataclasses.
        args: further positional arguments of `func`.
        test_type: function that returns True for leaves to change. Default: True for tensors only.
        error_on_other_type: raise an error for leaves that would not be changed. Default: False.
        kwargs: keyword arguments of `func`.

    Raises:
        TypeError: `error_on_other_type` is True, and `test_type` returns False for a leaf.
    """

    def visit(part: object) -> Any:
        if is_container(part):
            return rebuild(part, visit)
        if test_type(part):
            return func(part, *args, **kwargs)
        if error_on_other_type:
            name = getattr(func, "__name__", type(func).__name__).strip("_")
            raise TypeError(
                f"{name} got a value of type {type(part).__name__}. It takes tensors, and lists, tuples, mappings and "
                "dataclasses of them; for other objects there are gather_object and broadcast_object_list."
            )
        return part

    return visit(data)


def send_to_device(
    tensor: object,
    device: torch.device | str | int,
    non_blocking: bool = False,
    skip_keys: str | list[str] | None = None,
) -> Any:
    """Move nested tensors, and other objects with a `to` method, to a device. Not collective.

    Args:
        tensor: nested tensors.
        device: the target.
        non_blocking: do not wait for copies from pinned memory or to the host. Synchronize before you read copies on
            the host. Default: False.
        skip_keys: keys of mappings whose values are not moved, at every depth. Default: None.
    """
    place = torch.device(device)
    skipped = skip_keys or ()
    if isinstance(skipped, str):
        skipped = [skipped]

    def visit(part: Any) -> Any:
        if isinstance(part, torch.Tensor):
            return part.to(place, non_blocking=non_blocking)
        if callable(getattr(part, "to", None)):  # before containers: a PackedSequence is a tuple, too
            try:
                return part.to(place, non_blocking=non_blocking)
            except TypeError:  # such a method often has no argument `non_blocking`
                return part.to(place)
        return rebuild(part, visit, skip_keys=skipped)

    return visit(tensor)


def concatenate(data: list[Any] | tuple[Any, ...], dim: int = 0) -> Any:
    """Concatenate the tensors of several structures with equal nesting, leaf by leaf. Not collective.

    Args:
        data: the structures, at least one. With a single structure, leaves that are not tensors are unchanged.
        dim: the dimension of concatenation. Default: 0.

    Raises:
        ConfigurationError: `data` is empty, or structures differ.
        TypeError: a leaf of several structures is not a tensor.
    """
    if not data:
        raise ConfigurationError("concatenate got nothing to concatenate. Pass at least one structure.")
    first = data[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(list(data), dim=dim)
    if isinstance(first, Mapping):
        keys = [list(mapping) for mapping in data]
        if any(set(names) != set(first) for names in keys):
            raise ConfigurationError(f"concatenate got mappings of different keys: {keys}.")
        joined: Any = copy.copy(first)  # keeps the type, such as BatchEncoding
        for key in first:
            joined[key] = concatenate([mapping[key] for mapping in data], dim)
        return joined
    if isinstance(first, (list, tuple)):
        lengths = [len(sequence) for sequence in data]
        if len(set(lengths)) > 1:
            raise ConfigurationError(f"concatenate got sequences of different lengths: {lengths}.")
        columns = [concatenate(column, dim) for column in zip(*data, strict=True)]
        remaining = iter(columns)
        return rebuild(first, lambda _: next(remaining))
    if len(data) == 1:
        return first
    raise TypeError(f"concatenate got a value of type {type(first).__name__}, and it takes tensors.")


def wait_for_everyone() -> None:
    """Wait for every process. Collective; blocks on the host and not on the device."""
    PartialState().wait_for_everyone()


def gather(tensor: object) -> Any:
    """Concatenate nested tensors of all processes along the first dimension, in the order of the processes.

    Collective. Gradients do not flow through it.

    Args:
        tensor: tensors `[n, ...]`, with the same shape and dtype on every process. A 0-dim tensor is treated as `[1]`.
            For unequal lengths use `Accelerator.gather_for_metrics` or `pad_across_processes`.

    Returns:
        Tensors `[num_processes * n, ...]` on every process. A single process gets its argument unchanged.

    Raises:
        TypeError: a leaf is not a tensor.
        ConfigurationError: shapes or dtypes differ between processes. Raised on every process.
    """
    state = PartialState()
    if state.num_processes == 1:
        return tensor
    processes = state.joined()
    _check_same_call("gather", state, tensor)

    def gather_one(leaf: torch.Tensor) -> torch.Tensor:
        part = leaf.detach().contiguous()
        if part.dim() == 0:
            part = part[None]
        # The parts are views of one tensor, so that the result needs no further copy.
        gathered = part.new_empty((processes.world_size, *part.shape))
        dist.all_gather(list(gathered.unbind()), part, group=processes.group_for(leaf.device))
        return gathered.flatten(0, 1)

    return recursively_apply(gather_one, tensor)


def gather_object(object: object) -> Any:
    """Return the concatenated lists of all processes, in the order of the processes. Collective.

    Objects are pickled and sent through the host, so they should be small.

    Args:
        object: a list or tuple of picklable objects, of any length.

    Returns:
        The list. A single process gets its argument unchanged.

    Raises:
        TypeError: a process's `object` is neither a list nor a tuple. Raised on every process.
    """
    state = PartialState()
    if state.num_processes == 1:
        return object
    processes = state.joined()
    compare_calls(processes, "gather_object", "objects", "Make the same call on every process.")
    # A wrong argument is sent as its type, so that every process raises the error. If only one process raised it, the
    # others would wait for that process in their next exchange.
    gathered = processes.gather_object(object if isinstance(object, (list, tuple)) else type(object))
    objects: list[Any] = []
    for rank, part in enumerate(gathered):
        if isinstance(part, type):
            raise TypeError(
                f"gather_object takes a list, and got {part.__name__} on process {rank}. Write gather_object([value])."
            )
        objects.extend(part)
    return objects


def broadcast(tensor: object, from_process: int = 0) -> Any:
    """Overwrite nested tensors with those of one process, in place, and return them. Collective.

    Args:
        tensor: each tensor of the same shape and dtype on every process.
        from_process: the source of the values. Default: 0.

    Raises:
        TypeError: a leaf is not a tensor.
        ConfigurationError: the process does not exist, or shapes, dtypes or `from_process` differ between processes.
    """
    state = PartialState()
    if state.num_processes == 1:
        return tensor
    processes = state.joined()
    _check_same_call("broadcast", state, tensor, from_process)
    _check_process(from_process, state)

    def broadcast_one(leaf: torch.Tensor) -> torch.Tensor:
        destination = leaf.detach()  # shares the memory, and can be written in place if the leaf requires a gradient
        buffer = destination.contiguous()
        dist.broadcast(buffer, from_process, group=processes.group_for(leaf.device))
        if buffer.data_ptr() != destination.data_ptr():  # the leaf is not contiguous, so the buffer is a copy
            destination.copy_(buffer)
        return leaf

    return recursively_apply(broadcast_one, tensor)


def broadcast_object_list(object_list: list[Any], from_process: int = 0) -> list[Any]:
    """Overwrite a list in place with the list of one process, and return it. Collective. Uses pickle and the host.

    Args:
        object_list: picklable objects.
        from_process: the source of the list. Default: 0.

    Raises:
        ConfigurationError: `from_process` does not exist, or differs between processes.
    """
    state = PartialState()
    if state.num_processes == 1:
        return object_list
    processes = state.joined()
    hint = "One process sends, and all must name it."
    compare_calls(processes, f"broadcast_object_list(…, {from_process})", "a list", hint)
    _check_process(from_process, state)
    object_list[:] = processes.broadcast_object(list(object_list), from_process)
    return object_list


def copy_tensor_to_devices(tensor: torch.Tensor | None = None) -> torch.Tensor:
    """Return the tensor of the one process that passes it, on every process. Collective.

    Args:
        tensor: the tensor, on one process. None on all others, which need not know its shape and dtype.

    Raises:
        ConfigurationError: no process, or more than one, passes a tensor. Raised on every process.
    """
    described = gather_object([] if tensor is None else [(tensor.shape, tensor.dtype)])
    if len(described) != 1:
        raise ConfigurationError(f"copy_tensor_to_devices got {len(described)} tensors. Pass a tensor on one process.")
    if tensor is None:
        shape, dtype = described[0]
        tensor = torch.zeros(shape, dtype=dtype, device=PartialState().device)
    copied: torch.Tensor = reduce(tensor, "sum")  # of the tensor and zeros
    return copied


def reduce(tensor: object, reduction: str = "mean", scale: float = 1.0) -> Any:
    """Return means, sums or maxima of nested tensors over all processes. Collective. The arguments are not changed.

    With several processes, gradients do not flow through the result, unless `reduction` is `"none"`.

    Args:
        tensor: each tensor of the same shape and dtype on every process.
        reduction: `"mean"`, `"sum"`, `"max"` (of each element), or `"none"`, which returns this process's tensors.
            Default: `"mean"`.
        scale: factor of the result. Default: 1.0.

    Raises:
        TypeError: a leaf is not a tensor, or is an integer tensor whose mean over several processes is requested.
        ConfigurationError: the reduction is unknown, or shapes, dtypes or reductions differ between processes.
    """
    if reduction not in _REDUCTIONS:
        hint = " For others, reduce what gather returns: gather(tensor).amin(0)."
        raise unknown("reduction", reduction, _REDUCTIONS, hint)
    state = PartialState()

    def scale_one(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.clone() if scale == 1.0 else leaf * scale

    if state.num_processes == 1 or reduction == "none":
        _leaves("reduce", tensor)
        return recursively_apply(scale_one, tensor)
    processes = state.joined()
    _check_same_call("reduce", state, tensor, reduction)
    operation = dist.ReduceOp.MAX if reduction == "max" else dist.ReduceOp.SUM
    factor = scale / processes.world_size if reduction == "mean" else scale

    def reduce_one(leaf: torch.Tensor) -> torch.Tensor:
        if reduction == "mean" and not (leaf.is_floating_point() or leaf.is_complex()):
            raise TypeError(
                f"reduce got a tensor of {leaf.dtype}, which has no mean. Pass tensor.float(), or use 'sum'."
            )
        total = leaf.detach().contiguous().clone()  # all_reduce writes in place
        dist.all_reduce(total, operation, group=processes.group_for(leaf.device))
        return total if factor == 1.0 else total * factor

    return recursively_apply(reduce_one, tensor)


def pad_across_processes(tensor: object, dim: int = 0, pad_index: int = 0, pad_first: bool = False) -> Any:
    """Return nested tensors, each padded to its largest size on any process along one dimension. Collective.

    Sizes of all tensors are exchanged at once, on the host.

    Args:
        tensor: each tensor with the same number of dimensions on every process.
        dim: the dimension. Tensors without it are unchanged, and (with a warning) nested tensors of `torch.nested`.
            Default: 0.
        pad_index: the padding value. Default: 0.
        pad_first: pad at the front instead of the end. Default: False.

    Raises:
        TypeError: a leaf is not a tensor.
        ConfigurationError: numbers of tensors or dimensions, `dim`, or with `PartialState.debug` dtypes differ between
            processes. Raised on every process.
    """
    state = PartialState()
    if state.num_processes > 1:
        _check_same_call("pad_across_processes", state, tensor, dim, lengths_differ=True)
    leaves = _leaves("pad_across_processes", tensor)
    if any(leaf.is_nested for leaf in leaves):
        text = "pad_across_processes does not pad nested tensors. Call their to_padded_tensor() first."
        warnings.warn(text, CannotPadNestedTensorWarning, stacklevel=2)
    if state.num_processes == 1 or not leaves:
        return tensor

    def is_padded(leaf: torch.Tensor) -> bool:
        return not leaf.is_nested and -leaf.dim() <= dim < leaf.dim()

    # One exchange for all leaves. A leaf that is not padded sends -1, so that the lists are equally long.
    sizes = [leaf.shape[dim] if is_padded(leaf) else -1 for leaf in leaves]
    sizes_by_process = state.joined().gather_integers(sizes)
    largest_sizes = iter([max(of_leaf) for of_leaf in zip(*sizes_by_process, strict=True)])

    def pad_one(leaf: torch.Tensor) -> torch.Tensor:
        largest = next(largest_sizes)
        if not is_padded(leaf) or leaf.shape[dim] == largest:
            return leaf
        size = leaf.shape[dim]
        shape = list(leaf.shape)
        shape[dim] = largest
        padded = leaf.new_full(shape, pad_index)
        start = largest - size if pad_first else 0
        padded.narrow(dim, start, size).copy_(leaf)
        return padded

    return recursively_apply(pad_one, tensor)


def slice_tensors(
    data: object, tensor_slice: slice, process_index: int | None = None, num_processes: int | None = None
) -> Any:
    """Return nested tensors, each a view of a slice of its first dimension. Not collective.

    Args:
        data: tensors in lists, tuples and mappings.
        tensor_slice: the slice.
        process_index: Accepted without effect: `tensor_slice` says which rows are returned.
        num_processes: Accepted without effect: `tensor_slice` says which rows are returned.

    Raises:
        TypeError: A leaf is not a tensor.
    """
    del process_index, num_processes
    return recursively_apply(lambda tensor: tensor[tensor_slice], data, error_on_other_type=True)


def is_namedtuple(data: object) -> bool:
    """Return whether an object is a named tuple."""
    return isinstance(data, tuple) and hasattr(data, "_fields")


def honor_type(obj: Any, generator: Iterable[Any]) -> Any:
    """Return the items of an iterable as a list, tuple or named tuple: an object of the type of `obj`."""
    return type(obj)(*generator) if is_namedtuple(obj) else type(obj)(generator)


def find_device(data: object) -> torch.device | None:
    """Return the device of the first tensor in nested tensors, or None if they contain no tensor."""
    return next((tensor.device for tensor in iterate_tensors(data)), None)


def find_batch_size(data: object) -> int:
    """Return the length of the first tensor in nested tensors along its first dimension.

    Raises:
        ValueError: `data` contains no tensor, or the first tensor has no dimension.
    """
    first = next(iterate_tensors(data), None)
    if first is None or first.dim() == 0:
        raise ValueError(f"find_batch_size got no tensor with a first dimension: {data!r:.200}.")
    return len(first)


def pad_input_tensors(tensor: object, batch_size: int, num_processes: int, dim: int = 0) -> Any:
    """Pad nested tensors so that each process gets an equal part, by repeating the last sample. Not collective.

    Args:
        tensor: tensors of `batch_size` samples.
        batch_size: the number of samples.
        num_processes: the number of parts.
        dim: the dimension of the samples. Default: 0.

    Raises:
        TypeError: A leaf is not a tensor.
    """
    num_missing = -batch_size % num_processes

    def pad_one(leaf: torch.Tensor) -> torch.Tensor:
        if num_missing == 0:
            return leaf  # may be empty
        last = leaf.narrow(dim, leaf.shape[dim] - 1, 1)
        return torch.cat([leaf, *[last] * num_missing], dim)

    return recursively_apply(pad_one, tensor, error_on_other_type=True)


def listify(data: object) -> Any:
    """Return nested tensors as lists of numbers. Values of bfloat16 are converted to float32. Waits for the device."""

    def listify_one(leaf: torch.Tensor) -> Any:
        if leaf.dtype == torch.bfloat16:
            leaf = leaf.float()
        return leaf.detach().cpu().tolist()

    return recursively_apply(listify_one, data)


def convert_to_fp32(tensor: object) -> Any:
    """Convert nested float16 and bfloat16 tensors to float32. Other leaves are unchanged."""

    def convert_one(leaf: torch.Tensor) -> torch.Tensor:
        return leaf.float() if leaf.dtype in (torch.float16, torch.bfloat16) else leaf

    return recursively_apply(convert_one, tensor)


def convert_outputs_to_fp32(model_forward: Callable[P, Any]) -> Callable[P, Any]:
    """Return a function that calls another function and returns its outputs converted by `convert_to_fp32`."""

    @functools.wraps(model_forward)
    def forward(*args: P.args, **kwargs: P.kwargs) -> Any:
        return convert_to_fp32(model_forward(*args, **kwargs))

    return forward


def _leaves(operation: str, tree: object) -> list[torch.Tensor]:
    """Return the leaves of `tree`, depth first. Raise a TypeError that names `operation` if one is not a tensor."""
    leaves: list[torch.Tensor] = []

    def append(leaf: torch.Tensor) -> None:
        leaves.append(leaf)

    append.__name__ = operation  # for the message of `recursively_apply`
    recursively_apply(append, tree, error_on_other_type=True)
    return leaves


def _check_same_call(
    operation: str, state: PartialState, tree: object, argument: object = None, *, lengths_differ: bool = False
) -> None:
    """Check that every process calls `operation` with equal shapes and dtypes. Collective.

    `argument` must be equal as well, such as the reduction of `reduce`.

    Wrong types and different calls raise errors on every process before data is sent, because the other processes would
    wait forever in a partial exchange.
    """
    type_error: TypeError | None = None
    description: list[tuple[Any, ...]] | str
    try:
        _leaves(operation, tree)
    except TypeError as error:
        type_error = error
        description = str(error)  # sent, too, so that processes with correct types raise an error as well
    else:
        description = []
        for path, leaf in named_leaves(tree):
            fields = _description(leaf, lengths_differ, state.debug)
            description.append((path, *fields) if path else fields)
    name = operation if argument is None else f"{operation}(…, {argument!r})"
    try:
        compare_calls(state.joined(), name, description, _UNEQUAL_LENGTHS_HINT)
    except ConfigurationError as error:
        # The local error names the wrong value. The error about different calls only quotes it.
        raise (type_error or error) from None
    if type_error is not None:
        raise type_error


def _description(leaf: torch.Tensor, lengths_differ: bool, debug: bool) -> tuple[Any, ...]:
    """Return the fields of a leaf that must be equal on all processes, such as `((2, 3), "float32")`."""
    dtype = str(leaf.dtype).removeprefix("torch.")
    if not lengths_differ:
        return tuple(leaf.shape), dtype
    num_dims = f"{leaf.dim()} dimensions"
    return (num_dims, dtype) if debug else (num_dims,)


def _check_process(from_process: int, state: PartialState) -> None:
    if not 0 <= from_process < state.num_processes:
        raise ConfigurationError(
            f"from_process={from_process}, but there are {state.num_processes} processes, 0 to "
            f"{state.num_processes - 1}."
        )


def same_on_all_ranks(processes: Processes, call: object) -> bool:
    """Return whether every rank passes a `call` with the same `repr`. Collective, on the host."""
    # 8 bytes are one int64: a single small exchange, however long the call's text is.
    digest = hashlib.blake2b(repr(call).encode(), digest_size=8).digest()
    digests = processes.gather_integers([int.from_bytes(digest, "big", signed=True)])
    return all(row == digests[0] for row in digests)


def compare_calls(processes: Processes, operation: str, arguments: object, hint: str) -> None:
    """Raise an error on every rank if operations or arguments differ between ranks. Collective, on the host."""
    if not same_on_all_ranks(processes, (operation, arguments)):
        raise different_calls(processes.gather_object((operation, arguments)), hint)


def different_calls(calls: list[Any], hint: str) -> DistributedOperationException:
    """Return the error for calls that do not match. `calls` has the call of each process.

    Each call is an operation and its tensors: a text, or a list of tuples such as `("['loss']", (2, 3), "float32")`. A
    single tensor has no path: `((2, 3), "float32")`.
    """
    lines = [f"  process {rank}: {name} of {tensors}\n" for rank, (name, tensors) in enumerate(calls)]
    return DistributedOperationException(
        "the processes do not make the same call with tensors of the same shapes and dtypes:\n"
        f"{''.join(lines)}{_first_difference(calls)}{hint}"
    )


def _first_difference(calls: list[Any]) -> str:
    """Return a sentence that names the first tensor in which a process differs from process 0, or ''."""
    name = calls[0][0]
    by_process: list[dict[str, tuple[Any, ...]]] = []  # for example [{"['loss']": ((2, 3), "float32")}, …]
    for other_name, tensors in calls:
        if other_name != name or not isinstance(tensors, list):
            return ""
        by_path = {entry[0]: entry[1:] for entry in tensors}
        if not all(str(path).startswith(("[", ".")) for path in by_path):
            return ""  # the process passes a single tensor, which has no path
        by_process.append(by_path)
    first = by_process[0]
    for rank, other in enumerate(by_process):
        for path in {**first, **other}:
            if path not in first:
                return f"In {name}, process {rank} has a tensor at {path}, and process 0 has none.\n"
            if path not in other:
                return f"In {name}, process 0 has a tensor at {path}, and process {rank} has none.\n"
            if first[path] != other[path]:
                expected = ", ".join(map(str, first[path]))
                actual = ", ".join(map(str, other[path]))
                return f"In {name}, {path} is {expected} on process 0, and {actual} on process {rank}.\n"
        if list(other) != list(first):
            return f"In {name}, process {rank} has the keys in another order than process 0.\n"
    return ""
