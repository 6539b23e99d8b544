"""A GPTModel of megatron-core that computes the forward of a causal language model of transformers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import gelu, pad, silu

from trainwright.checkpoint.interop.megatron_names import LLAMA_LIKE, ModelShape, ModelWeight, joined_norms
from trainwright.core.errors import ConfigurationError, require_package

# Classes of transformers whose weights can be converted to a GPTModel.
_CLASSES = (*LLAMA_LIKE.values(), "GPT2LMHeadModel")

# Name in the configuration of a model → the only supported value. A configuration may lack the name.
_SUPPORTED: dict[str, Any] = {
    "hidden_act": "silu",
    "activation_function": "gelu_new",
    "scale_attn_weights": True,
    "attention_dropout": 0.0,
    "attn_pdrop": 0.0,
    "resid_pdrop": 0.0,
    "embd_pdrop": 0.0,
    "attention_bias": False,
    "mlp_bias": False,
    "scale_attn_by_inverse_layer_idx": False,
    "sliding_window": None,
    "add_cross_attention": False,
    "rope_type": "default",
}


def import_core(name: str = "") -> Any:
    """Import megatron-core, or one of its modules, such as `".parallel_state"`.

    Raises:
        MissingPackageError: Megatron-core is not installed.
    """
    purpose = "MegatronStrategy(engine='megatron-core')"
    return require_package(f"megatron.core{name}", purpose=purpose, install="'trainwright[megatron]'")


def check_cuda(device_type: str) -> None:
    """Check that the device type is CUDA. Check that megatron-core is installed.

    Raises:
        ConfigurationError: The device type is not CUDA.
        MissingPackageError: Megatron-core is not installed.
    """
    if device_type != "cuda":
        raise ConfigurationError(
            f"engine='megatron-core' needs CUDA devices, and Transformer Engine for fused attention; accelerator="
            f"{device_type!r}. Use MegatronStrategy(engine='torch')."
        )
    import_core()


def find_model(task: nn.Module) -> Any:
    """Return the causal language model of a task.

    Raises:
        ConfigurationError: Megatron-core does not support the task's model, or does not train all of the task's
            parameters.
    """
    models = [module for module in task.modules() if type(module).__name__ in _CLASSES]
    if len(models) != 1:
        raise ConfigurationError(
            f"{type(task).__name__} has {len(models)} models of the classes {', '.join(_CLASSES)}, and "
            "engine='megatron-core' trains one. Use engine='torch'."
        )
    model: Any = models[0]
    trained_ids = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    untrained_names = [name for name, parameter in task.named_parameters() if id(parameter) not in trained_ids]
    if untrained_names:
        raise ConfigurationError(
            f"{type(task).__name__} has parameters that are frozen or not in {type(model).__name__}, such as "
            f"{untrained_names[0]!r} ({len(untrained_names)} in total), and engine='megatron-core' trains all "
            "parameters of one model. Use engine='torch'."
        )
    config = model.config.to_dict()
    # transformers 5 nests the type. A model without rotary embeddings has no `rope_parameters`.
    config["rope_type"] = (config.get("rope_parameters") or {}).get("rope_type", "default")
    unsupported: list[str] = []
    for name, supported in _SUPPORTED.items():
        value = config.get(name, supported)
        if value != supported:
            unsupported.append(f"{name}={value!r}")
    if unsupported:
        raise ConfigurationError(
            f"engine='megatron-core' does not support {', '.join(unsupported)}. Change it, or use engine='torch'."
        )
    if any(vars(module).get("gradient_checkpointing") for module in model.modules()):
        raise ConfigurationError(
            "engine='megatron-core' does not use transformers' gradient checkpointing. Use recompute='full'."
        )
    return model


def shape_of(model: Any, tp: int) -> ModelShape:
    """Return the sizes of a model, after checking that `tp` divides them.

    Raises:
        ConfigurationError: `tp` does not divide a size.
        CheckpointError: The configuration lacks a size, or has a `quantization_config`.
    """
    name = type(model).__name__
    shape = ModelShape.of(model.config.to_dict(), name)
    if shape.vocabulary % tp:
        raise ConfigurationError(
            f"tp={tp} does not divide the vocabulary ({shape.vocabulary}) of {name}. Call "
            f"resize_token_embeddings(pad_to_multiple_of={tp})."
        )
    shape.check_parallel(tp, 1, shape.vocabulary)
    return shape


def make_gpt(model: Any, shape: ModelShape, tp: int, recompute: str | None, dtype: torch.dtype) -> Any:
    """Return this rank's part of an uninitialized GPTModel, with layers of Transformer Engine if it is installed.

    `model` is the model of transformers whose configuration is used. For the other arguments see `MegatronCoreEngine`.
    """
    is_gpt2 = shape.kind == "gpt2"
    model_config = model.config
    norm = "LayerNorm" if is_gpt2 else "RMSNorm"
    rotary_base = 10000
    if not is_gpt2:
        # transformers 5 has `rope_parameters`. Older versions have `rope_theta` in the configuration itself.
        options = model_config.to_dict()
        rotary_base = (options.get("rope_parameters") or options).get("rope_theta", rotary_base)
    recompute_options: dict[str, Any] = {}
    if recompute == "full":  # megatron-core requires a method
        recompute_options = {"recompute_method": "uniform", "recompute_num_layers": 1}
    config = import_core(".transformer.transformer_config").TransformerConfig(
        num_layers=shape.layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.heads,
        num_query_groups=shape.groups,
        kv_channels=shape.head,
        ffn_hidden_size=shape.mlp,
        perform_initialization=False,
        add_bias_linear=is_gpt2,
        add_qkv_bias=shape.kind == "qwen2",
        qk_layernorm=shape.kind == "qwen3",
        gated_linear_unit=not is_gpt2,
        activation_func=partial(gelu, approximate="tanh") if is_gpt2 else silu,
        normalization=norm,
        layernorm_epsilon=model_config.layer_norm_epsilon if is_gpt2 else model_config.rms_norm_eps,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        tensor_model_parallel_size=tp,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        recompute_granularity=recompute,
        **recompute_options,
    )
    specs = import_core(".models.gpt.gpt_layer_specs")
    qk = shape.kind == "qwen3"
    if import_core(".extensions.transformer_engine").HAVE_TE:
        layers = specs.get_gpt_layer_with_transformer_engine_spec(qk_layernorm=qk)
    else:
        layers = specs.get_gpt_layer_local_spec(qk_layernorm=qk, normalization=norm)
    return import_core(".models.gpt").GPTModel(
        config,
        layers,
        vocab_size=shape.vocabulary,
        max_sequence_length=shape.positions,
        share_embeddings_and_output_weights=shape.tied,
        position_embedding_type="learned_absolute" if is_gpt2 else "rope",
        rotary_base=rotary_base,
        parallel_output=True,
    )


class WeightRow(NamedTuple):
    """A weight of the GPTModel with its parameters.

    Attributes:
        weight: Description of the weight.
        gpt_parameter: This rank's parameter of the GPTModel.
        originals: The parameters of transformers' model that the weight joins.
    """

    weight: ModelWeight
    gpt_parameter: nn.Parameter
    originals: list[nn.Parameter]


class WeightMap:
    """Mapping between the weights of a GPTModel and those of transformers' model, which are on the host.

    One weight of the GPTModel may join several of transformers' model, such as those of query, key and value. The
    methods also convert other tensors with the shapes of weights, such as moments of an optimizer.

    Args:
        model: The model of transformers.
        gpt: This rank's part of the GPTModel.
        shape: Sizes of the model.
        tp: Number of tensor-parallel ranks.

    Attributes:
        rank: Tensor-parallel rank of this process.
        rows: The weights of the GPTModel.
    """

    def __init__(self, model: nn.Module, gpt: nn.Module, shape: ModelShape, tp: int) -> None:
        self._group = import_core(".parallel_state").get_tensor_model_parallel_group()
        self._tp = tp
        self.rank = self._group.rank()
        base = "transformer." if shape.kind == "gpt2" else "model."
        originals_by_name = dict(model.named_parameters())
        gpt_by_name = dict(gpt.named_parameters())
        self.rows: list[WeightRow] = []
        for weight in shape.weights():
            # Transformer Engine joins a norm and the linear layer after it, which changes the names of norms.
            name = weight.name if weight.name in gpt_by_name else joined_norms(weight.name)
            originals: list[nn.Parameter] = []
            for original in weight.names:
                in_base = not original.startswith("lm_head.")
                originals.append(originals_by_name[base + original if in_base else original])
            self.rows.append(WeightRow(weight, gpt_by_name[name], originals))

    @torch.no_grad()
    def divide(self, value: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter of the GPTModel with this rank's part of full values. Not collective.

        Args:
            value: Returns the full value of a parameter of transformers' model.
        """
        for weight, gpt_parameter, originals in self.rows:
            full = weight.join([value(parameter) for parameter in originals])
            yield gpt_parameter, weight.divide(full, self._tp)[self.rank]

    @torch.no_grad()
    def gather(self, value: Callable[[nn.Parameter], torch.Tensor]) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
        """Yield each parameter of transformers' model with its full value, on the host. Collective.

        Args:
            value: Returns this rank's part of a value for a parameter of the GPTModel.
        """
        for weight, gpt_parameter, originals in self.rows:
            part = value(gpt_parameter).contiguous()
            parts = [torch.empty_like(part) for _ in range(self._tp)]
            dist.all_gather(parts, part, group=self._group)
            full = weight.separate(weight.undivide(parts))
            for parameter, name in zip(originals, weight.names, strict=True):
                yield parameter, full[name].to("cpu")


@dataclass(frozen=True)
class CausalOutput:
    """Output of the model, with the names of transformers' outputs.

    Attributes:
        loss: Mean cross-entropy over targets (0-dim). None without labels.
        logits: Logits of the full vocabulary, (batch, length, vocabulary), float32. None in training with labels, which
            saves their memory.
    """

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None


def forward_through(gpt: nn.Module, model: nn.Module) -> Callable[..., Any]:
    """Return a function with the arguments and results of transformers' model that runs a GPTModel.

    The function raises a `ConfigurationError` for other arguments, and for left padding and packed sequences.
    """
    parallel = import_core(".tensor_parallel")

    def forward(
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        labels: torch.Tensor | None = None,
        shift_labels: torch.Tensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        use_cache: bool | None = False,
        **options: object,
    ) -> Any:
        unsupported = [name for name, value in options.items() if value is not None]
        if use_cache:
            unsupported.append("use_cache")
        if unsupported:
            raise ConfigurationError(
                f"engine='megatron-core' does not support {', '.join(unsupported)} in a call of a model. Remove "
                "them, or use engine='torch'."
            )
        length = input_ids.shape[1]
        positions = torch.arange(length, device=input_ids.device).expand_as(input_ids)
        # Waits for the device. Padding on the right needs no mask: the causal mask hides it from earlier tokens.
        if attention_mask is not None and not bool((attention_mask.diff(dim=1) <= 0).all()):
            raise ConfigurationError("engine='megatron-core' does not support padding on the left. Pad on the right.")
        if position_ids is not None and not bool((position_ids == positions).all()):
            raise ConfigurationError(
                "engine='megatron-core' does not support packed sequences or other position_ids. Remove "
                "position_ids, or use engine='torch'."
            )
        gpt.train(model.training)
        # True where attention is masked: at later positions.
        mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=input_ids.device).triu(1)
        logits = gpt(input_ids, positions, mask).float()
        if shift_labels is None and labels is not None:
            shift_labels = pad(labels, (0, 1), value=-100)[:, 1:]
        if shift_labels is None:
            return CausalOutput(logits=parallel.gather_from_tensor_model_parallel_region(logits))
        full_logits = None
        if not model.training:
            # Copied, because megatron-core 0.16's cross-entropy overwrites the logits.
            full_logits = parallel.gather_from_tensor_model_parallel_region(logits).clone()
        is_target = shift_labels != -100
        # The cross-entropy accepts only indices of the vocabulary. Losses of other positions are then multiplied by 0.
        targets = shift_labels.masked_fill(~is_target, 0).contiguous()
        losses = parallel.vocab_parallel_cross_entropy(logits, targets)
        num_items = is_target.sum() if num_items_in_batch is None else num_items_in_batch
        return CausalOutput((losses * is_target).sum() / num_items, full_logits)

    return forward
