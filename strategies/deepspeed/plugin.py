"""DeepSpeedPlugin: options of DeepSpeed with the names of Hugging Face Accelerate."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.kwargs_handler import KwargsHandler, as_flag, from_variable
from trainwright.strategies.deepspeed.config import AUTO, read_config
from trainwright.strategies.deepspeed.hf_config import HfDeepSpeedConfig
from trainwright.strategies.deepspeed.options import look_up
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy

# The path of each field in DeepSpeed's own configuration.
_PATHS = {
    "gradient_accumulation_steps": ("gradient_accumulation_steps",),
    "gradient_clipping": ("gradient_clipping",),
    "zero_stage": ("zero_optimization", "stage"),
    "offload_optimizer_device": ("zero_optimization", "offload_optimizer", "device"),
    "offload_param_device": ("zero_optimization", "offload_param", "device"),
    "offload_optimizer_nvme_path": ("zero_optimization", "offload_optimizer", "nvme_path"),
    "offload_param_nvme_path": ("zero_optimization", "offload_param", "nvme_path"),
    "zero3_save_16bit_model": ("zero_optimization", "stage3_gather_16bit_weights_on_model_save"),
}


@dataclass
class DeepSpeedPlugin(KwargsHandler):
    """Options of `DeepSpeedStrategy`, with the names of Hugging Face Accelerate.

    A field that is None takes the value of its environment variable (`ACCELERATE_DEEPSPEED_ZERO_STAGE`, …). The
    fields are read when the Accelerator is constructed, and those of a `deepspeed_config` until the model is prepared.

    Attributes:
        hf_ds_config: DeepSpeed's own configuration: a dict, the path of a JSON file or a `HfDeepSpeedConfig`, whose
            values may change until the model is prepared. The other fields fill in `"auto"` and missing values. A field
            that differs from the configuration is an error.
        gradient_accumulation_steps: Micro-batches of one optimizer step. Default: the value of the Accelerator.
        gradient_clipping: Maximum norm of the gradients. Default: None, which disables clipping.
        zero_stage: ZeRO stage, 0 to 3. Default: the stage in `hf_ds_config`, or else 2.
        is_train_batch_min: Accepted without effect.
        offload_optimizer_device, offload_param_device: `"none"`, `"cpu"` or `"nvme"`.
        offload_optimizer_nvme_path, offload_param_nvme_path: Folder for `"nvme"`. Both must be the same folder.
        zero3_init_flag: Accepted without effect. Stage 3 always shards modules while they are built.
        zero3_save_16bit_model: Accepted without effect. Checkpoints contain full weights at every stage.
        transformer_moe_cls_names: Classes of mixture-of-experts layers, in a list or separated by commas.
        enable_msamp: Must be False. MS-AMP is not supported.
        msamp_opt_level: Accepted without effect.
    """

    hf_ds_config: str | Path | Mapping[str, Any] | HfDeepSpeedConfig | None = from_variable(
        "ACCELERATE_DEEPSPEED_CONFIG_FILE"
    )
    gradient_accumulation_steps: int | None = None
    gradient_clipping: float | None = from_variable("ACCELERATE_GRADIENT_CLIPPING", float)
    zero_stage: int | None = from_variable("ACCELERATE_DEEPSPEED_ZERO_STAGE", int)
    is_train_batch_min: bool = True
    offload_optimizer_device: str | None = from_variable("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE")
    offload_param_device: str | None = from_variable("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE")
    offload_optimizer_nvme_path: str | None = from_variable("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH")
    offload_param_nvme_path: str | None = from_variable("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH")
    zero3_init_flag: bool | None = from_variable("ACCELERATE_DEEPSPEED_ZERO3_INIT", as_flag)
    zero3_save_16bit_model: bool | None = from_variable("ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL", as_flag)
    transformer_moe_cls_names: str | list[str] | None = from_variable("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES")
    enable_msamp: bool = False
    msamp_opt_level: str = "O1"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.hf_ds_config is None and self.zero_stage is None:
            self.zero_stage = 2

    @property
    def _given(self) -> str | Path | Mapping[str, Any] | None:
        own = self.hf_ds_config
        return own.config if isinstance(own, HfDeepSpeedConfig) else vars(self).get("deepspeed_config", own)

    @cached_property
    def deepspeed_config(self) -> dict[str, Any]:
        """DeepSpeed's configuration. Its values may be changed until the model is prepared. Values that `prepare`
        infers from the model and the data remain `"auto"`.
        """
        content = self.strategy(1).config.content
        if not isinstance(self.hf_ds_config, HfDeepSpeedConfig):
            return content
        self.hf_ds_config.config.update(content)
        return self.hf_ds_config.config

    def strategy(self, num_processes: int) -> DeepSpeedStrategy:
        """Return the strategy with the same options.

        Raises:
            ConfigurationError: An option is unknown, the strategy does not support it, or it differs from
                `hf_ds_config`.
        """
        content = read_config(self._given)
        different = [
            f"{name}={own!r} ({'.'.join(path)}={found!r})"
            for name, path in _PATHS.items()
            if (own := getattr(self, name)) is not None and (found := look_up(content, path)) not in (None, AUTO, own)
        ]
        if different:
            raise ConfigurationError(
                f"these fields of DeepSpeedPlugin, or their environment variables, differ from hf_ds_config (in "
                f'parentheses): {", ".join(different)}. Remove them, or write "auto" in the configuration.'
            )
        config = {one.name: getattr(self, one.name) for one in fields(self)}
        config["hf_ds_config"] = self._given
        if not self.enable_msamp:
            del config["enable_msamp"], config["msamp_opt_level"]
        return DeepSpeedStrategy.from_config(config)
