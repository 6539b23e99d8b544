"""Placeholders for an optimizer and a scheduler that DeepSpeed's configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from trainwright.core.errors import ConfigurationError


class DummyOptim(Optimizer):
    """Placeholder for the optimizer in DeepSpeed's configuration. Gives DeepSpeed the parameters, and values for
    `"auto"`.

    The class and its arguments have the names that Accelerate uses.

    Args:
        params: Parameters or parameter groups.
        lr: Learning rate for `"auto"` in the configuration.
        weight_decay: Weight decay for `"auto"` in the configuration.
        kwargs: Further values for `"auto"` in the configuration, such as `betas` and `eps`.

    Attributes:
        given_groups: The parameter groups as they were passed, without default values.
    """

    def __init__(self, params: ParamsT, lr: float = 0.001, weight_decay: float = 0.0, **kwargs: Any) -> None:
        entries: list[Any] = list(params)
        if entries and isinstance(entries[0], dict):  # parameter groups
            self.given_groups = [dict(group) for group in entries]
        else:
            self.given_groups = [{"params": entries}]
        for group in self.given_groups:
            members = group["params"]
            group["params"] = [members] if isinstance(members, torch.Tensor) else list(members)
        # Copies, because torch adds default values to the dicts.
        groups = [dict(group) for group in self.given_groups]
        super().__init__(groups, {"lr": lr, "weight_decay": weight_decay, **kwargs})

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]  # torch overloads it
        """Raise a ConfigurationError: a placeholder cannot step."""
        raise ConfigurationError(
            "DummyOptim is a placeholder for the optimizer of DeepSpeed's configuration. Use DeepSpeedStrategy("
            "config=…) with an 'optimizer' in it, or return a real optimizer from configure_optimizers."
        )


class DummyScheduler:
    """Placeholder for the scheduler in DeepSpeed's configuration, which advances once per optimizer step.

    The class and its arguments have the names that Accelerate uses.

    Args:
        optimizer: The optimizer that `configure_optimizers` returns together with the placeholder.
        total_num_steps: Number of steps for `"auto"` in the configuration. Default: the number of steps of the run.
        warmup_num_steps: Number of warmup steps for `"auto"` in the configuration. Default: 0.
        lr_scheduler_callable: Function that creates the scheduler from the real optimizer. Used if the configuration
            names an optimizer but no scheduler. Default: None.

    Attributes:
        message_before_real: The error message for calls before the real scheduler exists.
    """

    message_before_real: ClassVar[str] = (
        "DummyScheduler is a placeholder for the scheduler of DeepSpeed's configuration. Use DeepSpeedStrategy("
        "config=…) with a 'scheduler' in it, pass lr_scheduler_callable, or return a real scheduler from "
        "configure_optimizers."
    )

    def __init__(
        self,
        optimizer: Optimizer,
        total_num_steps: int | None = None,
        warmup_num_steps: int = 0,
        lr_scheduler_callable: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.lr_scheduler_callable = lr_scheduler_callable
        self.total_num_steps = total_num_steps
        self.warmup_num_steps = warmup_num_steps
        self._real: Any = None  # see `stand_for`

    def stand_for(self, scheduler: object) -> None:
        """Forward all later calls to `scheduler`, which schedules the real optimizer."""
        self._real = scheduler

    @property
    def real(self) -> Any:
        """The scheduler of the real optimizer. Raises a ConfigurationError before `stand_for` is called."""
        if self._real is None:
            raise ConfigurationError(self.message_before_real)
        return self._real

    def step(self) -> None:
        """Advance the schedule by one optimizer step."""
        self.real.step()

    def get_last_lr(self) -> list[float]:
        """Return the learning rate of each group."""
        learning_rates: list[float] = self.real.get_last_lr()
        return learning_rates

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the scheduler."""
        state: dict[str, Any] = self.real.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict` returned."""
        self.real.load_state_dict(state)


def refuse_schedule_of_dummy(scheduler: object, origin: str) -> None:
    """Raise a ConfigurationError for a real scheduler of a `DummyOptim`, which would have no effect."""
    if not isinstance(scheduler, DummyScheduler) and isinstance(getattr(scheduler, "optimizer", None), DummyOptim):
        raise ConfigurationError(
            f"{type(scheduler).__name__} was created with a DummyOptim and does not change the learning rate of the "
            f"optimizer that {origin} names. Use DummyScheduler and put a 'scheduler' into the configuration, or "
            "remove the 'optimizer' from the configuration and use a real optimizer."
        )
