"""FullyShardedDataParallelPlugin and TorchTensorParallelPlugin: options with Hugging Face Accelerate's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.kwargs_handler import KwargsHandler, from_variable
from trainwright.strategies.fsdp.option_table import FSDP
from trainwright.strategies.fsdp.strategy import FSDPStrategy
from trainwright.strategies.fsdp.tensor_parallel import TensorParallelStrategy
from trainwright.strategies.state import state_dict_type_name
from trainwright.strategies.units import WrapPolicy, matching

_CHECKED = "The Accelerator checks the options when it is constructed. Remove the call."


@dataclass
class FullyShardedDataParallelPlugin(KwargsHandler):
    """Options of `FSDPStrategy`, with the names of Hugging Face Accelerate.

    A field that is None takes the value of its environment variable (`FSDP_SHARDING_STRATEGY`, …). If the variable is
    not set, the default of the strategy applies. The fields that select units, precision, prefetching and recomputation
    may be set until a model is prepared, and `state_dict_type` until a state is saved. The others are read when the
    Accelerator is constructed.

    Attributes:
        fsdp_version: 1 or 2. Options of both versions are read. Training always uses FSDP2.
        sharding_strategy: A name, its number from 1 to 5, or torch's `ShardingStrategy`.
        reshard_after_forward: Free gathered parameters after the forward. With `fsdp_version=1`, a sharding strategy.
        backward_prefetch: Accepted without effect: FSDP2 always prefetches in backward.
        mixed_precision_policy: A torch policy, its arguments as a dict, or `"bf16"`, `"fp16"`, `"fp32"`. Default:
            the Accelerator's `mixed_precision`.
        auto_wrap_policy: `"TRANSFORMER_BASED_WRAP"`, `"SIZE_BASED_WRAP"`, `"NO_WRAP"`, or a function that selects
            modules. Without class names, `"TRANSFORMER_BASED_WRAP"` shards the modules that the model's `shard_units`
            returns, or else the modules of the classes in its `_no_split_modules`.
        cpu_offload: Keep shards on the host. A flag or a torch policy.
        ignored_modules, param_init_fn: Not supported. Must be None.
        state_dict_type: `"FULL_STATE_DICT"` or `"SHARDED_STATE_DICT"`. Default: the type of the configurations below,
            or `"SHARDED_STATE_DICT"`.
        state_dict_config, optim_state_dict_config: Torch configurations, whose type selects `state_dict_type`. Their
            options have no effect: full tensors are gathered on the host of rank 0.
        limit_all_gathers, use_orig_params, sync_module_states: Must be True, which is the behavior of FSDP2, or None.
        forward_prefetch: Gather the next unit during the forward of the current unit.
        activation_checkpointing: Recompute the activations of each unit in backward.
        activation_checkpointing_offload: Not supported. Must be False or None: the inputs of units stay on the device.
        cpu_ram_efficient_loading: See `FSDPStrategy`.
        transformer_cls_names_to_wrap: Names of module classes, in a list or separated by commas.
        min_num_params: Minimum number of parameters of a unit with `"SIZE_BASED_WRAP"`.
    """

    _elsewhere: ClassVar[Mapping[str, str]] = {
        "set_cpu_offload": "Pass cpu_offload.",
        "validate_cpu_offload": _CHECKED,
        "validate_mixed_precision_policy": _CHECKED,
    }

    fsdp_version: int | None = FSDP.field("fsdp_version")
    sharding_strategy: str | int | ShardingStrategy | None = FSDP.field("sharding_strategy")
    reshard_after_forward: str | bool | ShardingStrategy | None = FSDP.field("reshard_after_forward")
    backward_prefetch: Any = FSDP.field("backward_prefetch")
    mixed_precision_policy: MixedPrecision | MixedPrecisionPolicy | dict[str, Any] | str | None = None
    auto_wrap_policy: WrapPolicy | None = FSDP.field("auto_wrap_policy")
    cpu_offload: Any = FSDP.field("cpu_offload")
    ignored_modules: list[nn.Module] | None = None
    state_dict_type: Any = FSDP.field("state_dict_type")
    state_dict_config: Any = None
    optim_state_dict_config: Any = None
    limit_all_gathers: bool = True
    use_orig_params: bool | None = FSDP.field("use_orig_params")
    param_init_fn: Any = None
    sync_module_states: bool | None = FSDP.field("sync_module_states")
    forward_prefetch: bool | None = FSDP.field("forward_prefetch")
    activation_checkpointing: bool | None = FSDP.field("activation_checkpointing")
    activation_checkpointing_offload: bool | None = FSDP.field("activation_checkpointing_offload")
    cpu_ram_efficient_loading: bool | None = FSDP.field("cpu_ram_efficient_loading")
    transformer_cls_names_to_wrap: str | list[str] | None = FSDP.field("transformer_cls_names_to_wrap")
    min_num_params: int | None = FSDP.field("min_num_params")

    def set_mixed_precision(
        self, mixed_precision: str | torch.dtype, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """Set the data type of gathered parameters and of gradient reductions.

        Args:
            mixed_precision: `"bf16"`, `"fp16"`, `"fp32"` or a torch dtype.
            buffer_autocast: Accepted without effect: FSDP2 does not cast buffers.
            override: Replace an existing policy. Default: False, which keeps it and ignores `mixed_precision`.
        """
        del buffer_autocast
        if self.mixed_precision_policy is None or override:
            if isinstance(mixed_precision, str):
                self.mixed_precision_policy = mixed_precision
            else:
                policy = MixedPrecisionPolicy(param_dtype=mixed_precision, reduce_dtype=mixed_precision)
                self.mixed_precision_policy = policy

    def set_state_dict_type(self, state_dict_type: str | StateDictType | None = None) -> None:
        """Set the type of the states that are saved from now on. Every process must set the same type.

        Args:
            state_dict_type: `"FULL_STATE_DICT"`, `"SHARDED_STATE_DICT"` or torch's `StateDictType`. Default: None,
                which is the plugin's type, or else `"SHARDED_STATE_DICT"`.

        Raises:
            ConfigurationError: The type is unknown.
        """
        kind = state_dict_type_name(state_dict_type or self.state_dict_type or "sharded")
        self.state_dict_type = StateDictType[f"{kind.upper()}_STATE_DICT"]

    def set_auto_wrap_policy(self, model: nn.Module) -> None:
        """Replace a named `auto_wrap_policy` by torch's policy for the modules of `model`. Not collective.

        `"TRANSFORMER_BASED_WRAP"` without class names takes those in the model's `_no_split_modules`. A policy that is
        None, a function or `"NO_WRAP"` is not changed.

        Raises:
            ConfigurationError: The model has no module of a class, or no class is named.
        """
        name = str(self.auto_wrap_policy).upper()
        if name == "SIZE_BASED_WRAP" and self.min_num_params:
            self.auto_wrap_policy = partial(size_based_auto_wrap_policy, min_num_params=self.min_num_params)
        if name != "TRANSFORMER_BASED_WRAP":
            return
        names = self.transformer_cls_names_to_wrap or getattr(model, "_no_split_modules", None)
        if not names:
            raise ConfigurationError(
                f'auto_wrap_policy="TRANSFORMER_BASED_WRAP": {type(model).__name__} has no _no_split_modules. Pass '
                "transformer_cls_names_to_wrap."
            )
        if isinstance(names, str):
            names = [part.strip() for part in names.split(",")]
        units = matching(model, list(names), "transformer_cls_names_to_wrap")
        self.auto_wrap_policy = ModuleWrapPolicy({type(unit) for unit in units})

    def strategy(self, num_processes: int) -> FSDPStrategy:
        """Return the strategy with the same options.

        Raises:
            ConfigurationError: An option is unknown, or the strategy does not support it.
        """
        config = self.to_dict()
        for name in ("state_dict_config", "optim_state_dict_config"):
            torch_config = config.pop(name)
            if torch_config is None:
                continue
            kind = _kind(name, torch_config)
            if not config["state_dict_type"]:
                config["state_dict_type"] = kind
            elif state_dict_type_name(config["state_dict_type"]) != kind:
                raise ConfigurationError(
                    f"{name}={type(torch_config).__name__} and state_dict_type={self.state_dict_type!r} differ. "
                    "Remove one of them."
                )
        if str(self.backward_prefetch).upper() == "NO_PREFETCH":
            del config["backward_prefetch"]  # FSDP2 always prefetches
        if config.pop("fsdp_version") not in (None, 1, 2):
            raise ConfigurationError(f"fsdp_version={self.fsdp_version!r} is unknown. Use 2.")
        by_classes = str(self.auto_wrap_policy).upper() == "TRANSFORMER_BASED_WRAP"
        if by_classes and self.transformer_cls_names_to_wrap is None:
            del config["auto_wrap_policy"]  # the model names its units
        return FSDPStrategy.from_config(config)


def _kind(name: str, config: object) -> str:
    """Return the `state_dict_type` of a torch configuration."""
    if isinstance(config, (FullStateDictConfig, FullOptimStateDictConfig)):
        return "full"
    if isinstance(config, (ShardedStateDictConfig, ShardedOptimStateDictConfig)):
        return "sharded"
    raise ConfigurationError(
        f"{name} is a {type(config).__name__}. Use torch's configuration for FULL_STATE_DICT or SHARDED_STATE_DICT, "
        "such as FullStateDictConfig, or remove it."
    )


@dataclass
class TorchTensorParallelPlugin(KwargsHandler):
    """Options of tensor parallelism, with the names of Hugging Face Accelerate.

    Attributes:
        tp_size: Number of ranks that split the layers of one model. With more processes, each group of `tp_size` ranks
            reads different data, and parameters are sharded over the groups, as with `FSDPStrategy(tp=…)`. Default: the
            environment variable `TP_SIZE`, or 1.
        torch_device_mesh: Not supported. Must be None. The mesh is computed from the number of processes.
    """

    tp_size: int | None = from_variable("TP_SIZE", int)
    torch_device_mesh: Any = None

    def strategy(self, num_processes: int) -> FSDPStrategy:
        """Return the strategy with the same options.

        Raises:
            ConfigurationError: `torch_device_mesh` is not None, or `tp_size` is less than 1.
        """
        if self.torch_device_mesh is not None:
            raise ConfigurationError(
                "torch_device_mesh is not supported: the mesh is computed from tp_size and the number of processes. "
                "Remove it."
            )
        size = 1 if self.tp_size is None else self.tp_size
        if size == num_processes:
            return TensorParallelStrategy(tp=size)
        return FSDPStrategy(tp=size)
