"""The options of Megatron-LM and of the mesh with Accelerate's names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright.core.names.kwargs_handler import as_flag
from trainwright.strategies.option_table import EngineOption, OptionTable

# What to use instead of unsupported options of Megatron-LM. The texts end errors such as "… is not supported: TEXT."
_SEQUENCES = "Accelerator(parallelism_config=ParallelismConfig(cp_size=…)) splits sequences; remove it"
_EXPERTS = "Accelerator(fsdp_plugin=…, parallelism_config=ParallelismConfig(ep_size=…)) divides experts; remove it"
_DROPOUT = "the model's own configuration sets it, such as GPT2Config(attn_pdrop=…, resid_pdrop=…); remove it"
_STAGES = "use Accelerator(strategy=MegatronStrategy(split_points=…)), which names the first layer of each stage"
_LATER = "save_state and load_state always include the optimizer; remove it"
_HOST = "the optimizer stays on the device; use Accelerator(fsdp_plugin=…) with cpu_offload=True for one on the host"
# For `not_launched`: the launcher accepts the flag without effect.
_NO_EFFECT = ""


def _refused(name: str, read: Callable[[str], Any], refusal: str, *harmless: object) -> EngineOption:
    """Return an option of which only None and the `harmless` values are supported."""
    return EngineOption(
        name,
        read=read,
        refusal=refusal,
        harmless=harmless,
        not_launched="Megatron-LM itself does not run; remove the option, or pass it to MegatronLMPlugin for what to "
        "write",
    )


MEGATRON_LM = OptionTable(
    title="Megatron-LM",
    section="megatron_lm_config",
    switch="use_megatron_lm",
    argument="megatron_lm_plugin",
    flag="megatron_lm_{}",
    variable="MEGATRON_LM_{}",
    rows=(
        EngineOption("tp_degree", "Ranks that split layers.", read=int),
        EngineOption("sequence_parallelism", "Accepted.", read=as_flag),
        EngineOption("pp_degree", "Stages of the pipeline.", read=int),
        EngineOption("num_micro_batches", "Micro-batches of one optimizer step.", read=int),
        EngineOption("recompute_activations", "Recompute all but matrix products.", read=as_flag),
        EngineOption("use_distributed_optimizer", "Shard optimizer states over data-parallel ranks.", read=as_flag),
        EngineOption("gradient_clipping", "Largest norm of gradients; 0: any.", read=float),
        EngineOption("recompute_granularity", "full or selective.", choices=("full", "selective")),
        EngineOption("attention_backend", not_launched=_NO_EFFECT),
        EngineOption("attention_softmax_in_fp32", read=as_flag, not_launched=_NO_EFFECT),
        _refused("use_custom_fsdp", as_flag, "use use_distributed_optimizer=True", False),
        _refused("no_load_optim", as_flag, _LATER, False),
        _refused("no_save_optim", as_flag, _LATER, False),
        _refused("optimizer_cpu_offload", as_flag, _HOST, False),
        _refused("overlap_cpu_optimizer_d2h_h2d", as_flag, _HOST, False),
        _refused("eod_mask_loss", as_flag, "set labels to -100 where the loss does not count", False),
        _refused("use_precision_aware_optimizer", as_flag, "choose an optimizer with narrow states", False),
        _refused("decoder_last_pipeline_num_layers", int, _STAGES),
        _refused("recompute_method", str, "all layers are recomputed; use 'uniform'", "uniform"),
        _refused("recompute_num_layers", int, "each layer is recomputed separately; use 1", 1),
        _refused("context_parallel_size", int, _SEQUENCES, 1),
        _refused("expert_model_parallel_size", int, _EXPERTS, 1),
        _refused("expert_tensor_parallel_size", int, _EXPERTS, 1),
        _refused("attention_dropout", float, _DROPOUT, 0.0),
        _refused("hidden_dropout", float, _DROPOUT, 0.0),
        _refused("calculate_per_token_loss", as_flag, "each micro-batch counts by its rows", False),
        _refused("use_rotary_position_embeddings", as_flag, "the model determines its positions", False),
    ),
)

PARALLELISM = OptionTable(
    title="parallelism",
    section="parallelism_config",
    switch="use_parallelism_config",
    argument="parallelism_config",
    flag="parallelism_config_{}",
    variable="PARALLELISM_CONFIG_{}",
    rows=(
        EngineOption("dp_replicate_size", "Replicas of the model.", read=int),
        EngineOption("dp_shard_size", "Ranks that shard a replica.", read=int),
        EngineOption("tp_size", "Ranks that split layers.", read=int),
        EngineOption("cp_size", "Ranks that split sequences, in a ring.", read=int),
        EngineOption("sp_size", "Ranks that split sequences, by heads.", read=int),
        EngineOption("pp_size", read=int, flag=None),
        EngineOption("ep_size", read=int, flag=None),
    ),
)
