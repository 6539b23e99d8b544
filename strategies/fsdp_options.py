"""What may be said about sharding, in this framework's words and in those of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD")

_REMOVED = {
    "use_orig_params": "FSDP2 always keeps the original parameters, frozen and trainable ones side by side",
    "fsdp_use_orig_params": "FSDP2 always keeps the original parameters, frozen and trainable ones side by side",
    "limit_all_gathers": "FSDP2 frees memory without having to hold gathers back",
    "sync_module_states": "rank 0's weights always go to all ranks",
    "fsdp_sync_module_states": "rank 0's weights always go to all ranks",
    "state_dict_type": "checkpoints have one layout under every strategy",
    "fsdp_state_dict_type": "checkpoints have one layout under every strategy",
    "device_id": "Trainer(devices=…) says it",
    "param_init_fn": "define reset_parameters in the modules that are built on the device 'meta'",
    "ignored_modules": "every parameter of the task is sharded; keep a module that shall not be outside of the task",
    "backward_prefetch": "FSDP2 gathers the next unit while backward runs, by itself",
    "process_group": "Trainer(devices=…) and device_mesh say which ranks take part",
}
# Options whose one usable value asks for what happens anyway.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "fsdp_use_orig_params": (True, "true"),
    "fsdp_sync_module_states": (True, "true"),
    "fsdp_backward_prefetch": ("BACKWARD_PRE", "backward_pre", None),
    "fsdp_backward_prefetch_policy": ("BACKWARD_PRE", "backward_pre", None),
    "fsdp_cpu_ram_efficient_loading": (True, "true", False, "false"),
    "fsdp_version": (2, "2"),
}
_NUMBERED = {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD"}


def refuse_removed(options: Mapping[str, Any], known: tuple[str, ...]) -> None:
    """Raise for arguments that the strategy does not take, saying what has become of those of FSDP1.

    Raises:
        ConfigurationError: there is any.
    """
    for name, value in options.items():
        if name in _REMOVED:
            raise ConfigurationError(f"{name}={value!r} is an option of FSDP1: {_REMOVED[name]}. Leave it out.")
        raise ConfigurationError(
            f"FSDPStrategy has no argument {name!r}.{nearest(name, known)} It takes: {', '.join(known)}."
        )


def read_fsdp_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Read Hugging Face Accelerate's `fsdp_config` (its names, with or without `fsdp_`) into FSDPStrategy's arguments.

    Raises:
        ConfigurationError: an option that is unknown, or that FSDP2 does not have and that asks for something.
    """
    found: dict[str, Any] = {}
    policy = str(_get(config, "fsdp_auto_wrap_policy", "NO_WRAP")).upper()
    for given, value in config.items():
        name = given if given.startswith("fsdp_") else f"fsdp_{given}"
        if name in _HARMLESS and value in _HARMLESS[name]:
            continue
        if name == "fsdp_sharding_strategy":
            found["sharding_strategy"] = _NUMBERED.get(str(value), str(value).upper())
        elif name == "fsdp_offload_params":
            found["cpu_offload"] = _flag(given, value)
        elif name == "fsdp_activation_checkpointing":
            found["activation_checkpointing"] = _flag(given, value)
        elif name == "fsdp_reshard_after_forward":
            found |= _reshard(given, value)
        elif name == "fsdp_forward_prefetch":
            found["forward_prefetch"] = int(_flag(given, value))
        elif name == "fsdp_transformer_layer_cls_to_wrap":
            if policy == "TRANSFORMER_BASED_WRAP":
                names = value.split(",") if isinstance(value, str) else value
                found["auto_wrap_policy"] = [part.strip() if isinstance(part, str) else part for part in names]
        elif name == "fsdp_min_num_params":
            if policy == "SIZE_BASED_WRAP":
                found["min_num_params"] = int(value)
        elif name == "fsdp_auto_wrap_policy":
            _check_policy(given, policy, config)
        elif name == "fsdp_state_dict_type":
            continue  # checkpoints have one layout, which every strategy and number of ranks reads
        else:
            reason = _REMOVED.get(name, _REMOVED.get(given, "it is not known here"))
            raise ConfigurationError(f"{given}={value!r}: {reason}. Leave it out.")
    return found


def _check_policy(given: str, policy: str, config: Mapping[str, Any]) -> None:
    needs = {
        "TRANSFORMER_BASED_WRAP": "fsdp_transformer_layer_cls_to_wrap", "SIZE_BASED_WRAP": "fsdp_min_num_params",
        "NO_WRAP": None,
    }  # fmt: skip
    if policy not in needs:
        raise ConfigurationError(f"{given}={policy!r} is unknown.{nearest(policy, needs)} Known: {', '.join(needs)}.")
    needed = needs[policy]
    if needed is not None and _get(config, needed, None) is None:
        raise ConfigurationError(f"{given}={policy!r} needs {needed}. Say it, or define shard_units in the task.")


def _reshard(given: str, value: Any) -> dict[str, Any]:
    # With version 1 of FSDP this option held the sharding strategy.
    if str(value).upper() in SHARDING_STRATEGIES:
        return {"sharding_strategy": str(value).upper()}
    return {"reshard_after_forward": _flag(given, value)}


def _get(config: Mapping[str, Any], name: str, default: Any) -> Any:
    return config.get(name, config.get(name.removeprefix("fsdp_"), default))


def _flag(name: str, value: Any) -> bool:
    flags = {"true": True, "1": True, "false": False, "0": False, "none": False}
    found = flags.get(str(value).lower())
    if found is None:
        raise ConfigurationError(f"{name}={value!r}: write true or false.")
    return found


def check_arguments(
    sharding_strategy: str,
    device_mesh: Any,
    auto_wrap_policy: Any,
    min_num_params: Any,
    reshard_after_forward: Any,
    forward_prefetch: Any,
) -> None:
    """Check arguments of FSDPStrategy (see there) that need nothing else to be judged.

    Raises:
        ConfigurationError: a value that is unknown, or two that exclude each other.
    """
    if sharding_strategy not in SHARDING_STRATEGIES:
        raise ConfigurationError(
            f"sharding_strategy={sharding_strategy!r} is unknown."
            f"{nearest(str(sharding_strategy), SHARDING_STRATEGIES)} Known: {', '.join(SHARDING_STRATEGIES)}."
        )
    if device_mesh is not None and (
        len(device_mesh) != 2 or not all(isinstance(n, int) and n > 0 for n in device_mesh)
    ):
        raise ConfigurationError(
            f"device_mesh={device_mesh!r}: write (replicas, ranks that share one), such as (2, 4)."
        )
    if auto_wrap_policy is not None and min_num_params is not None:
        raise ConfigurationError("auto_wrap_policy and min_num_params both say what is a unit. Leave one out.")
    if min_num_params is not None and (not isinstance(min_num_params, int) or min_num_params < 1):
        raise ConfigurationError(f"min_num_params={min_num_params!r}: write a whole number, such as 1_000_000.")
    if sharding_strategy in ("SHARD_GRAD_OP", "NO_SHARD") and reshard_after_forward not in (None, False):
        raise ConfigurationError(
            f"sharding_strategy={sharding_strategy!r} keeps parameters whole after the forward, and "
            f"reshard_after_forward={reshard_after_forward!r} cuts them. Leave one out."
        )
    if not isinstance(forward_prefetch, int) or forward_prefetch < 0:
        raise ConfigurationError(f"forward_prefetch={forward_prefetch!r}: write a number of units, such as 1.")
