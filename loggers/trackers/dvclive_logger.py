"""Metrics, hyper-parameters and images in files of DVCLive."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import require_package
from trainwright.loggers.logger import Logger, RunInfo, Status
from trainwright.loggers.trackers.queued import Pixels, QueuedLogger, to_image


class DVCLiveLogger(QueuedLogger):
    """Logger for DVCLive: files in one folder, for DVC and its tools.

    Metrics are `plots/metrics/NAME.tsv`, hyper-parameters `params.yaml`, images and figures
    `plots/images/NAME/STEP.png`. DVCLive does not support texts and tables. A new run replaces the files of the
    previous run in the same folder, as DVCLive does. A resumed run continues these files.

    Args:
        dir: the folder. Default: None, `dvclive` in the run's root folder.
        prefix, log_model: see `RemoteLogger`. `log_model` needs a DVC repository.
        options: arguments of `dvclive.Live`, such as `exp_name`, `report`, `dvcyaml` (default here: None) and
            `save_dvc_exp` (default here: False), which needs a DVC repository.
    """

    _package = "dvclive"

    def __init__(
        self,
        dir: str | os.PathLike[str] | None = None,
        prefix: str = "",
        log_model: Literal["all"] | bool = False,
        **options: Any,
    ) -> None:
        super().__init__(prefix=prefix, log_model=log_model, dir=dir)
        self._options = options

    @classmethod
    def in_folder(cls, root_dir: Path, project: str | None = None, **options: Any) -> Logger:
        """Return a logger that writes into the folder `dvclive`, or into the project's sub-folder of it."""
        options.setdefault("dir", root_dir / "dvclive" / (project or ""))
        return cls(**options)

    def _open(self, run: RunInfo) -> None:
        dvclive = require_package("dvclive", purpose="DVCLiveLogger")
        self._dir = self._dir or run.root_dir / "dvclive"
        self._id = self._dir.name  # a run is resumed by its folder
        options = {"save_dvc_exp": False, "dvcyaml": None, "resume": self._exists, **self._options}
        self._experiment = dvclive.Live(dir=str(self._dir), **options)

    def _last_steps(self) -> Mapping[str, int]:
        # `val/loss.tsv` has the columns "step" and "loss", separated by a tab, after one line with their names.
        folder = Path(self.log_dir or ".", "plots", "metrics")
        last_steps: dict[str, int] = {}
        for path in folder.rglob("*.tsv"):
            lines = path.read_text().splitlines()[1:]
            if lines:
                name = path.relative_to(folder).with_suffix("").as_posix()
                last_steps[name] = int(lines[-1].split("\t")[0])
        return last_steps

    def _write_metrics(self, metrics: dict[str, float], step: int, seconds: float) -> None:
        self._experiment.step = step
        for key, value in metrics.items():
            self._experiment.log_metric(key, value)

    def _write_hyperparams(self, params: dict[str, Any]) -> None:
        self._experiment.log_params(params)

    def _write_image(self, key: str, pixels: Pixels, step: int) -> None:
        self._experiment.log_image(f"{key}/{step}.png", to_image(pixels))

    def _write_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        self._experiment.log_artifact(str(path), type="model", name=path.name, labels=list(aliases))

    def _flush(self) -> None:
        self._experiment.make_summary()

    def _close(self, status: Status) -> None:
        self._experiment.end()
