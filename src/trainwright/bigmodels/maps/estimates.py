"""Memory estimates for weights, training with Adam, activations and the KV cache."""

from __future__ import annotations

import functools
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from trainwright.bigmodels.maps.sizes import NUMBERED_BLOCK, DType, dtype_byte_size, is_floating, read_outline
from trainwright.checkpoint.disk.untrusted import reading
from trainwright.checkpoint.format.safetensors_io import read_header
from trainwright.core.errors import CheckpointError, ConfigurationError

ADAM_COPIES = 4  # weights, gradients, and two averages of Adam, all in the dtype of the weights
_FLOATING = ("F", "BF", "C")  # first letters of the floating and complex dtypes of safetensors


@dataclass(frozen=True, slots=True)
class WeightCount:
    """Number of elements in a model, to compute its bytes in any dtype.

    Attributes:
        elements: Floating-point elements of parameters and buffers. Shared tensors count once.
        fixed_bytes: Bytes of counters and masks, which are never converted to another dtype.
        largest_layer: Name of the largest layer.
        largest_elements: Floating-point elements of the largest layer.
        largest_fixed_bytes: Bytes of the counters and masks in the largest layer.
    """

    elements: int
    fixed_bytes: int
    largest_layer: str
    largest_elements: int
    largest_fixed_bytes: int = 0

    def total_bytes(self, dtype: DType) -> int:
        """Return the bytes of all weights and buffers in a dtype."""
        return math.ceil(self.elements * dtype_byte_size(dtype)) + self.fixed_bytes

    def largest_bytes(self, dtype: DType) -> int:
        """Return the bytes of the largest layer in a dtype."""
        return math.ceil(self.largest_elements * dtype_byte_size(dtype)) + self.largest_fixed_bytes

    def training_bytes(self, dtype: DType) -> int:
        """Return the bytes of weights, gradients and Adam's two averages in one dtype, without activations."""
        return ADAM_COPIES * self.total_bytes(dtype)


def count_weights(model: nn.Module) -> WeightCount:
    """Count the elements of a model on any device, the meta device included.

    Modules of the classes in its `_no_split_modules` (an attribute of transformers models) count as one layer.
    """
    outline = read_outline(model, no_split_module_classes=getattr(model, "_no_split_modules", None), dtype="int8")
    layers = [
        (size - fixed, fixed, name)  # an element takes one byte here, except in counters and masks
        for size, name, is_layer in zip(outline.sizes_bytes, outline.names, outline.is_layer, strict=True)
        if is_layer
        for fixed in (min(size, _fixed_bytes(model, name)),)
    ]
    elements, layer_bytes, layer_name = max(layers, key=lambda layer: layer[0], default=(0, 0, ""))
    fixed = _fixed_bytes(model, "")
    return WeightCount(outline.sizes_bytes[0] - fixed, fixed, layer_name, elements, layer_bytes)


def _fixed_bytes(model: nn.Module, name: str) -> int:
    """Return the bytes of the counters and masks in the module, parameter or buffer called `name`."""
    part: Any = functools.reduce(getattr, name.split("."), model) if name else model
    tensors = [part] if isinstance(part, torch.Tensor) else [*part.parameters(), *part.buffers()]
    return sum(
        tensor.nbytes for tensor in {id(tensor): tensor for tensor in tensors}.values() if not is_floating(tensor)
    )


def count_stored_weights(path: Path) -> WeightCount:
    """Count the elements in a safetensors file or a folder of them. Reads only the headers.

    A layer is a numbered block (`"model.layers.0"`) or, outside the blocks, the module that contains a tensor.

    Raises:
        CheckpointError: There is no such file, or a file is damaged.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(f"{path} contains no safetensors file. Pass such a file, or its folder.")
    layers: defaultdict[str, int] = defaultdict(int)
    fixed: defaultdict[str, int] = defaultdict(int)
    for file in files:
        header = read_header(file)
        header.pop("__metadata__", None)
        with reading(file):
            for name, entry in header.items():
                block = NUMBERED_BLOCK.match(name)
                layer = block[0] if block else name.rpartition(".")[0]
                if str(entry["dtype"]).startswith(_FLOATING):
                    layers[layer] += math.prod(entry["shape"])
                else:
                    fixed[layer] += entry["data_offsets"][1] - entry["data_offsets"][0]
    largest = max(layers, key=layers.__getitem__, default="")
    return WeightCount(sum(layers.values()), sum(fixed.values()), largest, layers[largest], fixed[largest])


def count_stage_bytes(
    forward: Callable[[], Any], model: nn.Module, stages: Sequence[Sequence[nn.Module]]
) -> tuple[list[int], list[int]]:
    """Return the bytes that autograd saves in each pipeline stage, and the bytes that each stage sends to the next.

    `forward` calls the model, with gradients enabled. Fake tensors (`torch._subclasses.FakeTensorMode`) take no memory.
    `stages` lists the modules of each stage. A stage ends with the call of its last module. If `stages` is empty, the
    model is one stage. Tensors that two stages save count in both stages. The model's parameters and buffers do not
    count. Activation checkpointing reduces the result.
    """
    own = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    kept: list[dict[int, torch.UntypedStorage]] = [{}]
    sent: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in own:
            kept[-1][storage._cdata] = storage
        return tensor

    def end_stage(module: nn.Module, args: object, output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        sent.append(first.untyped_storage().nbytes())
        kept.append({})

    with ExitStack() as undo:
        for stage in stages[:-1]:
            undo.callback(stage[-1].register_forward_hook(end_stage).remove)
        undo.enter_context(torch.enable_grad())
        undo.enter_context(torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor))
        result = forward()
    del result
    return [sum(storage.nbytes() for storage in stage.values()) for stage in kept], sent


class _GroupedProduct(torch.autograd.Function):
    """Replacement of `torch._grouped_mm` with the same output shape and the same saved tensors."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Return a tensor (rows, width) without values, for weights (experts, …, width)."""
        ctx.save_for_backward(rows, weights)
        return rows.new_empty(rows.shape[0], weights.shape[-1])


class FakeGroupedProducts(TorchFunctionMode):
    """Mode in which `torch._grouped_mm` accepts fake tensors of any dtype. torch 2.13 needs bfloat16 on the CPU."""

    def __torch_function__(self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        """Call `func`, or its replacement."""
        if func is getattr(torch, "_grouped_mm", None) and len(args) == 2 and args[0].dim() == 2:
            return _GroupedProduct.apply(*args)  # type: ignore[no-untyped-call]  # torch has no types here
        return func(*args, **(kwargs or {}))


def kv_cache_bytes(config: Mapping[str, Any], *, batch_size: int, sequence_length: int, dtype: DType) -> int | None:
    """Return the bytes of a model's KV cache in text generation, or None if the model has no such cache.

    Layers with sliding windows cache the tokens in the window. The decoder of an encoder-decoder model is assumed to
    cache equal numbers of encoder and decoder tokens. Latent attention caches compressed vectors.

    `config` is a transformers configuration of any model family. For models of text and images, its `text_config` is
    used. `sequence_length` includes the prompt.
    """
    text = config.get("text_config")
    config = text if isinstance(text, Mapping) else config
    is_decoder = bool(config.get("is_encoder_decoder"))
    own: tuple[str, ...] = ("num_decoder_layers", "decoder_layers") if is_decoder else ()
    layers = _first(config, *own, "num_hidden_layers", "n_layer", "n_layers", "num_layers")
    own = ("decoder_attention_heads",) if is_decoder else ()
    heads = _first(config, *own, "num_attention_heads", "n_head", "n_heads", "num_heads")
    width = _first(config, "hidden_size", "n_embd", "d_model")
    if not (layers and heads and width):
        return None
    if config.get("kv_lora_rank") and config.get("qk_rope_head_dim"):
        per_token = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        head_dim = _first(config, "head_dim", "d_kv") or width // heads
        is_single = config.get("multi_query") and not config.get("new_decoder_architecture")  # such as Falcon 7B
        per_token = 2 * head_dim * (1 if is_single else config.get("num_key_value_heads") or heads)
    tokens = 2 * layers * sequence_length if is_decoder else _kept_tokens(config, layers, sequence_length)
    cache_bytes: float = tokens * per_token * batch_size * dtype_byte_size(dtype)
    return math.ceil(cache_bytes)


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of the named settings that the configuration has, or 0."""
    return next((int(config[name]) for name in names if isinstance(config.get(name), int) and config[name]), 0)


def _kept_tokens(config: Mapping[str, Any], layers: int, sequence_length: int) -> int:
    """Return the number of tokens of a sequence that all layers together cache."""
    window = _first(config, "sliding_window", "attention_chunk_size")
    kinds = config.get("layer_types") or ["sliding_attention" if window else "full_attention"] * layers
    shared = _first(config, "num_kv_shared_layers")  # the last layers use the cache of earlier ones
    kept = 0
    for kind in kinds[: len(kinds) - shared]:
        if kind in ("sliding_attention", "chunked_attention") and window:
            kept += min(sequence_length, window - 1)  # the newest token is not cached yet
        elif kind.endswith("attention") and kind != "linear_attention":
            kept += sequence_length
    return kept


def read_config(path: Path) -> dict[str, Any]:
    """Read a transformers configuration from its JSON file.

    Raises:
        ConfigurationError: The file is not a JSON object with a `model_type`.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{path} is not a JSON file: {error}. Pass a config.json.") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ConfigurationError(f"{path} is not a config.json of transformers: it has no model_type. Pass one.")
    return config
