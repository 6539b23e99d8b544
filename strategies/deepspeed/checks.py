"""Checks of what DeepSpeed cannot train, before an engine is created. Each raises a ConfigurationError."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.signatures import overrides
from trainwright.core.task import TaskModule
from trainwright.strategies.deepspeed.config import EngineConfig
from trainwright.strategies.deepspeed.library import is_partitioned
from trainwright.strategies.deepspeed.placeholders import DummyOptim
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.binding import need_closure
from trainwright.strategies.units import check_no_shards, check_no_sparse

_OWN_METHODS = ("backward", "optimizer_zero_grad", "configure_gradient_clipping")
# What they do to an element depends on the rows and columns around it.
_WHOLE_MATRICES = ("Adafactor", "Muon", "LowRankAdamW")
_BLOCKWISE = ("torchao.", "bitsandbytes.")  # modules of optimizers that quantize states
_CPU_OPTIMIZERS = ("DeepSpeedCPUAdam", "DeepSpeedCPULion", "DeepSpeedCPUAdagrad", "ZenFlowCPUAdam")


def check_task(task: TaskModule, *, trains: bool) -> None:
    """Check a task before its model is built."""
    check_full(task)
    name = type(task).__name__
    for method in _OWN_METHODS:
        if trains and overrides(task, method, TaskModule):
            raise ConfigurationError(
                f"{name} defines {method}, which an engine of DeepSpeed does itself. Leave it out, or use "
                "strategy='ddp'."
            )


def check_full(model: nn.Module, *, built_in_shards: bool = False) -> None:
    """Check that a model does not hold shards of an earlier run.

    Args:
        model: Or a task.
        built_in_shards: Shards of `deepspeed.zero.Init`, in which transformers builds models for stage 3, are allowed.
            Default: False.
    """
    check_no_shards(model, lambda p: is_partitioned(p) and not (built_in_shards and hasattr(p, "ds_tensor")))


def check_unbuilt(task: TaskModule, config: EngineConfig) -> None:
    """Check a task whose model is about to be built."""
    early = next((name for name, _ in task.named_parameters()), None)
    if config.offload("offload_param") == "nvme" and early is not None:
        raise ConfigurationError(
            f"offload_parameters to 'nvme', and {early!r} was built where DeepSpeed could not send it there piece by "
            "piece: it would be stored in 16 bits. Build the model in configure_model."
        )


def check_optimizers(
    optimizers: list[Optimizer],
    task: nn.Module,
    config: EngineConfig,
    precision: Precision,
    source: str = "configure_optimizers returned",
) -> None:
    """Check the optimizers of a stage or of a user-written loop; `source` begins the messages."""
    named = "optimizer" in config.content
    if len(optimizers) != 1:
        what = "Use DummyOptim(model.parameters())" if named else "Put all parameters into groups of one optimizer"
        raise ConfigurationError(
            f"{source} {len(optimizers)} optimizers, and an engine of DeepSpeed steps one. "
            f"{what}, or use strategy='fsdp'."
        )
    (optimizer,) = optimizers
    name = type(optimizer).__name__
    if isinstance(optimizer, DummyOptim) is not named:
        way_out = "Use DummyOptim(…), or remove it there." if named else "Use a real one."
        raise ConfigurationError(
            f"{config.origin} has {'an' if named else 'no'} 'optimizer', and {source} {name}. {way_out}"
        )
    if need_closure(optimizers, precision):
        raise ConfigurationError(
            f"{name} evaluates the loss several times in a step, which an engine of DeepSpeed cannot. Use "
            "strategy='ddp', or another optimizer."
        )
    if config.stage > 0:
        check_no_sparse(task)
    if name in _WHOLE_MATRICES and config.stage > 0:
        raise ConfigurationError(
            f"{name} looks at whole matrices, and at stage={config.stage} DeepSpeed hands it pieces of flat vectors, "
            "which would train otherwise than in one process. Use an optimizer that works element by element, such as "
            "AdamW, or stage=0, or strategy='ddp'."
        )
    if any(kind.__module__.startswith(_BLOCKWISE) for kind in type(optimizer).__mro__):
        raise ConfigurationError(
            f"{name} quantizes its states in blocks of each parameter, and DeepSpeed steps flat vectors of "
            "several. Use strategy='fsdp' with an optimizer of torchao, strategy='ddp', or an optimizer of DeepSpeed."
        )
    device, forced = config.offload("offload_optimizer"), config.content.get("zero_force_ds_cpu_optimizer", True)
    if device != "none" and not named and forced and name not in _CPU_OPTIMIZERS:
        raise ConfigurationError(
            f"offload_optimizer to {device!r}, and {source} {name}, which DeepSpeed does not step there. Use "
            "deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=…), or DummyOptim with an 'optimizer' in the "
            "configuration."
        )


class TrainedParameters:
    """Parameters that an engine was created to train, which must not be frozen later."""

    def __init__(self, task: nn.Module) -> None:
        self._name = type(task).__name__
        self._flags = [(name, parameter, parameter.requires_grad) for name, parameter in task.named_parameters()]

    def check(self) -> None:
        """Check that the same parameters are trained. Not collective."""
        for name, parameter, trained in self._flags:
            if parameter.requires_grad is not trained:
                what = "frozen" if trained else "unfrozen"
                fate = "step on, by its momentum and decay" if trained else "leave out"
                raise TaskError(
                    f"{self._name}'s {name} was {what} after DeepSpeed's engine had been made, which would {fate}. Say "
                    "what is trained in __init__ or configure_model, and train the next stage in a fit of its own; or "
                    "use strategy='ddp' or 'fsdp'."
                )


def keep_groups(optimizer: Optimizer, task: str) -> None:
    """Have `add_param_group` of an optimizer that an engine has taken raise a TaskError: the group would rest."""

    def add_param_group(param_group: dict[str, Any]) -> None:
        raise TaskError(
            f"a parameter group was added to {task}'s {type(optimizer).__name__} after DeepSpeed's engine had been "
            "made, which steps the groups of configure_optimizers alone. Name all parameters there, and train the next "
            "stage in a fit of its own; or use strategy='ddp' or 'fsdp'."
        )

    optimizer.add_param_group = add_param_group  # type: ignore[method-assign]  # of this one alone
