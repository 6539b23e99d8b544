"""What may be said about ZeRO as arguments, and where it stands in DeepSpeed's configuration."""

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
_ONLY_IF_GIVEN = ("aio", "fp16", "activation_checkpointing")  # parts that are left out unless something is said of them
REMOVED = {
    **OF_LIGHTNING,
    "remote_device": "with stage=3, what configure_model builds is cut as it is built; offload_parameters=True keeps "
    "it on the host, or offload_params_device='nvme' on a disk",
    "logging_batch_size_per_gpu": "the training loader says it, or train_micro_batch_size_per_gpu in config",
    "load_full_weights": "checkpoints have one layout under every strategy, and weights from anywhere are loaded whole",
    "exclude_frozen_parameters": "ModelCheckpoint saves all weights, which any strategy can load",
}


def _at(*path: str, default: Any) -> Any:
    """Return a field whose value stands at `path` in DeepSpeed's configuration."""
    return field(default=default, metadata={"path": path})


@dataclass(frozen=True, kw_only=True)
class ZeroOptions:
    """The arguments of `DeepSpeedStrategy` that are about ZeRO, with Lightning's names and defaults.

    Attributes:
        zero_optimization: False means stage 0.
        stage: 0: nothing is cut; 1: the optimizer's states are cut into pieces, one for each rank; 2: the gradients
            too; 3: the parameters too.
        offload_optimizer, offload_optimizer_device: states and step of the optimizer are on the host (`"cpu"`), or
            the states on a disk (`"nvme"`, stage 3). The step is then DeepSpeedCPUAdam's.
        offload_parameters, offload_params_device: so for the parameters, at stage 3.
        nvme_path: folder on a fast disk.
        params_buffer_count, params_buffer_size: buffers between disk and host for parameters; size in elements.
        max_in_cpu: parameter elements that stay on the host when the others go to the disk.
        optimizer_buffer_count: buffers for the optimizer's states; at least 4 for Adam.
        block_size, queue_depth, single_submit, overlap_events, thread_count: how the disk is used; block size in bytes.
        pin_memory: host memory that is offloaded to is page-locked.
        sub_group_size: elements that are stepped at a time at stage 3.
        contiguous_gradients, overlap_comm, allgather_partitions, reduce_scatter: how gradients and parameters cross
            ranks.
        allgather_bucket_size, reduce_bucket_size: elements that cross at a time.
        zero_allow_untested_optimizer: other optimizers than Adam are let through.
        partition_activations, cpu_checkpointing, contiguous_memory_optimization, synchronize_checkpoint_boundary: for
            `deepspeed.checkpointing`.
        loss_scale, initial_scale_power, loss_scale_window, hysteresis, min_loss_scale: of float16; 0: found out.
        moe_leaf_modules: names of classes that are gathered as one at stage 3, as layers of experts must be.
        frozen_modules: names of classes of frozen modules, such as a teacher, that are cut at stage 3 by an engine of
            their own, while the rest is at stage 1 or 2.
    """

    zero_optimization: bool = True
    stage: int = _at("zero_optimization", "stage", default=2)
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_params_device: str = "cpu"
    nvme_path: str = "/local_nvme"
    params_buffer_count: int = 5
    params_buffer_size: int = 100_000_000
    max_in_cpu: int = 1_000_000_000
    offload_optimizer_device: str = "cpu"
    optimizer_buffer_count: int = 4
    block_size: int = _at("aio", "block_size", default=1048576)
    queue_depth: int = _at("aio", "queue_depth", default=8)
    single_submit: bool = _at("aio", "single_submit", default=False)
    overlap_events: bool = _at("aio", "overlap_events", default=True)
    thread_count: int = _at("aio", "thread_count", default=1)
    pin_memory: bool = False
    sub_group_size: int = _at("zero_optimization", "sub_group_size", default=1_000_000_000_000)
    contiguous_gradients: bool = _at("zero_optimization", "contiguous_gradients", default=True)
    overlap_comm: bool = _at("zero_optimization", "overlap_comm", default=True)
    allgather_partitions: bool = _at("zero_optimization", "allgather_partitions", default=True)
    reduce_scatter: bool = _at("zero_optimization", "reduce_scatter", default=True)
    allgather_bucket_size: int = _at("zero_optimization", "allgather_bucket_size", default=200_000_000)
    reduce_bucket_size: int = _at("zero_optimization", "reduce_bucket_size", default=200_000_000)
    zero_allow_untested_optimizer: bool = _at("zero_allow_untested_optimizer", default=True)
    partition_activations: bool = _at("activation_checkpointing", "partition_activations", default=False)
    cpu_checkpointing: bool = _at("activation_checkpointing", "cpu_checkpointing", default=False)
    contiguous_memory_optimization: bool = _at(
        "activation_checkpointing", "contiguous_memory_optimization", default=False
    )
    synchronize_checkpoint_boundary: bool = _at(
        "activation_checkpointing", "synchronize_checkpoint_boundary", default=False
    )
    loss_scale: float = _at("fp16", "loss_scale", default=0)
    initial_scale_power: int = _at("fp16", "initial_scale_power", default=16)
    loss_scale_window: int = _at("fp16", "loss_scale_window", default=1000)
    hysteresis: int = _at("fp16", "hysteresis", default=2)
    min_loss_scale: int = _at("fp16", "min_loss_scale", default=1)
    moe_leaf_modules: tuple[str, ...] = ()
    frozen_modules: tuple[str, ...] = ()


NAMES = tuple(each.name for each in fields(ZeroOptions))


def read_options(given: Mapping[str, Any]) -> ZeroOptions:
    """Read the arguments that were given."""
    options = ZeroOptions(**given)
    if options.stage not in (0, 1, 2, 3) or isinstance(options.stage, bool):
        raise ConfigurationError(f"stage={options.stage!r}: write 0, 1, 2 or 3.")
    if not options.zero_optimization and given.get("stage", 0) != 0:
        raise ConfigurationError(
            f"zero_optimization=False and stage={options.stage} contradict each other. Leave one out."
        )
    for _, name in OFFLOADS.values():
        value = getattr(options, name)
        if value not in DEVICES:
            raise ConfigurationError(
                f"{name}={value!r} is unknown.{nearest(str(value), DEVICES)} Write 'cpu' or 'nvme'."
            )
    return options


def statements(options: ZeroOptions, given: Mapping[str, Any]) -> dict[Path, tuple[str, Any]]:
    """Return what the arguments that were given say: path in DeepSpeed's configuration → (the argument, value)."""
    found: dict[Path, tuple[str, Any]] = {
        each.metadata["path"]: (each.name, given[each.name])
        for each in fields(options)
        if each.name in given and "path" in each.metadata
    }
    if given.get("zero_optimization") is False:
        found["zero_optimization", "stage"] = ("zero_optimization", 0)
    for part, (switch, device) in OFFLOADS.items():
        if switch in given or device in given:
            on = getattr(options, switch) if switch in given else True
            name = device if device in given and on else switch
            found["zero_optimization", part, "device"] = (name, getattr(options, device) if on else "none")
            if on:
                found |= {path: entry for path, entry in buffers(part, options).items() if entry[0] in given}
    return found


def buffers(part: str, options: ZeroOptions) -> dict[Path, tuple[str, Any]]:
    """Return what is said about an offload (`"offload_optimizer"` or `"offload_param"`) besides its device."""
    places = {
        "offload_optimizer": {"buffer_count": "optimizer_buffer_count"},
        "offload_param": {
            "buffer_count": "params_buffer_count", "buffer_size": "params_buffer_size", "max_in_cpu": "max_in_cpu",
        },
    }  # fmt: skip
    names = {"nvme_path": "nvme_path", "pin_memory": "pin_memory", **places[part]}
    return {("zero_optimization", part, key): (name, getattr(options, name)) for key, name in names.items()}


def defaults(options: ZeroOptions) -> dict[Path, Any]:
    """Return what Lightning's defaults put into a configuration of which the user has written nothing."""
    return {
        each.metadata["path"]: getattr(options, each.name)
        for each in fields(options)
        if "path" in each.metadata and each.metadata["path"][0] not in _ONLY_IF_GIVEN
    }


def place(config: dict[str, Any], path: Path, value: Any) -> None:
    """Set the value at a path in nested dicts."""
    for key in path[:-1]:
        config = config.setdefault(key, {})
    config[path[-1]] = value


def look_up(config: Mapping[str, Any], path: Path) -> Any:
    """Return the value at a path in nested dicts; None where there is none."""
    found: Any = config
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            return None
        found = found[key]
    return found
