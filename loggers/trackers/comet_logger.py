"""Metrics in Comet."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.loggers.hyperparams import flatten
from trainwright.loggers.logger import RunInfo, Status
from trainwright.loggers.trackers.queued import Pixels, QueuedLogger, to_image

# Comet also records metrics, parameters and output by default. This logger records logged values only.
_DEFAULT_OPTIONS = {
    "auto_metric_logging": False,
    "auto_param_logging": False,
    "auto_output_logging": False,
    "parse_args": False,
    "display_summary_level": 0,
}


class CometLogger(QueuedLogger):
    """Logger for Comet, online or offline.

    Offline, Comet writes a zip file for `comet upload`. A resumed run continues the same experiment. Offline, it writes
    another zip file for that experiment.

    Args:
        api_key: key of Comet. Default: None, Comet's setting.
        workspace: workspace in Comet. Default: None, Comet's setting.
        project: the project. Default: None, Comet's setting.
        experiment_key: the experiment to continue, or the key of a new one. Default: None, Comet's setting, or a new
            key.
        mode: `"create"` requires that no experiment has the key. `"get"` requires that an experiment has the key.
            `"get_or_create"` accepts both. Default: None, Comet's setting, or `"get_or_create"`. A resumed run uses
            `"get"`.
        online: False only writes files. Default: None, Comet's setting.
        prefix, log_model: see `RemoteLogger`.
        experiment_config: a `comet_ml.ExperimentConfig`, instead of `options`. What Comet records besides logged
            values then depends on it. Default: None.
        options: arguments of `comet_ml.ExperimentConfig`, for example `name` (default here: the name of the Trainer's
            run), `tags`, `offline_directory`.

    Raises:
        ConfigurationError: `experiment_config` and `options` were both passed.
    """

    _package = "comet_ml"
    _folder_argument = ("offline_directory", "comet")

    def __init__(
        self,
        *,
        api_key: str | None = None,
        workspace: str | None = None,
        project: str | None = None,
        experiment_key: str | None = None,
        mode: Literal["get_or_create", "create", "get"] | None = None,
        online: bool | None = None,
        prefix: str | None = None,
        log_model: Literal["all"] | bool = False,
        experiment_config: Any = None,
        **options: Any,
    ) -> None:
        if experiment_config is not None and options:
            raise ConfigurationError(
                f"CometLogger received experiment_config= and {', '.join(sorted(options))}. Set these options in the "
                "ExperimentConfig, or remove experiment_config=."
            )
        super().__init__(prefix=prefix or "", log_model=log_model, project=project, id=experiment_key)
        # Arguments of `comet_ml.start`.
        self._start_options = {"api_key": api_key, "workspace": workspace, "project": project, "online": online}
        self._mode = mode
        self._config = experiment_config
        self._options = options

    def _open(self, run: RunInfo) -> None:
        comet = require_package("comet_ml", purpose="CometLogger", install="comet-ml")
        config = self._config
        if config is None:
            options = {**_DEFAULT_OPTIONS, "name": run.run_name, **self._options}
            config = comet.ExperimentConfig(**options)
        mode = "get" if self._exists else self._mode
        self._experiment = comet.start(
            **self._start_options, experiment_key=self._id, mode=mode, experiment_config=config
        )
        self._id = self._experiment.get_key()

    def _write_metrics(self, metrics: dict[str, float], step: int, seconds: float) -> None:
        self._experiment.log_metrics(metrics, step=step)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self._experiment.log_parameters(flatten(params))

    def _write_image(self, key: str, pixels: Pixels, step: int) -> None:
        file = io.BytesIO()  # Comet's own conversion of arrays fails with NumPy 2
        to_image(pixels).save(file, format="png")
        file.seek(0)
        self._experiment.log_image(file, name=key, step=step)

    def _write_text(self, key: str, text: str, step: int) -> None:
        self._experiment.log_text(text, step=step, metadata={"key": key})

    def _write_table(self, key: str, columns: list[str], rows: list[list[Any]], step: int) -> None:
        self._experiment.log_table(f"{key}_step_{step}.csv", tabular_data=rows, headers=columns)

    def _write_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        self._experiment.log_model(path.name, str(path), metadata={"aliases": list(aliases)})

    def _flush(self) -> None:
        if self._start_options["online"] is not False:  # offline, Comet has nothing to send
            self._experiment.flush()

    def _close(self, status: Status) -> None:
        self._experiment.log_other("status", status)
        self._experiment.end()
