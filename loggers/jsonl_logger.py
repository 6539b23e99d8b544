"""Metrics as JSON Lines: one object for each call, readable during the run."""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from trainwright.core.errors import ConfigurationError
from trainwright.loggers.hyperparams import json_safe, plain
from trainwright.loggers.versioned import VersionedLogger, cut_torn_line, rows_without, write_atomically

METRICS_FILE = "metrics.jsonl"
HPARAMS_FILE = "hparams.json"
_OWN_COLUMNS = ("step", "time")


class JSONLinesLogger(VersionedLogger):
    """Logger that writes `metrics.jsonl` (and `hparams.json`) into `save_dir/name/version_N`.

    Each call writes one line, `{"step": …, "time": <seconds since 1970>, "<name>": …, …}`, before it returns. Each line
    is valid JSON: NaN and infinities are the texts "NaN", "Infinity" and "-Infinity".

    The arguments are those of `VersionedLogger`.
    """

    _OPEN = ("_file",)  # attributes that a pickle omits, see `VersionedLogger`
    _file: TextIO | None = None

    @property
    def metrics_file(self) -> Path:
        """The file of the run. It is known after `start`."""
        return self._folder() / METRICS_FILE

    def has_log(self, folder: Path) -> bool:
        return (folder / METRICS_FILE).exists()

    def last_steps(self) -> dict[str, int]:
        last_steps: dict[str, int] = {}
        for row in _rows(self.metrics_file):
            for name in row:
                if name not in _OWN_COLUMNS:
                    last_steps[name] = int(row["step"])
        return last_steps

    def remove_from(self, step: int, names: Collection[str] | None = None) -> None:
        self._close()
        rows = rows_without(_rows(self.metrics_file), step, names)
        write_atomically(self.metrics_file, "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows))

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Write `hparams.json`. A later call adds entries."""
        self._hyperparams.update(plain(params))
        text = json.dumps(json_safe(self._hyperparams), indent=2, allow_nan=False)
        write_atomically(self._folder() / HPARAMS_FILE, text + "\n")

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self._write(self.columns(metrics, *_OWN_COLUMNS), step)

    def log_text(self, key: str, text: str, step: int) -> None:
        self._write(self.columns({key: text}, *_OWN_COLUMNS), step)

    def _write(self, values: Mapping[str, Any], step: int) -> None:
        self.advance(step, values)
        if self._file is None:
            cut_torn_line(self.metrics_file)
            self._file = open(self.metrics_file, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  # until `_close`
        line = {"step": step, "time": time.time(), **json_safe(dict(values))}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the rows of a file. Raises a ConfigurationError if a line is damaged."""
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.endswith("\n"):  # a crash has truncated it
                return
            try:
                yield json.loads(line)
            except json.JSONDecodeError as error:
                raise ConfigurationError(
                    f"line {number} of {path} is not JSON: {error}. Repair or delete the line, or log into another "
                    "folder."
                ) from error
