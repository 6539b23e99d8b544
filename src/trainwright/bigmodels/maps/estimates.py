"""Memory estimates for weights, training with Adam, activations and the KV cache."""

from __future__ import annotations

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

from trainwright.bigmodels.maps.sizes import (
    NUMBERED_BLOCK,
    DType,
    dtype_byte_size,
    enclosing,
    is_floating,
    named_module_tensors,
    read_outline,
)
from trainwright.checkpoint.disk.untrusted import reading
from trainwright.checkpoint.format.safetensors_io import read_header
from trainwright.core.errors import CheckpointError, ConfigurationError

ADAM_COPIES = 4  # weights, gradients, and two averages of Adam, all in the dtype of the weights
_FLOATING = ("F", "BF", "C")  # first letters of the floating and complex dtypes of safetensors: F32, BF16, C64


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
        trained = ADAM_COPIES * self.elements * dtype_byte_size(dtype)
        return math.ceil(trained) + self.fixed_bytes  # counters and masks have no gradients


def count_weights(model: nn.Module) -> WeightCount:
    """Count the elements of a model on any device, the meta device included.

    Modules of the classes in its `_no_split_modules` (an attribute of transformers models) count as one layer.
    """
    elements: defaultdict[str, int] = defaultdict(int)  # module or tensor → floating-point elements
    fixed: defaultdict[str, int] = defaultdict(int)  # module or tensor → bytes of other tensors
    for name, tensor in named_module_tensors(model, recurse=True):
        for part in enclosing(name):
            if is_floating(tensor):
                elements[part] += tensor.numel()
            else:
                fixed[part] += tensor.nbytes
    outline = read_outline(model, no_split_module_classes=getattr(model, "_no_split_modules", None))
    layers = [name for name, is_layer in zip(outline.names, outline.is_layer, strict=True) if is_layer]
    largest = max(layers, key=elements.__getitem__, default="")
    return WeightCount(elements[""], fixed[""], largest, elements[largest], fixed[largest])


def count_stored_weights(path: Path) -> WeightCount:
    """Count the elements in a safetensors file or a folder of them. Reads only the headers.

    A layer is a numbered block (`"model.layers.0"`) or, outside the blocks, the module that contains a tensor.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
    if not files or not all(file.is_file() for file in files):
        raise CheckpointError(f"{path} contains no safetensors file. Pass such a file, or its folder.")
    elements: defaultdict[str, int] = defaultdict(int)  # layer → floating-point elements
    fixed: defaultdict[str, int] = defaultdict(int)  # layer → bytes of other tensors
    for file in files:
        header = read_header(file)
        header.pop("__metadata__", None)
        with reading(file):
            for name, entry in header.items():
                block = NUMBERED_BLOCK.match(name)
                layer = block[0] if block else name.rpartition(".")[0]
                if str(entry["dtype"]).startswith(_FLOATING):
                    elements[layer] += math.prod(entry["shape"])
                else:
                    begin, end = entry["data_offsets"]
                    fixed[layer] += end - begin
    largest = max(elements, key=elements.__getitem__, default="")
    return WeightCount(sum(elements.values()), sum(fixed.values()), largest, elements[largest], fixed[largest])


def count_stage_bytes(
    forward: Callable[[], Any], model: nn.Module, stages: Sequence[Sequence[nn.Module]]
) -> tuple[list[int], list[int]]:
    """Return the bytes that autograd saves in each pipeline stage, and the bytes that each stage sends to the next.

    Tensors that two stages save count in both stages. The model's parameters and buffers do not count. Activation
    checkpointing reduces the result.

    Args:
        forward: Calls the model. Gradients are enabled during the call. Fake tensors
            (`torch._subclasses.FakeTensorMode`) take no memory.
        model: The model, whose parameters and buffers are not counted.
        stages: The modules of each stage, which the forward calls in this order. A stage ends with the call of its last
            module, which sends its first output. If `stages` is empty, the model is one stage.

    Returns:
        The saved bytes of each stage, and the sent bytes of each stage except the last one.
    """
    # A tensor and its views have one storage. `_cdata` is the storage's address, by which it counts once. The saved
    # storages are kept until the end, so that no address is used again.
    weights = {tensor.untyped_storage()._cdata for tensor in (*model.parameters(), *model.buffers())}
    saved: list[dict[int, torch.UntypedStorage]] = [{}]  # one dict per stage
    sent: list[int] = []

    def count(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in weights:
            saved[-1][storage._cdata] = storage
        return tensor

    def end_stage(module: nn.Module, args: object, output: Any) -> None:
        hidden = output[0] if isinstance(output, (tuple, list)) else output
        sent.append(hidden.untyped_storage().nbytes())
        saved.append({})

    with ExitStack() as undo:
        for stage in stages[:-1]:
            undo.callback(stage[-1].register_forward_hook(end_stage).remove)
        undo.enter_context(torch.enable_grad())
        undo.enter_context(torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor))
        forward()
    return [sum(storage.nbytes() for storage in stage.values()) for stage in saved], sent


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

    Args:
        config: A transformers configuration of any model family. For models of text and images, its `text_config` is
            used.
        batch_size: Number of sequences that are generated at the same time.
        sequence_length: Tokens of each sequence, with those of the prompt.
        dtype: Dtype of the cache.

    Raises:
        ConfigurationError: The dtype is unknown.
    """
    text_config = config.get("text_config")
    if isinstance(text_config, Mapping):
        config = text_config
    layer_names = ["num_hidden_layers", "n_layer", "n_layers", "num_layers"]
    head_names = ["num_attention_heads", "n_head", "n_heads", "num_heads"]
    is_encoder_decoder = bool(config.get("is_encoder_decoder"))
    if is_encoder_decoder:
        layer_names = ["num_decoder_layers", "decoder_layers", *layer_names]
        head_names = ["decoder_attention_heads", *head_names]
    layers = _first(config, *layer_names)
    heads = _first(config, *head_names)
    width = _first(config, "hidden_size", "n_embd", "d_model")
    if not (layers and heads and width):
        return None
    if config.get("kv_lora_rank") and config.get("qk_rope_head_dim"):  # latent attention
        per_token = config["kv_lora_rank"] + config["qk_rope_head_dim"]
    else:
        kv_heads = config.get("num_key_value_heads") or heads
        if config.get("multi_query") and not config.get("new_decoder_architecture"):  # such as Falcon 7B
            kv_heads = 1
        head_dim = _first(config, "head_dim", "d_kv") or width // heads
        per_token = 2 * kv_heads * head_dim  # keys and values
    if is_encoder_decoder:
        tokens = 2 * layers * sequence_length
    else:
        tokens = _cached_tokens(config, layers, sequence_length)
    cache_bytes: float = tokens * per_token * batch_size * dtype_byte_size(dtype)
    return math.ceil(cache_bytes)


def _first(config: Mapping[str, Any], *names: str) -> int:
    """Return the first of the named settings that is a number other than 0, or 0."""
    for name in names:
        value = config.get(name)
        if value and isinstance(value, int):  # some are None, or a list with a value per layer
            return value
    return 0


def _cached_tokens(config: Mapping[str, Any], layers: int, sequence_length: int) -> int:
    """Return the number of tokens of a sequence that all layers together cache."""
    window = _first(config, "sliding_window", "attention_chunk_size")
    kinds = config.get("layer_types")  # one name per layer, such as "full_attention" or "linear_attention"
    if not kinds:
        kinds = ["sliding_attention" if window else "full_attention"] * layers
    shared = _first(config, "num_kv_shared_layers")  # the last layers use the cache of earlier ones
    tokens = 0
    for kind in kinds[: len(kinds) - shared]:
        if window and kind in ("sliding_attention", "chunked_attention"):
            tokens += min(sequence_length, window - 1)  # the newest token is not cached yet
        elif kind.endswith("attention") and kind != "linear_attention":  # other layers have a state of fixed size
            tokens += sequence_length
    return tokens


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
