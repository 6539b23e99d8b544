"""Metrics in Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.loggers.hyperparams import plain
from trainwright.loggers.images import to_pixels
from trainwright.loggers.logger import RemoteLogger, RunInfo, Status

STEP_KEY = "trainer/global_step"
"""The x-axis of every curve: W&B's own step counts calls, and cannot be decreased."""

_START_TIMEOUT_S = 10.0  # W&B's own default is 90 s, for which training would wait

_EXIT_CODES: dict[Status, int] = {"success": 0, "failed": 1, "interrupted": 255}


class WandbLogger(RemoteLogger):
    """Logger for Weights & Biases, online or offline.

    W&B never deletes a run's history. An online run that is resumed from an earlier step skips values at steps that the
    history already contains, so that the steps of curves always increase. Offline, W&B cannot resume. Each session
    writes a separate file with the same run id, and `wandb sync --append` joins them.

    Args:
        name: the run's display name. Default: None, the name of the Trainer's run.
        save_dir: folder for W&B's files. None uses the run's root folder. Default: `"."`.
        version: id of the run to resume or to create. Default: None, which lets W&B create an id.
        offline: write files only, for `wandb sync`. Default: False.
        id: the same as `version`. Default: None.
        project: the project. Default: None, W&B's setting or `"uncategorized"`.
        log_model: see `RemoteLogger`. Checkpoints are artifacts.
        experiment: an existing run to log to. The logger does not finish it. Default: None.
        prefix: see `RemoteLogger`.
        dir: the same as `save_dir`. Default: None.
        anonymous: let W&B log without an account. Default: None, W&B's setting.
        checkpoint_name: name of the artifacts of checkpoints. Default: `"model-"` and the run's id.
        add_file_policy: `"mutable"` lets W&B copy a checkpoint before the upload. `"immutable"` uploads it without a
            copy. Default: `"mutable"`.
        init_options: arguments of `wandb.init`, for example `entity`, `group`, `tags`, `config`.

    Raises:
        ConfigurationError: `log_model` is set with `offline`, `id` and `version` differ, or `log_model` or
            `add_file_policy` is unknown.
    """

    _folder_argument = ("save_dir", "")

    def __init__(
        self,
        name: str | None = None,
        save_dir: str | os.PathLike[str] | None = ".",
        version: str | None = None,
        offline: bool = False,
        id: str | None = None,
        project: str | None = None,
        log_model: Literal["all"] | bool = False,
        experiment: Any = None,
        prefix: str = "",
        *,
        dir: str | os.PathLike[str] | None = None,
        anonymous: bool | None = None,
        checkpoint_name: str | None = None,
        add_file_policy: Literal["mutable", "immutable"] = "mutable",
        **init_options: object,
    ) -> None:
        if offline and log_model:
            raise ConfigurationError(
                f"WandbLogger(log_model={log_model!r}, offline=True): checkpoints are uploaded, which needs a "
                "connection. Set offline=False or log_model=False."
            )
        if id is not None and version is not None and id != version:
            raise ConfigurationError(f"WandbLogger(id={id!r}, version={version!r}) mean the same; give one of them.")
        if add_file_policy not in ("mutable", "immutable"):
            raise ConfigurationError(
                f"WandbLogger(add_file_policy={add_file_policy!r}): expected 'mutable' or 'immutable'."
            )
        super().__init__(
            prefix=prefix, log_model=log_model, project=project, id=id or version, dir=save_dir if dir is None else dir
        )
        if anonymous is not None:
            init_options["anonymous"] = "allow" if anonymous else "never"
        self._name = name
        self._offline = offline
        self._checkpoint_name = checkpoint_name
        self._add_file_policy = add_file_policy
        self._init_options = init_options
        self._experiment = experiment  # None until `start` opens a run
        # True if this logger opens and finishes the run. False for a run that was passed or that was already open.
        self._is_ours = experiment is None
        self._resumed_step: int | None = None  # the last step in a resumed history
        self._resumed_evaluation_steps: dict[str, int] = {}  # the last evaluation steps, by the key of their x-axis
        self._evaluation_names: set[str] = set()  # names whose x-axis is the evaluation step

    @property
    def experiment(self) -> Any:
        """The W&B run, which is opened if needed. After `finish` it is closed and can still be read."""
        is_closed = self._run is None and self._is_ours and self._experiment is not None and not self.muted
        return self._experiment if is_closed else super().experiment

    def _backend(self) -> Any:
        return self._experiment

    def start(self, run: RunInfo) -> None:
        """Open the W&B run. Blocks until W&B's service has started and, online, the server has answered.

        If the server does not answer within 10 s, a warning is issued and the run is recorded offline. With `settings`
        in `init_options`, their timeout applies and W&B's error is raised.
        """
        if self._run is not None:
            return
        wandb = _wandb()
        needs_experiment = self._is_ours or self._experiment is None  # a copy of this logger has no experiment
        self._dir = self._dir or run.root_dir
        if needs_experiment and wandb.run is not None:
            self.warn_once(
                "a W&B run is already open in this process; WandbLogger logs to it and does not close it. Call "
                "wandb.finish() before, to create a separate run."
            )
            self._experiment = wandb.run
            self._is_ours = False
        elif needs_experiment:
            self._dir.mkdir(parents=True, exist_ok=True)
            self._experiment = self._init(wandb, self._options_of(run))
            self._is_ours = True
        super().start(run)
        self._resumed_evaluation_steps = {}
        self._evaluation_names = set()
        experiment = self._experiment
        self._id = experiment.id
        self._project = self._project or getattr(experiment, "project", None)
        experiment.define_metric(STEP_KEY)
        # step_sync repeats the latest step in rows without one, such as those of `wandb.log` in user code.
        experiment.define_metric("*", step_metric=STEP_KEY, step_sync=True)
        if getattr(experiment, "resumed", False) is True:
            last_step = experiment.summary.get(STEP_KEY)
            self._resumed_step = None if last_step is None else int(last_step)

    def _options_of(self, run: RunInfo) -> dict[str, Any]:
        """Return the arguments of `wandb.init`. The user's `init_options` take precedence."""
        options: dict[str, Any] = {
            "name": run.run_name if self._name is None else self._name,
            "project": self._project,
            "dir": str(self._dir),
            "id": self._id,
            "resume": "allow",
        }
        if self._offline:
            options["mode"] = "offline"
        options.update(self._init_options)
        return options

    def _init(self, wandb: Any, options: dict[str, Any]) -> Any:
        needs_no_server = options.get("mode") in ("offline", "disabled")
        if needs_no_server or options.get("settings") is not None:
            return wandb.init(**options)
        try:
            return wandb.init(**options, settings=wandb.Settings(init_timeout=_START_TIMEOUT_S))
        except wandb.errors.CommError as error:
            self.warn_once(
                f"WandbLogger: the server did not open a run within {_START_TIMEOUT_S:g} s: {error}. The run is "
                "recorded offline; send it with `wandb sync`."
            )
            options["mode"] = "offline"
            return wandb.init(**options)

    def log_hyperparams(self, params: Mapping[str, Any]) -> None:
        """Add nested values to the run's config."""
        self._experiment.config.update(plain(params), allow_val_change=True)

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Log values. Values at steps that a resumed history already contains are skipped."""
        self._log(metrics, step)

    def log_evaluation_step(self, metrics: Mapping[str, float], step: int, stage: str) -> None:
        """Log values over the stage's evaluation steps, except steps that a resumed history already contains."""
        key = f"trainer/{stage}_step"
        values = self.prefixed(metrics)
        if key not in self._resumed_evaluation_steps:
            last_step = None if self._resumed_step is None else self._experiment.summary.get(key)
            # -1 is below every step: nothing is skipped.
            self._resumed_evaluation_steps[key] = -1 if last_step is None else int(last_step)
        # `epoch` keeps the training step as its x-axis, because training logs it too.
        shared = self.prefixed({"epoch": 0}).keys()
        for name in values.keys() - self._evaluation_names - shared:
            self._experiment.define_metric(name, step_metric=key)
            self._evaluation_names.add(name)
        if step > self._resumed_evaluation_steps[key]:
            self._experiment.log({**values, key: step})

    def log_image(
        self, key: str, image: Any = None, step: int | None = None, *, images: list[Any] | None = None, **options: Any
    ) -> None:
        """Log an image in a form of `Logger.log_image`, or a list of images.

        Args:
            key: name of the entry.
            image: the image, a path or a `wandb.Image`, or a list of them.
            step: 0-based step. Default: None, the latest step that was logged.
            images: the list, under Lightning's name.
            options: arguments of `wandb.Image`, such as `caption=`; for a list of images, lists of the same length.
        """
        if images is not None:
            image = images
        is_list_of_lists = isinstance(image, list) and bool(image) and isinstance(image[0], list)  # rows of pixels
        if isinstance(image, list) and not is_list_of_lists:
            self._log_several("Image", key, [_for_wandb(each) for each in image], step, options)
        else:
            self._log({key: _wandb().Image(_for_wandb(image), **options)}, step)

    def log_figure(self, key: str, figure: object, step: int) -> None:
        self._log({key: _wandb().Image(figure)}, step)

    def log_text(self, key: str, text: str | None = None, step: int | None = None, **table: Any) -> None:
        """Log a text, as a table with one cell, which W&B shows unchanged.

        With `columns=` and `data=`, or `dataframe=`, instead of a text: see `log_table`.
        """
        if text is None:
            self.log_table(key, step=step, **table)
        else:
            self._put_table(key, ["text"], [[text]], step)

    def _put_table(self, key: str, columns: list[str], rows: list[list[Any]], step: int | None) -> None:
        self._log({key: _wandb().Table(columns=columns, data=rows)}, step)

    def log_audio(self, key: str, audios: list[Any], step: int | None = None, **options: list[Any]) -> None:
        """Log arrays or paths of sounds. Each option, such as `sample_rate=[…]`, is a list with one value per sound."""
        self._log_several("Audio", key, audios, step, options)

    def log_video(self, key: str, videos: list[Any], step: int | None = None, **options: list[Any]) -> None:
        """Log arrays or paths of videos. Each option, such as `fps=[…]`, is a list with one value per video."""
        self._log_several("Video", key, videos, step, options)

    def _log_several(
        self, kind: str, key: str, values: list[Any], step: int | None, options: Mapping[str, list[Any]]
    ) -> None:
        if not isinstance(values, list) or any(len(of_values) != len(values) for of_values in options.values()):
            raise ConfigurationError(
                f"WandbLogger.log_{kind.lower()}({key!r}): pass a list, and options as lists of the same length."
            )
        media_class = getattr(_wandb(), kind)
        media: list[Any] = []
        for index, value in enumerate(values):
            options_of_value = {name: of_values[index] for name, of_values in options.items()}
            media.append(media_class(value, **options_of_value))
        self._log({key: media}, step)

    def download_artifact(
        self,
        artifact: str,
        save_dir: str | os.PathLike[str] | None = None,
        artifact_type: str | None = None,
        use_artifact: bool = True,
    ) -> str:
        """Download an artifact and return its folder. By default it is recorded as an input of the open run."""
        if use_artifact and not self.muted:
            wandb_artifact = self.use_artifact(artifact, artifact_type)
        else:
            wandb_artifact = _wandb().Api().artifact(artifact, type=artifact_type)
        root = None if save_dir is None else str(save_dir)
        return str(wandb_artifact.download(root=root))

    def use_artifact(self, artifact: str, artifact_type: str | None = None) -> Any:
        """Return an artifact, and record it as an input of the run."""
        return self.experiment.use_artifact(artifact, type=artifact_type)

    def watch(self, model: object, log: str | None = "gradients", log_freq: int = 100, log_graph: bool = True) -> None:
        """Record histograms of gradients or parameters in W&B. W&B reads them during the step, which takes time."""
        self.experiment.watch(model, log=log, log_freq=log_freq, log_graph=log_graph)

    def finish(self, status: Status) -> None:
        """End the W&B run with `status`, unless this logger did not open it.

        Blocks until everything is uploaded. Offline, W&B's own process may still write its file for a moment.
        """
        if self._run is None:
            return
        try:
            if self._last_checkpoint is not None and self._last_checkpoint[0].exists():
                self._put_checkpoint(*self._last_checkpoint)
        finally:
            self._run = None
            self._last_checkpoint = None
            if self._is_ours:
                self._experiment.finish(exit_code=_EXIT_CODES[status])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume the run of `state`, unless another id was requested. Call it before `start`, because an open W&B run
        cannot be replaced.
        """
        saved_id = state.get("id")
        if saved_id is None or saved_id == self._id or self._is_id_fixed:
            return
        if self._run is not None:
            self.warn_once(
                f"the checkpoint belongs to the W&B run {saved_id!r}, but the run {self._id!r} is already open and "
                f"continues as a new one. Pass WandbLogger(id={saved_id!r}) to continue the old curves."
            )
            return
        self._id = saved_id

    def _log(self, values: Mapping[str, Any], step: int | None) -> None:
        row = self.prefixed(values)
        if step is not None:
            if self._resumed_step is not None and step <= self._resumed_step:
                return
            row[STEP_KEY] = step
        self._experiment.log(row)

    def _put_checkpoint(self, path: Path, aliases: tuple[str, ...]) -> None:
        wandb = _wandb()
        name = self._checkpoint_name or f"model-{self._id}"
        artifact = wandb.Artifact(name, type="model", metadata={"checkpoint": path.name})
        add = artifact.add_dir if path.is_dir() else artifact.add_file
        if self._add_file_policy == "mutable":
            add(str(path))  # W&B's default
        else:
            add(str(path), policy=self._add_file_policy)
        self._experiment.log_artifact(artifact, aliases=["latest", path.name, *aliases])


def _for_wandb(image: Any) -> Any:
    """Return an image as pixels that W&B accepts. Paths and `wandb.Image` are returned as they are."""
    if isinstance(image, (str, os.PathLike, _wandb().Image)):
        return image
    pixels = to_pixels(image)
    return pixels[:, :, 0] if pixels.shape[2] == 1 else pixels


def _wandb() -> Any:
    return require_package("wandb", purpose="WandbLogger")
