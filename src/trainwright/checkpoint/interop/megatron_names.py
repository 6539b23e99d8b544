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

# Model types that have the layers of Llama → the class in transformers.
LLAMA_LIKE = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
CONFIG_HINT = "Pass the model's transformers config with --config FOLDER_OR_FILE."
# Keys of the sizes in a `config.json`, in this order: layers, hidden size, heads.
_GPT2_SIZES = ("n_layer", "n_embd", "n_head")
_LLAMA_SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads")
# Megatron-core's names with Transformer Engine, which joins a norm and the projection that follows it.
_JOINED_NORMS = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
_Layout = Literal["qkv", "gated", "column", "vocabulary", "row", "same"]
# Layout → the dimension that tensor parallelism divides. None means that every rank has the full tensor. All shapes are
# (outputs, inputs) in megatron-core.
_DIVIDED: dict[_Layout, int | None] = {
    "qkv": 0,  # joined queries, keys and values; ranks divide the groups of heads
    "gated": 0,  # joined gate and up projection; ranks divide each of the two
    "column": 0,
    "vocabulary": 0,  # embedding and output layer, which may have rows of padding at the end
    "row": 1,
    "same": None,
}


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
    """Sizes of a model, from which the names and shapes of its weights follow (see `weights`).

    Attributes:
        kind: the `model_type` in transformers.
        layers: number of layers.
        hidden: size of the hidden states.
        heads: number of query heads.
        groups: number of key-value heads. Each is shared by `heads // groups` query heads.
        head: size of a head.
        mlp: size of the hidden states in the MLP.
        vocabulary: number of rows of the embedding.
        positions: maximal number of tokens in a sequence.
        tied: True if the output layer shares the weight of the embedding.
    """

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
        """Return the sizes in the content of a `config.json`. Error messages name `origin` as the file.

        Raises a `CheckpointError` if a size is missing or the model is not supported.
        """
        kind = config.get("model_type")
        is_gpt2 = kind == "gpt2"
        if not is_gpt2 and kind not in LLAMA_LIKE:
            known = ", ".join([*LLAMA_LIKE, "gpt2"])
            raise CheckpointError(
                f"{origin} has model_type={kind!r}. Only models of these types can be converted: {known}."
            )
        keys = _GPT2_SIZES if is_gpt2 else _LLAMA_SIZES
        required = [*keys, "vocab_size"] if is_gpt2 else [*keys, "intermediate_size", "vocab_size"]
        missing = []
        for key in required:
            size = config.get(key)
            if type(size) is not int or size < 1:
                missing.append(key)
        if missing:
            raise CheckpointError(f"{origin}: expected positive integers for {', '.join(missing)}.")
        if config.get("quantization_config"):
            raise CheckpointError(f"{origin} has a quantization_config. Convert the unquantized model.")
        layers_key, hidden_key, heads_key = keys
        layers = config[layers_key]
        hidden = config[hidden_key]
        heads = config[heads_key]
        # A file may lack these keys. For several of them, null means the default.
        if is_gpt2:
            groups = heads
            head = hidden // heads
            mlp = config.get("n_inner") or 4 * hidden
            positions = config.get("n_positions", 1024)
        else:
            groups = config.get("num_key_value_heads") or heads
            head = config.get("head_dim") or (128 if kind == "qwen3" else hidden // heads)
            mlp = config["intermediate_size"]
            positions = config.get("max_position_embeddings", 2048)
        if heads % groups or (is_gpt2 and hidden % heads):
            raise CheckpointError(f"{origin}: {heads} heads do not fit {groups} key-value heads and width {hidden}.")
        return cls(
            kind=str(kind),
            layers=layers,
            hidden=hidden,
            heads=heads,
            groups=groups,
            head=head,
            mlp=mlp,
            vocabulary=config["vocab_size"],
            positions=positions,
            tied=bool(config.get("tie_word_embeddings", is_gpt2)),
        )

    def check_parallel(self, tp: int, pp: int, vocabulary: int) -> None:
        """Raise a `ConfigurationError` if the model cannot be divided over `tp` ranks and `pp` stages.

        `vocabulary` is the number of rows of the embedding with padding. `tp` must divide it, and it must not be
        smaller than the model's vocabulary.
        """
        for name, size in {"heads": self.heads, "key-value heads": self.groups, "MLP width": self.mlp}.items():
            if size % tp:
                raise ConfigurationError(f"tp={tp} does not divide the model's {name} ({size}).")
        if self.layers % pp:
            raise ConfigurationError(f"pp={pp} does not divide the model's layers ({self.layers}).")
        if vocabulary < self.vocabulary:
            raise ConfigurationError(f"vocab={vocabulary} is smaller than the model's vocabulary ({self.vocabulary}).")
        if vocabulary % tp:
            # Megatron's `--make-vocab-size-divisible-by` has the default 128, times the tensor-parallel size.
            padded = math.ceil(vocabulary / (128 * tp)) * 128 * tp
            raise ConfigurationError(
                f"tp={tp} does not divide the vocabulary ({vocabulary}). Pad it: vocab={padded} is what Megatron uses "
                "by default."
            )

    def weights(self) -> Iterator[ModelWeight]:
        """Yield the weights that the model has in megatron-core, before division over tensor-parallel ranks."""
        if self.kind == "gpt2":
            yield from self._gpt2_weights()
        else:
            yield from self._llama_weights()
        if not self.tied:
            yield self._weight("output_layer.weight", "vocabulary", (self.vocabulary, self.hidden), "lm_head.weight")

    def _gpt2_weights(self) -> Iterator[ModelWeight]:
        hidden = self.hidden
        words = "embedding.word_embeddings.weight"
        positions = "embedding.position_embeddings.weight"
        yield self._weight(words, "vocabulary", (self.vocabulary, hidden), "wte.weight")
        yield self._weight(positions, "same", (self.positions, hidden), "wpe.weight")
        for number in range(self.layers):
            yield from self._gpt2_layer(f"decoder.layers.{number}.", f"h.{number}.")
        yield self._weight("decoder.final_layernorm.weight", "same", (hidden,), "ln_f.weight")
        yield self._weight("decoder.final_layernorm.bias", "same", (hidden,), "ln_f.bias")

    def _gpt2_layer(self, core: str, hf: str) -> Iterator[ModelWeight]:
        """Yield the weights of a layer, whose names begin with `core` in megatron-core and `hf` in transformers."""
        hidden = self.hidden
        attention = f"{core}self_attention."
        qkv_size = 3 * self.heads * self.head
        yield self._weight(f"{core}input_layernorm.weight", "same", (hidden,), f"{hf}ln_1.weight")
        yield self._weight(f"{core}input_layernorm.bias", "same", (hidden,), f"{hf}ln_1.bias")
        yield self._weight(f"{attention}linear_qkv.weight", "qkv", (qkv_size, hidden), f"{hf}attn.c_attn.weight")
        yield self._weight(f"{attention}linear_qkv.bias", "qkv", (qkv_size,), f"{hf}attn.c_attn.bias")
        yield self._weight(f"{attention}linear_proj.weight", "row", (hidden, hidden), f"{hf}attn.c_proj.weight")
        # Ranks add their partial products of a "row" weight, and then its bias, which every rank has.
        yield self._weight(f"{attention}linear_proj.bias", "same", (hidden,), f"{hf}attn.c_proj.bias")
        yield self._weight(f"{core}pre_mlp_layernorm.weight", "same", (hidden,), f"{hf}ln_2.weight")
        yield self._weight(f"{core}pre_mlp_layernorm.bias", "same", (hidden,), f"{hf}ln_2.bias")
        yield self._weight(f"{core}mlp.linear_fc1.weight", "column", (self.mlp, hidden), f"{hf}mlp.c_fc.weight")
        yield self._weight(f"{core}mlp.linear_fc1.bias", "column", (self.mlp,), f"{hf}mlp.c_fc.bias")
        yield self._weight(f"{core}mlp.linear_fc2.weight", "row", (hidden, self.mlp), f"{hf}mlp.c_proj.weight")
        yield self._weight(f"{core}mlp.linear_fc2.bias", "same", (hidden,), f"{hf}mlp.c_proj.bias")

    def _llama_weights(self) -> Iterator[ModelWeight]:
        words = "embedding.word_embeddings.weight"
        yield self._weight(words, "vocabulary", (self.vocabulary, self.hidden), "embed_tokens.weight")
        for number in range(self.layers):
            yield from self._llama_layer(f"decoder.layers.{number}.", f"layers.{number}.")
        yield self._weight("decoder.final_layernorm.weight", "same", (self.hidden,), "norm.weight")

    def _llama_layer(self, core: str, hf: str) -> Iterator[ModelWeight]:
        """Yield the weights of a layer, whose names begin with `core` in megatron-core and `hf` in transformers."""
        hidden = self.hidden
        attention = f"{core}self_attention."
        queries_size = self.heads * self.head  # differs from `hidden` in some models, such as Qwen3-0.6B
        qkv_size = (self.heads + 2 * self.groups) * self.head
        q, k, v = (f"{hf}self_attn.{letter}_proj." for letter in "qkv")
        yield self._weight(f"{core}input_layernorm.weight", "same", (hidden,), f"{hf}input_layernorm.weight")
        qkv_weights = (f"{q}weight", f"{k}weight", f"{v}weight")
        yield self._weight(f"{attention}linear_qkv.weight", "qkv", (qkv_size, hidden), *qkv_weights)
        if self.kind == "qwen2":
            yield self._weight(f"{attention}linear_qkv.bias", "qkv", (qkv_size,), f"{q}bias", f"{k}bias", f"{v}bias")
        if self.kind == "qwen3":
            # One norm for all heads, so that tensor parallelism does not divide it.
            yield self._weight(f"{attention}q_layernorm.weight", "same", (self.head,), f"{hf}self_attn.q_norm.weight")
            yield self._weight(f"{attention}k_layernorm.weight", "same", (self.head,), f"{hf}self_attn.k_norm.weight")
        output = f"{hf}self_attn.o_proj.weight"
        yield self._weight(f"{attention}linear_proj.weight", "row", (hidden, queries_size), output)
        yield self._weight(f"{core}pre_mlp_layernorm.weight", "same", (hidden,), f"{hf}post_attention_layernorm.weight")
        gate_and_up = (f"{hf}mlp.gate_proj.weight", f"{hf}mlp.up_proj.weight")
        yield self._weight(f"{core}mlp.linear_fc1.weight", "gated", (2 * self.mlp, hidden), *gate_and_up)
        yield self._weight(f"{core}mlp.linear_fc2.weight", "row", (hidden, self.mlp), f"{hf}mlp.down_proj.weight")

    def _weight(self, name: str, layout: _Layout, shape: tuple[int, ...], *hf_names: str) -> ModelWeight:
        return ModelWeight(name, layout, shape, hf_names, self)


@dataclass(frozen=True, slots=True)
class ModelWeight:
    """A weight of megatron-core, and the weights of transformers that are joined in it.

    Attributes:
        name: name in megatron-core, as with `--transformer-impl local`.
        layout: how projections are joined in the tensor, and which dimension is divided; see `_DIVIDED`.
        shape: shape of megatron-core's full tensor, without padding of the vocabulary.
        names: names in transformers, without the prefix `model.` or `transformer.`, in the order in which the tensors
            are joined. There are three or one for `"qkv"`, two for `"gated"`, and one for other layouts.
        model: the sizes of the model.
    """

    name: str
    layout: _Layout
    shape: tuple[int, ...]
    names: tuple[str, ...]
    model: ModelShape

    @property
    def _is_transposed(self) -> bool:
        """Return whether transformers stores the weight as (inputs, outputs).

        The `Conv1D` layers of GPT-2 do so. Their names are `c_attn`, `c_proj` and `c_fc`.
        """
        return self.model.kind == "gpt2" and ".c_" in self.names[0] and len(self.shape) == 2

    def join(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the tensors of transformers into megatron-core's full tensor."""
        parts = [tensor.T for tensor in tensors] if self._is_transposed else list(tensors)
        if self.layout == "qkv":
            if len(parts) == 1:  # GPT-2 has one projection for queries, keys and values
                parts = list(parts[0].chunk(3))
            # Each row of `shape` has the heads of one group. With 4 heads in 2 groups, the rows are (q0 q1 k0 v0) and
            # (q2 q3 k1 v1).
            groups = self.model.groups
            parts = [part.reshape(groups, -1, self.model.head, *part.shape[1:]) for part in parts]
            return torch.cat(parts, dim=1).flatten(0, 2)
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def separate(self, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """Split megatron-core's full tensor into the tensors of transformers by name."""
        parts = [tensor]
        if self.layout == "vocabulary":
            # Megatron pads the vocabulary at the end.
            parts = [tensor[: self.model.vocabulary]]
        elif self.layout == "gated":
            parts = list(tensor.chunk(2))
        elif self.layout == "qkv":
            groups = self.model.groups
            queries = self.model.heads // groups  # query heads of one group
            # Each group has its queries, one key and one value; see `join`.
            grouped = tensor.reshape(groups, queries + 2, self.model.head, *tensor.shape[1:])
            parts = [part.flatten(0, 2) for part in torch.split(grouped, [queries, 1, 1], dim=1)]
            if len(self.names) == 1:
                # GPT-2 has one projection: all queries, then all keys, then all values.
                parts = [torch.cat(parts)]
        if self._is_transposed:
            parts = [part.T for part in parts]
        return dict(zip(self.names, parts, strict=True))

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the tensors in transformers by name."""
        meta = self.separate(torch.empty(self.shape, device="meta"))
        return {name: tuple(tensor.shape) for name, tensor in meta.items()}

    def divide(self, tensor: torch.Tensor, tp: int) -> list[torch.Tensor]:
        """Return the shards of megatron-core's full tensor for `tp` tensor-parallel ranks, as views where possible."""
        dim = _DIVIDED[self.layout]
        if dim is None:
            return [tensor] * tp
        if self.layout == "gated":
            # Each rank has a shard of the gate and the same shard of the up projection.
            gate, up = tensor.chunk(2)
            return [torch.cat(shards) for shards in zip(gate.chunk(tp), up.chunk(tp), strict=True)]
        return list(tensor.chunk(tp, dim))

    def undivide(self, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """Join the tensors of all tensor-parallel ranks into megatron-core's full tensor, including padding."""
        dim = _DIVIDED[self.layout]
        if dim is None or len(shards) == 1:
            return shards[0]
        if self.layout == "gated":
            gates = []
            ups = []
            for shard in shards:
                gate, up = shard.chunk(2)
                gates.append(gate)
                ups.append(up)
            return torch.cat([*gates, *ups])
        return torch.cat(list(shards), dim)


def config_from_args(args: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return a transformers config for the arguments in a checkpoint of Megatron.

    Returns None if sizes are missing, or if the model is neither a GPT-2 nor like Llama, Qwen2 or Qwen3.
    """
    vocabulary = args.get("vocab_size") or args.get("padded_vocab_size")
    names = ("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "max_position_embeddings")
    sizes = [vocabulary, *(args.get(name) for name in names)]
    if any(type(size) is not int for size in sizes):
        return None
    shared = {
        "vocab_size": vocabulary,
        "tie_word_embeddings": not args.get("untie_embeddings_and_output_weights", False),
    }
    parts = {name: args.get(name) for name in ("position_embedding_type", "normalization", "swiglu", "add_bias_linear")}
    gpt2_parts = {
        "position_embedding_type": "learned_absolute",
        "normalization": "LayerNorm",
        "swiglu": False,
        "add_bias_linear": True,
    }
    llama_parts = {
        "position_embedding_type": "rope",
        "normalization": "RMSNorm",
        "swiglu": True,
        "add_bias_linear": False,
    }
    if parts == gpt2_parts and not _differs_from_gpt2(args):
        return _gpt2_config(args) | shared
    if parts == llama_parts and not _has_unsupported_parts(args):
        return _llama_config(args) | shared
    return None


def _has_unsupported_parts(args: Mapping[str, Any]) -> bool:
    """Return whether the positions, MLP or attention differ from those of the models in `LLAMA_LIKE`."""
    if args.get("rotary_percent", 1.0) != 1.0:
        return True
    return any(args.get(name) for name in ("use_rope_scaling", "rotary_interleaved", "num_experts", "window_size"))


def _differs_from_gpt2(args: Mapping[str, Any]) -> bool:
    """Return whether the MLP or attention differ from those of GPT-2."""
    heads = args["num_attention_heads"]
    groups = args.get("num_query_groups") or heads
    if args.get("group_query_attention") and groups != heads:
        return True
    default_head = args["hidden_size"] // heads
    if (args.get("kv_channels") or default_head) != default_head:
        return True
    return any(args.get(name) for name in ("num_experts", "window_size", "qk_layernorm"))


def _gpt2_config(args: Mapping[str, Any]) -> dict[str, Any]:
    # Both options of Megatron approximate GELU with tanh, which transformers names `gelu_new`.
    is_approximate = args.get("bias_gelu_fusion") or args.get("openai_gelu")
    return {
        "model_type": "gpt2",
        "architectures": ["GPT2LMHeadModel"],
        "n_layer": args["num_layers"],
        "n_embd": args["hidden_size"],
        "n_head": args["num_attention_heads"],
        "n_inner": args["ffn_hidden_size"],
        "n_positions": args["max_position_embeddings"],
        "activation_function": "gelu_new" if is_approximate else "gelu",
        "layer_norm_epsilon": args.get("norm_epsilon", 1e-5),
    }


def _llama_config(args: Mapping[str, Any]) -> dict[str, Any]:
    if args.get("qk_layernorm"):
        kind = "qwen3"
    elif args.get("add_qkv_bias"):
        kind = "qwen2"
    else:
        kind = "llama"
    heads = args["num_attention_heads"]
    groups = heads
    # Megatron's `num_query_groups` has the default 1, which is used only with `group_query_attention`.
    if args.get("group_query_attention"):
        groups = args.get("num_query_groups") or heads
    return {
        "model_type": kind,
        "architectures": [LLAMA_LIKE[kind]],
        "num_hidden_layers": args["num_layers"],
        "hidden_size": args["hidden_size"],
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": args["ffn_hidden_size"],
        "head_dim": args.get("kv_channels") or args["hidden_size"] // heads,
        "max_position_embeddings": args["max_position_embeddings"],
        "rms_norm_eps": args.get("norm_epsilon", 1e-5),
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": float(args.get("rotary_base", 10000))},
    }
