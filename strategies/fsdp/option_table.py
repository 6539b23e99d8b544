"""The options of FSDP with Accelerate's names."""

from __future__ import annotations

from trainwright.core.names.kwargs_handler import as_flag
from trainwright.strategies.option_table import EngineOption, OptionTable

_NO_INPUT_OFFLOAD = "inputs of recomputed layers stay on the device; use --fsdp_activation_checkpointing true alone"

FSDP = OptionTable(
    title="FSDP",
    section="fsdp_config",
    switch="use_fsdp",
    argument="fsdp_plugin",
    flag="fsdp_{}",
    variable="FSDP_{}",
    rows=(
        EngineOption(
            "fsdp_version",
            "Version whose options are given.",
            read=int,
            flag="fsdp_version",
            variable="FSDP_VERSION",
            choices=("1", "2"),
        ),
        EngineOption("sharding_strategy", "Sharding strategy of version 1."),
        EngineOption("reshard_after_forward", "Free gathered parameters after the forward."),
        EngineOption(
            "cpu_offload",
            "Keep shards on the host.",
            read=as_flag,
            flag="fsdp_offload_params",
            variable="FSDP_OFFLOAD_PARAMS",
        ),
        EngineOption("min_num_params", "Smallest unit of SIZE_BASED_WRAP.", read=int),
        EngineOption("auto_wrap_policy", "TRANSFORMER_BASED_WRAP, SIZE_BASED_WRAP or NO_WRAP."),
        EngineOption(
            "transformer_cls_names_to_wrap",
            "Classes of units, separated by commas.",
            flag="fsdp_transformer_layer_cls_to_wrap",
            variable="FSDP_TRANSFORMER_CLS_TO_WRAP",
        ),
        EngineOption("backward_prefetch", "When the next unit is gathered in backward."),
        EngineOption("state_dict_type", "FULL_STATE_DICT or SHARDED_STATE_DICT."),
        EngineOption("forward_prefetch", "Gather the next unit during a forward.", read=as_flag),
        EngineOption("use_orig_params", "Only true.", read=as_flag),
        EngineOption("cpu_ram_efficient_loading", "Only rank 0 reads pretrained weights.", read=as_flag),
        EngineOption("sync_module_states", "Only true.", read=as_flag),
        EngineOption("activation_checkpointing", "Recompute activations in backward.", read=as_flag),
        EngineOption("activation_checkpointing_offload", read=as_flag, not_launched=_NO_INPUT_OFFLOAD),
    ),
)
