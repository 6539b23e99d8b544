"""The module that engines wrap: its forward is one step of the task, so that no forward of the user is patched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from trainwright.core.task import TaskModule


class StepModule(nn.Module):
    """Calls `task.<step>(*args)` as its forward.

    Args:
        task: holds all the parameters; they keep their names in `task.state_dict()`, whatever wraps this module.
    """

    def __init__(self, task: TaskModule) -> None:
        super().__init__()
        self.task = task

    def forward(self, step: str | Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run the step called `step`, for example `"training_step"`, or a function in its place."""
        return (getattr(self.task, step) if isinstance(step, str) else step)(*args, **kwargs)
