"""Arguments for ZeRO, and their paths in DeepSpeed's configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.strategies.capabilities import OF_LIGHTNING

Path = tuple[str, ...]
DEVICES = ("none", "cpu", "nvme")
# Part of DeepSpeed's configuration → the arguments that switch it on and name its device.
OFFLOADS = {
    "offload_optimizer": ("offload_optimizer", "offload_optimizer_device"),
    "offload_param": ("offload_parameters", "offload_params_device"),
}
# Sections that are written only with passed arguments. Without them, DeepSpeed uses the same default values.
_ONLY_IF_PASSED = ("aio", "fp16", "activation_checkpointing")
REMOVED = {
    **OF_LIGHTNING,
    "remote_device": "with stage=3, modules are sharded while configure_model builds them; offload_parameters=True "
    "keeps them on the host, offload_params_device='nvme' on disk",
    "logging_batch_size_per_gpu": "the batch size is that of the training loader, or train_micro_batch_size_per_gpu in "
    "config",
    "load_full_weights": "every strategy loads full weights from every checkpoint",
    "exclude_frozen_parameters": "ModelCheckpoint saves all weights, which any strategy can load",
}


def _option(default: object, *path: str) -> Any:
    """Return a field that is None if it is not passed.

    Args:
        default: Value of the option if neither the argument nor the user's configuration sets it.
        path: Keys of the option in DeepSpeed's configuration. Empty if several options together determine keys.
    """
    return field(default=None, metadata={"default": default, "path": path})


@dataclass(frozen=True, kw_only=True, repr=False)
class ZeroOptions:
    """The ZeRO arguments of `DeepSpeedStrategy`, with Lightning's names and defaults.

    A field is None if the argument is not passed. `DEFAULTS` contains the defaults.

    Attributes:
        zero_optimization: False means stage 0.
        stage: 0 shards nothing; 1 shards optimizer states; 2 also shards gradients; 3 also shards parameters.
        offload_optimizer: Offload optimizer states, and step on the host. torch's Adam and AdamW are converted to
            DeepSpeedCPUAdam. Any other optimizer must be DeepSpeedCPUAdam or similar.
        offload_optimizer_device: `"cpu"` stores the states in host memory. `"nvme"` stores them on disk, at stage 3
            only.
        offload_parameters, offload_params_device: The two options above for parameters instead of states. Stage 3 only.
        nvme_path: Folder on a fast disk.
        params_buffer_count: Number of host buffers for parameters on disk.
        params_buffer_size: Number of elements of each buffer.
        max_in_cpu: Number of parameter elements that stay in host memory. The other parameters are offloaded to disk.
        optimizer_buffer_count: Number of host buffers for optimizer states on disk. Adam needs at least 4.
        block_size: Block size of disk access in bytes.
        queue_depth, single_submit, overlap_events, thread_count: Further options of DeepSpeed's disk access.
        pin_memory: Use page-locked host memory for offload.
        sub_group_size: Number of elements per optimizer sub-step at stage 3.
        contiguous_gradients, overlap_comm, allgather_partitions, reduce_scatter: See `zero_optimization` in DeepSpeed's
            documentation.
        allgather_bucket_size, reduce_bucket_size: Number of elements per collective.
        zero_allow_untested_optimizer: Allow optimizers other than Adam.
        partition_activations, cpu_checkpointing, contiguous_memory_optimization, synchronize_checkpoint_boundary:
            Options of `deepspeed.checkpointing`.
        loss_scale, initial_scale_power, loss_scale_window, hysteresis, min_loss_scale: Loss scaling for float16.
            `loss_scale=0` is dynamic.
        moe_leaf_modules: Class names of modules whose parameters stage 3 gathers together. Required for layers of
            experts.
        frozen_modules: Class names of frozen modules, such as a teacher. A separate stage-3 engine shards them, while
            the rest of the model is at stage 1 or 2.
    """

    zero_optimization: bool | None = _option(True)
    stage: int | None = _option(2, "zero_optimization", "stage")
    offload_optimizer: bool | None = _option(False)
    offload_parameters: bool | None = _option(False)
    offload_params_device: str | None = _option("cpu")
    nvme_path: str | None = _option("/local_nvme")
    params_buffer_count: int | None = _option(5)
    params_buffer_size: int | None = _option(100_000_000)
    max_in_cpu: int | None = _option(1_000_000_000)
    offload_optimizer_device: str | None = _option("cpu")
    optimizer_buffer_count: int | None = _option(4)
    block_size: int | None = _option(1048576, "aio", "block_size")
    queue_depth: int | None = _option(8, "aio", "queue_depth")
    single_submit: bool | None = _option(False, "aio", "single_submit")
    overlap_events: bool | None = _option(True, "aio", "overlap_events")
    thread_count: int | None = _option(1, "aio", "intra_op_parallelism")
    pin_memory: bool | None = _option(False)
    sub_group_size: int | None = _option(1_000_000_000_000, "zero_optimization", "sub_group_size")
    contiguous_gradients: bool | None = _option(True, "zero_optimization", "contiguous_gradients")
    overlap_comm: bool | None = _option(True, "zero_optimization", "overlap_comm")
    allgather_partitions: bool | None = _option(True, "zero_optimization", "allgather_partitions")
    reduce_scatter: bool | None = _option(True, "zero_optimization", "reduce_scatter")
    allgather_bucket_size: int | None = _option(200_000_000, "zero_optimization", "allgather_bucket_size")
    reduce_bucket_size: int | None = _option(200_000_000, "zero_optimization", "reduce_bucket_size")
    zero_allow_untested_optimizer: bool | None = _option(True, "zero_allow_untested_optimizer")
    partition_activations: bool | None = _option(False, "activation_checkpointing", "partition_activations")
    cpu_checkpointing: bool | None = _option(False, "activation_checkpointing", "cpu_checkpointing")
    contiguous_memory_optimization: bool | None = _option(
        False, "activation_checkpointing", "contiguous_memory_optimization"
    )
    synchronize_checkpoint_boundary: bool | None = _option(
        False, "activation_checkpointing", "synchronize_checkpoint_boundary"
    )
    loss_scale: float | None = _option(0, "fp16", "loss_scale")
    initial_scale_power: int | None = _option(16, "fp16", "initial_scale_power")
    loss_scale_window: int | None = _option(1000, "fp16", "loss_scale_window")
    hysteresis: int | None = _option(2, "fp16", "hysteresis")
    min_loss_scale: int | None = _option(1, "fp16", "min_loss_scale")
    moe_leaf_modules: tuple[str, ...] | None = _option(())
    frozen_modules: tuple[str, ...] | None = _option(())


DEFAULTS = {each.name: each.metadata["default"] for each in fields(ZeroOptions)}
"""Values of options that neither an argument nor the user's configuration sets."""


def passed_options(given: ZeroOptions) -> dict[str, Any]:
    """Return the arguments that were passed, by name."""
    values = {each.name: getattr(given, each.name) for each in fields(ZeroOptions)}
    return {name: value for name, value in values.items() if value is not None}


def read_options(given: ZeroOptions) -> ZeroOptions:
    """Check the arguments that were passed, and return all options. The others have their default values.

    Raises:
        ConfigurationError: The stage or a device is unknown, or `stage` contradicts `zero_optimization=False`.
    """
    passed = passed_options(given)
    options = ZeroOptions(**(DEFAULTS | passed))
    if options.stage not in (0, 1, 2, 3) or isinstance(options.stage, bool):
        raise ConfigurationError(f"stage={options.stage!r}: write 0, 1, 2 or 3.")
    if not options.zero_optimization and passed.get("stage", 0) != 0:
        raise ConfigurationError(
            f"zero_optimization=False and stage={options.stage} contradict each other. Remove one of them."
        )
    for _, name in OFFLOADS.values():
        value = getattr(options, name)
        if value not in DEVICES:
            raise ConfigurationError(
                f"{name}={value!r} is unknown.{nearest(str(value), DEVICES)} Write 'cpu' or 'nvme'."
            )
    return options


def statements(given: ZeroOptions) -> dict[Path, tuple[str, Any]]:
    """Return the passed arguments as {path in DeepSpeed's configuration: (argument name, value)}.

    For example `offload_optimizer=True` gives `{("zero_optimization", "offload_optimizer", "device"):
    ("offload_optimizer", "cpu")}`.
    """
    passed = passed_options(given)
    options = read_options(given)
    values: dict[Path, tuple[str, Any]] = {}
    for each in fields(ZeroOptions):
        path: Path = each.metadata["path"]
        if path and each.name in passed:
            values[path] = (each.name, passed[each.name])
    if passed.get("zero_optimization") is False:
        values["zero_optimization", "stage"] = ("zero_optimization", 0)
    for part, (switch, device) in OFFLOADS.items():
        if switch not in passed and device not in passed:
            continue
        device_path = ("zero_optimization", part, "device")
        is_on = passed.get(switch, True)  # a device without the switch turns offloading on
        if not is_on:
            values[device_path] = (switch, "none")
            continue
        name = device if device in passed else switch
        values[device_path] = (name, getattr(options, device))
        for path, (name, value) in buffers(part, options).items():
            if name in passed:
                values[path] = (name, value)
    return values


def buffers(part: str, options: ZeroOptions) -> dict[Path, tuple[str, Any]]:
    """Return {path: (argument name, value)} for `"offload_optimizer"` or `"offload_param"`, without the device."""
    # Key in the part → argument name.
    buffer_options = {
        "offload_optimizer": {"buffer_count": "optimizer_buffer_count"},
        "offload_param": {
            "buffer_count": "params_buffer_count",
            "buffer_size": "params_buffer_size",
            "max_in_cpu": "max_in_cpu",
        },
    }
    names = {"nvme_path": "nvme_path", "pin_memory": "pin_memory", **buffer_options[part]}
    return {("zero_optimization", part, key): (name, getattr(options, name)) for key, name in names.items()}


def defaults(options: ZeroOptions) -> dict[Path, Any]:
    """Return {path: value} of options for a user without a configuration. Sections such as `"fp16"` are omitted."""
    values: dict[Path, Any] = {}
    for each in fields(options):
        path: Path = each.metadata["path"]
        if path and path[0] not in _ONLY_IF_PASSED:
            values[path] = getattr(options, each.name)
    return values


def set_value(config: dict[str, Any], path: Path, value: object) -> None:
    """Set the value at a path in nested dicts."""
    for key in path[:-1]:
        config = config.setdefault(key, {})
    config[path[-1]] = value


def look_up(config: Mapping[str, Any], path: Path) -> Any:
    """Return the value at a path in nested dicts, or None if there is none."""
    value: Any = config
    for key in path:
        if not isinstance(value, Mapping) or key not in value:
            return None
        value = value[key]
    return value
