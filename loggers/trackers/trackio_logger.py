"""Metrics, hyper-parameters and images in Trackio."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainwright.core.errors import require_package
from trainwright.loggers.hyperparams import flatten
from trainwright.loggers.logger import RunInfo, Status
from trainwright.loggers.trackers.queued import Pixels, QueuedLogger, to_image


class TrackioLogger(QueuedLogger):
    """Logger for Trackio: a local SQLite file, a Space of Hugging Face, or a server.

    Local files are in the folder of the environment variable TRACKIO_DIR, or in Trackio's default folder. A run is
    resumed by its name. Trackio does not store a run's status, or hyper-parameters that are logged after the first
    metrics.

    Args:
        project: the project. Default: `"trainwright_logs"`.
        name: the run's name. Default: None, the name of the Trainer's run, or a name that Trackio creates.
        prefix: see `RemoteLogger`.
        options: arguments of `trackio.init`, for example `space_id`, `server_url`, `group`.
    """

    _package = "trackio"

    def __init__(
        self, project: str = "trainwright_logs", name: str | None = None, prefix: str = "", **options: Any
    ) -> None:
        super().__init__(prefix=prefix, project=project)
        self._run_name = name
        self._options = options

    def _open(self, run: RunInfo) -> None:
        trackio = require_package("trackio", purpose="TrackioLogger")
        options: dict[str, Any] = {
            "project": self._project,
            "name": self._id or self._run_name or run.run_name,
            "resume": "allow" if self._exists else "never",
            # Trackio would open its dashboard in a notebook, and log the utilization of GPU and CPU.
            "embed": False,
            "auto_log_gpu": False,
            "auto_log_cpu": False,
        }
        options.update(self._options)
        self._experiment = trackio.init(**options)
        self._id = self._experiment.name  # a run is resumed by its name

    def _last_steps(self) -> Mapping[str, int]:
        storage = require_package("trackio.sqlite_storage", purpose="TrackioLogger").SQLiteStorage
        last_steps: dict[str, int] = {}
        # A row is one call of `log`, such as {"loss": 0.5, "step": 3, "timestamp": …}. Only local rows are read, not
        # those of a Space or a server. The result's entries for "step" and "timestamp" belong to no metric.
        for row in storage.get_logs(self._project, self._id):
            for key in row:
                last_steps[key] = max(row["step"], last_steps.get(key, 0))
        return last_steps

    def _write_metrics(self, metrics: dict[str, float], step: int, seconds: float) -> None:
        self._experiment.log(metrics, step=step)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self._experiment.config.update(flatten(params))

    def _write_image(self, key: str, pixels: Pixels, step: int) -> None:
        image = require_package("trackio", purpose="TrackioLogger").Image(to_image(pixels))
        self._experiment.log({key: image}, step=step)

    def _write_text(self, key: str, text: str, step: int) -> None:
        self._experiment.log({key: text}, step=step)

    def _write_table(self, key: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        table = require_package("trackio", purpose="TrackioLogger").Table(columns=columns, data=rows)
        self._experiment.log({key: table}, step=step)

    def _close(self, status: Status) -> None:
        self._experiment.finish()
