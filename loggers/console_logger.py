"""Metrics as lines of text, for logs of batch systems and for runs without a progress bar."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from trainwright.core.errors import visible
from trainwright.loggers.hyperparams import flatten
from trainwright.loggers.logger import Logger


class ConsoleLogger(Logger):
    """Logger that prints `step 120 | loss 0.1234 | lr 0.001`, one line for each call.

    Args:
        prefix: text before the name of each metric, followed by a dash. Default: `""`.
        stream: output stream. Default: None, which is `sys.stdout` at the time of printing.
        precision: significant digits of a number. Default: 4.
    """

    def __init__(self, prefix: str = "", *, stream: TextIO | None = None, precision: int = 4) -> None:
        super().__init__(prefix=prefix)
        self._stream = stream
        self._precision = precision

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        parts = ["hyper-parameters"]
        parts += [f"{name} {value}" for name, value in flatten(params).items()]
        self._print(" | ".join(parts))

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._print_row(f"step {step}", metrics)

    def log_evaluation_step(self, metrics: Mapping[str, float], step: int, stage: str) -> None:
        self._print_row(f"{stage} step {step}", metrics)

    def log_text(self, key: str, text: str, step: int) -> None:
        (name,) = self.prefixed({key: text})
        self._print(f"step {step} | {name}: {text}")

    def flush(self) -> None:
        self._out.flush()

    @property
    def _out(self) -> TextIO:
        return self._stream if self._stream is not None else sys.stdout

    def _print_row(self, head: str, metrics: Mapping[str, float]) -> None:
        parts = [head]
        parts += [f"{name} {value:.{self._precision}g}" for name, value in self.prefixed(metrics).items()]
        self._print(" | ".join(parts))

    def _print(self, line: str) -> None:
        self._out.write(visible(line) + "\n")

    def __getstate__(self) -> dict[str, Any]:
        """Omit streams of this process, because they cannot be pickled."""
        state = dict(self.__dict__)
        state["_run"] = None
        if self._stream in (sys.stdout, sys.stderr):
            state["_stream"] = None
        return state
