"""The default progress bar, drawn by tqdm in terminals and notebooks."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from trainwright.callbacks.progress_bar import Kind, ProgressBar
from trainwright.core.errors import require_package
from trainwright.core.process import has_widgets, in_notebook, on_terminal


class TQDMProgressBar(ProgressBar):
    """Progress bar drawn by tqdm. Plain lines are written if the output is neither a terminal nor a notebook.

    Args:
        refresh_rate: see `ProgressBar`. Default: 1.
        process_position: number of lines to keep free above, if several processes draw into one terminal. Default: 0.
        leave: keep every epoch's bar on the screen. Default: False.
    """

    reads_only = True

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, leave)
        self.process_position = process_position
        self._bars: dict[Kind, Any] = {}

    def can_draw(self) -> bool:
        """Return whether standard output is a terminal or a notebook."""
        return on_terminal() or in_notebook()

    def open(self, kind: Kind, description: str, total: int | None, done: int) -> None:
        place = self.process_position
        if kind == "eval" and "train" in self._bars:
            place += 1  # below the training bar
        if in_notebook() and not has_widgets():
            place = 0  # tqdm moves between lines by escape sequences, which a notebook prints: bars share one line
        self._bars[kind] = _bar_class()(
            total=total,
            initial=done,
            desc=description,
            position=place,
            leave=True,  # decided when it is closed
            dynamic_ncols=True,
            unit="batch",
            file=sys.stdout,
            mininterval=0,  # `ProgressBar` decides when to draw
            miniters=1,
            smoothing=0.1,
        )

    def draw(self, kind: Kind, done: int, metrics: Mapping[str, str]) -> None:
        bar = self._bars.get(kind)
        if bar is None:
            return
        if metrics:
            bar.set_postfix(metrics, refresh=False)
        if done > bar.n:
            bar.update(done - bar.n)
        else:
            bar.refresh()

    def close(self, kind: Kind, *, leave: bool, paused_s: float = 0.0) -> None:
        bar = self._bars.pop(kind, None)
        if bar is not None:
            bar.leave = leave
            bar.close()
        for other in self._bars.values():  # the rate and remaining time of the other bar exclude the pause
            other.start_t += paused_s
            other.last_print_t += paused_s

    def write(self, text: str) -> None:
        if self._bars:
            _bar_class().write(text, file=sys.stdout)
        else:
            super().write(text)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_bars": {}}


def _bar_class() -> Any:
    """Return tqdm's class for a notebook with widgets, else its class for terminals.

    The monitor thread, which only redraws rarely updated bars, is disabled, because a process with threads must not
    fork loader workers.
    """
    module = "tqdm.notebook" if has_widgets() else "tqdm"
    base = require_package(module, purpose="TQDMProgressBar").tqdm
    return type("Bar", (base,), {"monitor_interval": 0})
