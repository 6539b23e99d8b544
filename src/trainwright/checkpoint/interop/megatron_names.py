"""Names and layouts of a causal language model in transformers and in megatron-core.

Megatron-core joins the projections of attention into one tensor. This tensor has the queries, key and value of each
key-value head. It also joins the projections of a gated MLP (gate, up). Tensor parallelism divides each tensor along
one dimension.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from trainwright.core.errors import CheckpointError, ConfigurationError

LLAMA_LIKE = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM"}
LLAMA_LIKE |= {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
CONFIG_HINT = "Pass the model's transformers config with --config FOLDER_OR_FILE."
# Megatron-core's names with Transformer Engine, which joins a norm and the projection that follows it.
_JOINED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
# Layout → the dimension that tensor parallelism divides. None: every rank has the full tensor.
_DIVIDED: dict[str, int | None] = {"qkv": 0, "gated": 0, "column": 0, "vocabulary": 0, "row": 1, "same": None}
_Layout = Literal["qkv", "gated", "column", "vocabulary", "row", "same"]


def plain_norms(name: str) -> str:
    """Convert a weight's name in Megatron's `--transformer-impl transformer_engine` to the name in `local`."""
    for plain, joined in _JOINED_NORMS.items():
        name = name.replace(joined, plain)
    return name


def joined_norms(name: str) -> str:
    """Convert a weight's name in Megatron's `--transformer-impl local` to the name in `transformer_engine`."""
    for plain, joined in _JOINED_NORMS.items():
        name = name.replace(plain, joined)
    return name


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model. `groups`: number of key-value heads; `head`: size of a head; `mlp`: hidden size of the MLP."""

    kind: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head: int
    mlp: int
    vocabulary: int
    positions: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any], origin: object) -> ModelShape:
        """Return the sizes in the content of a `config.json`. Error messages name `origin` as the file."""
        kind = config.get("model_type")
        if kind != "gpt2" and kind not in LLAMA_LIKE:
            known = ", ".join([*LLAMA_LIKE, "gpt2"])
            raise CheckpointError(
                f"{origin} has model_type={kind!r}. Only models of these types can be converted: {known}."
            )
        names = ("n_layer", "n_embd", "n_head") if kind == "gpt2" else _LLAMA_SIZES
        missing = [name for name in (*names, "vocab_size") if type(config.get(name)) is not int or config[name] < 1]
        if missing:
            raise CheckpointError(f"{origin}: expected positive integers for {', '.join(missing)}.")
        if config.get("quantization_config"):
            raise CheckpointError(f"{origin} has a quantization_config. Convert the unquantized model.")
        layers, hidden, heads = (config[name] for name in names[:3])
        groups = heads if kind == "gpt2" else config.get("num_key_value_heads") or heads
        mlp = config.get("n_inner") or 4 * hidden if kind == "gpt2" else config["intermediate_size"]
        head = config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
        if heads % groups or (kind == "gpt2" and hidden % heads):
            raise CheckpointError(f"{origin}: {heads} heads do not fit {groups} key-value heads and width {hidden}.")
        positions = config.get("n_positions", 1024) if kind == "gpt2" else config.get("max_position_embeddings", 2048)
        tied = bool(config.get("tie_word_embeddings", kind == "gpt2"))
        vocabulary = config["vocab_size"]
        return cls(str(kind), layers, hidden, heads, groups, head, mlp, vocabulary, positions, tied)

    def check_parallel(self, tp: int, pp: int, vocabulary: int) -> None:
        """Raise a `ConfigurationError` if `tp` or `pp` does not divide the model, or `vocabulary` is too small."""
        sizes = {"heads": self.heads, "key-value heads": self.groups, "MLP width": self.mlp, "layers": self.layers}
        for name, size in sizes.items():
            option, parts = ("pp", pp) if name == "layers" else ("tp", tp)
            if size % parts:
                raise ConfigurationError(f"{option}={parts} does not divide the model's {name} ({size}).")
        if vocabulary < self.vocabulary:
            raise ConfigurationError(f"vocab={vocabulary} is smaller than the model's vocabulary ({self.vocabulary}).")
        if vocabulary % tp:
            padded = math.ceil(vocabulary / (128 * tp)) * 128 * tp
            raise ConfigurationError(
                f"tp={tp} does not divide the vocabulary ({vocabulary}). Pad it: vocab={padded} is what Megatron uses "
                "by default."
            )

    def weights(self) -> Iterator[ModelWeight]:
        """Yield the weights that the model has in megatron-core, before division over tensor-parallel ranks."""
        gpt2, hidden, inner = self.kind == "gpt2", self.hidden, self.heads * self.head
        joined = (self.heads + 2 * self.groups) * self.head
        norms = ("weight", "bias") if gpt2 else ("weight",)
        words, rows = "embedding.word_embeddings.weight", (self.vocabulary, hidden)
        yield self._weight(words, "vocabulary", rows, ("wte.weight" if gpt2 else "embed_tokens.weight",))
        if gpt2:
            positions = "embedding.position_embeddings.weight"
            yield self._weight(positions, "same", (self.positions, hidden), ("wpe.weight",))
        for number in range(self.layers):
            ours, theirs = f"decoder.layers.{number}.", f"{'h' if gpt2 else 'layers'}.{number}."
            for name, layout, shape, names in self._layer(hidden, inner, joined):
                yield self._weight(ours + name, layout, shape, tuple(theirs + one for one in names))
        for end in norms:
            yield self._weight(
                f"decoder.final_layernorm.{end}", "same", (hidden,), (f"{'ln_f' if gpt2 else 'norm'}.{end}",)
            )
        if not self.tied:
            yield self._weight("output_layer.weight", "vocabulary", rows, ("lm_head.weight",))

    def _layer(self, hidden: int, inner: int, joined: int) -> Iterator[_Row]:
        qkv, proj, fc1, fc2 = ("self_attention.linear_qkv.", "self_attention.linear_proj.", *_MLP)
        if self.kind == "gpt2":
            for end in ("weight", "bias"):
                wide = (hidden,) if end == "weight" else ()
                yield f"input_layernorm.{end}", "same", (hidden,), (f"ln_1.{end}",)
                yield qkv + end, "qkv", (joined, *wide), (f"attn.c_attn.{end}",)
                yield f"pre_mlp_layernorm.{end}", "same", (hidden,), (f"ln_2.{end}",)
                yield fc1 + end, "column", (self.mlp, *wide), (f"mlp.c_fc.{end}",)
            for name, width, old in ((proj, inner, "attn.c_proj."), (fc2, self.mlp, "mlp.c_proj.")):
                yield name + "weight", "row", (hidden, width), (old + "weight",)
                yield name + "bias", "same", (hidden,), (old + "bias",)
            return
        projections = tuple(f"self_attn.{letter}_proj." for letter in "qkv")
        yield "input_layernorm.weight", "same", (hidden,), ("input_layernorm.weight",)
        yield qkv + "weight", "qkv", (joined, hidden), tuple(name + "weight" for name in projections)
        if self.kind == "qwen2":
            yield qkv + "bias", "qkv", (joined,), tuple(name + "bias" for name in projections)
        if self.kind == "qwen3":
            for one in "qk":
                yield f"self_attention.{one}_layernorm.weight", "same", (self.head,), (f"self_attn.{one}_norm.weight",)
        yield proj + "weight", "row", (hidden, inner), ("self_attn.o_proj.weight",)
        yield "pre_mlp_layernorm.weight", "same", (hidden,), ("post_attention_layernorm.weight",)
        yield fc1 + "weight", "gated", (2 * self.mlp, hidden), ("mlp.gate_proj.weight", "mlp.up_proj.weight")
        yield fc2 + "weight", "row", (hidden, self.mlp), ("mlp.down_proj.weight",)

    def _weight(self, name: str, layout: _Layout, shape: tuple[int, ...], names: tuple[str, ...]) -> ModelWeight:
        return ModelWeight(name, layout, shape, names, self)


_Row = tuple[str, _Layout, tuple[int, ...], tuple[str, ...]]
_LLAMA_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "intermediate_size")
_MLP = ("mlp.linear_fc1.", "mlp.linear_fc2.")


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A weight of megatron-core, and the weights of transformers that are joined in it.

    Attributes:
        name: name in megatron-core.
        layout: how projections are joined in the tensor, and which dimension is divided; see `_DIVIDED`.
        shape: shape of the full tensor, without padding of the vocabulary.
        names: names in transformers, without the prefix `model.` or `transformer.`.
        model: the sizes of the model.
    """

    name: str
    layout: _Layout
    shape: tuple[int, ...]
    names: tuple[str, ...]
    model: ModelShape

    @property
    def _transposed(self) -> bool:  # GPT-2 stores (inputs, outputs)
        return self.model.kind == "gpt2" and self.layout != "vocabulary" and ".c_" in self.names[0]

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the tensors of transformers into megatron-core's full tensor."""
        given = [tensor.T if self._transposed and tensor.dim() == 2 else tensor for tensor in tensors]
        if self.layout != "qkv":
            return given[0] if len(given) == 1 else torch.cat(given)
        q, k, v = given if len(given) == 3 else given[0].chunk(3)
        grouped = [one.reshape(self.model.groups, -1, self.model.head, *one.shape[1:]) for one in (q, k, v)]
        return torch.cat(grouped, dim=1).flatten(0, 2)

    def separate(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split megatron-core's full tensor into the tensors of transformers by name."""
        parts = [tensor]
        if self.layout == "vocabulary":
            parts = [tensor[: self.model.vocabulary]]
        elif self.layout == "gated":
            parts = list(tensor.chunk(2))
        elif self.layout == "qkv":
            queries, groups, head = self.model.heads // self.model.groups, self.model.groups, self.model.head
            grouped = tensor.reshape(groups, queries + 2, head, *tensor.shape[1:])
            by_kind = torch.split(grouped, [queries, 1, 1], dim=1)
            parts = [part.flatten(0, 2) for part in by_kind]
            parts = parts if len(self.names) == 3 else [torch.cat(parts)]
        parts = [part.T if self._transposed and part.dim() == 2 else part for part in parts]
        return dict(zip(self.names, parts, strict=True))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in transformers by name."""
        meta = self.separate(torch.empty(self.shape, device="meta"))
        return {name: tuple(tensor.shape) for name, tensor in meta.items()}

    def divide(self, tensor: torch.Tensor, tp: int) -> list[torch.Tensor]:
        """Return the shards of megatron-core's full tensor for `tp` tensor-parallel ranks."""
        dim = _DIVIDED[self.layout]
        if dim is None:
            return [tensor] * tp
        if self.layout == "gated":
            return [torch.cat(halves) for halves in zip(*(half.chunk(tp) for half in tensor.chunk(2)), strict=True)]
        return list(tensor.chunk(tp, dim))

    def undivide(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the tensors of all tensor-parallel ranks into the full tensor."""
        dim = _DIVIDED[self.layout]
        if dim is None or len(shards) == 1:
            return shards[0]
        if self.layout == "gated":
            return torch.cat([torch.cat(halves) for halves in zip(*(one.chunk(2) for one in shards), strict=True)])
        return torch.cat(list(shards), dim)


def config_from_args(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a transformers config for the arguments in a checkpoint of Megatron, or None if arguments are missing."""
    sizes = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings")
    vocabulary = args.get("vocab_size") or args.get("padded_vocab_size")
    if not all(type(size) is int for size in (vocabulary, *map(args.get, sizes))):
        return None
    layers, hidden, heads, mlp, positions = (args[name] for name in sizes)
    tied = not args.get("untie_embeddings_and_output_weights", False)
    shared = {"vocab_size": vocabulary, "tie_word_embeddings": tied}
    style = [args.get(name) for name in ("position_embedding_type", "normalization", "swiglu", "add_bias_linear")]
    if style == ["learned_absolute", "LayerNorm", False, True]:
        gelu = "gelu_new" if args.get("bias_gelu_fusion") or args.get("openai_gelu") else "gelu"
        names = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "n_inner": mlp, "n_positions": positions}
        rest = {"activation_function": gelu, "layer_norm_epsilon": args.get("norm_epsilon", 1e-5)}
        return {"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], **names, **rest, **shared}
    scaled = args.get("use_rope_scaling") or args.get("rotary_percent", 1.0) != 1.0 or args.get("rotary_interleaved")
    if style != ["rope", "RMSNorm", True, False] or scaled or args.get("num_experts") or args.get("window_size"):
        return None
    kind = "qwen3" if args.get("qk_layernorm") else "qwen2" if args.get("add_qkv_bias") else "llama"
    grouped = args.get("group_query_attention") and args.get("num_query_groups")
    return {
        "model_type": kind,
        "architectures": [LLAMA_LIKE[kind]],
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": grouped or heads,
        "intermediate_size": mlp,
        "head_dim": args.get("kv_channels") or hidden // heads,
        "max_position_embeddings": positions,
        "rms_norm_eps": args.get("norm_epsilon", 1e-5),
        "hidden_act": "silu",
        **shared,
        "rope_parameters": {"rope_type": "default", "rope_theta": float(args.get("rotary_base", 10000))},
    }
