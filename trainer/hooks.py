"""The task and the callbacks of a stage: calls of their hooks, and the callbacks by role."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any, TypeVar

from trainwright.callbacks.callback import Callback
from trainwright.callbacks.hook_table import HookTable
from trainwright.callbacks.roles import ProgressDisplay, Saver
from trainwright.core.errors import TaskError, TrainwrightWarning
from trainwright.core.process import try_output
from trainwright.core.run import Run
from trainwright.core.task import TaskModule
from trainwright.strategies.engine import Engine

Role = TypeVar("Role")


class StageHooks:
    """The task and the callbacks of a stage.

    Args:
        trainer: the Trainer, which hooks receive.
        engine: provides the rank. Only the main rank prints and warns.
        task: the user's task; None before there is one.
        callbacks: callbacks of the stage. Its setup adds the task's own.

    Attributes:
        trainer: see above.
        task_or_none: the task; None before there is one.
        callbacks: see above.
        table: the hooks of each event. Empty until `StageRun.set_up` fills it. The loop and the step read the hooks of
            their events from the table, and call `fire` for rare events only.
    """

    def __init__(self, trainer: Run, engine: Engine, task: TaskModule | None, callbacks: list[Callback]) -> None:
        self.trainer = trainer
        self.task_or_none = task
        self.callbacks = callbacks
        self.table = HookTable()
        self._engine = engine

    @property
    def task(self) -> TaskModule:
        """The user's task.

        Raises:
            TaskError: no stage has been started yet.
        """
        if self.task_or_none is None:
            raise TaskError("this Trainer has no task yet. Pass one to trainer.fit(task, …) or trainer.test(task, …).")
        return self.task_or_none

    def fire(self, event: str, *args: object) -> None:
        """Call all hooks of an event, in order: those of the callbacks and of the task.

        Args:
            event: name of a field of `HookTable`.
            *args: arguments after the Trainer and the task.
        """
        for hook in getattr(self.table, event):
            hook(self.trainer, self.task_or_none, *args)

    def all_of(self, role: type[Role]) -> list[Role]:
        """Return the callbacks with a role (see `callbacks.roles`), in order."""
        return [callback for callback in self.callbacks if isinstance(callback, role)]

    def first_of(self, role: type[Role]) -> Role | None:
        """Return the first callback with a role, or None."""
        return next(iter(self.all_of(role)), None)

    @property
    def saver(self) -> Saver | None:
        """The first ModelCheckpoint, or None."""
        return self.first_of(Saver)  # type: ignore[type-abstract]  # a protocol serves as a role

    def callback_states(self) -> dict[str, Any]:
        """Return the states of the callbacks by their state keys. Callbacks with an empty state are omitted."""
        states = {}
        for callback in self.callbacks:
            state = callback.state_dict()
            if state:
                states[callback.state_key] = state
        return states

    def print(self, *values: Any, **options: Any) -> None:
        """Print on the main process, above the progress bar. `options` are those of Python's `print`."""
        if not self._engine.is_main:
            return
        display = self.first_of(ProgressDisplay)  # type: ignore[type-abstract]  # as above
        show: Callable[..., None] = print if display is None else display.print
        if "file" in options:  # an error of the user's file is raised
            show(*values, **options)
        else:  # a closed terminal must not end the training
            try_output(show, *values, **options)

    def warn(self, message: str) -> None:
        """Issue a warning on the main rank."""
        if self._engine.is_main:
            warnings.warn(message, TrainwrightWarning, stacklevel=2)
