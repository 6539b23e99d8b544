"""Metrics in ClearML."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import require_package
from trainwright.loggers.hyperparams import flatten
from trainwright.loggers.logger import RunInfo, Status
from trainwright.loggers.trackers.queued import Pixels, QueuedLogger

# ClearML also records arguments, output and resource usage by default. This logger records logged values only.
_DEFAULT_OPTIONS = {
    "reuse_last_task_id": False,
    "auto_connect_arg_parser": False,
    "auto_connect_frameworks": False,
    "auto_connect_streams": False,
    "auto_resource_monitoring": False,
}


class ClearMLLogger(QueuedLogger):
    """Logger for ClearML, online or offline.

    A metric `val/loss` is the series `loss` of the plot `val`. ClearML stores only finite values. Other values are
    skipped. Offline, ClearML writes a folder and a zip file for `Task.import_offline_session`. ClearML chooses the
    folder. It cannot resume a task offline, so every start creates a new one.

    Args:
        project_name: the project. Default: `"trainwright_logs"`.
        task_name: the task's name. Default: None, the name of the Trainer's run, or `"run"`.
        task_id: the task to continue. Offline, a new task is created, with a warning. Default: None, which creates a
            task.
        offline: write files only. Default: None, ClearML's own setting: `CLEARML_OFFLINE_MODE=1` or
            `Task.set_offline(True)`.
        prefix, log_model: see `RemoteLogger`.
        options: arguments of `Task.init`, for example `tags`, `output_uri`.
    """

    _package = "clearml"
    _project_argument = "project_name"

    def __init__(
        self,
        project_name: str = "trainwright_logs",
        task_name: str | None = None,
        task_id: str | None = None,
        offline: bool | None = None,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        **options: Any,
    ) -> None:
        super().__init__(prefix=prefix, log_model=log_model, project=project_name, id=task_id)
        self._task_name = task_name
        self._offline = offline
        self._options = options

    def _open(self, run: RunInfo) -> None:
        clearml = require_package("clearml", purpose="ClearMLLogger")
        # By default ClearML forks a reporting process. The fork may hang because torch has threads, and `close` waits.
        clearml.Task._report_subprocess_enabled = False
        if self._offline is None:
            self._offline = clearml.Task.is_offline()
        elif clearml.Task.is_offline() != self._offline:
            clearml.Task.set_offline(self._offline)
        options: dict[str, Any] = dict(_DEFAULT_OPTIONS)
        options["project_name"] = self._project
        options["task_name"] = self._task_name or run.run_name or "run"
        continues = self._id is not None and not self._offline
        if self._is_id_fixed and self._offline:
            self.warn_once(
                f"ClearMLLogger: ClearML cannot continue the task {self._id} offline. A new task is created."
            )
        if continues:
            options["continue_last_task"] = self._id
        options.update(self._options)
        self._experiment = clearml.Task.init(**options)
        if continues:
            # Otherwise ClearML adds the last iteration of the continued task to every step.
            self._experiment.set_initial_iteration(0)
        self._id = self._experiment.id
        self._dir = Path(self._experiment.get_offline_mode_folder()) if self._offline else None

    def state_dict(self) -> dict[str, Any]:
        if self._offline:  # an offline task cannot be continued
            return {}
        return super().state_dict()

    def _write_metrics(self, metrics: dict[str, float], step: int, seconds: float) -> None:
        for key, value in metrics.items():
            if math.isfinite(value):
                self._experiment.get_logger().report_scalar(*_title(key), value, step)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self._experiment.update_parameters({f"General/{key}": value for key, value in flatten(params).items()})

    def _write_image(self, key: str, pixels: Pixels, step: int) -> None:
        self._experiment.get_logger().report_image(*_title(key), step, image=pixels)

    def _write_text(self, key: str, text: str, step: int) -> None:
        self._experiment.get_logger().report_text(f"{key} (step {step}): {text}", print_console=False)

    def _write_table(self, key: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        self._experiment.get_logger().report_table(*_title(key), step, table_plot=[columns, *rows])

    def _write_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        metadata = {"aliases": ", ".join(aliases)}
        # Wait, because a newer checkpoint may replace the file afterwards.
        self._experiment.upload_artifact(path.name, artifact_object=path, metadata=metadata, wait_on_upload=True)

    def _flush(self) -> None:
        self._experiment.flush()

    def _close(self, status: Status) -> None:
        # The task of a successful run needs no call: `close` marks it as completed.
        if not self._offline and status == "failed":
            self._experiment.mark_failed()
        elif not self._offline and status == "interrupted":
            self._experiment.mark_stopped()
        self._experiment.close()


def _title(key: str) -> tuple[str, str]:
    """Return the plot and the series of a metric: `("val", "loss")` for `val/loss`, `("loss", "loss")` for `loss`."""
    title, _, series = key.rpartition("/")
    return title or key, series
