"""Metrics in SwanLab."""

from __future__ import annotations

import os
from typing import Any

from trainwright.core.errors import require_package
from trainwright.loggers.hyperparams import flatten
from trainwright.loggers.logger import RunInfo, Status
from trainwright.loggers.trackers.queued import Pixels, QueuedLogger, to_image

_STATES: dict[Status, str] = {"success": "success", "failed": "crashed", "interrupted": "aborted"}


class SwanLabLogger(QueuedLogger):
    """Logger for SwanLab, online or offline.

    Offline, SwanLab writes a folder for `swanlab sync`. A resumed run has the same id. Offline, a resumed run writes
    another folder. SwanLab supports one open run per process.

    Args:
        project: the project. Default: `"trainwright_logs"`.
        name: the run's display name. Default: None, the name of the Trainer's run, or a name that SwanLab creates.
        id: id of the run to continue or to create. Default: None, which lets SwanLab create an id.
        log_dir: folder of SwanLab's files. Default: None, `swanlog` in the run's root folder.
        prefix: see `RemoteLogger`.
        options: arguments of `swanlab.init`, for example `mode="offline"`, `workspace`, `tags`.
    """

    _package = "swanlab"
    _folder_argument = ("log_dir", "swanlog")
    _closes_in_caller = True  # Run.finish restores signal handlers, which only the main thread can

    def __init__(
        self,
        project: str = "trainwright_logs",
        name: str | None = None,
        id: str | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        prefix: str = "",
        **options: Any,
    ) -> None:
        super().__init__(prefix=prefix, project=project, id=id, dir=log_dir)
        self._run_name = name
        self._options = options

    def _open(self, run: RunInfo) -> None:
        swanlab = require_package("swanlab", purpose="SwanLabLogger")
        self._dir = self._dir or run.root_dir / "swanlog"
        options: dict[str, Any] = {
            "project": self._project,
            "name": self._run_name or run.run_name,
            "log_dir": self.log_dir,
        }
        if self._id is not None:
            options["id"] = self._id
            options["resume"] = "allow"  # continue the run if it exists, otherwise create it
        options.update(self._options)
        self._experiment = swanlab.init(**options)
        self._id = self._experiment.id

    def _write_metrics(self, metrics: dict[str, float], step: int, seconds: float) -> None:
        self._experiment.log(metrics, step=step)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self._experiment.config.update(flatten(params))

    def _write_image(self, key: str, pixels: Pixels, step: int) -> None:
        self._experiment.log_image(key=key, data=to_image(pixels), step=step)

    def _write_text(self, key: str, text: str, step: int) -> None:
        self._experiment.log_text(key=key, data=text, step=step)

    def _close(self, status: Status) -> None:
        # SwanLab requires an error text for the state "crashed". A logger receives only the status of the run.
        error = "failed" if status == "failed" else None
        self._experiment.finish(_STATES[status], error=error)
