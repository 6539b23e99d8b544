"""The module that engines wrap: its forward is one step of the task, so that no forward of the user is patched."""

from __future__ import annotations

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

    def forward(self, step: str, *args: Any, **kwargs: Any) -> Any:
        """Run the step called `step`, for example `"training_step"`."""
        return getattr(self.task, step)(*args, **kwargs)
