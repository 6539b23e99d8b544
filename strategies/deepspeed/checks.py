"""Checks that raise a ConfigurationError for tasks and optimizers that DeepSpeed cannot train."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.host.rank_zero import rank_zero_info
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.strategies.deepspeed.config import EngineConfig
from trainwright.strategies.deepspeed.library import cpu_adam, is_partitioned
from trainwright.strategies.deepspeed.placeholders import DummyOptim
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.binding import need_closure
from trainwright.strategies.units import check_no_shards, check_no_sparse

_REPLACED_METHODS = ("backward", "optimizer_zero_grad", "configure_gradient_clipping")
# Optimizers whose update of an element depends on its rows and columns.
_FULL_MATRIX = ("Adafactor", "Muon", "LowRankAdamW")
_BLOCKWISE = ("torchao.", "bitsandbytes.")  # modules of optimizers that quantize states
_CPU_OPTIMIZERS = ("DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad", "ZenFlowCPUAdam")


def check_task(task: TaskModule, *, trains: bool) -> None:
    """Check a task before its model is built."""
    check_full(task)
    name = type(task).__name__
    for method in _REPLACED_METHODS:
        if trains and overrides(task, method, TaskModule):
            raise ConfigurationError(
                f"{name} overrides {method}, which DeepSpeed's engine replaces. Remove it, or use strategy='ddp'."
            )


def check_full(model: nn.Module, *, built_in_shards: bool = False) -> None:
    """Check that a model does not hold shards of an earlier run.

    Args:
        model: A model or task.
        built_in_shards: Allow shards of `deepspeed.zero.Init`, with which transformers builds models for stage 3.
            Default: False.
    """
    check_no_shards(model, lambda p: is_partitioned(p) and not (built_in_shards and hasattr(p, "ds_tensor")))


def check_unbuilt(task: TaskModule, config: EngineConfig) -> None:
    """Check that no parameter exists before `configure_model`, if parameters are offloaded to NVMe."""
    first_name = next((name for name, _ in task.named_parameters()), None)
    if config.offload("offload_param") == "nvme" and first_name is not None:
        raise ConfigurationError(
            f"offload_parameters to 'nvme': {first_name!r} was built before configure_model, and DeepSpeed would store "
            "it in 16 bits. Build the model in configure_model."
        )


def check_optimizers(
    optimizers: list[Optimizer],
    task: nn.Module,
    config: EngineConfig,
    precision: Precision,
    source: str = "configure_optimizers returned",
) -> None:
    """Check the optimizers of a Trainer's stage or of a prepared model. `source` begins their names in messages."""
    config_has_optimizer = "optimizer" in config.content
    if len(optimizers) != 1:
        what = (
            "Use DummyOptim(model.parameters())"
            if config_has_optimizer
            else "Put all parameters into groups of one optimizer"
        )
        raise ConfigurationError(
            f"{source} {len(optimizers)} optimizers, but a DeepSpeed engine steps one. {what}, or use strategy='fsdp'."
        )
    (optimizer,) = optimizers
    name = type(optimizer).__name__
    if isinstance(optimizer, DummyOptim) != config_has_optimizer:
        article = "an" if config_has_optimizer else "no"
        advice = "Use DummyOptim(…), or remove the 'optimizer'." if config_has_optimizer else "Use a real optimizer."
        raise ConfigurationError(f"{config.origin} has {article} 'optimizer', but {source} {name}. {advice}")
    if need_closure(optimizers, precision):
        raise ConfigurationError(
            f"{name} evaluates the loss several times in a step, which DeepSpeed does not support. Use strategy='ddp', "
            "or another optimizer."
        )
    if config.stage > 0:
        check_no_sparse(task)
    if name in _FULL_MATRIX and config.stage > 0:
        raise ConfigurationError(
            f"{name} needs full matrices, but at stage={config.stage} DeepSpeed passes it shards of flat vectors. Use "
            "an elementwise optimizer such as AdamW, or stage=0, or strategy='ddp'."
        )
    if any(kind.__module__.startswith(_BLOCKWISE) for kind in type(optimizer).__mro__):
        raise ConfigurationError(
            f"{name} quantizes its states in blocks of each parameter, but DeepSpeed steps flat vectors of several "
            "parameters. Use strategy='fsdp' with an optimizer of torchao, strategy='ddp', or a DeepSpeed optimizer."
        )
    if _needs_cpu_optimizer(optimizer, config) and _adamw_mode(optimizer) is None:
        raise ConfigurationError(
            f"offload_optimizer to {config.offload('offload_optimizer')!r}: {source} {name}, which DeepSpeed cannot "
            "step on the host. Use torch's Adam or AdamW without amsgrad and maximize, "
            "deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=…), or DummyOptim with an 'optimizer' in the "
            "configuration."
        )


def _needs_cpu_optimizer(optimizer: Optimizer, config: EngineConfig) -> bool:
    """Return whether DeepSpeed refuses to step an optimizer because it is not one of its optimizers for the host."""
    offloads = config.offload("offload_optimizer") != "none"
    forced = config.content.get("zero_force_ds_cpu_optimizer", True)
    is_of_deepspeed = isinstance(optimizer, DummyOptim) or type(optimizer).__name__ in _CPU_OPTIMIZERS
    return bool(offloads and forced and not is_of_deepspeed)


def _adamw_mode(optimizer: Optimizer) -> bool | None:
    """Return the `adamw_mode` of the equal DeepSpeedCPUAdam, or None if no such mode exists."""
    if type(optimizer) not in (torch.optim.Adam, torch.optim.AdamW):
        return None
    if any(group["amsgrad"] or group["maximize"] for group in optimizer.param_groups):
        return None
    modes = {group["decoupled_weight_decay"] for group in optimizer.param_groups}
    return modes.pop() if len(modes) == 1 else None


def on_host(optimizer: Optimizer, config: EngineConfig) -> Optimizer:
    """Return the optimizer that DeepSpeed steps in place of a checked optimizer.

    With offload, this is a DeepSpeedCPUAdam in place of torch's Adam or AdamW. Both have the same parameter groups, so
    that a schedule of torch's optimizer changes the learning rates of DeepSpeed's optimizer. Any other optimizer is
    returned unchanged. Rank 0 logs a conversion.
    """
    if not _needs_cpu_optimizer(optimizer, config):
        return optimizer
    converted = cpu_adam(optimizer.param_groups, adamw_mode=bool(_adamw_mode(optimizer)))
    # Shared dicts, so that hooks of the user's optimizer are called, also those that are registered later.
    for name in ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"):
        vars(converted)[name] = vars(optimizer)[name]
    # torch's mark of an optimizer that has stepped. Without it, schedules would warn that they step first.
    vars(optimizer)["_opt_called"] = True
    rank_zero_info(
        f"DeepSpeed steps {type(optimizer).__name__} on the host as DeepSpeedCPUAdam, which rounds differently. "
        "zero_force_ds_cpu_optimizer=False in the configuration keeps torch's optimizer."
    )
    return converted


def keep_groups(optimizer: Optimizer, task: str) -> None:
    """Make `add_param_group` of an optimizer raise a TaskError, because DeepSpeed's engine would not step the group."""

    def add_param_group(param_group: dict[str, Any]) -> None:
        raise TaskError(
            f"a parameter group was added to {task}'s {type(optimizer).__name__} after DeepSpeed's engine was "
            "created. The engine steps only the groups of configure_optimizers. Add all parameters there and call "
            "fit once for each training phase, or use strategy='ddp' or 'fsdp'."
        )

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]  # of this object only
