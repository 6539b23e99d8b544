"""Built-in tensor-parallel plans for transformers' Llama, GPT-2, BERT and T5 families, and selection of a plan."""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.fsdp.layers.plan import GivenPlan, Plan, SplitLayers, need_divisible, starred, with_stars
from trainwright.strategies.fsdp.layers.styles import (
    DivideAttributes,
    FusedColwise,
    LossParallel,
    SplitParameters,
    is_conv1d,
)


@dataclass(frozen=True)
class Family:
    """Tensor-parallel rules of one family of models. A module is named by the end of its name: `"mlp.up_proj"`.

    Attributes:
        counts: Values of the model's configuration that must be divisible by the number of ranks.
        styles: Name of a module → its style. The names are of one module each: `"q"` selects `"layer.*.q"`, and not
            `"layer.*.wq"`.
        embeddings: Names of the token embeddings.
        head: Name of the layer that computes logits. Models without this layer have no such module.
        along_sequence: Styles that override `styles` for sequence parallelism. None if it is not supported.
    """

    counts: tuple[str, ...]
    styles: dict[str, Any]
    embeddings: tuple[str, ...]
    head: str = "lm_head"
    along_sequence: dict[str, Any] | None = None


_LLAMA = Family(
    counts=("num_attention_heads", "num_key_value_heads"),
    styles={
        **dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "colwise"),
        **dict.fromkeys(("mlp.gate_proj", "mlp.up_proj"), "colwise"),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise"),
        # Qwen 3 has a norm of each head: (batch, length, heads, width of a head).
        **dict.fromkeys(("q_norm", "k_norm"), SequenceParallel(sequence_dim=2, use_local_output=True)),
    },
    embeddings=("embed_tokens",),
    along_sequence={
        "layers.0": "split_sequence",
        **dict.fromkeys(("input_layernorm", "post_attention_layernorm", "norm"), "sequence"),
        **dict.fromkeys(("self_attn", "mlp"), "gather_sequence"),
        **dict.fromkeys(("self_attn.o_proj", "mlp.down_proj"), "rowwise_to_sequence"),
    },
)
_GPT2 = Family(
    counts=("n_head",),
    styles={
        "attn": DivideAttributes("split_size", "num_heads"),
        "attn.c_attn": FusedColwise(3),
        "mlp.c_fc": "colwise",
        **dict.fromkeys(("attn.c_proj", "mlp.c_proj"), "rowwise"),
    },
    embeddings=("wte",),
)
_BERT = Family(
    counts=("num_attention_heads",),
    styles={
        **dict.fromkeys(("self.query", "self.key", "self.value", "intermediate.dense"), "colwise"),
        "output.dense": "rowwise",
        "cls.predictions": SplitParameters("bias"),  # tied to the decoder's
    },
    embeddings=("word_embeddings",),
    head="cls.predictions.decoder",
)
_T5 = Family(
    counts=("num_heads",),
    styles={
        **dict.fromkeys(("q", "k", "v", "wi", "wi_0", "wi_1", "relative_attention_bias"), "colwise"),
        **dict.fromkeys(("o", "wo"), "rowwise"),
        **dict.fromkeys(("SelfAttention", "EncDecAttention"), DivideAttributes("n_heads", "inner_dim")),
    },
    embeddings=("shared", "embed_tokens"),  # of the encoder and of the decoder, tied
)
# By `model_type` in transformers' configurations.
FAMILIES = {
    **dict.fromkeys(("llama", "mistral", "qwen2", "qwen3"), _LLAMA),
    "gpt2": _GPT2,
    "bert": _BERT,
    **dict.fromkeys(("t5", "mt5"), _T5),
}


def ready_plan(
    model: nn.Module, tp: int, *, prefix: str = "", sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, Any]:
    """Return the plan for a Llama, Mistral, Qwen 2, Qwen 3, GPT-2, BERT or T5 model of transformers, with any head.

    The plan splits attention heads, feed-forward layers, embeddings and the language head. Ranks may hold parts of the
    vocabulary of unequal size.

    Args:
        model: For example a `LlamaForCausalLM` or a `GPT2Model`.
        tp: Number of ranks that split the layers.
        prefix: The model's name in the task, for example `"model"` for `self.model`.
        sequence_parallel: Split norms and residuals along the sequence. The length must be divisible by `tp`. Supported
            for the Llama family only.
        loss_parallel: Do not gather logits, and compute `cross_entropy` on the shards of the logits.

    Raises:
        ConfigurationError: The model or an option is not supported, or its number of heads is not divisible by `tp`.
            With `loss_parallel`, also if the size of the vocabulary is not.

    Returns:
        Name of a module in the task → its style. The blocks of a list have one entry with `*`, such as
        `{"model.layers.*.mlp.up_proj": "colwise", "lm_head": "colwise_gathered"}`.
    """
    family = _family(model)
    if family is None:
        raise ConfigurationError(
            f"no built-in tensor-parallel plan supports {type(model).__name__}. There are plans for the model types "
            f"{', '.join(FAMILIES)}. Define tensor_parallel_plan in the task.{_advice(model)}"
        )
    config: Any = model.config
    if sequence_parallel and family.along_sequence is None:
        name = "GPT-2" if family is _GPT2 else type(model).__name__
        raise ConfigurationError(
            f"sequence_parallel=True is not supported for {name}, which applies dropout and positions outside of "
            "its blocks. Remove it."
        )
    if family is _GPT2 and getattr(config, "add_cross_attention", False):
        raise ConfigurationError(
            "add_cross_attention=True is not supported by the built-in plan for GPT-2. Define tensor_parallel_plan in "
            "the task."
        )
    need_divisible(tp, **{count: getattr(config, count) for count in family.counts})
    if loss_parallel and config.vocab_size % tp:
        raise ConfigurationError(
            f"vocab_size={config.vocab_size} is not divisible by tp={tp}, which loss_parallel needs. Call "
            f"model.resize_token_embeddings(pad_to_multiple_of={tp})."
        )
    styles = {**family.styles, **dict.fromkeys(family.embeddings, "embedding")}
    head_input = None  # placement of the head's input; None for the full sequence on every rank
    names = with_stars(model)
    if sequence_parallel and family.along_sequence is not None:
        head_input = Shard(1)
        styles |= family.along_sequence
        # Only the first block splits the sequence, so that its name is needed beside "layers.*".
        names += [name for name, _ in model.named_modules() if name.endswith("layers.0")]
    if loss_parallel:
        styles[family.head] = LossParallel(input_layouts=head_input)
    elif head_input is None:
        styles[family.head] = "colwise_gathered"
    else:
        styles[family.head] = ColwiseParallel(input_layouts=head_input, output_layouts=Replicate())
    plan: dict[str, Any] = {}
    for name in names:
        for end, style in styles.items():
            # For example, "self_attn.q_proj" selects "layers.*.self_attn.q_proj". The dots compare complete parts of
            # the names: "q" must not select "wq", but must select a module with the full name "q".
            is_selected = f".{name}".endswith(f".{end}")
            if is_selected:
                name_in_task = f"{prefix}.{name}" if prefix else name
                plan[name_in_task] = style  # if several ends match, the last one
    return plan


@runtime_checkable
class PlansLayers(Protocol):
    """A model with its own tensor-parallel plan, such as every task; see `TaskModule.tensor_parallel_plan`."""

    def tensor_parallel_plan(self, mesh: DeviceMesh) -> Mapping[str, Any] | None:
        """Return the plan. None selects the strategy's argument, or a built-in plan."""


def find_plan(task: nn.Module, given: GivenPlan | None, mesh: DeviceMesh) -> Plan:
    """Return the first plan that exists: the strategy's (`given`), the task's, or a built-in one. Not collective.

    Raises:
        ConfigurationError: The model has no plan, or a built-in plan does not support the model.
    """
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
    """Return built-in plans with sequence parallelism for the transformers models in a task.

    The result is None if no model is supported.

    Args:
        strict: Raise an error for a model without sequence parallelism. False splits its layers, but no sequences.
    """
    return find_ready_plan(task, mesh["tp"].size(), sequence_parallel=True if strict else None)


def find_ready_plan(task: nn.Module, tp: int, *, sequence_parallel: bool | None = False) -> dict[str, Any] | None:
    """Return the built-in plans for all transformers models in a task. None if no model is supported.

    Args:
        sequence_parallel: See `ready_plan`. None means True for models that support it, and False for others.
    """
    plan: dict[str, Any] = {}
    model_names: list[str] = []
    for name, module in task.named_modules():
        family = _family(module)
        # The blocks of transformers models have a `config` too.
        if family is None or not hasattr(module, "base_model_prefix"):
            continue
        # A LlamaForCausalLM contains a LlamaModel, whose layers are in its plan already.
        if any(name.startswith(f"{outer}.") for outer in model_names):
            continue
        model_names.append(name)
        split_sequence = sequence_parallel
        if split_sequence is None:
            split_sequence = family.along_sequence is not None
        plan |= ready_plan(module, tp, prefix=name, sequence_parallel=split_sequence)
    return plan or None


class _NeedsMesh(Exception):
    """Error of `PlannedMesh` if a plan needs more of the mesh than the sizes of its axes. `check_plan` catches it."""


class PlannedMesh:
    """Replacement for a `DeviceMesh` that does not exist yet. It has the names and sizes of the axes, but no ranks."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self.mesh_dim_names = tuple(lengths)
        self.shape = tuple(lengths.values())
        self.ndim = len(lengths)

    def __getitem__(self, name: str) -> PlannedMesh:
        """Return one axis."""
        if name not in self.mesh_dim_names:  # or several axes, whose ranks are not known yet
            raise _NeedsMesh
        return PlannedMesh({name: self.shape[self.mesh_dim_names.index(name)]})

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks in total, or along one axis."""
        return math.prod(self.shape) if mesh_dim is None else self.shape[mesh_dim]


def check_plan(task: nn.Module, given: GivenPlan | None, lengths: Mapping[str, int]) -> None:
    """Check that a plan exists, that it names modules of the task, and that all layers are divisible.

    Not collective. If the plan is a function that needs more than the sizes of the mesh, the check follows once the
    mesh exists.

    Args:
        task: The task.
        given: The strategy's argument `tensor_parallel_plan`.
        lengths: Name of an axis of the mesh → number of ranks along it.

    Raises:
        ConfigurationError: See `find_plan` and `SplitLayers`.
    """
    mesh: Any = PlannedMesh(lengths)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a user's plan function runs again, and warns, when layers are split
            plan = find_plan(task, given, mesh)
    except _NeedsMesh:
        return
    except AttributeError as error:
        # The plan uses an attribute that only a DeviceMesh has, such as `get_group`.
        if isinstance(error.obj, PlannedMesh):
            return
        raise
    SplitLayers(task, plan, mesh["tp"])


def _family(module: nn.Module) -> Family | None:
    """Return the family of a transformers model by the `model_type` of its configuration. None if it is unknown."""
    config = getattr(module, "config", None)
    kind = getattr(config, "model_type", None)
    return FAMILIES.get(kind) if isinstance(kind, str) else None  # `config` may be any object


def _advice(model: nn.Module) -> str:
    """Return a sentence with a proposed plan, or an empty string."""
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

    Layers that read the hidden width and increase it, and layers with names of queries, keys and values, are split by
    outputs; fused ones block by block. Layers whose output has the hidden width are split by inputs.

    Returns:
        Names of layers with `*` for numbers → styles. Empty without layers of at least two styles.
    """
    layers: dict[str, tuple[int, int]] = {}  # name with stars, such as "blocks.*.mlp" → (inputs, outputs)
    for name, module in model.named_modules():
        is_in_block = "*" in starred(name)
        if not is_in_block:
            continue
        if isinstance(module, nn.Linear):
            layers[starred(name)] = (module.in_features, module.out_features)
        elif is_conv1d(module):
            inputs, outputs = module.get_parameter("weight").shape
            layers[starred(name)] = (inputs, outputs)
    # The hidden width is the most frequent one, and the smallest of equally frequent ones: the feed-forward width may
    # be as frequent, but is larger.
    widths = Counter(width for shape in layers.values() for width in shape)
    hidden = max(widths, key=lambda width: (widths[width], -width), default=0)
    plan: dict[str, str] = {}
    for name, (inputs, outputs) in layers.items():
        end = name.rpartition(".")[2]
        if inputs == hidden and outputs % 3 == 0 and _READS_FUSED_HEADS.fullmatch(end):
            plan[name] = "fused_colwise"
        elif inputs == hidden and (outputs > hidden or _READS_HEADS.fullmatch(end)):
            plan[name] = "colwise"
        elif outputs == hidden:
            plan[name] = "rowwise"
    # A layer that is split by outputs needs a later one that is split by inputs.
    if len(set(plan.values())) < 2:
        return {}
    return plan
