"""Ready tensor-parallel plans for transformers' Llama and GPT-2 families, and the check of a plan."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.strategies.fsdp.layers.plan import Plan, SplitLayers, need_divisible
from trainwright.strategies.fsdp.layers.styles import DivideAttributes, FusedColwise, LossParallel

# What a transformers config calls its `model_type`.
LLAMA_FAMILY = ("llama", "mistral", "qwen2")
GPT2_FAMILY = ("gpt2",)


def ready_plan(
    model: nn.Module, tp: int, *, prefix: str = "", sequence_parallel: bool = False, loss_parallel: bool = False
) -> dict[str, Any]:
    """Return the plan for a model of transformers: Llama, Mistral, Qwen 2 or GPT-2, with or without a language head.

    Heads, feed-forward layers, embeddings and the language head are split. A vocabulary that `tp` does not divide stays
    whole on every rank, with a warning.

    Args:
        model: for example a `LlamaForCausalLM` or a `GPT2Model`.
        tp: the number of ranks over which layers are split.
        prefix: the model's name in the task, for example `"model"` for `self.model`.
        sequence_parallel: norms and residuals work on a piece of the sequence on each rank, whose length must be
            divisible by `tp`. Llama's family only.
        loss_parallel: logits stay in pieces, on which `cross_entropy` works: the model's own loss, or the step's.

    Raises:
        ConfigurationError: another model, or a number of heads that is not divisible by `tp`.
    """
    kind = _family(model)
    if kind in LLAMA_FAMILY:
        plan = _llama(model, tp, sequence_parallel, loss_parallel)
    elif kind in GPT2_FAMILY:
        if sequence_parallel:
            raise ConfigurationError(
                "sequence_parallel=True, and GPT-2 drops out and adds positions outside of its blocks. Leave it out."
            )
        plan = _gpt2(model, tp, loss_parallel)
    else:
        raise ConfigurationError(
            f"there is no ready tensor-parallel plan for {type(model).__name__}. There are plans for the model types "
            f"{', '.join((*LLAMA_FAMILY, *GPT2_FAMILY))}. Define tensor_parallel_plan in the task."
        )
    return {f"{prefix}.{name}" if prefix else name: style for name, style in plan.items()}


@runtime_checkable
class PlansLayers(Protocol):
    """A model that plans how its layers are split, as every task does; see `TaskModule.tensor_parallel_plan`."""

    def tensor_parallel_plan(self, mesh: DeviceMesh) -> Mapping[str, Any] | None:
        """Return the plan; None: the strategy's argument, or a built-in plan."""


def find_plan(task: nn.Module, given: Plan | None, mesh: DeviceMesh) -> Plan:
    """Return the plan by which a task's layers are split: the one given, its own, or a ready one. Not collective."""
    plan = given
    if plan is None and isinstance(task, PlansLayers):
        plan = task.tensor_parallel_plan(mesh)
    if plan is None:
        plan = find_ready_plan(task, mesh["tp"].size())
    if not plan:
        raise ConfigurationError(
            f"tp={mesh['tp'].size()} splits layers, and nothing says which layers of {type(task).__name__}. Define "
            "tensor_parallel_plan(self, mesh) in it, for example returning {'net.0': 'colwise', 'net.2': 'rowwise'}."
        )
    return plan


def find_ready_plan(task: nn.Module, tp: int) -> dict[str, Any] | None:
    """Return the ready plans for all models of transformers that a task holds; None if there is no such model."""
    found: dict[str, Any] = {}
    inside: list[str] = []
    for name, module in task.named_modules():
        known = _family(module) in (*LLAMA_FAMILY, *GPT2_FAMILY) and _is_model(module)
        if known and not any(name.startswith(f"{outer}.") for outer in inside):
            inside.append(name)
            found |= ready_plan(module, tp, prefix=name)
    return found or None


class PlannedMesh:
    """What a `DeviceMesh` that does not exist yet will say of its sizes."""

    def __init__(self, lengths: Mapping[str, int]) -> None:
        self.mesh_dim_names = tuple(lengths)
        self.shape = tuple(lengths.values())
        self.ndim = len(lengths)

    def __getitem__(self, name: str) -> PlannedMesh:
        """Return one axis."""
        return PlannedMesh({name: self.shape[self.mesh_dim_names.index(name)]})

    def size(self, mesh_dim: int | None = None) -> int:
        """Return the number of ranks, or that along one axis."""
        found = 1
        for length in self.shape if mesh_dim is None else self.shape[mesh_dim : mesh_dim + 1]:
            found *= length
        return found


def check_plan(task: nn.Module, given: Plan | None, lengths: Mapping[str, int]) -> None:
    """Check that there is a plan, that it names modules of the task, and that what it splits is divisible.

    Not collective, and nothing is touched. A plan that asks its mesh for more than sizes is checked once there is one.
    """
    mesh: Any = PlannedMesh(lengths)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # they come when layers are split
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
    """Whether a module is a whole model: its blocks have the config too."""
    return any(hasattr(part, name) for part in (module, *module.children()) for name in ("layers", "h"))


def _parts(model: Any, blocks: str) -> tuple[str, str | None]:
    """Return what stands before the names within the base model, and the name of the layer that makes logits."""
    base = "" if hasattr(model, blocks) else f"{model.base_model_prefix}."
    return base, "lm_head" if hasattr(model, "lm_head") else None


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
        raise ConfigurationError("add_cross_attention=True: the ready plan for GPT-2 does not split cross attention.")
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


def _ends(
    config: Any, tp: int, embedding: str, head: str | None, sequence_parallel: bool, loss_parallel: bool
) -> dict[str, Any]:
    """Return what becomes of the embedding and of the layer that makes logits."""
    layouts = Shard(1) if sequence_parallel else None
    if config.vocab_size % tp:
        advice = f"model.resize_token_embeddings(pad_to_multiple_of={tp})"
        if loss_parallel or sequence_parallel:
            raise ConfigurationError(
                f"vocab_size={config.vocab_size} is not divisible by tp={tp}, which sequence_parallel and "
                f"loss_parallel need. Call {advice}."
            )
        warnings.warn(
            f"vocab_size={config.vocab_size} is not divisible by tp={tp}: the embedding and the logits' layer stay "
            f"whole on every rank. To split them, call {advice}.",
            TrainwrightWarning,
            stacklevel=2,
        )
        return {}
    plan: dict[str, Any] = {embedding: "embedding"}
    if head is not None and loss_parallel:
        plan[head] = LossParallel(input_layouts=layouts)
    elif head is not None:
        plan[head] = (
            ColwiseParallel(input_layouts=layouts, output_layouts=Replicate()) if layouts else "colwise_gathered"
        )
    return plan
