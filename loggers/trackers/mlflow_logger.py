"""Metrics in MLflow."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import require_package
from trainwright.loggers.hyperparams import flatten
from trainwright.loggers.logger import RunInfo, Status
from trainwright.loggers.trackers.queued import Pixels, QueuedLogger

_STATUS: dict[Status, str] = {"success": "FINISHED", "failed": "FAILED", "interrupted": "KILLED"}
# MLflow rejects requests above these limits.
_MAX_PARAMETER_LENGTH = 6000
_MAX_PARAMETERS_PER_REQUEST = 100


class MLFlowLogger(QueuedLogger):
    """Logger for MLflow: a tracking server, or a SQLite file.

    Images, figures, texts and tables are artifacts. MLflow keeps the first value of each parameter.
    Characters that MLflow does not accept in a name are replaced by `_`.

    Args:
        experiment_name: the experiment; it is created if it does not exist. Default: `"trainwright_logs"`.
        run_name: the run's display name. Default: None, the name of the Trainer's run, or a name that MLflow creates.
        tracking_uri: the server or store. Default: None, which is MLFLOW_TRACKING_URI, or the file `mlflow.db` in
            `save_dir`.
        tags: tags of a new run. Default: None.
        save_dir: folder of the store if neither `tracking_uri` nor MLFLOW_TRACKING_URI is set. None uses the run's
            root folder. Default: `"./mlruns"`.
        prefix, log_model: see `RemoteLogger`.
        artifact_location: location of the artifacts of a new experiment. Default: None, the server's setting, or the
            folder `artifacts` in `save_dir`.
        run_id: the run to resume. Default: None, which creates a run.
    """

    _package = "mlflow.tracking"
    _project_argument = "experiment_name"
    _folder_argument = ("save_dir", "")

    def __init__(
        self,
        experiment_name: str = "trainwright_logs",
        run_name: str | None = None,
        tracking_uri: str | None = None,
        tags: Mapping[str, Any] | None = None,
        save_dir: str | os.PathLike[str] | None = "./mlruns",
        log_model: Literal["all"] | bool = False,
        prefix: str = "",
        artifact_location: str | None = None,
        run_id: str | None = None,
    ) -> None:
        folder = save_dir if tracking_uri is None else None
        super().__init__(prefix=prefix, log_model=log_model, project=experiment_name, id=run_id, dir=folder)
        self._run_name = run_name
        self._uri = tracking_uri
        self._tags = dict(tags or {})
        self._artifact_location = artifact_location
        self._experiment_id: str | None = None

    @property
    def name(self) -> str | None:
        """The id of the experiment; None until it is known."""
        return self._experiment_id

    experiment_id = name  # the name in MLflow and in Lightning
    run_id = QueuedLogger.version

    def _open(self, run: RunInfo) -> None:
        tracking = require_package("mlflow.tracking", purpose="MLFlowLogger")
        variables = require_package("mlflow.environment_variables", purpose="MLFlowLogger")
        self._uri = self._uri or variables.MLFLOW_TRACKING_URI.get()
        artifact_location = self._artifact_location
        if self._uri is None:
            self._dir = (self._dir or run.root_dir).absolute()
            self._dir.mkdir(parents=True, exist_ok=True)
            uri = f"sqlite:///{self._dir / 'mlflow.db'}"
            artifact_location = artifact_location or (self._dir / "artifacts").as_uri()
        else:
            self._dir = None
            uri = self._uri
        client = tracking.MlflowClient(uri)
        if self._id is not None:
            self._experiment_id = client.get_run(self._id).info.experiment_id
            client.update_run(self._id, status="RUNNING")
        else:
            experiment = client.get_experiment_by_name(self._project)
            if experiment is None:
                self._experiment_id = client.create_experiment(self._project, artifact_location=artifact_location)
            else:
                self._experiment_id = experiment.experiment_id
            name = run.run_name if self._run_name is None else self._run_name
            self._id = client.create_run(self._experiment_id, tags=self._tags, run_name=name).info.run_id
        self._experiment = client

    def _metric_name(self, name: str) -> str:
        return _name(name)

    def _last_steps(self) -> Mapping[str, int]:
        last_steps: dict[str, int] = {}
        for name in self._experiment.get_run(self._id).data.metrics:
            history = self._experiment.get_metric_history(self._id, name)
            last_steps[name] = max(metric.step for metric in history)
        return last_steps

    def _write_metrics(self, metrics: dict[str, float], step: int, seconds: float) -> None:
        entities = require_package("mlflow.entities", purpose="MLFlowLogger")
        milliseconds = int(seconds * 1000)
        values = [entities.Metric(name, value, milliseconds, step) for name, value in metrics.items()]
        self._experiment.log_batch(self._id, metrics=values)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        entities = require_package("mlflow.entities", purpose="MLFlowLogger")
        known = self._experiment.get_run(self._id).data.params
        values = {_name(key): str(value)[:_MAX_PARAMETER_LENGTH] for key, value in flatten(params).items()}
        # MLflow rejects another value of a known parameter.
        new = [entities.Param(key, value) for key, value in values.items() if key not in known]
        for begin in range(0, len(new), _MAX_PARAMETERS_PER_REQUEST):
            self._experiment.log_batch(self._id, params=new[begin : begin + _MAX_PARAMETERS_PER_REQUEST])

    def _write_image(self, key: str, pixels: Pixels, step: int) -> None:
        self._experiment.log_image(self._id, pixels, f"images/{_name(key)}/step_{step}.png")

    def _write_text(self, key: str, text: str, step: int) -> None:
        self._experiment.log_text(self._id, text, f"texts/{_name(key)}/step_{step}.txt")

    def _write_table(self, key: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        values = {column: [row[index] for row in rows] for index, column in enumerate(columns)}
        self._experiment.log_table(self._id, values, f"tables/{_name(key)}/step_{step}.json")

    def _write_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        folder = f"checkpoints/{path.name}"
        send = self._experiment.log_artifacts if path.is_dir() else self._experiment.log_artifact
        send(self._id, str(path), folder)
        if aliases:
            self._experiment.log_text(self._id, json.dumps(list(aliases)), f"{folder}/aliases.json")

    def _close(self, status: Status) -> None:
        self._experiment.set_terminated(self._id, _STATUS[status])


def _name(key: str) -> str:
    """Return a name that MLflow accepts: `val_f1_` for `val:f1%`."""
    return re.sub(r"[^a-zA-Z0-9_/. -]", "_", key)
