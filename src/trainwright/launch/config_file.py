"""Configuration files of `trainwright launch`: writing, default values, and conversion from FSDP1 to FSDP2.

A file that cannot be written raises ConfigurationError.
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import ConfigurationError
from trainwright.core.names.constants import FSDP_SHARDING_STRATEGY
from trainwright.launch.launch import check_options, device_count
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import FILE_NAMES, TYPES, config_folders, known_options

_AXES = "parallelism_config"
# Options of FSDP1 that FSDP2 does not have, besides fsdp_sharding_strategy, which is translated.
_REMOVED_OF_FSDP1 = (
    "fsdp_backward_prefetch",
    "fsdp_forward_prefetch",
    "fsdp_sync_module_states",
    "fsdp_use_orig_params",
)


def default_path() -> Path:
    """Return the path of the file that is written and read by default."""
    return config_folders()[0] / FILE_NAMES[0]


def content_of(config: LaunchConfig, devices: str = "MULTI_GPU") -> dict[str, Any]:
    """Return the content of a file in the layout of `accelerate config`. `options_of` reads the same options back.

    Args:
        config: The options.
        devices: Value of `distributed_type` for several processes on accelerators. Default: `"MULTI_GPU"`.
    """
    # Options that `distributed_type` and `compute_environment` stand for. The file does not repeat them.
    implied: dict[str, Any]
    content: dict[str, Any]
    if config.sagemaker:
        implied = {"sagemaker": True, "sagemaker_distributed_type": config.sagemaker_distributed_type}
        content = {"compute_environment": "AMAZON_SAGEMAKER"}
        if config.sagemaker_distributed_type is not None:
            content["distributed_type"] = config.sagemaker_distributed_type
    else:
        kind = _type_of(config, devices)
        implied = dict(TYPES.get(kind, {}))
        content = {"compute_environment": "LOCAL_MACHINE", "distributed_type": kind}
    sections: dict[str, dict[str, Any]] = {}
    for name, value in config.set_options().items():
        section = known_options()[name].section
        if section == _AXES and config.use_parallelism_config is None:
            section = ""  # a section would set use_parallelism_config
        if value in ("True", "False"):  # an option that is a truth value or a name
            value = value == "True"
        if section:
            sections.setdefault(section, {})[name] = value
        elif implied.get(name) != value:
            key = "use_cpu" if name == "cpu" else name  # Accelerate's name
            content[key] = value
    if sections.get(_AXES) and config.use_parallelism_config:
        del content["use_parallelism_config"]  # the section stands for it
    return content | sections


def _type_of(config: LaunchConfig, devices: str) -> str:
    """Return the value of `distributed_type`. `devices` is that for several processes on accelerators."""
    for kind, values in TYPES.items():
        if values and any(getattr(config, name) for name in values):
            return kind
    if (config.num_processes or 1) > 1 or (config.num_machines or 1) > 1:
        return "MULTI_CPU" if config.cpu else devices
    return "NO"


def write_file(config: LaunchConfig, path: Path, devices: str = "MULTI_GPU") -> Path:
    """Write a configuration file and return its path. JSON if its name ends in `.json`, else YAML.

    Args:
        config: The options.
        path: The file. Its folder is created.
        devices: See `content_of`.

    Raises:
        ConfigurationError: The file cannot be written.
    """
    import yaml  # not needed for `--help`

    content = content_of(config, devices)
    if path.suffix == ".json":
        text = f"{json.dumps(content, indent=2)}\n"
    else:
        text = yaml.safe_dump(content)
    # A full disk must not leave half a file in place of the old one. A symbolic link stays, and its target is replaced.
    target = path.resolve()
    partial = target.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(text, encoding="utf-8")
        partial.replace(target)
    except OSError as error:
        with suppress(OSError):
            partial.unlink()
        raise ConfigurationError(
            f"config_file={str(path)!r} cannot be written: {error}. Pass --config_file with another path."
        ) from error
    return path


def basic_config(mixed_precision: str = "no") -> LaunchConfig:
    """Return the options of one process for each device of this machine."""
    devices = device_count()
    config = LaunchConfig(
        cpu=devices == 0,
        num_machines=1,
        num_processes=devices or 1,
        mixed_precision=known_options()["mixed_precision"].parse(mixed_precision, "a basic configuration"),
    )
    check_options(config)
    return config


def write_basic_config(
    mixed_precision: str = "no", save_location: str | os.PathLike[str] | None = None
) -> Path | Literal[False]:
    """Write a configuration file with one process for each device of this machine.

    Args:
        mixed_precision: `"no"`, `"fp16"`, `"bf16"` or `"fp8"`. Default: `"no"`.
        save_location: The file. Default: None, which is the file that `trainwright launch` reads by default.

    Returns:
        The path of the file. False if the file already exists. It is then not changed.

    Raises:
        ConfigurationError: The precision is unknown, or the file cannot be written.
    """
    path = default_path() if save_location is None else Path(save_location)
    config = basic_config(mixed_precision)
    if path.is_file():
        print(f"{path} exists and stays as it is. Delete it, or pass another save_location.")
        return False
    return write_file(config, path)


def to_fsdp2(config: LaunchConfig, origin: str) -> tuple[LaunchConfig, list[str]]:
    """Convert options of FSDP1 to FSDP2. Also return the set options that FSDP2 does not have, by name.

    Args:
        config: Options of `trainwright launch` with options of FSDP1.
        origin: Path of the file, for errors.

    Raises:
        ConfigurationError: The options are not of FSDP1, FSDP2 has no counterpart of the sharding strategy, or a hybrid
            strategy on several machines has no `num_processes`.
    """
    if not config.use_fsdp:
        raise ConfigurationError(f"{origin} does not describe FSDP. Add distributed_type: FSDP.")
    if config.fsdp_version == 2:
        raise ConfigurationError(f"{origin} has fsdp_version: 2 already. Use it as it is.")
    strategy = _sharding_strategy(config)
    if strategy == "NO_SHARD" or strategy not in FSDP_SHARDING_STRATEGY:
        advice = "It is unknown"
        if strategy == "NO_SHARD":
            advice = "FSDP2 always shards. Use distributed_type: MULTI_GPU"
        raise ConfigurationError(f"{origin}: fsdp_sharding_strategy={strategy!r} has no counterpart. {advice}.")
    reshards = strategy in ("FULL_SHARD", "HYBRID_SHARD")
    values: dict[str, Any] = {"fsdp_version": 2, "fsdp_reshard_after_forward": str(reshards)}
    machines = config.num_machines or 1
    # FSDP1 shards within each machine and replicates over machines. FSDP2 needs two axes of a mesh for this.
    shards_within_machines = strategy.startswith("HYBRID") and machines > 1
    removed: list[str] = []
    if shards_within_machines and config.use_parallelism_config:
        if config.parallelism_config_dp_replicate_size is None:
            removed.append(f"fsdp_sharding_strategy={strategy}, which is {_AXES}_dp_replicate_size={machines} in FSDP2")
    elif shards_within_machines:
        if config.num_processes is None:
            raise ConfigurationError(f"{origin}: {strategy} needs num_processes. Write it into the file.")
        values["use_parallelism_config"] = True
        values[f"{_AXES}_dp_replicate_size"] = machines
        values[f"{_AXES}_dp_shard_size"] = config.num_processes // machines
    values["fsdp_sharding_strategy"] = None
    for name in _REMOVED_OF_FSDP1:
        values[name] = None
        if getattr(config, name) is not None:
            removed.append(name)
    return replace(config, **values), removed


def _sharding_strategy(config: LaunchConfig) -> str:
    """Return the strategy of FSDP1 by name, such as `"FULL_SHARD"`, which is the default."""
    strategy = config.fsdp_sharding_strategy
    reshards = str(config.fsdp_reshard_after_forward)
    if not strategy and reshards.upper() in FSDP_SHARDING_STRATEGY:
        strategy = reshards  # files of FSDP1 may have the strategy under this key
    if not strategy:
        return "FULL_SHARD"
    # {"1": "FULL_SHARD", "2": "SHARD_GRAD_OP", …}
    names_by_number = {str(number): name for number, name in enumerate(FSDP_SHARDING_STRATEGY, 1)}
    return names_by_number.get(strategy, strategy.upper())
