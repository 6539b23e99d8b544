"""Keep the best k checkpoints by a metric, the last one, and one per interval."""

from __future__ import annotations

import datetime
import time
import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Literal

from trainwright.callbacks.agreed_clock import AgreedClock
from trainwright.callbacks.callback import Callback, Order
from trainwright.callbacks.checkpoint_name import (
    DEFAULT_TEMPLATE,
    FileExtension,
    check_template,
    format_name,
    template_fields,
)
from trainwright.callbacks.keep_every import KeepEvery, Length
from trainwright.callbacks.monitored import check_mode, from_json, from_main_rank, missing_metric, to_json
from trainwright.callbacks.save_facts import NO_FACTS, SaveFacts
from trainwright.callbacks.top_k import TopK
from trainwright.core.errors import ConfigurationError, Preempted, TrainwrightWarning
from trainwright.core.host.folders import check_writable, is_url, local_folder
from trainwright.core.metric_value import MetricValue
from trainwright.core.names.hidden_names import claimed_names, names_in
from trainwright.core.run import Run, SaveRequest, Stage
from trainwright.core.state import StepResult
from trainwright.core.task import TaskModule


class ModelCheckpoint(Callback):
    """Callback that decides when checkpoints are saved, how they are named and which ones are deleted.

    Default: save after every validation (or training epoch, without validation) and keep the latest checkpoint. The
    score is the value in `trainer.callback_metrics` at the end of the step, after validation and, at an epoch's end,
    after `on_train_epoch_end`. Training and validation metrics can be monitored. Rank 0's values are broadcast when a
    save is due. NaN is the worst score. Only checkpoints in this callback's index are deleted. The index contains names
    relative to the folder, so a run's folder may be moved.

    Args:
        dirpath: folder of the checkpoints, or a URL that fsspec supports (`s3://bucket/run`). With a URL, checkpoints
            are written below `trainer.default_root_dir/checkpoints` and uploaded; local and remote copies are deleted
            together. Default: `trainer.checkpoint_dir`.
        filename: template of the folder's name: `"{epoch}-{val_loss:.2f}"` becomes `epoch=3-val_loss=0.12`. Default:
            `"{epoch}-{step}"`. `FILE_EXTENSION` is appended, which is empty, and `.ckpt` under `as_lightning()`.
        monitor: the metric to rank by. Default: None, which keeps the latest checkpoint.
        verbose: print what is saved. Default: False.
        save_last: True also writes a checkpoint named `last` at each save. `"link"` instead creates a relative symbolic
            link `last` to the newest checkpoint. None and False disable it. Default: None.
        save_top_k: number of checkpoints to keep; -1 for all. Without `monitor` only -1, 0 and 1 are valid. Default: 1.
        save_on_exception: save from the main process after an exception (see `Run.emergency_save`). Default: False.
        save_weights_only: omit optimizers, progress and generators. Default: False.
        mode: `"min"` if lower scores are better, `"max"` if higher scores are better. Default: `"min"`.
        auto_insert_metric_name: write `name=` before each value in the name. Default: True.
        every_n_train_steps: save when `state.step` is a multiple of this number, instead of per epoch. Default: None.
        train_time_interval: save at intervals of this duration, instead of per epoch. Default: None.
        every_n_epochs: save at the validations (or ends) of every n-th epoch. 0 disables it. Default: None,
            which is 1, or 0 with `every_n_train_steps` or `train_time_interval`.
        save_on_train_epoch_end: save at the end of epochs (True) or at validations (False). Default: None, which saves
            at validations, or at the end of epochs if the fit has none.
        keep_every: interval of training (`"1000 steps"`, `"1 epoch"`, `"1 h"`, or a number of steps) after which the
            next checkpoint is kept permanently. With `monitor` it is written even if its score is not among the best.
            Default: None.
        enable_version_counter: append `-v1`, `-v2`, … if a name is taken. False replaces the checkpoint, unless
            `keep_every` keeps it. Default: True.

    Raises:
        ConfigurationError: arguments contradict each other. In a run: the monitored metric was not logged by the end of
            validation (or of an epoch, without validation).
    """

    reads_only = True
    order = Order.LAST
    CHECKPOINT_NAME_LAST = "last"
    CHECKPOINT_JOIN_CHAR = "-"
    CHECKPOINT_EQUALS_CHAR = "="
    FILE_EXTENSION: str = FileExtension()  # type: ignore[assignment]  # a descriptor; sub-classes may set a text
    STARTING_VERSION = 1

    def __init__(
        self,
        dirpath: str | Path | None = None,
        filename: str | None = None,
        monitor: str | None = None,
        verbose: bool = False,
        save_last: bool | Literal["link"] | None = None,
        save_top_k: int = 1,
        save_on_exception: bool = False,
        save_weights_only: bool = False,
        mode: str = "min",
        auto_insert_metric_name: bool = True,
        every_n_train_steps: int | None = None,
        train_time_interval: datetime.timedelta | None = None,
        every_n_epochs: int | None = None,
        save_on_train_epoch_end: bool | None = None,
        enable_version_counter: bool = True,
        *,
        keep_every: Length | None = None,
    ) -> None:
        self.mode = check_mode(mode, "ModelCheckpoint")
        self.filename = filename
        self.monitor = monitor
        self.verbose = verbose
        self.save_last = save_last
        self.save_top_k = save_top_k
        self.save_on_exception = save_on_exception
        self.save_weights_only = save_weights_only
        self.auto_insert_metric_name = auto_insert_metric_name
        self.every_n_train_steps = every_n_train_steps or 0
        self.train_time_interval = train_time_interval
        if every_n_epochs is None:
            has_other_interval = every_n_train_steps is not None or train_time_interval is not None
            every_n_epochs = 0 if has_other_interval else 1
        self.every_n_epochs = every_n_epochs
        self.save_on_train_epoch_end = save_on_train_epoch_end
        self.enable_version_counter = enable_version_counter
        self.keep_every = keep_every
        self.current_score: float | None = None
        self.remote: str | None = None
        self._dirpath_argument: Path | None = None
        if is_url(dirpath):
            self.remote = dirpath.rstrip("/")
        elif dirpath is not None:
            self._dirpath_argument = Path(dirpath).expanduser().absolute()
        self._folder = self._dirpath_argument  # `setup` replaces None by the run's folder
        self._warned_fields: set[str] = set()  # fields of `filename` with a warning that they were never logged
        # The index: names of checkpoints that this callback keeps, relative to the folder.
        self._top = TopK(save_top_k, self.mode)
        self._permanent = KeepEvery(keep_every)
        self._latest: str | None = None  # without a monitor: the newest, kept instead of a best one
        self._last: str | None = None  # the checkpoint or link `last`, with its version if the name was taken
        self._unranked_last: str | None = None  # with save_last="link": the link's target if not among the best
        # Checkpoints that are deleted once the newest save is published. They are part of the state, because a run may
        # be killed between the two: the resumed run finds them in `_loaded_removals` and deletes those that exist.
        self._removals: list[str] = []
        self._loaded_removals: list[str] = []
        self._last_saved_step = 0  # completed steps at the newest save; nothing is saved before the first step
        self._saved_at_s = 0.0  # of the monotonic clock, when the last interval ended
        self._clock = AgreedClock(self._seconds_to_next_save)
        # In this fit a validation has run, or an epoch has ended: a missing metric may then be an error.
        self._validated = False
        self._epoch_ended = False
        # A save was due before the monitored metric was logged. The next validation saves instead.
        self._waiting_for_metric = False
        self._remote_names: frozenset[str] = frozenset()  # names in the remote folder when the fit began
        self._loaded_dirpath: str | None = None  # folder or URL of a loaded index; None once it is checked
        self._check_arguments()

    def _check_arguments(self) -> None:
        if self.save_top_k < -1:
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={self.save_top_k}): write -1 (all), 0 (none) or more."
            )
        if self.monitor is None and self.save_top_k > 1:
            raise ConfigurationError(
                f"ModelCheckpoint(save_top_k={self.save_top_k}, monitor=None): there is nothing to rank by. Name a "
                "metric with monitor=..., or use save_top_k=1 (the latest) or -1 (all)."
            )
        for name in ("every_n_train_steps", "every_n_epochs"):
            value = getattr(self, name)
            if value < 0:
                raise ConfigurationError(f"ModelCheckpoint({name}={value}): write 0 (never) or more.")
        intervals = (self.every_n_train_steps > 0, self.every_n_epochs > 0, self.train_time_interval is not None)
        if sum(intervals) > 1:
            raise ConfigurationError(
                f"ModelCheckpoint(every_n_train_steps={self.every_n_train_steps}, every_n_epochs={self.every_n_epochs},"
                f" train_time_interval={self.train_time_interval}): choose one of the three; use several "
                "ModelCheckpoints for several intervals."
            )
        if self.save_last not in (None, True, False, "link"):
            raise ConfigurationError(f"ModelCheckpoint(save_last={self.save_last!r}): write True, False or 'link'.")
        if self.save_last == "link" and self.remote is not None:
            raise ConfigurationError(
                f"ModelCheckpoint(dirpath={self.remote!r}, save_last='link'): a remote folder does not support links. "
                "Use save_last=True, or remove save_last: ckpt_path='last' finds the newest checkpoint without it."
            )
        check_template(self.filename if self.filename is not None else DEFAULT_TEMPLATE, "ModelCheckpoint")

    @property
    def state_key(self) -> str:
        # Several ModelCheckpoints of a run differ in what they save. Folders and names may change in a resume.
        seconds = None
        if self.train_time_interval is not None:
            seconds = self.train_time_interval.total_seconds()
        return (
            f"ModelCheckpoint(monitor={self.monitor!r}, mode={self.mode!r}, every_n_train_steps="
            f"{self.every_n_train_steps}, every_n_epochs={self.every_n_epochs}, train_time_interval_s={seconds})"
        )

    @property
    def dirpath(self) -> str | None:
        """The folder or URL of the checkpoints; None before a run without an argument `dirpath`."""
        if self.remote is not None:
            return self.remote
        return None if self._folder is None else str(self._folder)

    @property
    def local_dirpath(self) -> Path | None:
        """The local folder of the checkpoints; None before a run without an argument `dirpath`."""
        return self._folder

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint, or of the latest without a monitor; empty without a checkpoint."""
        return self._path(self._latest if self.monitor is None else self._top.best)

    @property
    def best_model_score(self) -> MetricValue | None:
        """Score of the best checkpoint, with the methods of a tensor; None without a monitor or a checkpoint."""
        return None if self._top.best is None else MetricValue(self._top.scores[self._top.best])

    @property
    def best_k_models(self) -> dict[str, MetricValue]:
        """Scores of the best checkpoints by path."""
        return {self._path(name): MetricValue(score) for name, score in self._top.scores.items()}

    @property
    def kth_best_model_path(self) -> str:
        """Path of the worst checkpoint in `best_k_models`; empty if there is none."""
        return self._path(self._top.kth_best)

    @property
    def kth_value(self) -> MetricValue | None:
        """Score of the worst checkpoint in `best_k_models`; None if there is none."""
        return None if self._top.kth_best is None else MetricValue(self._top.scores[self._top.kth_best])

    @property
    def last_model_path(self) -> str:
        """Path of the checkpoint (or link) named `last`; empty if there is none."""
        return self._path(self._last)

    def _path(self, name: str | None) -> str:
        if name is None or self._folder is None:
            return ""
        if self.remote is not None:
            return f"{self.remote}/{name}"
        return str(self._folder / name)

    def format_checkpoint_name(
        self, metrics: Mapping[str, Any], filename: str | None = None, ver: int | None = None, prefix: str | None = None
    ) -> str:
        """Return the path of a checkpoint in `dirpath`, or its name without a `dirpath`.

        Args:
            metrics: values for the template's fields. A missing value is written as `nan`.
            filename: the template. Default: None, which uses this callback's template.
            ver: a version to append, `-v1`. Default: None.
            prefix: text before the name, followed by a hyphen. Default: None.
        """
        template = filename or self.filename or DEFAULT_TEMPLATE
        name = format_name(
            template, metrics, insert_names=self.auto_insert_metric_name, equals=self.CHECKPOINT_EQUALS_CHAR
        )
        if prefix is not None:
            name = f"{prefix}{self.CHECKPOINT_JOIN_CHAR}{name}"
        if ver is not None:
            name = f"{name}{self.CHECKPOINT_JOIN_CHAR}v{ver}"
        name += self.FILE_EXTENSION
        return name if self.dirpath is None else f"{self.dirpath}/{name}"

    def state_dict(self) -> dict[str, Any]:
        # The keys belong to the format of checkpoints, so they keep earlier names of the attributes.
        return {
            "dirpath": self._loaded_dirpath or self.dirpath,
            "scores": {name: to_json(score) for name, score in self._top.scores.items()},
            "current_score": to_json(self.current_score),
            "latest": self._latest,
            "last": self._last,
            "beside": self._unranked_last,
            "last_saved_step": self._last_saved_step,
            "replaced": [*self._loaded_removals, *self._removals],
            "kept": self._permanent.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._top.scores = {name: float(score) for name, score in state_dict["scores"].items()}
        self.current_score = from_json(state_dict["current_score"])
        self._latest = state_dict["latest"]
        self._last = state_dict["last"]
        self._unranked_last = state_dict["beside"]
        self._last_saved_step = state_dict["last_saved_step"]
        self._loaded_removals = list(state_dict.get("replaced", []))
        if "kept" in state_dict:
            self._permanent.load_state_dict(state_dict["kept"])
        self._loaded_dirpath = state_dict["dirpath"]

    # When to save

    def setup(self, trainer: Run, task: TaskModule, stage: Stage) -> None:
        if stage != "fit":
            return
        folder = self._dirpath_argument or trainer.checkpoint_dir
        if self.remote is not None:
            folder = local_folder(Path(trainer.default_root_dir, "checkpoints").absolute(), self.remote)
        if self._folder not in (None, folder):
            self._remove_from_index(self._indexed_names())  # names of an earlier fit, in another folder
        self._folder = folder
        if trainer.is_global_zero and not self._saves_nothing(trainer):
            check_writable(folder)

    def on_train_start(self, trainer: Run, task: TaskModule) -> None:
        self._validated = False
        self._epoch_ended = False
        self._waiting_for_metric = False
        self._last_saved_step = min(self._last_saved_step, trainer.state.step)  # a new run may pass that step again
        self._saved_at_s = time.monotonic()
        self._permanent.begin(trainer)
        if self.remote is not None and not self._saves_nothing(trainer):
            # Now rather than at the first save, so that a refused connection is an error before hours of training.
            self._remote_names = frozenset(trainer.remote_names(self.remote))
        self._clock.start(trainer)

    def on_train_step_end(self, trainer: Run, task: TaskModule, result: StepResult) -> None:
        if self.every_n_train_steps:
            is_due = trainer.state.step % self.every_n_train_steps == 0
        else:
            is_due = self.train_time_interval is not None and self._clock.is_up(trainer)
        if not is_due:
            return
        self._saved_at_s = time.monotonic()
        self._save_at_step_end(trainer)

    def on_validation_end(self, trainer: Run, task: TaskModule) -> None:
        if trainer.sanity_checking or trainer.stage != "fit":
            return
        self._validated = True
        is_due = not self._saves_at_epoch_end(trainer) and self._epoch_is_due(trainer)
        if self._waiting_for_metric or is_due:
            self._save_at_step_end(trainer)

    def on_train_epoch_end(self, trainer: Run, task: TaskModule) -> None:
        self._epoch_ended = True
        if self._saves_at_epoch_end(trainer) and self._epoch_is_due(trainer):
            self._save_at_step_end(trainer)

    def on_train_end(self, trainer: Run, task: TaskModule) -> None:
        if trainer.interrupted:
            return
        if self.save_last or self._needs_last_step(trainer):
            self._save_at_step_end(trainer)

    def _needs_last_step(self, trainer: Run) -> bool:
        """Return whether the end of a fit is saved, although the interval may not have ended."""
        by_count = self.every_n_train_steps or self.every_n_epochs
        if not (by_count or self.train_time_interval or self.keep_every):
            return False
        if self.monitor is None:
            # If one checkpoint is kept, it must contain the last step, wherever the fit ends. If all are kept, a run
            # that is shorter than its first interval must save one too.
            return self.save_top_k == 1 or (self.save_top_k == -1 and self._latest is None)
        # A limit of steps may end the fit before its first validation, after which a monitored metric is read.
        if self.save_top_k == 0 or self._top.best is not None:
            return False
        return self.monitor in ("epoch", "step") or self.monitor in trainer.callback_metrics

    def on_exception(self, trainer: Run, task: TaskModule, exception: BaseException) -> None:
        if not self.save_on_exception or self._saves_nothing(trainer):
            return
        step = trainer.state.step
        # A preemption leaves no time for another checkpoint.
        if isinstance(exception, Preempted) or self._last_saved_step == step:
            return
        if trainer.is_global_zero:
            facts = self._read_facts(trainer, trainer.state.epoch, step)
            name = self._free_name(trainer, facts, self.filename, reuse=None)
            trainer.emergency_save(self._new_request(name, facts))

    def _saves_at_epoch_end(self, trainer: Run) -> bool:
        if self.save_on_train_epoch_end is not None:
            return self.save_on_train_epoch_end
        return not trainer.has_validation

    def _epoch_is_due(self, trainer: Run) -> bool:
        return self.every_n_epochs > 0 and (trainer.state.epoch + 1) % self.every_n_epochs == 0

    def _saves_nothing(self, trainer: Run) -> bool:
        return bool(trainer.fast_dev_run) or trainer.sanity_checking or trainer.stage != "fit"

    def _save_at_step_end(self, trainer: Run) -> None:
        """Decide about checkpoints at the end of the step, when all metrics of the step are known."""
        state = trainer.state
        if self._saves_nothing(trainer) or self._last_saved_step == state.step:
            return
        # Read the epoch now, because at an epoch's end the counter may increase before the end of the step. In
        # `on_train_end` it has increased already, but the name must contain the epoch that was trained.
        epoch = state.epoch
        if epoch > 0 and state.batch_in_epoch == 0:
            epoch -= 1
        trainer.at_step_end(partial(self._save_due, trainer, epoch, state.step))

    def _seconds_to_next_save(self) -> float:
        if self.train_time_interval is None:
            return 0.0
        elapsed_s = time.monotonic() - self._saved_at_s
        return self.train_time_interval.total_seconds() - elapsed_s

    # What to save

    def _save_due(self, trainer: Run, epoch: int, step: int) -> None:
        """Request the checkpoints that are due now. Collective with several processes."""
        if self._last_saved_step == step:
            return  # two events of this step were due, such as an interval and an epoch's end
        # Only rank 0 reads the folder: other nodes may not have it.
        facts = self._read_facts(trainer, epoch, step) if trainer.is_global_zero else NO_FACTS
        facts = from_main_rank(trainer, facts)
        if self._loaded_dirpath is not None:
            self._check_index(trainer, facts)
        elif facts.present:
            self._remove_from_index(self._indexed_names() - facts.present)  # not written, or deleted by the user
        self._remove_from_index(set(facts.claimed))  # of another process that resumed the same run
        self._waiting_for_metric = False
        self._check_name_fields(trainer, facts)
        if self.monitor is None:
            request = self._newest_request(trainer, facts)
        else:
            request = self._best_request(trainer, facts, self.monitor)
        if facts.keep_every_progress is not None and not self._waiting_for_metric:
            # An interval of `keep_every` has ended: a checkpoint of this step is kept, even if its score is not among
            # the best.
            if request is None:
                request = self._new_request(self._free_name(trainer, facts, self.filename, reuse=None), facts)
            self._permanent.add(request.name, facts.keep_every_progress)
        if self.save_last:
            self._add_last(trainer, facts, request)
        elif request is not None:
            self._request(trainer, request, facts)

    def _read_facts(self, trainer: Run, epoch: int, step: int) -> SaveFacts:
        return SaveFacts(
            epoch=epoch,
            step=step,
            metrics=dict(trainer.callback_metrics),
            present=names_in(self._folder) | self._remote_names,
            claimed=claimed_names(self._folder),
            index_is_valid=self._loaded_dirpath is None or self._is_same_folder(trainer, self._loaded_dirpath),
            keep_every_progress=self._permanent.due_progress(trainer),
        )

    def _is_same_folder(self, trainer: Run, loaded_dirpath: str) -> bool:
        """Return whether a loaded index belongs to the current folder: the same folder, a link to it, or a moved copy.
        In any other folder, checkpoints of the same names belong to another run and are never deleted.
        """
        if loaded_dirpath == self.dirpath:
            return True
        is_remote = self.remote is not None or is_url(loaded_dirpath)
        if is_remote or self._folder is None:
            return False
        was_moved = not Path(loaded_dirpath).exists()
        return was_moved or trainer.wrote_into(self._folder)

    def _newest_request(self, trainer: Run, facts: SaveFacts) -> SaveRequest | None:
        if self.save_top_k == 0:
            return None
        previous = self._latest
        self._latest = self._free_name(trainer, facts, self.filename, reuse=previous)
        request = self._new_request(self._latest, facts)
        if self.save_top_k == 1:
            self._remove_after(request, previous)
        return request

    def _best_request(self, trainer: Run, facts: SaveFacts, monitor: str) -> SaveRequest | None:
        """Return a request if the score is among the best."""
        if self.save_top_k == 0:
            return None
        score = facts.values.get(monitor)
        if score is None:
            self._raise_or_wait(trainer, facts)
            return None
        self.current_score = self._top.comparable(float(score))
        if not self._top.accepts(self.current_score):
            if self.verbose:
                trainer.print(
                    f"Epoch {facts.epoch}, step {facts.step}: {monitor}={score:.5g} was not in the best "
                    f"{self.save_top_k}."
                )
            return None
        name = self._free_name(trainer, facts, self.filename, reuse=self._top.displaced())
        displaced = self._top.add(name, self.current_score)
        request = self._new_request(name, facts)
        self._remove_after(request, displaced)
        return request

    def _new_request(self, name: str, facts: SaveFacts) -> SaveRequest:
        return SaveRequest(
            name,
            self._folder,
            self.save_weights_only,
            dict(facts.metrics),
            remote=self.remote,
            must_be_new=self.enable_version_counter and name not in facts.present,
        )

    def _remove_after(self, request: SaveRequest, name: str | None) -> None:
        """Delete a checkpoint after `request` is published, unless it is permanent or `request` replaces it."""
        if name is None or name == request.name:
            return
        if name not in self._permanent.names:
            request.remove.append(name)

    def _add_last(self, trainer: Run, facts: SaveFacts, request: SaveRequest | None) -> None:
        """Make `request`, if any, and request the checkpoint or link named `last`."""
        previous = self._last
        self._last = self._free_name(trainer, facts, self.CHECKPOINT_NAME_LAST, reuse=self._last)
        if self.save_last != "link":
            if request is not None:
                self._request(trainer, request, facts)
            last_request = self._new_request(self._last, facts)
            self._remove_after(last_request, previous)
            self._request(trainer, last_request, facts)
            return
        previous_target = self._unranked_last
        self._unranked_last = None
        if request is None:
            # Not among the best: it is still written, and kept as long as it is the last.
            self._unranked_last = self._free_name(trainer, facts, self.filename, reuse=previous_target)
            request = self._new_request(self._unranked_last, facts)
        self._remove_after(request, previous_target)
        if previous is not None and previous != self._last:
            request.remove.append(previous)
        request.link = self._last
        self._request(trainer, request, facts)

    def _request(self, trainer: Run, request: SaveRequest, facts: SaveFacts) -> None:
        if self._last_saved_step != facts.step:
            self._removals = []  # those of an earlier step were deleted when its save was published
        self._last_saved_step = facts.step
        for name in self._loaded_removals:
            if name not in request.remove:
                request.remove.append(name)
        self._loaded_removals = []
        self._removals += request.remove
        trainer.request_save(request)
        if self.verbose:
            score = ""
            if self.monitor is not None:
                score = f", {self.monitor}={facts.values.get(self.monitor)}"
            trainer.print(f"Epoch {facts.epoch}, step {facts.step}{score}: saving {request.name!r}.")

    def _free_name(self, trainer: Run, facts: SaveFacts, template: str | None, *, reuse: str | None) -> str:
        """Return a name that is free in the folder, or `reuse`, whose checkpoint may be replaced."""
        name = Path(self.format_checkpoint_name(facts.values, template)).name
        taken = set(self._permanent.names)  # they stay, even with enable_version_counter=False
        if self.enable_version_counter:
            # Checkpoints that other callbacks requested at this step may not be in the folder yet.
            taken |= facts.present | self._names_in_use(trainer)
        if reuse is not None and reuse not in self._permanent.names:
            taken.discard(reuse)
        version = self.STARTING_VERSION
        while name in taken:
            name = Path(self.format_checkpoint_name(facts.values, template, ver=version)).name
            version += 1
        return name

    def _names_in_use(self, trainer: Run) -> set[str]:
        """Return the names of checkpoints that this and other ModelCheckpoints keep in the folder."""
        names: set[str] = set()
        for callback in trainer.callbacks:
            if isinstance(callback, ModelCheckpoint) and callback._folder == self._folder:
                names |= callback._indexed_names()
        return names

    def _indexed_names(self) -> set[str]:
        names = {*self._top.scores, *self._permanent.names}
        for name in (self._latest, self._last, self._unranked_last):
            if name is not None:
                names.add(name)
        return names

    def _check_index(self, trainer: Run, facts: SaveFacts) -> None:
        """Remove names from the index of a resumed run that are not in the folder (another dirpath, or deleted by the
        user).
        """
        loaded_dirpath = self._loaded_dirpath
        self._loaded_dirpath = None
        present = facts.present if facts.index_is_valid else frozenset[str]()
        missing = self._indexed_names() - present
        reported = set(missing)
        if facts.index_is_valid and self._last is not None:
            # In the same folder `last` is missing if the run was killed before it was created.
            reported.discard(self._last)
        self._loaded_removals = sorted(present.intersection(self._loaded_removals) - self._names_in_use(trainer))
        self._remove_from_index(missing)
        if reported and trainer.is_global_zero:
            names = ", ".join(sorted(reported))
            warnings.warn(
                f"ModelCheckpoint: {names} (saved in {loaded_dirpath}) not found in {self.dirpath}; the best are "
                "ranked without them.",
                TrainwrightWarning,
                stacklevel=2,
            )

    def _remove_from_index(self, names: set[str]) -> None:
        self._top.scores = {name: score for name, score in self._top.scores.items() if name not in names}
        self._permanent.remove(names)
        if self._latest in names:
            self._latest = None
        if self._last in names:
            self._last = None
        if self._unranked_last in names:
            self._unranked_last = None

    def _raise_or_wait(self, trainer: Run, facts: SaveFacts) -> None:
        """Raise an error if the monitored metric should have been logged by now. Otherwise wait for validation."""
        message = missing_metric(
            f"ModelCheckpoint(monitor={self.monitor!r})", str(self.monitor), facts.metrics, trainer
        )
        if self._validated or (self._epoch_ended and not trainer.has_validation):
            raise ConfigurationError(
                f"{message} Log it with self.log({self.monitor!r}, ...). A metric that is logged at the end of the "
                "training epoch needs save_on_train_epoch_end=True when validation runs within the epoch."
            )
        self._waiting_for_metric = True
        if trainer.is_global_zero and trainer.has_validation:
            warnings.warn(f"{message} Nothing is ranked until validation has run.", TrainwrightWarning, stacklevel=2)

    def _check_name_fields(self, trainer: Run, facts: SaveFacts) -> None:
        if not self._epoch_ended or (trainer.has_validation and not self._validated):
            return  # the metric may be logged later
        if not trainer.is_global_zero:
            return
        for name in template_fields(self.filename or ""):
            if name in facts.values or name in self._warned_fields:
                continue
            self._warned_fields.add(name)
            text = missing_metric(f"ModelCheckpoint(filename={self.filename!r})", name, facts.values, trainer)
            warnings.warn(
                f"{text} Its value in names is nan. Log it, or remove it from filename.",
                TrainwrightWarning,
                stacklevel=2,
            )
