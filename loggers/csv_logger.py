"""Metrics in a CSV file: one row for each call, one column for each name."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from trainwright.loggers.logger import RunInfo
from trainwright.loggers.versioned import DEFAULT_NAME, VersionedLogger, cut_torn_line, rows_without, write_atomically

METRICS_FILE = "metrics.csv"


class CSVLogger(VersionedLogger):
    """Logger that writes `metrics.csv` (and `hparams.yaml`) into `save_dir/name/version_N`.

    The first column is `step`. The others follow in the order of their first appearance. Missing values are empty. A
    new name adds a column: the file is then rewritten under another name and renamed, so that no row is lost in a
    crash.

    Args:
        save_dir, name, version, prefix: see `VersionedLogger`.
        flush_logs_every_n_steps: write rows to the disk when the step has increased by this number since the last
            write, and at the end. Default: 100.
    """

    NAME_METRICS_FILE = METRICS_FILE
    NAME_HPARAMS_FILE = "hparams.yaml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str] | None = None,
        name: str | None = DEFAULT_NAME,
        version: int | str | None = None,
        prefix: str = "",
        flush_logs_every_n_steps: int = 100,
    ) -> None:
        super().__init__(save_dir, name, version, prefix)
        self.flush_logs_every_n_steps = flush_logs_every_n_steps
        self._columns: list[str] = []  # of the file, in their order; empty before the first write
        self._rows: list[dict[str, Any]] = []  # rows that are not in the file yet
        # The step of the last write, or of the first row if nothing has been written. None before the first row.
        self._flushed_at: int | None = None

    @property
    def metrics_file(self) -> Path:
        """The CSV file of the run. It is known after `start`."""
        return self._folder() / METRICS_FILE

    @property
    def metrics_file_path(self) -> str:
        """The path of `metrics_file` as text."""
        return str(self.metrics_file)

    def start(self, run: RunInfo) -> None:
        """Create the version's folder. Read the header if the folder contains a log to continue."""
        if self._run is not None:
            return
        super().start(run)
        cut_torn_line(self.metrics_file)
        self._columns = []
        if self._continues:
            self._columns, _ = _read(self.metrics_file)

    def has_log(self, folder: Path) -> bool:
        return (folder / METRICS_FILE).exists()

    def last_steps(self) -> dict[str, int]:
        _, rows = _read(self.metrics_file)
        last_steps: dict[str, int] = {}
        for row in rows:
            for name in row:
                if name != "step":
                    last_steps[name] = int(row["step"])
        return last_steps

    def remove_from(self, step: int, names: Collection[str] | None = None) -> None:
        columns, rows = _read(self.metrics_file)
        write_atomically(self.metrics_file, _text(columns, rows_without(rows, step, names), header=True))

    def log_hyperparams(self, params: Mapping[str, Any] | None = None) -> None:
        """Write `hparams.yaml`. A later call adds entries. Default: None adds no entries."""
        self.write_hyperparams({} if params is None else params)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        row = self.columns(metrics, "step")
        self.advance(step, row)
        self._rows.append({"step": step, **row})
        if self._flushed_at is None:
            self._flushed_at = step
        if step - self._flushed_at >= self.flush_logs_every_n_steps:
            self.flush()

    def flush(self) -> None:
        """Write pending rows. Blocks until they are in the file."""
        for log in self._of_evaluations.values():
            log.flush()
        if not self._rows:
            return
        known_names = set(self._columns)
        new_names: list[str] = []
        for row in self._rows:
            for name in row:
                if name not in known_names:
                    known_names.add(name)
                    new_names.append(name)
        if new_names or not self.metrics_file.exists():
            self._rewrite(new_names)
        else:
            with open(self.metrics_file, "a", encoding="utf-8", newline="") as file:
                file.write(_text(self._columns, self._rows, header=False))
        self._flushed_at = self._rows[-1]["step"]
        self._rows = []

    def _rewrite(self, new_names: Iterable[str]) -> None:
        """Write the file again with additional columns, and add the pending rows."""
        path = self.metrics_file
        file_columns: list[str] = []
        file_rows = ""
        if path.exists():
            file_columns, file_rows = _split(path)
        # `self._columns` too, in case the file was deleted during the run.
        columns = list(dict.fromkeys(["step", *file_columns, *self._columns, *new_names]))
        # Each row gets a comma for each new column, as text: "0,0.5" becomes "0,0.5,". Parsing all rows at each new
        # name would take minutes for a thousand names.
        num_added = len(columns) - len(file_columns)
        file_rows = file_rows.replace("\n", "," * num_added + "\n")
        header = _text(columns, [], header=True)
        write_atomically(path, header + file_rows + _text(columns, self._rows, header=False))
        self._columns = columns

    def _close(self) -> None:
        self._rows = []
        self._flushed_at = None


def _split(path: Path) -> tuple[list[str], str]:
    """Return the columns, and the text of the rows without an incomplete last row.

    Each line is a row, because values are numbers, which contain no line breaks.
    """
    with open(path, encoding="utf-8", newline="") as file:
        columns = next(csv.reader(file), [])  # a name may contain a line break
        text = file.read().replace("\r\n", "\n")
    return columns, text[: text.rfind("\n") + 1]


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return columns and rows, without empty values and without an incomplete last line."""
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(line for line in file if line.endswith("\n"))
        rows = [{name: text for name, text in row.items() if text} for row in reader]
        return list(reader.fieldnames or ()), rows


def _text(columns: list[str], rows: Iterable[Mapping[str, Any]], *, header: bool) -> str:
    out = io.StringIO(newline="")
    writer = csv.DictWriter(out, columns, restval="", lineterminator="\n")
    if header:
        writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()
