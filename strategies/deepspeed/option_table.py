"""The options of DeepSpeed with Accelerate's names."""

from __future__ import annotations

from trainwright.core.names.kwargs_handler import as_flag
from trainwright.strategies.option_table import EngineOption, OptionTable

_ZERO = "zero_optimization"

DEEPSPEED = OptionTable(
    title="DeepSpeed",
    section="deepspeed_config",
    switch="use_deepspeed",
    argument="deepspeed_plugin",
    flag="{}",
    variable="ACCELERATE_DEEPSPEED_{}",
    rows=(
        EngineOption(
            "zero_stage", "Stage of ZeRO, 0 to 3.", read=int, choices=("0", "1", "2", "3"), path=(_ZERO, "stage")
        ),
        EngineOption("offload_optimizer_device", "none, cpu or nvme.", path=(_ZERO, "offload_optimizer", "device")),
        EngineOption("offload_param_device", "none, cpu or nvme.", path=(_ZERO, "offload_param", "device")),
        EngineOption(
            "offload_optimizer_nvme_path",
            "Folder of offloaded optimizer states.",
            path=(_ZERO, "offload_optimizer", "nvme_path"),
        ),
        EngineOption(
            "offload_param_nvme_path", "Folder of offloaded parameters.", path=(_ZERO, "offload_param", "nvme_path")
        ),
        # Its flag and its variable are also those of other engines.
        EngineOption("gradient_accumulation_steps", flag=None, variable=None, path=("gradient_accumulation_steps",)),
        EngineOption(
            "gradient_clipping",
            "Largest norm of gradients.",
            read=float,
            variable="ACCELERATE_GRADIENT_CLIPPING",
            path=("gradient_clipping",),
            needs_switch=False,
        ),
        EngineOption(
            "hf_ds_config",
            "DeepSpeed's own configuration.",
            flag="deepspeed_config_file",
            variable="ACCELERATE_DEEPSPEED_CONFIG_FILE",
        ),
        EngineOption(
            "transformer_moe_cls_names",
            "Classes of expert layers.",
            flag="deepspeed_moe_layer_cls_names",
            variable="ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES",
        ),
        EngineOption(
            "zero3_init_flag",
            "Build models of transformers in shards, at stage 3.",
            read=as_flag,
            variable="ACCELERATE_DEEPSPEED_ZERO3_INIT",
        ),
        EngineOption(
            "zero3_save_16bit_model",
            "Accepted without effect: checkpoints contain full weights at every stage.",
            read=as_flag,
            path=(_ZERO, "stage3_gather_16bit_weights_on_model_save"),
        ),
        EngineOption(
            "deepspeed_hostfile",
            "File with the machines: lines of 'NAME slots=NUMBER'.",
            variable=None,
            needs_switch=False,
        ),
        EngineOption(
            "deepspeed_exclusion_filter",
            "Machines and slots to leave out: 'a@b:0,2'.",
            variable=None,
            needs_switch=False,
        ),
        EngineOption(
            "deepspeed_inclusion_filter", "Machines and slots to use: 'a@b:0,2'.", variable=None, needs_switch=False
        ),
        EngineOption(
            "deepspeed_multinode_launcher",
            "standard: start the command on each machine. pdsh: once.",
            variable=None,
            needs_switch=False,
        ),
    ),
)
