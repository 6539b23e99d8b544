"""Built-in tensor-parallel plans for transformers' Llama, GPT-2, BERT and T5 families, and selection of a plan."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.fsdp.layers.plan import GivenPlan, Plan, SplitLayers, need_divisible, starred, with_stars
from trainwright.strategies.fsdp.layers.styles import (
    DivideAttributes,
    FusedColwise,
    LossParallel,
    SplitParameters,
    is_conv1d,
)

# Values of `model_type` in transformers' configurations.
LLAMA_FAMILY = ("llama", "mistral", "qwen2", "qwen3")
GPT2_FAMILY = ("gpt2",)
BERT_FAMILY = ("bert",)
T5_FAMILY = ("t5", "mt5")
FAMILIES = (*LLAMA_FAMILY, *GPT2_FAMILY, *BERT_FAMILY, *T5_FAMILY)


def ready_plan(
    model: nn.Module, tp: int, *, prefix: str = "", sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, Any]:
    """Return the plan for a transformers model: Llama, Mistral, Qwen 2 and 3, GPT-2, BERT or T5, with any head.

    The plan splits attention heads, feed-forward layers, embeddings and the language head. Ranks may hold parts of the
    vocabulary of unequal size.

    Args:
        model: For example a `LlamaForCausalLM` or a `GPT2Model`.
        tp: Number of ranks that split the layers.
        prefix: The model's name in the task, for example `"model"` for `self.model`.
        sequence_parallel: Split norms and residuals along the sequence, whose length must be divisible by `tp`. For
            the Llama family only.
        loss_parallel: Keep logits sharded, and compute `cross_entropy` on the shards.

    Raises:
        ConfigurationError: The model is not supported, or its number of heads is not divisible by `tp`.
    """
    kind = _family(model)
    if kind in LLAMA_FAMILY:
        plan = _llama(model, tp, sequence_parallel, loss_parallel)
    elif kind in FAMILIES:
        if sequence_parallel:
            name = "GPT-2" if kind in GPT2_FAMILY else type(model).__name__
            raise ConfigurationError(
                f"sequence_parallel=True is not supported for {name}, which applies dropout and positions outside of "
                "its blocks. Remove it."
            )
        make = _gpt2 if kind in GPT2_FAMILY else _bert if kind in BERT_FAMILY else _t5
        plan = make(model, tp, loss_parallel)
    else:
        raise ConfigurationError(
            f"no built-in tensor-parallel plan supports {type(model).__name__}. There are plans for the model types "
            f"{', '.join(FAMILIES)}. Define tensor_parallel_plan in the task.{_advice(model)}"
        )
    return {f"{prefix}.{name}" if prefix else name: style for name, style in plan.items()}


@runtime_checkable
class PlansLayers(Protocol):
    """A model with its own tensor-parallel plan, such as every task; see `TaskModule.tensor_parallel_plan`."""

    def tensor_parallel_plan(self, mesh: DeviceMesh) -> Mapping[str, Any] | None:
        """Return the plan. None selects the strategy's argument, or a built-in plan."""


def find_plan(task: nn.Module, given: GivenPlan | None, mesh: DeviceMesh) -> Plan:
    """Return the tensor-parallel plan of a task: the given one, its own, or a built-in one. Not collective."""
    plan = given(task, mesh) if callable(given) else given
    if plan is None and isinstance(task, PlansLayers):
        plan = task.tensor_parallel_plan(mesh)
    if plan is None:
        plan = find_ready_plan(task, mesh["tp"].size())
    if not plan:
        raise ConfigurationError(
            f"tp={mesh['tp'].size()} needs a tensor-parallel plan for {type(task).__name__}. Define "
            "tensor_parallel_plan(self, mesh) in it, for example returning {'net.0': 'colwise', 'net.2': 'rowwise'}."
            f"{_advice(task)}"
        )
    return plan


def sequence_parallel_plan(task: nn.Module, mesh: DeviceMesh, *, strict: bool) -> Plan | None:
    """Return the built-in plans with sequence parallelism; see `ready_plan`.

    Args:
        strict: Raise an error for a model that does not support sequence parallelism. False: split only its layers.
    """
    return find_ready_plan(task, mesh["tp"].size(), sequence_parallel=True if strict else None)


def find_ready_plan(task: nn.Module, tp: int, *, sequence_parallel: bool | None = False) -> dict[str, Any] | None:
    """Return the built-in plans for all transformers models in a task. None if no model is supported.

    Args:
        sequence_parallel: See `ready_plan`. None: True for models that support it.
    """
    found: dict[str, Any] = {}
    inside: list[str] = []
    for name, module in task.named_modules():
        known = _family(module) in FAMILIES and _is_model(module)
        if known and not any(name.startswith(f"{outer}.") for outer in inside):
            inside.append(name)
            wanted = _family(module) in LLAMA_FAMILY if sequence_parallel is None else sequence_parallel
            found |= ready_plan(module, tp, prefix=name, sequence_parallel=wanted)
    return found or None


class PlannedMesh:
    """Sizes of a `DeviceMesh` that does not exist yet."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self.mesh_dim_names = tuple(lengths)
        self.shape = tuple(lengths.values())
        self.ndim = len(lengths)

    def __getitem__(self, name: str) -> PlannedMesh:
        """Return one axis."""
        return PlannedMesh({name: self.shape[self.mesh_dim_names.index(name)]})

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks in total, or along one axis."""
        found = 1
        for length in self.shape if mesh_dim is None else self.shape[mesh_dim : mesh_dim + 1]:
            found *= length
        return found


def check_plan(task: nn.Module, given: GivenPlan | None, lengths: Mapping[str, int]) -> None:
    """Check that a plan exists, names modules of the task, and splits only divisible layers.

    Not collective. Changes nothing. If the plan reads more than sizes from its mesh, it is checked once the mesh
    exists.
    """
    mesh: Any = PlannedMesh(lengths)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # shown when layers are split
            plan = find_plan(task, given, mesh)
    except AttributeError as error:
        if isinstance(error.obj, PlannedMesh):
            return
        raise
    SplitLayers(task, plan, mesh["tp"])


def _family(module: nn.Module) -> str | None:
    kind = getattr(getattr(module, "config", None), "model_type", None)
    return kind if isinstance(kind, str) else None


def _is_model(module: nn.Module) -> bool:
    """Return whether a module is a transformers model. Its blocks have a `config` too."""
    return hasattr(module, "base_model_prefix")


def _parts(model: Any, blocks: str) -> tuple[str, str | None]:
    """Return the prefix of names in the base model, and the name of the layer that computes logits."""
    base = "" if hasattr(model, blocks) else f"{model.base_model_prefix}."
    return base, "lm_head" if hasattr(model, "lm_head") else None


_NORMS = ("q_norm", "k_norm")


def _llama(model: Any, tp: int, sequence_parallel: bool, loss_parallel: bool) -> dict[str, Any]:
    config = model.config
    need_divisible(tp, num_attention_heads=config.num_attention_heads, num_key_value_heads=config.num_key_value_heads)
    base, head = _parts(model, "layers")
    layer = f"{base}layers.*."
    plan: dict[str, Any] = {
        **{f"{layer}self_attn.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj")},
        f"{layer}self_attn.o_proj": "rowwise",
        f"{layer}mlp.gate_proj": "colwise",
        f"{layer}mlp.up_proj": "colwise",
        f"{layer}mlp.down_proj": "rowwise",
    }
    if config.model_type == "qwen3":  # a norm of each head: (batch, length, heads, width of a head)
        plan |= {f"{layer}self_attn.{name}": SequenceParallel(sequence_dim=2, use_local_output=True) for name in _NORMS}
    if sequence_parallel:
        plan |= {
            f"{base}layers.0": "split_sequence",
            f"{layer}input_layernorm": "sequence",
            f"{layer}post_attention_layernorm": "sequence",
            f"{layer}self_attn": "gather_sequence",
            f"{layer}mlp": "gather_sequence",
            f"{layer}self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{layer}mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
            f"{base}norm": "sequence",
        }
    return plan | _ends(config, tp, f"{base}embed_tokens", head, sequence_parallel, loss_parallel)


def _gpt2(model: Any, tp: int, loss_parallel: bool) -> dict[str, Any]:
    config = model.config
    if getattr(config, "add_cross_attention", False):
        raise ConfigurationError(
            "add_cross_attention=True is not supported by the built-in plan for GPT-2. Define tensor_parallel_plan in "
            "the task."
        )
    need_divisible(tp, n_head=config.n_head)
    base, head = _parts(model, "h")
    block = f"{base}h.*."
    plan: dict[str, Any] = {
        f"{block}attn": DivideAttributes("split_size", "num_heads"),
        f"{block}attn.c_attn": FusedColwise(3),
        f"{block}attn.c_proj": "rowwise",
        f"{block}mlp.c_fc": "colwise",
        f"{block}mlp.c_proj": "rowwise",
    }
    return plan | _ends(config, tp, f"{base}wte", head, False, loss_parallel)


def _bert(model: Any, tp: int, loss_parallel: bool) -> dict[str, Any]:
    config, names = model.config, with_stars(model)
    need_divisible(tp, num_attention_heads=config.num_attention_heads)
    base = "" if hasattr(model, "encoder") else f"{model.base_model_prefix}."
    layer = f"{base}encoder.layer.*."
    plan: dict[str, Any] = {f"{layer}intermediate.dense": "colwise", f"{layer}output.dense": "rowwise"}
    for attention in ("attention", "crossattention"):
        if f"{layer}{attention}" in names:
            plan |= {f"{layer}{attention}.self.{name}": "colwise" for name in ("query", "key", "value")}
            plan[f"{layer}{attention}.output.dense"] = "rowwise"
    head = "cls.predictions.decoder" if "cls.predictions.decoder" in names else None
    ends = _ends(config, tp, f"{base}embeddings.word_embeddings", head, False, loss_parallel)
    if head in ends:
        ends["cls.predictions"] = SplitParameters("bias")  # tied to the decoder's
    return plan | ends


_T5_STYLES = {
    **dict.fromkeys(("q", "k", "v", "wi", "wi_0", "wi_1", "relative_attention_bias"), "colwise"),
    **dict.fromkeys(("o", "wo"), "rowwise"),
    **dict.fromkeys(("SelfAttention", "EncDecAttention"), DivideAttributes("n_heads", "inner_dim")),
}


def _t5(model: Any, tp: int, loss_parallel: bool) -> dict[str, Any]:
    config = model.config
    need_divisible(tp, num_heads=config.num_heads)
    names = {name: name.rpartition(".")[2] for name in with_stars(model)}
    plan: dict[str, Any] = {name: _T5_STYLES[end] for name, end in names.items() if end in _T5_STYLES}
    head = "lm_head" if hasattr(model, "lm_head") else None
    ends = _ends(config, tp, "embed_tokens", head, False, loss_parallel)
    embedding = ends.pop("embed_tokens", None)
    if embedding is not None:  # of the encoder and of the decoder, tied
        ends |= {name: embedding for name, end in names.items() if end in ("shared", "embed_tokens")}
    return plan | ends


def _advice(model: nn.Module) -> str:
    proposed = propose_plan(model)
    if not proposed:
        return ""
    return (
        f" A guess from names and shapes of the linear layers in its repeated blocks: {proposed}. Compare its losses "
        "with those of one process. An attention module that stores its number of heads also needs DivideAttributes."
    )


_READS_HEADS = re.compile(r"(w|to_)?(q|k|v|query|key|value)(_?(proj|lin|linear))?")
_READS_FUSED_HEADS = re.compile(r"c_attn|w?qkv(_proj)?|in_proj", re.IGNORECASE)  # side by side, not head by head


def propose_plan(model: nn.Module) -> dict[str, str]:
    """Guess a plan for the linear layers in a model's repeated blocks from their names and shapes.

    Layers from the hidden width to a larger one, and those named like queries, keys and values, are split by outputs.
    Layers that return to the hidden width are split by inputs.
    """
    layers: dict[str, tuple[int, int]] = {}
    for name, module in model.named_modules():
        if "*" in starred(name) and (isinstance(module, nn.Linear) or is_conv1d(module)):
            weight = module.get_parameter("weight")
            inputs, outputs = weight.shape if is_conv1d(module) else reversed(weight.shape)
            layers[starred(name)] = (inputs, outputs)
    widths = Counter(width for shape in layers.values() for width in shape)
    hidden = max(widths, key=lambda width: (widths[width], -width), default=0)
    found: dict[str, str] = {}
    for name, (inputs, outputs) in layers.items():
        end = name.rpartition(".")[2]
        if inputs == hidden and outputs % 3 == 0 and _READS_FUSED_HEADS.fullmatch(end):
            found[name] = "fused_colwise"
        elif inputs == hidden and (outputs > hidden or _READS_HEADS.fullmatch(end)):
            found[name] = "colwise"
        elif outputs == hidden:
            found[name] = "rowwise"
    return found if len(set(found.values())) > 1 else {}


def _ends(
    config: Any, tp: int, embedding: str, head: str | None, sequence_parallel: bool, loss_parallel: bool
) -> dict[str, Any]:
    """Return the plan for the embedding and for the layer that computes logits."""
    layouts = Shard(1) if sequence_parallel else None
    if loss_parallel and config.vocab_size % tp:
        raise ConfigurationError(
            f"vocab_size={config.vocab_size} is not divisible by tp={tp}, which loss_parallel needs. Call "
            f"model.resize_token_embeddings(pad_to_multiple_of={tp})."
        )
    plan: dict[str, Any] = {embedding: "embedding"}
    if head is not None and loss_parallel:
        plan[head] = LossParallel(input_layouts=layouts)
    elif head is not None:
        plan[head] = (
            ColwiseParallel(input_layouts=layouts, output_layouts=Replicate()) if layouts else "colwise_gathered"
        )
    return plan
