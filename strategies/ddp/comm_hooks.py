"""Communication hooks of DistributedDataParallel: torch's by name, or the user's own."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.names.kwargs_handler import KwargsHandler

Hook = Callable[[Any, Any], Any]
"""`(state, torch.distributed.GradBucket)` → a future of the bucket's flat gradients, averaged over ranks."""


class DDPCommunicationHookType(StrEnum):
    """Names of torch's communication hooks. `FP16` and `BF16` can also be used as wrappers."""

    NO = "no"
    FP16 = "fp16"
    BF16 = "bf16"
    POWER_SGD = "power_sgd"
    BATCHED_POWER_SGD = "batched_power_sgd"


def batched_power_sgd(state: Any, bucket: Any) -> Any:
    """Average a bucket with PowerSGD, as a low-rank approximation of one square matrix. Collective.

    Source: Vogels et al. (2019), algorithm 1. Replaces torch's `batched_powerSGD_hook`, which fails in its first
    compressed step (torch 2.13: its matrices have two dimensions, but `_orthogonalize` needs three).

    Args:
        state: A `PowerSGDState`.
        bucket: A `torch.distributed.GradBucket`.

    Returns:
        A future of the bucket's flat gradients.
    """
    flat: torch.Tensor = bucket.buffer()
    index: int = bucket.index()
    if state.iter < state.start_powerSGD_iter:
        state.maybe_increase_iter(bucket)
        return default_hooks.allreduce_hook(state.process_group, bucket)
    group = state.process_group or dist.group.WORLD
    side = math.isqrt(len(flat) - 1) + 1  # of the smallest square: 10 elements need 4 × 4
    matrix = torch.nn.functional.pad(flat, (0, side * side - len(flat))).view(side, side)
    if state.use_error_feedback and index in state.error_dict:
        matrix += state.error_dict[index]  # what the last step's approximation has lost
    if state.warm_start and index in state.q_memory_dict:
        right = state.q_memory_dict[index]
    else:  # random, but the same on all ranks, because torch creates `state.rng` with the same seed
        generator = torch.Generator().manual_seed(int(state.rng.randint(1_000_000_000)))
        rank = min(state.matrix_approximation_rank, side)
        right = torch.randn(side, rank, generator=generator).to(flat)
    # One step of subspace iteration. Ranks exchange `left` and `factors`, each of side × rank elements, instead of the
    # matrix of side² elements.
    left = matrix @ _orthogonal(right)
    state.maybe_increase_iter(bucket)

    def finish(summed: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        directions = _orthogonal(summed.value()[0])
        factors = matrix.T @ directions
        dist.all_reduce(factors, group=group, async_op=True).get_future().wait()
        factors /= dist.get_world_size(group)
        approximation = directions @ factors.T
        if state.use_error_feedback:
            state.error_dict[index] = matrix - approximation  # added to the gradients of the next step
        if state.warm_start:
            state.q_memory_dict[index] = factors
        return flat.copy_(approximation.view(-1)[: len(flat)])

    return dist.all_reduce(left, group=group, async_op=True).get_future().then(finish)


def _orthogonal(columns: torch.Tensor) -> torch.Tensor:
    """Return an orthonormal basis of the space that the columns span."""
    exact = columns if columns.dtype is torch.float64 else columns.float()  # torch has no half-precision QR
    basis: torch.Tensor = torch.linalg.qr(exact).Q
    return basis.to(columns.dtype)


_HOOKS: dict[str, Hook] = {
    "fp16": default_hooks.fp16_compress_hook,
    "bf16": default_hooks.bf16_compress_hook,
    "power_sgd": powerSGD_hook.powerSGD_hook,
    "batched_power_sgd": batched_power_sgd,
}
_WRAPPERS: dict[str, Callable[[Hook], Hook]] = {
    "fp16": default_hooks.fp16_compress_wrapper,
    "bf16": default_hooks.bf16_compress_wrapper,
}
_POWER_SGD = ("power_sgd", "batched_power_sgd")
_POWER_SGD_OPTIONS = tuple(name for name in inspect.signature(PowerSGDState).parameters if name != "process_group")


@dataclass
class DistributedDataParallelKwargs(KwargsHandler):
    """Options of DistributedDataParallel with Hugging Face Accelerate's names; see `DDPStrategy.from_kwargs`.

    Attributes:
        dim: Must be 0: a process uses one device.
        broadcast_buffers: Copy rank 0's buffers to the other ranks before every training forward. Default: True.
        bucket_cap_mb: Size of the gradient buckets in MiB. Default: 25.
        find_unused_parameters: Search for the parameters that a step does not use, in every step. Default: False.
        check_reduction: Must be False: torch has deprecated it.
        gradient_as_bucket_view: Gradients are views of the buckets. Default: False.
        static_graph: Every step uses the same parameters in the same order. Default: False.
        comm_hook, comm_wrapper: See `CommHook`.
        comm_state_option: Options of PowerSGD.
    """

    dim: int = 0
    broadcast_buffers: bool = True
    bucket_cap_mb: int = 25
    find_unused_parameters: bool = False
    check_reduction: bool = False
    gradient_as_bucket_view: bool = False
    static_graph: bool = False
    comm_hook: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_wrapper: DDPCommunicationHookType | str = DDPCommunicationHookType.NO
    comm_state_option: dict[str, Any] = field(default_factory=dict)

    def to_arguments(self) -> dict[str, Any]:
        """Return the options as arguments of `DDPStrategy`.

        Raises:
            ConfigurationError: `dim` or `check_reduction` is set.
        """
        if self.dim != 0:
            raise ConfigurationError(f"dim={self.dim}: a process uses one device and splits no batches. Use dim=0.")
        if self.check_reduction:
            raise ConfigurationError("check_reduction=True: torch checks every reduction itself. Remove it.")
        return {
            "broadcast_buffers": self.broadcast_buffers,
            "bucket_cap_mb": None if self.bucket_cap_mb == 25 else self.bucket_cap_mb,  # torch's own default
            "find_unused_parameters": self.find_unused_parameters,
            "gradient_as_bucket_view": self.gradient_as_bucket_view,
            "static_graph": self.static_graph,
            "ddp_comm_hook": self.comm_hook,
            "ddp_comm_wrapper": self.comm_wrapper,
            "ddp_comm_state": self.comm_state_option or None,
        }


class CommHook:
    """A communication hook. It replaces DistributedDataParallel's averaging of a gradient bucket.

    Args:
        hook: A `DDPCommunicationHookType`, its name, or a function for `register_comm_hook`. Default: None, which is
            `"no"`.
        wrapper: `"fp16"` or `"bf16"`, which casts the tensors that the hook exchanges, or a function that takes a hook
            and returns a hook. Default: None.
        state: The state that the hook function receives. For PowerSGD, a dict of options or a `PowerSGDState`. Default:
            None.

    Attributes:
        hook, wrapper: A lower-case name, or the function. `"no"` for none.
        state: The state of a hook function. None for PowerSGD.
        power_sgd: Options of `PowerSGDState`. None for other hooks.

    Raises:
        ConfigurationError: A name or an option is unknown or has a wrong value, or the hook accepts no state.
    """

    def __init__(self, hook: Any = None, wrapper: Any = None, state: Any = None) -> None:
        self.hook = _named("ddp_comm_hook", hook, tuple(str(kind) for kind in DDPCommunicationHookType))
        self.wrapper = _named("ddp_comm_wrapper", wrapper, ("no", *_WRAPPERS))
        self.state = state
        self.power_sgd: dict[str, Any] | None = None
        if isinstance(state, PowerSGDState) or self.hook in _POWER_SGD:
            self.power_sgd = _power_sgd_options(state)
            self.state = None
        elif isinstance(self.hook, str) and state is not None:
            raise ConfigurationError(
                f"ddp_comm_state={state!r}: the hook {self.hook!r} has no state. Remove it, or use 'power_sgd'."
            )

    @property
    def is_plain(self) -> bool:
        """True if gradients are averaged without a hook or a wrapper."""
        return bool(self.hook == "no" and self.wrapper == "no")

    def register(self, replica: DistributedDataParallel) -> None:
        """Register the hook with a replica, with a new state of PowerSGD. Not collective."""
        if self.is_plain:
            return
        hook: Hook = default_hooks.allreduce_hook
        if self.hook != "no":
            hook = _HOOKS[self.hook] if isinstance(self.hook, str) else self.hook
        if self.wrapper != "no":
            wrapper = _WRAPPERS[self.wrapper] if isinstance(self.wrapper, str) else self.wrapper
            hook = wrapper(hook)
        state = self.state if self.power_sgd is None else _new_power_sgd(self.power_sgd)
        # The lambda avoids two checks of torch 2.13: it rejects its own bfloat16 hook without NCCL, although gloo
        # supports bfloat16, and it rejects hooks with string annotations (`from __future__ import annotations`).
        replica.register_comm_hook(state, lambda state, bucket: hook(state, bucket))


def _named(argument: str, value: object, known: tuple[str, ...]) -> Any:
    """Return a known name in lower case, or a function."""
    if value is None:
        return "no"
    if isinstance(value, str):
        name = str(value).lower()
        if name not in known:
            raise ConfigurationError(
                f"{argument}={str(value)!r} is unknown.{nearest(name, known)} Known: {', '.join(known)}, or a function."
            )
        return name
    if value is powerSGD_hook.batched_powerSGD_hook:  # fails in torch 2.13; see `batched_power_sgd`
        return "batched_power_sgd"
    if not callable(value):
        raise ConfigurationError(f"{argument}={value!r}: write one of {', '.join(known)}, or a function.")
    return value


def _power_sgd_options(state: object) -> dict[str, Any]:
    """Check and return PowerSGD's options.

    The errors and low-rank factors in a `PowerSGDState` are dropped. They belong to the buckets of one replica, and
    every stage creates a new replica.
    """
    if isinstance(state, PowerSGDState):
        options = {name: getattr(state, name) for name in _POWER_SGD_OPTIONS if hasattr(state, name)}
        options["process_group"] = state.process_group
        options["rng"] = copy.deepcopy(state.rng)
        return options
    if state is None:
        options = {}
    elif isinstance(state, Mapping):
        options = dict(state)
    else:
        raise ConfigurationError(
            f"ddp_comm_state={state!r}: pass PowerSGD's options by name, such as "
            "{'matrix_approximation_rank': 2}, or a PowerSGDState."
        )
    for name in options:
        if name not in _POWER_SGD_OPTIONS:
            raise ConfigurationError(
                f"ddp_comm_state: PowerSGD has no option {name!r}.{nearest(name, _POWER_SGD_OPTIONS)} Known: "
                f"{', '.join(_POWER_SGD_OPTIONS)}."
            )
    options["process_group"] = None
    try:
        PowerSGDState(**options)  # checks the values
    except (ValueError, TypeError) as error:
        raise ConfigurationError(f"ddp_comm_state={state!r}: {error}") from None
    return options


def _new_power_sgd(options: dict[str, Any]) -> PowerSGDState:
    arguments = dict(options)
    rng = arguments.pop("rng", None)  # not an argument of PowerSGDState
    state = PowerSGDState(**arguments)
    if rng is not None:
        state.rng = copy.deepcopy(rng)
    return state
