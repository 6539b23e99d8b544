"""How much memory a model will take, counted without taking it: weights, training with Adam, activations, KV cache."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.checkpoint.safetensors_io import read_header
from trainwright.core.errors import CheckpointError, ConfigurationError
from trainwright.strategies.offload.placement import largest_whole
from trainwright.strategies.offload.sizes import DType, dtype_byte_size, read_outline

ADAM_COPIES = 4  # weights, gradients, and two averages of Adam, all in the dtype of the weights
_BLOCK = re.compile(r"(?:.*?\.)?\d+(?=\.)")  # "model.layers.0" of "model.layers.0.mlp.weight": a numbered block
_INTEGERS = ("I", "U", "B")  # how the names of safetensors' dtypes of counters and masks begin; BF16 is none of them


@dataclass(frozen=True, slots=True)
class WeightCount:
    """How many elements a model has, from which its bytes in any dtype follow.

    Attributes:
        elements: floating elements of parameters and buffers, a shared tensor counted once.
        fixed_bytes: of counters and masks, whose dtype does not change.
        largest_layer: name of the largest module that is not divided.
        largest_elements: of that module.
    """

    elements: int
    fixed_bytes: int
    largest_layer: str
    largest_elements: int

    def total_bytes(self, dtype: DType) -> int:
        """Return the bytes of all weights and buffers in a dtype."""
        return math.ceil(self.elements * dtype_byte_size(dtype)) + self.fixed_bytes

    def largest_bytes(self, dtype: DType) -> int:
        """Return the bytes of the largest layer in a dtype."""
        return math.ceil(self.largest_elements * dtype_byte_size(dtype))

    def training_bytes(self, dtype: DType) -> int:
        """Return the bytes of weights, gradients and both averages of Adam, all in one dtype, without activations."""
        return ADAM_COPIES * self.total_bytes(dtype)


def count_weights(model: nn.Module) -> WeightCount:
    """Count a model's elements; classes in its `_no_split_modules` (as transformers has them) count as one layer.

    Args:
        model: on any device, the meta device included.
    """
    outline = read_outline(model, no_split_module_classes=getattr(model, "_no_split_modules", None), dtype="int8")
    largest_elements, largest_layer = largest_whole(outline)
    seen: dict[int, torch.Tensor] = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    floating = [tensor for tensor in seen.values() if tensor.dtype.is_floating_point or tensor.dtype.is_complex]
    fixed = [tensor for tensor in seen.values() if not (tensor.dtype.is_floating_point or tensor.dtype.is_complex)]
    return WeightCount(
        elements=sum(tensor.numel() for tensor in floating),
        fixed_bytes=sum(tensor.numel() * tensor.element_size() for tensor in fixed),
        largest_layer=largest_layer,
        largest_elements=largest_elements,
    )


def count_stored_weights(path: Path) -> WeightCount:
    """Count the elements in a safetensors file or a folder of such files, reading nothing but headers.

    A layer is a numbered block (`"model.layers.0"`), or what stands before a tensor's own name.

    Raises:
        CheckpointError: there is no such file, or one is damaged.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(f"{path} holds no safetensors file.")
    layers: defaultdict[str, int] = defaultdict(int)
    fixed_bytes = 0
    for file in files:
        for name, entry in read_header(file).items():
            if name == "__metadata__":
                continue
            dtype = str(entry["dtype"])
            if dtype.startswith(_INTEGERS) and dtype != "BF16":
                fixed_bytes += entry["data_offsets"][1] - entry["data_offsets"][0]
                continue
            block = _BLOCK.match(name)
            layers[block[0] if block else name.rpartition(".")[0]] += math.prod(entry["shape"])
    largest = max(layers, key=layers.__getitem__, default="")
    return WeightCount(sum(layers.values()), fixed_bytes, largest, layers[largest])


def count_activation_bytes(forward: Callable[[], Any], model: nn.Module) -> int:
    """Return the bytes that autograd keeps from a forward for its backward, the model's own tensors left out.

    The forward may be one of fake tensors (`torch._subclasses.FakeTensorMode`), which computes nothing and takes no
    memory, and which torch gives the kernels of the device that they pretend to be on; a module that keeps activations
    in its own way (by recomputing them, for example) is counted as it behaves.

    Args:
        forward: calls the model; gradients are on.
        model: its parameters and buffers are not counted.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[storage._cdata] = storage
        return tensor

    with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        result = forward()
    del result
    return sum(storage.nbytes() for storage in kept.values())


def kv_cache_bytes(config: Mapping[str, Any], *, batch_size: int, sequence_length: int, dtype: DType) -> int | None:
    """Return the bytes of the keys and values that generating text keeps; None where a model has no such cache.

    Args:
        config: of a transformers model: `num_hidden_layers`, `num_attention_heads`, `num_key_value_heads`, `head_dim`,
            `hidden_size`, or the names that GPT-2 has for them.
        batch_size: sequences at once.
        sequence_length: tokens of each, those of the prompt included.
        dtype: of the cache.
    """
    layers = config.get("num_hidden_layers") or config.get("n_layer")
    heads = config.get("num_attention_heads") or config.get("n_head")
    width = config.get("hidden_size") or config.get("n_embd")
    if not (layers and heads and width) or config.get("is_encoder_decoder"):
        return None
    head_dim = config.get("head_dim") or width // heads
    key_value_heads = config.get("num_key_value_heads") or heads
    elements = 2 * layers * key_value_heads * head_dim * sequence_length * batch_size
    cache_bytes: float = elements * dtype_byte_size(dtype)
    return math.ceil(cache_bytes)


def read_config(path: Path) -> dict[str, Any]:
    """Return a transformers configuration from its JSON file.

    Raises:
        ConfigurationError: the file is no JSON object, or does not say which kind of model it is.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is no JSON file: {error}.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigurationError(f"{path} is no configuration of a transformers model: it has no model_type.")
    return config
