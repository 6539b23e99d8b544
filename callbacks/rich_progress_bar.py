"""A progress bar drawn by rich."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trainwright.callbacks.progress_bar import Kind, ProgressBar
from trainwright.core.errors import require_package
from trainwright.core.process import has_widgets, on_terminal

_PURPOSE = "RichProgressBar"


class RichProgressBar(ProgressBar):
    """Progress bar drawn by rich. Plain lines are written if the output is neither a terminal nor a notebook
    with ipywidgets.

    Args:
        refresh_rate: see `ProgressBar`. Default: 1.
        leave: keep every epoch's bar on the screen. Default: False.
    """

    reads_only = True

    def __init__(self, refresh_rate: int = 1, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave)
        self._screen: Any = None  # a rich.progress.Progress while a bar is open
        self._rows: dict[Kind, Any] = {}  # ids of its tasks, which are the open bars

    def can_draw(self) -> bool:
        """Return whether standard output is a terminal or a notebook with ipywidgets, without which rich only warns."""
        return on_terminal() or has_widgets()

    def open(self, kind: Kind, description: str, total: int | None, done: int) -> None:
        if self._screen is None:
            self._screen = _new_screen()
            self._screen.start()
        self._rows[kind] = self._screen.add_task(description, total=total, completed=done, metrics="")
        self._screen.refresh()

    def draw(self, kind: Kind, done: int, metrics: Mapping[str, str]) -> None:
        if kind not in self._rows:
            return
        self._screen.update(self._rows[kind], completed=done)
        if metrics:
            text = " ".join(f"{name}={value}" for name, value in metrics.items())
            self._screen.update(self._rows[kind], metrics=text)
        self._screen.refresh()

    def close(self, kind: Kind, *, leave: bool, paused_s: float = 0.0) -> None:
        if kind not in self._rows:
            return
        row = self._rows.pop(kind)
        if leave:
            self._screen.stop_task(row)
        else:
            self._screen.remove_task(row)
        for other in self._rows.values():  # the elapsed time of the other bar excludes the pause
            task = self._screen.tasks[self._screen.task_ids.index(other)]
            task.start_time += paused_s
        if not self._rows:
            self._screen.stop()
            self._screen = None

    def write(self, text: str) -> None:
        if self._screen is None:
            super().write(text)
        else:
            self._screen.console.print(text, markup=False, highlight=False)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_screen": None, "_rows": {}}


def _new_screen() -> Any:
    progress = require_package("rich.progress", purpose=_PURPOSE)
    console = require_package("rich.console", purpose=_PURPOSE)
    return progress.Progress(
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[metrics]}", markup=False),
        console=console.Console(file=sys.stdout),
        auto_refresh=False,  # no thread: a process with threads must not fork loader workers
    )
