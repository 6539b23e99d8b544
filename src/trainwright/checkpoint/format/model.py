"""The model part of a checkpoint, in Hugging Face's sharded safetensors layout, which other libraries can read.

    model-00001-of-00002.safetensors
    model-00002-of-00002.safetensors
    model.safetensors.index.json      "weight_map": tensor name → file, and "metadata"
    extra_state.json                  only if the state dict has values that are not tensors

Under `"metadata"`, the key `"trainwright"` has the entries that the layout lacks:
`{"tied": {"head.weight": "embedding.weight"}, "dtypes": {"rope": "torch.complex64"}, "extra": "extra_state"}`.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from trainwright.checkpoint.disk.durable import FileEntry
from trainwright.checkpoint.disk.planned_file import PlannedFile, write_files
from trainwright.checkpoint.disk.untrusted import check_json_size, dump_json, inside, read_json, reading
from trainwright.checkpoint.format.codec import plan_tree, read_tree
from trainwright.checkpoint.format.safetensors_io import from_storable, plan_safetensors, read_safetensors, to_storable
from trainwright.core.errors import CheckpointError
from trainwright.core.names.hidden_names import plain_name

MODEL_INDEX = "model.safetensors.index.json"
SINGLE_FILE = "model.safetensors"
EXTRA_STEM = "extra_state"
MAX_SHARD_BYTES = 5 * 10**9  # the default of huggingface_hub


def plain_names(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with the results of `plain_name` as names. Two equal results raise `CheckpointError`."""
    values: dict[str, Any] = {}
    for long_name, value in state_dict.items():
        name = plain_name(long_name)
        if name in values:
            raise CheckpointError(f"two entries of the state dict are called {name!r} (one is {long_name!r}).")
        values[name] = value
    return values


def load_plain_state(
    module: torch.nn.Module, state: Mapping[str, Any], *, strict: bool = True
) -> tuple[list[str], list[str]]:
    """Load a state dict into `module` in place. Names may have the prefixes that wrappers add.

    Returns:
        Two lists of names: missing (only in the module) and unexpected (only in `state`).

    Raises:
        CheckpointError: shapes differ, or names differ with `strict=True`.
    """
    module_names = {plain_name(name): name for name in module.state_dict()}
    # An entry without a counterpart keeps its name, and is reported as unexpected.
    renamed = {module_names.get(plain_name(name), name): value for name, value in state.items()}
    # A stage under inference mode may have set buffers of the module. They can be changed under inference mode only.
    tensors = itertools.chain(module.parameters(), module.buffers())
    in_inference = any(tensor.is_inference() for tensor in tensors)
    try:
        with torch.inference_mode(in_inference):
            result = module.load_state_dict(renamed, strict=strict)
    except RuntimeError as error:
        if "size mismatch" in str(error):
            hint = " Build it with the sizes below, or rename the layers with other sizes and pass strict=False."
        else:
            hint = " Pass strict=False to load only the weights whose names are in both."
        raise CheckpointError(f"the saved weights do not fit {type(module).__name__}.{hint} {error}") from error
    if result is None:  # an overridden load_state_dict may return nothing
        return [], []
    missing = [plain_name(name) for name in result.missing_keys]
    unexpected = [plain_name(name) for name in result.unexpected_keys]
    return missing, unexpected


def plan_model(state_dict: Mapping[str, Any], *, max_shard_bytes: int = MAX_SHARD_BYTES) -> list[PlannedFile]:
    """Plan the files of a state dict: numbered safetensors shards with an index. Copies and writes nothing.

    Tied tensors (same memory, shape and strides) are stored once, under the first name. Tensors of complex and rare
    1-byte dtypes are stored as views with a dtype of safetensors. The index has tied names and original dtypes. Values
    that are not tensors (`get_extra_state`) are encoded by `codec`.

    Args:
        state_dict: name → tensor, on any device.
        max_shard_bytes: largest total size of the tensors in one shard. A larger tensor gets its own shard. Default:
            5 GB.

    Returns:
        The files, with paths relative to the folder of the model. The index is the last one.

    Raises:
        CheckpointError: a value cannot be saved, or two names differ only in prefixes of wrappers.
    """
    tensors: dict[str, torch.Tensor] = {}
    extra: dict[str, Any] = {}
    tied: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    first_names: dict[tuple[Any, ...], str] = {}  # `memory_key` and dtype → name of the first such tensor
    for name, value in plain_names(state_dict).items():
        if not isinstance(value, torch.Tensor):
            extra[name] = value
            continue
        try:
            stored, original_dtype = to_storable(value)
        except CheckpointError as error:
            raise CheckpointError(f"model.{name}: {error}") from error
        # With the dtype: a buffer of complex numbers and its view as pairs of reals have the same stored tensor.
        key = (*memory_key(stored, name), value.dtype)
        first = first_names.setdefault(key, name)
        if first != name:
            tied[name] = first
            continue
        tensors[name] = stored
        if original_dtype is not None:
            dtypes[name] = original_dtype
    sizes = {name: tensor.nbytes for name, tensor in tensors.items()}
    shards = deal_out(sizes, max_shard_bytes)
    names_by_file = dict(zip(shard_names(len(shards)), shards, strict=True))
    files = []
    for path, names in names_by_file.items():
        files.append(plan_safetensors(path, {name: tensors[name] for name in names}))
    metadata: dict[str, Any] = {"tied": tied, "dtypes": dtypes}
    if extra:
        metadata["extra"] = EXTRA_STEM
        files += plan_tree(EXTRA_STEM, extra)
    index = shard_index(sizes, names_by_file, {"trainwright": metadata})
    text = check_json_size(dump_json(index, indent=2).encode() + b"\n", MODEL_INDEX)
    return [*files, PlannedFile(MODEL_INDEX, text)]


def write_model(
    folder: Path, state_dict: Mapping[str, Any], *, max_shard_bytes: int = MAX_SHARD_BYTES
) -> dict[str, FileEntry]:
    """Write the files of `plan_model` into the empty `folder`. Return each file's size and hash by file name.

    Blocks until the files are synced. The extra memory is one tensor.
    """
    return write_files(folder, plan_model(state_dict, max_shard_bytes=max_shard_bytes))


def memory_key(tensor: torch.Tensor, name: str) -> tuple[Any, ...]:
    """Return a key that is equal for tensors with the same device, memory, shape, strides and negation (of a view such
    as `x.conj().imag`). Empty tensors have different keys.
    """
    if tensor.numel() == 0:
        return (name,)  # empty tensors all begin at address 0
    return (tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.is_neg())


def deal_out(sizes: Mapping[str, int], max_shard_bytes: int) -> list[list[str]]:
    """Divide tensors into shards. Return the names in each shard. There is at least one shard, which may be empty.

    A tensor larger than `max_shard_bytes` gets its own shard, and the shard that was being filled is filled further.
    For the sizes a: 2, b: 9, c: 2, d: 2 and `max_shard_bytes=5`, the result is `[["b"], ["a", "c"], ["d"]]`. It is the
    result of huggingface_hub's `split_torch_state_dict_into_shards`.
    """
    shards: list[list[str]] = []
    current: list[str] = []  # the shard that is being filled
    num_bytes = 0  # of `current`
    for name, size in sizes.items():
        if size > max_shard_bytes:
            shards.append([name])
            continue
        if current and num_bytes + size > max_shard_bytes:
            shards.append(current)
            current = []
            num_bytes = 0
        current.append(name)
        num_bytes += size
    if current:
        shards.append(current)
    return shards or [[]]


def shard_names(num: int, *, stem: str = "model", suffix: str = ".safetensors", infix: str = "") -> list[str]:
    """Return the file names of `num` shards, such as `model-00001-of-00002.safetensors`.

    `infix` follows `stem`: `infix="fp16"` returns `model-fp16-00001-of-00002.safetensors`.
    """
    prefix = f"{stem}-{infix}" if infix else stem
    return [f"{prefix}-{number:05d}-of-{num:05d}{suffix}" for number in range(1, num + 1)]


def shard_index(
    sizes: Mapping[str, int], shards: Mapping[str, Sequence[str]], metadata: Mapping[str, object]
) -> dict[str, Any]:
    """Return the content of a model's index. `sizes` are bytes by tensor name, `shards` are tensor names by file."""
    files: dict[str, str] = {}
    for file, names in shards.items():
        files |= dict.fromkeys(names, file)
    return {
        "metadata": {"total_size": sum(sizes.values()), **metadata},
        "weight_map": {name: files[name] for name in sizes},
    }


@dataclass(frozen=True, slots=True)
class ShardIndex:
    """The content of a `model.safetensors.index.json`.

    Attributes:
        names: names of the stored tensors, in the order of the index.
        shards: the same names by the path of their file.
        tied: name of a tied tensor → name under which it is stored. Empty if another library has written the index.
        dtypes: name → original dtype of a tensor that `to_storable` converted.
        extra: stem of the files with values that are not tensors. None without such values.
    """

    names: list[str]
    shards: dict[Path, list[str]]
    tied: dict[str, str]
    dtypes: dict[str, str]
    extra: str | None


def read_index(path: Path, files: Collection[str] | None = None) -> ShardIndex:
    """Read an index. The shards must exist in the folder of the index and, unless `files` is None, be among `files`.

    Raises a CheckpointError for other shards, and for a damaged index.
    """
    index = read_json(path)
    try:
        weight_map: dict[str, str] = dict(index["weight_map"])
        metadata = dict(index.get("metadata", {}).get("trainwright", {}))
        tied = dict(metadata.get("tied", {}))
        dtypes = dict(metadata.get("dtypes", {}))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{path} is not an index of safetensors shards: {error!r}. Copy it again, or use another checkpoint."
        ) from error
    shards: dict[Path, list[str]] = {}
    for file in dict.fromkeys(weight_map.values()):  # each file once, in order
        shard = inside(path.parent, file, str(path))
        if files is not None and file not in files:
            raise CheckpointError(f"{path} names the shard {file!r}, which the manifest does not list.")
        if not shard.is_file():
            raise CheckpointError(f"{path} names the shard {file!r}, which is missing. Copy it, too.")
        shards[shard] = []
    for name, file in weight_map.items():
        shards[path.parent / file].append(name)
    for name, first in tied.items():
        if first not in weight_map:
            raise CheckpointError(f"{path} ties {name!r} to {first!r}, which the index does not contain.")
    extra = str(metadata["extra"]) if "extra" in metadata else None
    return ShardIndex(list(weight_map), shards, tied, dtypes, extra)


def read_model(
    folder: Path, device: torch.device | str = "cpu", *, copy: bool = True, files: Collection[str] | None = None
) -> dict[str, Any]:
    """Read the files of `write_model`, or any folder of Hugging Face safetensors.

    Args:
        folder: contains `model.safetensors.index.json` and its shards, or one `model.safetensors`.
        device: device of the tensors.
        copy: see `read_safetensors`.
        files: names of the files that the manifest lists. An index with other shards raises. Default: None, all files.

    Returns:
        The state dict: tensors, and other values on the CPU, by name. Tied names have the same tensor.

    Raises:
        CheckpointError: the index is damaged, or a shard is outside `folder`, missing or incomplete.
    """
    with reading(folder):
        path = folder / MODEL_INDEX
        if not path.is_file():
            if (folder / SINGLE_FILE).is_file():
                return dict(read_safetensors(inside(folder, SINGLE_FILE, str(folder)), device=device, copy=copy))
            raise CheckpointError(f"{folder} holds neither {MODEL_INDEX} nor {SINGLE_FILE}.")
        index = read_index(path, files)
        tensors: dict[str, torch.Tensor] = {}
        for shard, names in index.shards.items():
            tensors |= read_safetensors(shard, device=device, names=names, copy=copy)
        values: dict[str, Any] = {}
        for name in index.names:
            values[name] = from_storable(tensors[name], index.dtypes.get(name))
        for name, first in index.tied.items():
            values[name] = values[first]
        if index.extra is not None:
            values |= read_tree(folder, EXTRA_STEM)
        return values
