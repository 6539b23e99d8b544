"""Hugging Face Accelerate's words for DeepSpeed (its `deepspeed_config` and `DeepSpeedPlugin`), in this framework's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.strategies.deepspeed.config import AUTO, read_config

_ELSEWHERE = {
    "deepspeed_hostfile": "the launcher that starts the processes reads it",
    "deepspeed_exclusion_filter": "the launcher that starts the processes reads it",
    "deepspeed_inclusion_filter": "the launcher that starts the processes reads it",
    "deepspeed_multinode_launcher": "start the processes with torchrun, srun or mpirun",
    "mixed_precision": "say Trainer(precision=…)",
    "enable_msamp": "MS-AMP does not run on this torch",
    "msamp_opt_level": "MS-AMP does not run on this torch",
}
# What happens anyway: stage 3 cuts modules as they are built, and checkpoints hold whole weights at every stage.
_HARMLESS = ("zero3_init_flag", "zero3_save_16bit_model", "is_train_batch_min")
_DEVICES = {
    "offload_optimizer_device": ("offload_optimizer", "offload_optimizer_device"),
    "offload_param_device": ("offload_parameters", "offload_params_device"),
}
_FILES = ("hf_ds_config", "deepspeed_config_file")
_CLASSES = ("deepspeed_moe_layer_cls_names", "transformer_moe_cls_names")
_PATHS = ("offload_optimizer_nvme_path", "offload_param_nvme_path")
_VALUES = ("gradient_accumulation_steps", "gradient_clipping")
KNOWN = ("zero_stage", *_DEVICES, *_PATHS, *_VALUES, *_FILES, *_CLASSES, *_HARMLESS)


def read_accelerate_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return `DeepSpeedStrategy`'s arguments for what Accelerate's names say."""
    found: dict[str, Any] = {}
    content: Any = {
        "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
        "gradient_clipping": "auto", "zero_optimization": {"stage": "auto"}, "zero_allow_untested_optimizer": True,
    }  # fmt: skip
    values: dict[str, Any] = {}
    for name, value in config.items():
        if name in _ELSEWHERE:
            raise ConfigurationError(f"{name}={value!r}: {_ELSEWHERE[name]}. Leave it out here.")
        if name not in KNOWN:
            raise ConfigurationError(f"{name}={value!r} is unknown.{nearest(name, KNOWN)} Known: {', '.join(KNOWN)}.")
        if value is None or name in _HARMLESS:
            continue
        if name == "zero_stage":
            found["stage"] = int(value)
        elif name in _DEVICES:
            switch, device = _DEVICES[name]
            found[switch] = str(value) != "none"
            if found[switch]:
                found[device] = str(value)
        elif name in _PATHS and str(value) != "none":
            if found.get("nvme_path", str(value)) != str(value):
                raise ConfigurationError(f"{' and '.join(_PATHS)} differ. Use one folder for both.")
            found["nvme_path"] = str(value)
        elif name in _CLASSES:
            names = value.split(",") if isinstance(value, str) else value
            found["moe_leaf_modules"] = tuple(part.strip() for part in names)
        elif name in _FILES:
            content = value
        elif name in _VALUES:
            values[name] = value
    content = read_config(content) if values else content
    for name, value in values.items():
        if content.get(name) not in (None, AUTO, value):
            raise ConfigurationError(
                f'{name}={value!r}, and the configuration has {content[name]!r}. Leave one out, or write "auto" there.'
            )
    return {"config": content | values, **found} if values else {"config": content, **found}
