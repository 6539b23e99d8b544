"""Options of sharding, with the names of this and other frameworks. Invalid options raise a ConfigurationError."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy, MixedPrecision, MixedPrecisionPolicy, OffloadPolicy
from torch.optim import Optimizer

from trainwright.checkpoint.format.quantized_state import is_even
from trainwright.core.errors import ConfigurationError, nearest
from trainwright.strategies.capabilities import OF_LIGHTNING, REFUSALS
from trainwright.strategies.fsdp.option_table import FSDP
from trainwright.strategies.mesh import MeshShape
from trainwright.strategies.precision import Precision
from trainwright.strategies.state import state_dict_type_name
from trainwright.strategies.steps.binding import need_closure

SHARDING_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2", "NO_SHARD")
RESHARDING = ("FULL_SHARD", "HYBRID_SHARD")  # they free full parameters after the forward
_ONE_REPLICA_PER_NODE = ("HYBRID_SHARD", "HYBRID_SHARD_ZERO2")  # without device_mesh
AFTER_STAGE = ("all", "main", "none")

_ORIGINAL = "FSDP2 always keeps the original parameters, so a unit may have frozen and trainable ones"
_ONE_LAYOUT = "checkpoints have the same layout under every strategy and number of ranks"
_BY_ITSELF = "FSDP2 always gathers the next unit while backward runs"
REMOVED = {
    "use_orig_params": _ORIGINAL,
    "limit_all_gathers": "FSDP2 does not need to delay all-gathers to free memory",
    "sync_module_states": "rank 0's weights are always broadcast to all ranks",
    "state_dict_config": _ONE_LAYOUT,
    "optim_state_dict_config": _ONE_LAYOUT,
    "device_id": "use Trainer(devices=…)",
    "param_init_fn": "define reset_parameters in the modules that are built on the device 'meta'",
    "ignored_modules": "every parameter of the task is sharded; store a module that must not be sharded elsewhere",
    "ignored_states": "every parameter of the task is sharded; store a parameter that must not be sharded elsewhere",
    "backward_prefetch": _BY_ITSELF,
    "backward_prefetch_policy": _BY_ITSELF,
    "process_group": "Trainer(devices=…) and device_mesh select the ranks",
    "activation_checkpointing_offload": "activations that checkpointing stores stay on the device",
    "version": "only FSDP2 is available, which also reads the options of version 1",
    **OF_LIGHTNING,
}
# Options by name without `fsdp_`, with the values that are accepted because FSDP2 always behaves so.
_HARMLESS: dict[str, tuple[Any, ...]] = {
    "use_orig_params": ("true",),
    "sync_module_states": ("true",),
    "limit_all_gathers": ("true",),
    "backward_prefetch": ("backward_pre",),
    "backward_prefetch_policy": ("backward_pre",),
    "activation_checkpointing_offload": ("false",),
    "version": ("2",),
}
_CLASSES = "transformer_cls_names_to_wrap"
_OF_UNITS = ("auto_wrap_policy", "min_num_params", _CLASSES)  # read together by `_unit_arguments`
# Sharding strategies by the number that Accelerate's configuration files use.
_NUMBERED = {
    "1": "FULL_SHARD", "2": "SHARD_GRAD_OP", "3": "NO_SHARD", "4": "HYBRID_SHARD", "5": "HYBRID_SHARD_ZERO2"
}  # fmt: skip


def read_fsdp_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Convert Hugging Face Accelerate's `fsdp_config` to FSDPStrategy's arguments.

    Args:
        config: Options by name, with or without the prefix `fsdp_`, or fields of `FullyShardedDataParallelPlugin`. An
            option of None has its default value.

    Raises:
        ConfigurationError: An option is unknown or has an invalid or unsupported value.
    """
    # Field of the plugin → (name in `config`, which errors show; value).
    # For example {"cpu_offload": ("fsdp_offload_params", "true")}.
    options: dict[str, tuple[str, Any]] = {}
    for name, value in config.items():
        if value is not None:
            options[_field_of(name)] = (name, value)

    arguments: dict[str, Any] = {}
    for field, (name, value) in options.items():
        text = str(getattr(value, "name", value)).lower()  # torch's enumerations have names
        if field in _OF_UNITS or text in _HARMLESS.get(field, ()):
            continue
        if field == "sharding_strategy":
            arguments[field] = _NUMBERED.get(text, value)
        elif field == "cpu_offload":
            is_flag = isinstance(value, (str, int))
            arguments[field] = _flag(name, value) if is_flag else value
        elif field in ("activation_checkpointing", "cpu_ram_efficient_loading"):
            arguments[field] = _flag(name, value)
        elif field == "reshard_after_forward":
            # With version 1 of FSDP this option held the sharding strategy.
            if text.upper().lstrip("_") in SHARDING_STRATEGIES:
                arguments["sharding_strategy"] = value
            else:
                arguments[field] = _flag(name, value)
        elif field == "forward_prefetch":
            arguments[field] = int(_flag(name, value))  # Accelerate's flag; FSDPStrategy takes a number of units
        elif field == "state_dict_type":
            arguments[field] = state_dict_type_name(value)
        elif field == "mixed_precision_policy":
            arguments["mixed_precision"] = _named_policy(name, value)
        else:
            raise ConfigurationError(f"{name}={value!r}: {REMOVED.get(field, 'the option is unknown')}. Remove it.")
    return arguments | _unit_arguments(options)


def _field_of(name: str) -> str:
    """Return the plugin's field for the name of a field or flag, without the prefix `fsdp_`."""
    option = FSDP.find(name) or FSDP.find(f"fsdp_{name}")
    if option is not None:
        name = option.name
    return name.removeprefix("fsdp_")


def _unit_arguments(options: Mapping[str, tuple[str, Any]]) -> dict[str, Any]:
    """Return the arguments that select the units."""
    if "auto_wrap_policy" not in options:
        return {}
    written, policy = options["auto_wrap_policy"]
    if callable(policy):
        return {"auto_wrap_policy": policy}
    kind = str(policy).upper()
    if kind == "NO_WRAP":
        return {}
    needs = {"TRANSFORMER_BASED_WRAP": _CLASSES, "SIZE_BASED_WRAP": "min_num_params"}
    if kind not in needs:
        known = [*needs, "NO_WRAP"]
        raise ConfigurationError(f"{written}={policy!r} is unknown.{nearest(kind, known)} Known: {', '.join(known)}.")
    needed = needs[kind]
    if needed not in options:
        flag = FSDP.options[needed].flag
        raise ConfigurationError(
            f"{written}={policy!r} needs {flag}. Add it, or remove both and define the task's shard_units."
        )
    written, value = options[needed]
    if needed == "min_num_params":
        if not str(value).isdecimal():
            raise ConfigurationError(f"{written}={value!r}: use an integer, such as 100000000.")
        return {needed: int(str(value))}
    if isinstance(value, str):
        value = [name.strip() for name in value.split(",")]
    if not isinstance(value, Sequence):
        raise ConfigurationError(f"{written}={value!r}: use names of classes, such as ['Block'].")
    return {"auto_wrap_policy": list(value)}


def _named_policy(name: str, value: object) -> Any:
    """Convert a dict or the name of a data type to a policy. Other values are returned unchanged."""
    if isinstance(value, Mapping):
        try:
            policy = MixedPrecision(**value)
        except TypeError as error:  # an unknown field
            raise ConfigurationError(f"{name}={dict(value)!r}: {error}.") from error
        return mixed_precision_policy(policy)
    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
    if isinstance(value, str):
        if value not in dtypes:
            raise ConfigurationError(
                f"{name}={value!r} is unknown.{nearest(value, dtypes)} Known: {', '.join(dtypes)}."
            )
        return MixedPrecisionPolicy(param_dtype=dtypes[value], reduce_dtype=dtypes[value])
    return value


def _flag(name: str, value: object) -> bool:
    flags = {"true": True, "1": True, "false": False, "0": False, "none": False}
    flag = flags.get(str(value).lower())
    if flag is None:
        raise ConfigurationError(f"{name}={value!r}: use true or false.")
    return flag


def sharding_strategy_name(value: object) -> str:
    """Return the name of a sharding strategy from its name in any case, or from torch's `ShardingStrategy`."""
    name = str(getattr(value, "name", value)).upper().lstrip("_")  # torch's name is _HYBRID_SHARD_ZERO2
    if name not in SHARDING_STRATEGIES:
        raise ConfigurationError(
            f"sharding_strategy={value!r} is unknown.{nearest(name, SHARDING_STRATEGIES)} "
            f"Known: {', '.join(SHARDING_STRATEGIES)}."
        )
    return name


def one_of(name: str, value: object, known: tuple[str, ...]) -> str:
    """Return the value of an argument. Raise an error if it is not one of the known values."""
    if value not in known:
        raise ConfigurationError(f"{name}={value!r} is unknown.{nearest(str(value), known)} Known: {', '.join(known)}.")
    return str(value)


def recomputed_modules(activation_checkpointing: object, policy: object) -> Any:
    """Return `activation_checkpointing`, or `policy` (Lightning's argument for it) if it is not None.

    None becomes False.
    """
    if policy is None:
        return False if activation_checkpointing is None else activation_checkpointing
    if activation_checkpointing not in (None, False):
        raise ConfigurationError(
            "activation_checkpointing and activation_checkpointing_policy both select modules. Remove one of them."
        )
    return policy


def offload_flag(value: object) -> bool:
    """Return whether shards stay on the host, for a flag, FSDP1's `CPUOffload` or FSDP2's offload policy."""
    if isinstance(value, CPUOffload):
        return value.offload_params
    if isinstance(value, CPUOffloadPolicy):
        if not value.pin_memory:
            raise ConfigurationError(
                "cpu_offload=CPUOffloadPolicy(pin_memory=False) is not supported: memory is always pinned for "
                "accelerators, and never on the CPU. Use cpu_offload=True."
            )
        return True
    if value is None or isinstance(value, OffloadPolicy):  # the base class of CPUOffloadPolicy, which does not offload
        return False
    if not isinstance(value, bool):
        raise ConfigurationError(f"cpu_offload={value!r}: use True or False.")
    return value


def mixed_precision_policy(value: object) -> MixedPrecisionPolicy | None:
    """Return an FSDP2 policy. FSDP1's `MixedPrecision` is converted."""
    if value is None or isinstance(value, MixedPrecisionPolicy):
        return value
    if not isinstance(value, MixedPrecision):
        raise ConfigurationError(
            f"mixed_precision={value!r}: pass a torch.distributed.fsdp.MixedPrecisionPolicy, or remove it and use "
            "Trainer(precision='bf16-mixed')."
        )
    if value.buffer_dtype is not None or value.keep_low_precision_grads:
        raise ConfigurationError(
            f"mixed_precision={value!r}: FSDP2 does not cast buffers, and gradients have the dtype of the shards. "
            "Remove buffer_dtype and keep_low_precision_grads."
        )
    return MixedPrecisionPolicy(param_dtype=value.param_dtype, reduce_dtype=value.reduce_dtype)


def check_arguments(
    sharding_strategy: str,
    device_mesh: object,
    auto_wrap_policy: object,
    min_num_params: object,
    reshard_after_forward: object,
    forward_prefetch: object,
) -> None:
    """Check arguments of FSDPStrategy, without the model, the Trainer and the processes."""
    if device_mesh is not None and not _is_mesh(device_mesh):
        raise ConfigurationError(
            f"device_mesh={device_mesh!r}: use (number of replicas, ranks per replica), such as (2, 4)."
        )
    if sharding_strategy == "NO_SHARD" and device_mesh is not None:
        raise ConfigurationError(
            f"sharding_strategy='NO_SHARD' replicates the model on every rank, and device_mesh={device_mesh!r} divides "
            "the ranks into replicas and shards. Remove one of them."
        )
    if auto_wrap_policy is not None and min_num_params is not None:
        raise ConfigurationError("auto_wrap_policy and min_num_params both select the units. Remove one of them.")
    if min_num_params is not None and (not isinstance(min_num_params, int) or min_num_params < 1):
        raise ConfigurationError(f"min_num_params={min_num_params!r}: use an integer, such as 1_000_000.")
    if sharding_strategy not in RESHARDING and reshard_after_forward not in (None, False):
        raise ConfigurationError(
            f"sharding_strategy={sharding_strategy!r} keeps full parameters after the forward, and "
            f"reshard_after_forward={reshard_after_forward!r} reshards them. Remove one of them."
        )
    if not isinstance(forward_prefetch, int) or forward_prefetch < 0:
        raise ConfigurationError(f"forward_prefetch={forward_prefetch!r}: use a number of units, such as 1.")


def _is_mesh(value: object) -> bool:
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        return False
    return all(isinstance(size, int) and size > 0 for size in value)


_FULL_ONLY = ("bitsandbytes.", "trainwright.optimizers.")  # modules whose optimizers step full tensors only
# torchao does not quantize a state with fewer elements on a rank. The check below compares the elements of the full
# parameter, so that it also refuses some parameters whose shards are all smaller.
_SMALLEST_QUANTIZED = 4096
_NOT_FOR_DTENSORS = (torch.optim.Adafactor, torch.optim.Rprop)  # of torch 2.13


def check_optimizers(optimizers: Iterable[Optimizer], precision: Precision) -> None:
    """Check that optimizers can step a sharded model."""
    for optimizer in optimizers:
        if isinstance(optimizer, _NOT_FOR_DTENSORS):
            raise ConfigurationError(
                f"torch's {type(optimizer).__name__} cannot step sharded weights. Use another optimizer, such as "
                "AdamW, or strategy='ddp'."
            )
        _check_quantized(optimizer)
    if need_closure(optimizers, precision):
        names = ", ".join(type(optimizer).__name__ for optimizer in optimizers)
        raise ConfigurationError(f"{names} {REFUSALS['closures'].format(strategy='a sharded strategy')}")


def _check_quantized(optimizer: Optimizer) -> None:
    """Check an optimizer with quantized states, which may need full parameters or unsplit blocks of states."""
    name = type(optimizer).__name__
    modules = [kind.__module__ for kind in type(optimizer).__mro__]
    if any(module.startswith(_FULL_ONLY) for module in modules):
        raise ConfigurationError(
            f"{name} needs full parameters, and a sharded strategy divides them between ranks. Use an "
            "optimizer of torchao, such as create_optimizer('adamw_8bit', …), or strategy='ddp'."
        )
    if not any(module.startswith("torchao.") for module in modules):
        return
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter in parameters:
        if parameter.numel() < _SMALLEST_QUANTIZED or is_even(parameter):
            continue
        raise ConfigurationError(
            f"torchao's {name} needs the same number of rows on every rank, and the rows of a parameter of shape "
            f"{tuple(parameter.shape)} are not divisible by the number of ranks. Use a divisible number of rows, "
            "torch.optim.AdamW, or strategy='ddp'."
        )


def mesh_shape(
    sharding_strategy: str,
    device_mesh: tuple[int, int] | None,
    *,
    tp: int = 1,
    cp: int = 1,
    num_nodes: int,
    devices_per_node: int,
) -> MeshShape:
    """Return the mesh of a run. Not collective.

    For the arguments see `FSDPStrategy`. Here, `cp` is the number of ranks that split a sequence, by `cp` or `sp`.

    Raises:
        ConfigurationError: The sizes do not match the number of processes.
    """
    # Processes are divided by tp, then by cp. For example 16 processes with tp=2 and cp=2 are 8 tensor-parallel groups
    # and 4 data-parallel ranks, which device_mesh=(2, 2) arranges as 2 replicas of 2 shards.
    tp_groups = check_tp(tp, devices_per_node * num_nodes)
    if tp_groups % cp:
        processes = "process(es)" if tp == 1 else f"group(s) of tp={tp} processes"
        # The next smaller and the next larger number of processes. With 6 processes, cp=4 and tp=1: 4 or 8.
        fitting = [(tp_groups // cp + 1) * cp * tp]
        if tp_groups > cp:
            fitting.insert(0, tp_groups // cp * cp * tp)
        raise ConfigurationError(
            f"Sequences are split over {cp} ranks (cp or sp), which does not divide the run's {tp_groups} {processes}. "
            f"Start {' or '.join(map(str, fitting))} processes."
        )
    data_ranks = tp_groups // cp
    if device_mesh is not None:
        replicas, shards = device_mesh
        if replicas * shards != data_ranks:
            groups = "process(es)"
            if cp > 1:
                groups = f"group(s) of cp={cp} x tp={tp} processes"
            elif tp > 1:
                groups = f"group(s) of tp={tp} processes"
            best = (1, data_ranks)
            if data_ranks % replicas == 0:
                best = (replicas, data_ranks // replicas)
            raise ConfigurationError(
                f"device_mesh={(replicas, shards)} has {replicas * shards} ranks, and the run has {data_ranks} "
                f"{groups}. Use device_mesh={best}, or change the number of processes."
            )
        return MeshShape(dp_replicate=replicas, dp_shard=shards, cp=cp, tp=tp)
    if sharding_strategy == "NO_SHARD":
        return MeshShape(dp_replicate=data_ranks, cp=cp, tp=tp)
    if sharding_strategy in _ONE_REPLICA_PER_NODE:
        if num_nodes == 1:
            raise ConfigurationError(
                f"sharding_strategy={sharding_strategy!r} keeps a replica on each node, and there is one node. Pass "
                f"the number of replicas and the ranks per replica, such as device_mesh=(1, {data_ranks})."
            )
        if data_ranks % num_nodes:
            raise ConfigurationError(
                f"sharding_strategy={sharding_strategy!r} keeps a replica on each of {num_nodes} nodes, which does not "
                f"divide the run's {data_ranks} data-parallel rank(s). Use a tp and cp that divide the "
                f"{devices_per_node} processes of a node, or device_mesh=(replicas, ranks per replica)."
            )
        return MeshShape(dp_replicate=num_nodes, dp_shard=data_ranks // num_nodes, cp=cp, tp=tp)
    return MeshShape(dp_shard=data_ranks, cp=cp, tp=tp)


def check_sizes(**sizes: int | None) -> None:
    """Check that arguments are integers of at least 1, or None."""
    for name, size in sizes.items():
        if size is not None and (type(size) is not int or size < 1):  # True would be 1
            raise ConfigurationError(f"{name}={size!r}: use an integer of at least 1.")


def check_sequence_ranks(cp: int, sp: int) -> None:
    """Check the numbers of ranks that split sequences."""
    check_sizes(cp=cp, sp=sp)
    if cp > 1 and sp > 1:
        raise ConfigurationError(f"cp={cp} and sp={sp} split sequences in two ways. Use one of them.")


def check_tp(tp: int, world: int) -> int:
    """Return the number of groups of `tp` processes. Raise a ConfigurationError if `tp` does not divide `world`."""
    if world % tp:
        divisors = [size for size in range(1, world + 1) if world % size == 0]
        raise ConfigurationError(
            f"tp={tp} does not divide the run's {world} process(es). Use tp={' or '.join(map(str, divisors))}, or "
            f"{tp * (world // tp + 1)} processes."
        )
    return world // tp
