"""The content of a run's checkpoint: everything that a fit needs to continue exactly."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch

from trainwright.checkpoint import Snapshot
from trainwright.checkpoint.format.codec import encode
from trainwright.checkpoint.task_objects import TASK_OBJECTS, describe
from trainwright.core.errors import CheckpointError, TrainwrightWarning
from trainwright.core.hyperparameters import DATAMODULE_HYPER_PARAMETERS, HYPER_PARAMETERS, copy_hparams
from trainwright.core.names.hidden_names import plain_name
from trainwright.core.names.replacement import is_replaced
from trainwright.core.rng import rng_state
from trainwright.core.state import class_names
from trainwright.loggers.metric_values import objects_state
from trainwright.strategies.engine import Engine
from trainwright.strategies.steps.phase import Phase
from trainwright.trainer.checkpoints.auto_resume import Attempt
from trainwright.trainer.checkpoints.shown import ShownCheckpoint
from trainwright.trainer.data import StageData
from trainwright.trainer.evaluation_state import EvaluationState
from trainwright.trainer.hooks import StageHooks
from trainwright.trainer.logs import Logs
from trainwright.trainer.loop_state import LoopState
from trainwright.trainer.run_state import RunProgress


class CheckpointContents:
    """Collects the state of a run for a checkpoint. `Loads` restores it.

    Args:
        engine: provides weights, optimizers and ranks.
        hooks: the task and the callbacks, whose hooks may add entries.
        progress: provides the training progress, the seed and skipped data.
        data: provides the position in the training data.
        loop: provides the schedules and the check of losses.
        logs: provides metrics and loggers.
        evaluation: provides the metric objects of an unfinished validation, which checkpoints omit.

    Attributes:
        attempt: the launcher's attempt that the fit belongs to. `StageRun.join` sets it.
    """

    def __init__(
        self,
        engine: Engine,
        hooks: StageHooks,
        progress: RunProgress,
        data: StageData,
        loop: LoopState,
        logs: Logs,
        evaluation: EvaluationState,
    ) -> None:
        self.attempt = Attempt()
        self._engine = engine
        self._hooks = hooks
        self._progress = progress
        self._data = data
        self._loop = loop
        self._logs = logs
        self._evaluation = evaluation

    def half_done(self) -> str | None:
        """Return why the current state cannot be saved as the state after the last completed step; None if it can.

        It can also be saved within the next step, until an optimizer begins to step, for engines with `state_rests`.

        Returns:
            A clause for messages, which follows "while".
        """
        phase = self._engine.phase
        if phase is Phase.BETWEEN_STEPS:
            return None
        # Without `state_rests`, weights may change also while gradients are computed.
        if phase is Phase.WEIGHTS or not self._engine.capabilities.state_rests:
            return "an optimizer was stepping, so some weights may be updated and others not"
        if self._data.train_data is not None and self._data.train_data.loader.stateful:
            return "its stateful loader had already read the batches of the next step, which was not completed"
        return None

    def collect(self, *, weights_only: bool) -> Snapshot:
        """Collect the state of the run. Collective: gathers the generator and loader states of all ranks.

        Args:
            weights_only: exclude optimizers, progress and generators.

        Returns:
            The snapshot. It references the live tensors, so write or copy it before training continues.

        Raises:
            NonFiniteError: a loss or gradient since the last check was not finite (`on_nonfinite`).
            CheckpointError: the task has quantized layers, or a hook has added an entry that cannot be saved.
        """
        self._loop.check_finite()
        self._engine.begin_save()

        def gather_states() -> list[dict[str, Any]]:
            return [] if weights_only else self._engine.processes.gather_object(self._state_of_this_rank())

        return self._collect(gather_states, weights_only=weights_only, metrics=dict(self._logs.callback_metrics))

    def collect_alone(self, metrics: dict[str, float]) -> Snapshot:
        """Collect this rank's state without communication, for use in an exception path.

        With several ranks only weights are collected, because a resume would also need the random generators of the
        other ranks.

        Args:
            metrics: metrics to store. The current `callback_metrics` are not read, because the device may have failed.

        Raises:
            CheckpointError: the weights are sharded across ranks, or a loss or gradient of this rank was not finite.
        """
        if self._loop.guard is not None and self._loop.guard.is_bad_here():
            raise CheckpointError(
                "a step was not finite (its loss or a gradient), and weights have changed since then. Earlier "
                "checkpoints are valid."
            )
        world_size = self._engine.processes.world_size
        if world_size > 1 and not self._engine.capabilities.full_weights:
            raise CheckpointError(
                f"the weights are sharded across {world_size} ranks and cannot be collected after an error, because "
                "other ranks may have failed. Earlier checkpoints are complete."
            )

        def state_without_communication() -> list[dict[str, Any]]:
            return [self._state_of_this_rank()] if world_size == 1 else []

        return self._collect(state_without_communication, weights_only=world_size > 1, metrics=metrics)

    def num_bytes_here(self) -> int:
        """Return the approximate size in bytes of a checkpoint's tensors in this rank's host memory. Not collective."""
        tensors: list[torch.Tensor] = [*self._hooks.task.parameters(), *self._hooks.task.buffers()]
        for optimizer in self._engine.optimizers:
            for state in optimizer.state.values():
                tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        distinct = {id(tensor): tensor for tensor in tensors}  # tied weights count once; `==` compares their values
        num_bytes = 0
        for tensor in distinct.values():
            if tensor.device.type == "cpu" and tensor.layout is torch.strided:
                if hasattr(tensor, "to_local"):  # a DTensor, without importing its class
                    tensor = tensor.to_local()  # this rank's shard
                num_bytes += tensor.nbytes
        return num_bytes

    def metrics_state(self) -> dict[str, Any]:
        """Return this rank's aggregated metrics of the current epoch. Waits for the device.

        Returns:
            `"logged"`: the state of the values that `log` has aggregated; `"objects"`: the states of the task's metric
            objects.
        """
        task = self._hooks.task
        objects = objects_state(task, without=self._evaluation.own_objects)
        return {"logged": self._logs.metrics.state_dict(task), "objects": objects}

    def _state_of_this_rank(self) -> dict[str, Any]:
        """Return the state that differs between ranks: random generators, stateful loader and metrics of the epoch."""
        return {
            "rng": rng_state(self._engine.device),
            "loader": self._data.loader_state(),
            "metrics": self.metrics_state(),
        }

    def _collect(
        self, gather_states: Callable[[], list[dict[str, Any]]], *, weights_only: bool, metrics: dict[str, float]
    ) -> Snapshot:
        """Collect the state of the run.

        Args:
            gather_states: returns the `_state_of_this_rank` of each rank; empty for a checkpoint with weights only.
            weights_only: exclude optimizers, progress and generators.
            metrics: metrics to store.
        """
        engine = self._engine
        task = self._hooks.task
        if any(type(parameter).__module__.startswith("torchao.") for parameter in task.parameters()):
            raise CheckpointError(
                f"{type(task).__name__} has quantized layers, which checkpoints do not support. Save before the fit "
                "ends, or pass QuantizationAwareTraining(convert=False). To save the quantized weights, pass its path=."
            )
        weights = engine.state.model_state()  # before the optimizer states, because shards of both share one table
        optimizers = [] if weights_only else engine.state.optimizer_states()
        shown = self._shown(weights, None if weights_only else optimizers)
        with self._logs.metrics.closed_in("on_save_checkpoint"):
            self._hooks.fire("on_save_checkpoint", shown)
        # After the hooks, which may draw random numbers: the run continues with the numbers after them.
        states_by_rank = gather_states()
        trainer = self._task_entries(shown)
        if not weights_only:
            trainer |= self._trainer_entries(states_by_rank)
        model = shown["state_dict"]
        if engine.state.saves_shards:
            model, optimizers = engine.state.shards_of((model, optimizers))
        return Snapshot(
            state=self._progress_entries(),
            model=model,
            optimizers=optimizers,
            trainer=trainer,
            rng=[state["rng"] for state in states_by_rank],
            metrics=metrics,
            world_size=engine.processes.world_size,
            kind="weights" if weights_only else "full",
            in_shards=engine.state.saves_shards,
            state_rests=engine.capabilities.state_rests,
        )

    def _progress_entries(self) -> dict[str, Any]:
        """Return the training progress, including whether a validation is still due."""
        state = self._progress.state
        # `validation_owed` is True while a validation runs. Before it begins, the schedule decides.
        is_owed = state.validation_owed or (self._loop.owes_validation(state) and self._data.has_validation)
        return {**state.to_dict(), "validation_owed": is_owed}

    def _task_entries(self, shown: ShownCheckpoint) -> dict[str, Any]:
        """Return the entries of every checkpoint: hyper-parameters, and the entries that hooks have added."""
        added = shown.own  # also has the hyper-parameters, which hooks may have changed
        hyperparameters = added.pop(HYPER_PARAMETERS, {})
        descriptions: dict[str, str] = {}
        if added and is_replaced("lightning"):
            added, descriptions = _without_objects(added)
        entries: dict[str, Any] = {**self._hooks.task.saved_hyperparameters(hyperparameters), "task": added}
        if descriptions:
            entries[TASK_OBJECTS] = descriptions
        return entries

    def _trainer_entries(self, states_by_rank: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the entries that only a full checkpoint has.

        Args:
            states_by_rank: the `_state_of_this_rank` of each rank.
        """
        engine = self._engine
        progress = self._progress
        logs = self._logs
        states_by_data_rank = engine.data_ranks.pick(states_by_rank) if states_by_rank else []
        schedules = self._loop.schedules
        datamodule = self._data.datamodule
        entries: dict[str, Any] = {
            "callbacks": self._hooks.callback_states(),
            "schedulers": schedules.state_dict(),
            "schedule_classes": class_names(config.scheduler for config in schedules.configs),
            "strategy": engine.state_dict(),
            "data": self._place_in_data(states_by_data_rank),
            "loggers": [] if logs.group is None else logs.group.state_dict(),
            "datamodule": {} if datamodule is None else datamodule.state_dict(),
        }
        if datamodule is not None:
            entries[DATAMODULE_HYPER_PARAMETERS] = datamodule.saved_hyperparameters()
        entries |= {
            "left_out": progress.skipped_data(),
            "metrics": [state["metrics"] for state in states_by_data_rank],
            "frozen": frozen_names(self._hooks.task),
            "seed": progress.seed,
            "run_id": progress.run_id,
            "job": self.attempt.key,
            "precision": engine.precision.name,
        }
        # If several ranks share the same data, a resume needs the generators of one rank per data rank. `rng` has those
        # of all ranks, and this entry names one rank for each data rank.
        if engine.data_ranks.size != engine.processes.world_size:
            entries["data_ranks"] = list(engine.data_ranks.members)
        if engine.phase is not Phase.BETWEEN_STEPS:  # an emergency save; see `half_done`
            entries["within_step"] = True
        return entries

    def _place_in_data(self, states_by_data_rank: list[dict[str, Any]]) -> dict[str, Any]:
        """Return the position in the training data, with the states of stateful loaders under `"loaders"`."""
        place = self._data.state_dict()
        states_by_reader = states_by_data_rank[:: self._engine.data_ranks.parts]  # the others read the same batches
        loaders = [state["loader"] for state in states_by_reader]
        if None in loaders:  # the loader is not stateful
            return place
        return {**place, "loaders": loaders}

    def _shown(self, weights: dict[str, Any], optimizers: list[dict[str, Any]] | None) -> ShownCheckpoint:
        """Return the checkpoint for hooks. `optimizers` is None for a weights-only checkpoint."""
        state = self._progress.state
        read: dict[str, Callable[[], Any]] = {"epoch": lambda: state.epoch, "global_step": lambda: state.step}
        if optimizers is not None:
            read["callbacks"] = self._hooks.callback_states
            read["lr_schedulers"] = self._loop.schedules.state_dict
            read["optimizer_states"] = lambda: optimizers
        hyperparameters = {HYPER_PARAMETERS: copy_hparams(self._hooks.task.hparams)}  # hooks may change them
        return ShownCheckpoint(
            "on_save_checkpoint", hyperparameters, weights, read, advice="add entries under other names"
        )


def _without_objects(entries: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the entries that a checkpoint can contain, and descriptions of the others. Warn about the others.

    Tasks of libraries add objects that Lightning pickles. Their users cannot change them. In a program of Trainwright,
    such an entry is an error.
    """
    saved = {}
    descriptions = {}
    for name, value in entries.items():
        try:
            encode({name: value}, shards={})
        except CheckpointError as error:
            warnings.warn(
                f"on_save_checkpoint: the checkpoint is written without the entry {name!r}. {error}",
                TrainwrightWarning,
                stacklevel=2,
            )
            descriptions[name] = describe(value)
        else:
            saved[name] = value
    return saved, descriptions


def frozen_names(task: torch.nn.Module) -> list[str]:
    """Return the names of parameters that do not require gradients."""
    return sorted(plain_name(name) for name, parameter in task.named_parameters() if not parameter.requires_grad)
