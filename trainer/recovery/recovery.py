"""Failures of a stage: signals that end it, rollbacks to an earlier checkpoint, and reports of errors."""

from __future__ import annotations

import signal
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from trainwright.checkpoint.format.manifests import open_checkpoint, open_or_error
from trainwright.core.errors import CheckpointError, Preempted, RollbackError, TrainwrightWarning
from trainwright.core.run import SaveRequest
from trainwright.core.signatures import method_of
from trainwright.core.state import SkippedData
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.phase import Phase
from trainwright.trainer.checkpoints.load_request import LoadRequest, Opened
from trainwright.trainer.checkpoints.loads import Loads
from trainwright.trainer.checkpoints.places import CheckpointPlaces
from trainwright.trainer.checkpoints.saves import Saves
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.data import StageData
from trainwright.trainer.hooks import StageHooks
from trainwright.trainer.logs import Logs
from trainwright.trainer.loop_state import LoopState
from trainwright.trainer.recovery.failure import note_batch, note_missing_weights
from trainwright.trainer.recovery.preemption import MARGIN_S, Preemption, requeue_job
from trainwright.trainer.run_state import RunProgress

PREEMPTED_NAME = "preempted"  # one folder per run, replaced by each later preemption
_MAX_TEXT = 2000  # characters of an error in the run's record
_UNITS = ("samples", "micro_batches", "batch")  # units of a position in the data, in order of preference


@dataclass(frozen=True, slots=True)
class RollbackRequest:
    """A request to roll back.

    Attributes:
        path: the checkpoint.
        reason: the reason, for messages.
        skips_data: skip all data that was consumed since the checkpoint.
    """

    path: Path
    reason: str
    skips_data: bool


class RollBack(Exception):
    """Exception that exits the current epoch for a rollback. Raised on every rank."""

    def __init__(self, request: RollbackRequest) -> None:
        super().__init__(request.reason)
        self.request = request


@dataclass(frozen=True, slots=True)
class _SavePlan:
    """What rank 0 knows about a checkpoint before the process ends.

    Attributes:
        written: this run's checkpoint of the current step. None if there is none.
        needed_s: the time that a save needs, in seconds.
        left_s: seconds until the process is killed.
        name: name of the checkpoint.
    """

    written: Path | None
    needed_s: float
    left_s: float
    name: str


def unit_of(place: Mapping[str, int]) -> str:
    """Return the first of `"samples"`, `"micro_batches"` and `"batch"` that a position in an epoch has.

    `"samples"` and `"micro_batches"` count over all ranks, so that the position is valid for any number of ranks.
    """
    return next(unit for unit in _UNITS if unit in place)


class Recovery:
    """Handles the failures of a stage.

    Args:
        settings: provides `max_rollbacks` and `auto_requeue`.
        engine: communicates with other ranks.
        hooks: the task and the callbacks.
        progress: records rollbacks and skipped data.
        data: the data module, and the position in the training data.
        loop: the state of the training loop.
        logs: receives reports.
        places: the folders of checkpoints.
        saves: writes a checkpoint before the process ends.
        loads: restores a checkpoint in a rollback.

    Attributes:
        preemption: the signals that were received.
    """

    def __init__(
        self,
        settings: Settings,
        engine: Engine,
        hooks: StageHooks,
        progress: RunProgress,
        data: StageData,
        loop: LoopState,
        logs: Logs,
        places: CheckpointPlaces,
        saves: Saves,
        loads: Loads,
    ) -> None:
        self.preemption = Preemption(settings.preemption_grace_s)
        self._settings = settings
        self._engine = engine
        self._hooks = hooks
        self._progress = progress
        self._data = data
        self._loop = loop
        self._logs = logs
        self._places = places
        self._saves = saves
        self._loads = loads

    # Signals

    def exit_on_signal(self) -> NoReturn:
        """Write a checkpoint of the current step if there is time, and end the process. Collective.

        Call it at a step boundary, after all ranks have agreed on a signal. After SIGUSR1, Slurm's warning before the
        time limit, the job is requeued unless `auto_requeue=False`.

        Raises:
            Preempted: always.
        """
        name = signal.Signals(self.preemption.signal).name
        done = self._save_before_exit()
        if self._settings.arguments.auto_requeue and name == "SIGUSR1" and self._engine.is_main:
            done += requeue_job()
        self._logs.record_event("preemption", signal=name, text=done)
        step = self._progress.state.step
        self._hooks.print(f"trainwright: rank {self.preemption.receiver} received {name} at step {step}: {done}")
        raise Preempted(name)

    def _save_before_exit(self) -> str:
        """Write a checkpoint unless one of this step exists or time is short. Return a message for the user.

        Collective.
        """
        state = self._progress.state
        if self._hooks.saver is None:
            return "no checkpoint was written, because checkpointing is disabled."
        try:
            self._saves.finish()  # a save in progress needs less time than a new one
        except (OSError, CheckpointError) as error:
            self._hooks.print(f"trainwright: {error}")
        if state.step == 0:
            return "no checkpoint was written, because no step was completed."
        # Rank 0 measures and decides, so that all ranks take the same branch below.
        plan: _SavePlan | None = None
        if self._engine.is_main:
            folder = self._places.run_folder
            plan = _SavePlan(
                # A checkpoint written before the validation of this step lacks the validation's results.
                written=None if state.validation_owed else folder.find(state.step),
                needed_s=self._saves.longest_write_s,
                left_s=self.preemption.remaining_s(),
                name=folder.free_name(PREEMPTED_NAME),
            )
        plan = self._engine.processes.broadcast_object(plan)
        assert plan is not None  # rank 0's
        if plan.written is not None:
            return f"{plan.written} already holds this step. Resume with fit(ckpt_path='last')."
        if plan.left_s < plan.needed_s + MARGIN_S:
            return (
                f"no checkpoint was written, because {plan.left_s:.1f} s of preemption_grace are left and the slowest "
                f"save took {plan.needed_s:.1f} s. Earlier checkpoints are complete. Resume with "
                "fit(ckpt_path='last')."
            )
        self._saves.raises = True  # otherwise the message below would report a checkpoint that was not written
        try:
            self._saves.request(SaveRequest(plan.name))
            self._saves.execute_requests()
            self._saves.finish()
        except (OSError, CheckpointError) as error:
            return f"the checkpoint could not be written: {error}. Earlier checkpoints are complete."
        except (RollBack, RollbackError) as rollback:  # of a request in this step, which `execute_requests` executes
            return (
                f"no checkpoint was written, because the run was about to roll back: {rollback}. Earlier checkpoints "
                "are complete. Resume with fit(ckpt_path='last')."
            )
        return f"wrote {self._places.folder / plan.name}. Resume with fit(ckpt_path='last')."

    # Rollbacks

    def request_rollback(self, reason: str, *, before_step: int) -> None:
        """Roll back to an earlier checkpoint at the end of the current step; see `Run.request_rollback`."""
        self._saves.at_step_end(partial(self._raise_rollback, reason, before_step))

    def _raise_rollback(self, reason: str, before_step: int) -> None:
        """Raise `RollBack`, or warn if no checkpoint exists. Called at the end of a step. Collective.

        Raises:
            RollBack: to the newest checkpoint of `before_step` or earlier.
            RollbackError: the run has reached `max_rollbacks`.
        """
        num_done = self._progress.num_rollbacks
        most = self._settings.arguments.max_rollbacks
        if num_done >= most:
            raise RollbackError(
                f"{reason}. The run has already rolled back {num_done} time(s), which reaches max_rollbacks={most}. "
                "Lower the learning rate, check the data in trainer.skipped_batches, or increase max_rollbacks."
            )
        path = self.find_checkpoint(before_step)
        if path is not None:
            raise RollBack(RollbackRequest(path, reason, skips_data=True))
        self._hooks.warn(
            f"{reason}, but this run has no full checkpoint of step {before_step} or earlier. Training continues "
            "without a rollback. Save more often and keep more checkpoints (ModelCheckpoint(save_top_k=-1))."
        )

    def find_checkpoint(self, max_step: int) -> Path | None:
        """Return this run's newest valid full checkpoint with at most `max_step` steps, or None. Collective.

        Waits for checkpoints that are being written. Ignores checkpoints that an earlier rollback has discarded.

        Raises:
            CheckpointError: the last checkpoint could not be written, or the run's index is damaged.
        """
        self._saves.finish()
        find = partial(self._find_newest, max_step)
        return self._engine.processes.on_main_rank(find, "find a checkpoint to roll back to")

    def _find_newest(self, max_step: int) -> Path | None:
        """Choose among the checkpoints in the run's index and the one that the run was resumed from."""
        folder = self._places.run_folder
        origin = self._loads.origin
        abandoned = self._progress.abandoned
        candidates = folder.listed(
            lambda entry: entry.kind == "full" and entry.step <= max_step and entry.created not in abandoned
        )
        if origin is not None and origin.is_dir():
            candidates.append(open_or_error(origin))
        newest = folder.newest(candidates, accepts=lambda found: found.manifest.step <= max_step)
        return None if newest is None else newest.path

    def roll_back(self, request: RollbackRequest) -> None:
        """Restore the requested checkpoint within the run, and record the data to skip. Collective.

        Call it where nothing references the epoch's loader, so that the loader's workers end. Callbacks and loggers
        receive the same calls as for a resume in a new process, up to `on_fit_start`. Then start the loggers again.
        """
        # The order matters: what the checkpoint overwrites is read first; requests and values of the abandoned steps
        # are discarded before hooks could see them; the loader's workers end before the position changes; callbacks
        # are set up again before their states are loaded.
        state = self._progress.state
        progress = self._progress
        data = self._data.train_data
        assert data is not None  # an epoch was running
        abandoned_state = state.to_dict()
        abandoned_position = data.loader.position(state.batch_in_epoch)
        progress.num_rollbacks += 1
        if self._engine.is_main:
            progress.abandoned |= self._places.run_folder.written_after(request.path)
        self._engine.step.discard_step()
        self._saves.forget_requests()
        metrics = self._logs.metrics
        metrics.in_step = False
        metrics.batch = None
        metrics.flush_step()  # discards values of the abandoned steps
        self._logs.record_event("rollback", reason=request.reason, path=str(request.path))
        if self._logs.group is not None:
            self._logs.group.finish("interrupted")  # once started again, they remove entries after the checkpoint
        data.close()  # its workers have read past the checkpoint's position
        self._hooks.fire("setup", "fit")
        for config in self._loop.schedules.configs:
            config.paused = False  # the callback that has paused it pauses it again where its state says so
        opened = Opened.read(open_checkpoint(request.path), LoadRequest(), full=True)
        opened.show(self._hooks)
        self._loads.resume(opened)
        state.seconds = abandoned_state["seconds"]  # training time includes the abandoned steps
        if not self._settings.arguments.reload_dataloaders_every_n_epochs:
            self._data.train_data = data  # `resume` has discarded it; the user's loader is not created again
        if request.skips_data:
            self._skip_since(abandoned_state, abandoned_position, request.reason)
        self._loop.validated_at = -1
        self._loop.last_result = None
        self._engine.phase = Phase.BETWEEN_STEPS
        self._hooks.warn(
            f"{request.reason}. Rolled back from step {abandoned_state['step']} to step {state.step} "
            f"({request.path}); rollback {progress.num_rollbacks} of at most {self._settings.arguments.max_rollbacks}."
        )

    def _skip_since(self, abandoned_state: dict[str, Any], abandoned_position: dict[str, int], reason: str) -> None:
        """Record the data between the restored position and the position before the rollback as skipped.

        One entry per epoch: a rollback from epoch 3 to epoch 1 skips the rest of epoch 1, epoch 2 and the beginning of
        epoch 3.

        Args:
            abandoned_state: the progress before the rollback.
            abandoned_position: the position in its epoch before the rollback.
            reason: the reason of the rollback.
        """
        state = self._progress.state
        restored_place = self._data.place or {}
        restored_position = restored_place.get("position") or {"batch": 0, "samples": 0, "micro_batches": 0}
        unit = unit_of(abandoned_position)
        last_epoch = abandoned_state["epoch"]
        for epoch in range(state.epoch, last_epoch + 1):
            first_batch = 0
            start = 0
            if epoch == state.epoch:
                first_batch = int(restored_position["batch"])
                start = int(restored_position.get(unit, 0))
            num_batches = None  # to the end of the epoch
            stop = None
            if epoch == last_epoch:
                num_batches = abandoned_state["batch_in_epoch"] - first_batch
                stop = abandoned_position[unit]
            self._progress.skipped_batches.append(
                SkippedData(
                    reason=reason,
                    epoch=epoch,
                    step=state.step,
                    first_batch=first_batch,
                    num_batches=num_batches,
                    unit=unit,
                    start=start,
                    stop=stop,
                )
            )

    # Errors

    def note_batch(self, error: BaseException, step: str, batch: Any, batch_idx: int) -> None:
        """Add a note about the step and its batch to an error of the task; see `failure.note_batch`."""
        processes = self._engine.processes
        rank = processes.rank if processes.world_size > 1 else None
        note_batch(error, type(self._hooks.task).__name__, step, batch, batch_idx, self._progress.state, rank)

    def report_error(self, error: BaseException) -> Exception | None:
        """Write an error into the run's record, and call `on_exception` of every callback and of the data module.

        An error of a hook becomes a warning.

        Returns:
            An error of the engine that names the user's parameters, to raise from `error`. The hooks received it
            instead of `error`. None if the engine has nothing to add.
        """
        task = self._hooks.task
        datamodule = self._data.datamodule
        group = self._loop.group
        batch = self._logs.metrics.batch
        is_in_step = self._engine.phase is not Phase.BETWEEN_STEPS
        if is_in_step and group is not None and batch is not None:
            self.note_batch(error, "training_step", batch, group.first_idx + group.index)
        note_missing_weights(error, task)
        explained = self._engine.explain_error(error, task)
        reported = error if explained is None else explained
        if not isinstance(reported, (Preempted, KeyboardInterrupt)):  # neither is an error of the run
            self._logs.record_event("error", type=type(reported).__name__, text=str(reported)[:_MAX_TEXT])
        hooks: list[Callable[[], Any]] = []
        for hook in self._hooks.table.on_exception:
            hooks.append(partial(hook, self._hooks.trainer, task, reported))
        if datamodule is not None:
            hooks.append(partial(method_of(datamodule, "on_exception"), reported))
        for call in hooks:
            try:
                call()
            except Exception as second:  # noqa: BLE001  # reported; the first error is the one to raise
                warnings.warn(
                    f"on_exception itself failed: {type(second).__name__}: {second}", TrainwrightWarning, stacklevel=2
                )
        return explained

    def print_where_to_resume(self) -> None:
        """Print this run's newest checkpoint after Ctrl-C, once all saves have completed."""
        if not self._engine.is_main:
            return
        folder = self._places.folder
        entries = [entry for entry in self._places.run_folder.index.entries() if entry.kind == "full"]
        if entries:
            newest = max(entries, key=lambda entry: entry.created)
            text = (
                f"the newest checkpoint is {folder / newest.name}, of step {newest.step}. Resume with "
                "fit(ckpt_path='last')."
            )
        else:
            text = f"{folder} has no checkpoint of this run that a fit can resume."
        self._hooks.print(f"trainwright: Ctrl-C at step {self._progress.state.step}: {text}")
