"""Handle steps whose loss or gradient is NaN or infinite.

With `on_nonfinite="skip"` or `"rollback"`, each loss is checked before weights change. With `"raise"` this is so only
if reading a value does not wait for the device. Otherwise losses are checked later, where the host waits for the device
anyway, and before each save.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from trainwright.core.errors import NonFiniteError
from trainwright.core.state import Group, SkippedData
from trainwright.data.prepared import PreparedLoader
from trainwright.strategies.steps import non_finite
from trainwright.strategies.steps.non_finite import FirstNonFinite, NonFinite
from trainwright.trainer.recovery.recovery import RollBack, RollbackRequest, unit_of
from trainwright.trainer.run import StageRun

_MAX_SHOWN_PARAMETERS = 5
_MAX_SHOWN_SAMPLES = 16
_MAX_RECORDED_SAMPLES = 256  # of each rank
_NUM_SINGLE_WARNINGS = 5  # the first skipped steps warn one by one, later ones at the 8th, 16th, 32nd, …

Ids = list[int | str]  # the results of `PreparedLoader.indices_in`


def step_function(run: StageRun) -> Callable[[Group], torch.Tensor | None]:
    """Return the function that runs a step's forward and backward in the current epoch.

    It is the engine's own function unless `on_nonfinite` is set or the rest of the epoch has data to skip. Sets
    `loop.guard`.
    """
    loader = run.data.train().loader
    position = loader.position(run.state.batch_in_epoch)
    ahead: list[SkippedData] = []
    for skipped in run.progress.skipped_batches:
        if skipped.epoch != run.state.epoch:
            continue
        if skipped.stop is None:  # up to the end of the epoch
            ahead.append(skipped)
            continue
        # For example, position={"batch": 3, "samples": 24} and an entry from sample 40 to 48: it is still ahead.
        # A loader that cannot count in the unit of an entry skips none of it, as `SkippedData.overlaps` would be False.
        is_countable = skipped.unit in position
        if is_countable and position[skipped.unit] < skipped.stop:
            ahead.append(skipped)
    run.loop.guard = None
    if run.settings.arguments.on_nonfinite is None and not ahead:
        return run.engine.step.forward_backward
    guarded = GuardedStep(run, loader, ahead)
    run.loop.guard = guarded
    return guarded


class GuardedStep:
    """Forward and backward of a step, with a check that loss and gradients are finite on all ranks.

    Called like `Step.forward_backward`. Returns the same value, or None for skipped data. All ranks make the same
    decision: they exchange one flag, and the details only if it is set.

    Args:
        run: the run. With `on_nonfinite=None`, data is skipped but values are not checked.
        loader: the training loader of the current epoch.
        ahead: data of this epoch to skip. After a rollback, it also contains data without non-finite values.
    """

    def __init__(self, run: StageRun, loader: PreparedLoader, ahead: Sequence[SkippedData]) -> None:
        self._run = run
        self._loader = loader
        self._ahead = ahead
        step = run.engine.step
        mode = run.settings.arguments.on_nonfinite
        # At most one of these is set. Both are None if values are not checked (`on_nonfinite=None`).
        self._first: FirstNonFinite | None = None  # losses are checked later, by `check`
        self._buffers: BufferCopies | None = None  # each loss is checked before the optimizer steps
        if mode == "raise" and non_finite.reading_waits(step.parts.device):
            self._first = FirstNonFinite(step)
        elif mode is not None:
            self._buffers = BufferCopies(run.task)
        # For losses that are checked later: step since the last check → index of its first batch, number of batches.
        # `check` clears it.
        self._places: dict[int, tuple[int, int]] = {}

    def __call__(self, group: Group) -> torch.Tensor | None:
        """Run forward and backward of a step, and check the result. Collective.

        Raises:
            NonFiniteError: `on_nonfinite="raise"`, a rollback is not possible, or `max_skipped` consecutive steps were
                skipped. Raised on every rank.
            RollBack: the run rolls back to a checkpoint. Raised on every rank.
        """
        if self._ahead and self._is_skipped(group):
            # As after a step: `on_train_batch_end` receives the last batch, which is still on the host.
            group.index = len(group.batches) - 1
            group.last_batch = group.batches[-1]
            return None
        engine = self._run.engine
        if self._buffers is None:  # no check, or a later one
            loss = engine.step.forward_backward(group)
            if self._first is not None and loss is not None:
                self._places[self._run.state.step] = (group.first_idx, len(group.batches))
                self._first.record(loss, self._run.state.step)
            return loss
        self._buffers.refresh()
        loss = engine.step.forward_backward(group)
        if loss is None or non_finite.is_finite(engine.step, loss, engine.data_ranks):
            self._run.progress.skipped_in_a_row = 0
            return loss
        self._decide(group, loss)
        group.last_output = {}  # as if the step was skipped
        return None

    def check(self) -> None:
        """Raise if a loss or gradient of any rank since the last check is not finite. Collective; waits for the device.

        Raises:
            NonFiniteError: on every rank. Weights have changed since that step.
        """
        if self._first is None:
            return
        if not self._first.is_seen(self._run.engine.data_ranks):
            self._places.clear()
            return
        # Each rank has its own first step with a non-finite value, or None. The earliest of them is reported.
        seen_by_rank = self._run.engine.processes.gather_object(self._first.read())
        steps: list[int] = []
        for seen in seen_by_rank:
            if seen is not None:
                step_of_rank, _ = seen
                steps.append(step_of_rank)
        step = min(steps)
        first_batch, num_batches = self._places.get(step, (0, 1))
        values_by_rank = [self._of_step(step, seen) for seen in seen_by_rank]
        bad_step = self._combine(step, first_batch, num_batches, values_by_rank)
        raise self._error(
            bad_step,
            "Weights have changed since then, because losses are read only where the host waits for the device. All "
            "checkpoints were written before that step",
        )

    @staticmethod
    def _of_step(step: int, seen: tuple[int, NonFinite] | None) -> NonFinite:
        """Return the non-finite values of a rank at `step`, or none if its first non-finite step is later.

        `seen` is the result of `FirstNonFinite.read` on that rank.
        """
        if seen is None:
            return NonFinite(0.0, [])
        step_of_rank, values = seen
        if step_of_rank != step:
            return NonFinite(0.0, [])
        return values

    def is_bad_here(self) -> bool:
        """Return whether a loss or gradient of this rank was not finite. Waits for the device; not collective."""
        return self._first is not None and self._first.read() is not None

    def _positions(self, group: Group) -> tuple[dict[str, int], dict[str, int]]:
        """Return the positions in the training data before and after the step."""
        before = self._loader.position(group.first_idx)
        after = self._loader.position(group.first_idx + len(group.batches))
        return before, after

    def _is_skipped(self, group: Group) -> bool:
        """Return whether any of the group's data is to be skipped. The group is then skipped as a whole."""
        before, after = self._positions(group)
        return any(skipped.overlaps(self._run.state.epoch, before, after) for skipped in self._ahead)

    def _decide(self, group: Group, loss: torch.Tensor) -> None:
        """Raise, roll back or record that the step is skipped. Collective.

        The order matters: the values are read before the gradients are discarded, and the data is recorded before the
        rollback, which keeps the record.

        Raises:
            NonFiniteError, RollBack: see `__call__`.
        """
        run = self._run
        mode = run.settings.arguments.on_nonfinite
        max_skipped = run.settings.arguments.max_skipped
        num_skipped = run.progress.skipped_in_a_row
        bad_step = self._find(group, loss)
        if self._buffers is not None:
            self._buffers.restore()
        if mode == "raise":
            self._end_run(group, bad_step, "No weight has changed")
        if max_skipped is not None and num_skipped >= max_skipped:
            self._end_run(
                group,
                bad_step,
                f"The {num_skipped} steps before it were skipped too, which reaches max_skipped={max_skipped}",
            )
        checkpoint = None
        if mode == "rollback":
            self._check_may_roll_back(bad_step, group)
            checkpoint = run.recovery.find_checkpoint(run.state.step)
        self._record(bad_step, group)
        run.engine.step.discard_step()
        if checkpoint is not None:
            # The data was recorded above, so the rollback itself skips none.
            raise RollBack(RollbackRequest(checkpoint, bad_step.text, skips_data=False))
        self._warn(bad_step, no_checkpoint=mode == "rollback")

    def _find(self, group: Group, loss: torch.Tensor) -> _NonFiniteStep:
        """Return the non-finite losses and gradients of the current step. Collective; waits for the device."""
        values_by_rank = self._run.engine.processes.gather_object(non_finite.explain(self._run.engine.step, loss))
        return self._combine(self._run.state.step, group.first_idx, len(group.batches), values_by_rank)

    def _combine(self, step: int, first: int, num: int, values_by_rank: list[NonFinite]) -> _NonFiniteStep:
        """Combine the values of all ranks in a step on `num` batches of this epoch from batch `first`. Collective."""
        ids_by_rank = self._run.engine.processes.gather_object(self._ids(first, num))
        is_unknown = any(ids is None for ids in ids_by_rank)
        return _NonFiniteStep(
            step=step,
            epoch=self._run.state.epoch,
            batches=(first, first + num - 1),
            losses=[values.loss for values in values_by_rank],
            parameters=[values.parameters for values in values_by_rank],
            sample_ids=None if is_unknown else ids_by_rank,
        )

    def _ids(self, first: int, num: int) -> Ids | None:
        """Return the data set indices in this rank's part of a step; None if they are unknown."""
        ids: Ids = []
        for batch in range(first, first + num):
            ids_of_batch = self._loader.indices_in(batch)
            if ids_of_batch is None:
                return None
            ids += ids_of_batch
        return ids

    def _record(self, bad_step: _NonFiniteStep, group: Group) -> None:
        """Add the step's data to the progress, which checkpoints contain, and to the run's record."""
        run = self._run
        before, after = self._positions(group)
        unit = unit_of(after)
        skipped = SkippedData(
            reason=bad_step.what,
            epoch=bad_step.epoch,
            step=bad_step.step,
            first_batch=group.first_idx,
            num_batches=len(group.batches),
            unit=unit,
            start=before[unit],
            stop=after[unit],
            sample_ids=bad_step.sample_ids,
        )
        run.progress.skipped_batches.append(skipped)
        run.progress.skipped_in_a_row += 1
        short_ids: list[Ids] | None = None
        if bad_step.sample_ids is not None:
            short_ids = [of_rank[:_MAX_RECORDED_SAMPLES] for of_rank in bad_step.sample_ids]
        run.logs.record_event("skipped", **replace(skipped, sample_ids=short_ids).to_dict())

    def _check_may_roll_back(self, bad_step: _NonFiniteStep, group: Group) -> None:
        """Raise a NonFiniteError if a rollback would not help, or no further rollback is allowed. Collective."""
        progress = self._run.progress
        max_rollbacks = self._run.settings.arguments.max_rollbacks
        before, after = self._positions(group)
        if any(skipped.overlaps(bad_step.epoch, before, after) for skipped in progress.skipped_batches):
            self._end_run(group, bad_step, "This data was already skipped once")
        if progress.num_rollbacks >= max_rollbacks:
            self._end_run(
                group,
                bad_step,
                f"The run has rolled back {progress.num_rollbacks} time(s), which reaches "
                f"max_rollbacks={max_rollbacks}",
            )

    def _end_run(self, group: Group, bad_step: _NonFiniteStep, why: str) -> NoReturn:
        """Raise the error on every rank, after the values that the step has logged are written. Collective."""
        self._log(group)
        raise self._error(bad_step, why)

    def _error(self, bad_step: _NonFiniteStep, why: str) -> NonFiniteError:
        """Return the error for a step. `why` says why the run ends."""
        advice = "skip such steps: Trainer(on_nonfinite='skip')."
        if self._run.settings.arguments.on_nonfinite == "skip":
            advice = "allow more skipped steps: Trainer(max_skipped=None)."
        error = NonFiniteError(
            f"{bad_step.text}. {why}. Check these samples and the operations that compute the loss "
            "(Trainer(detect_anomaly=True) names the one that failed in backward), lower the learning rate, or "
            f"{advice}"
        )
        error.step = bad_step.step
        error.epoch = bad_step.epoch
        error.ranks = bad_step.ranks
        error.source = bad_step.source
        error.parameters = bad_step.names
        error.sample_ids = bad_step.sample_ids
        return error

    def _log(self, group: Group) -> None:
        """Pass the values that the step has logged to the loggers, because the run ends here. Collective."""
        run = self._run
        flushed = run.logs.metrics.flush_step(run.logs.exchange)
        run.logs.shown.show(flushed)
        if run.logs.group is not None and flushed.logged:
            run.logs.group.log_metrics({**flushed.logged, "epoch": run.state.epoch}, run.state.step)

    def _warn(self, bad_step: _NonFiniteStep, *, no_checkpoint: bool) -> None:
        """Warn of a skipped step, unless many were skipped. `no_checkpoint`: it is skipped instead of a rollback."""
        run = self._run
        count = len(run.progress.skipped_batches)
        is_power_of_two = count & (count - 1) == 0  # 8 & 7 = 0b1000 & 0b0111 = 0
        if count > _NUM_SINGLE_WARNINGS and not is_power_of_two:
            return
        how = "it is skipped"
        if no_checkpoint:
            how += ", because this run has no checkpoint to roll back to yet"
        run.hooks.warn(f"{bad_step.text}: {how}. No weight has changed. trainer.skipped_batches has {count} entries.")


@dataclass(frozen=True, slots=True)
class _NonFiniteStep:
    """Losses and gradients of a step that are not finite. The lists have one item per rank.

    Attributes:
        step, epoch: the step and its epoch.
        batches: indices of the first and the last micro-batch in the epoch.
        losses: the loss of each rank, finite or not.
        parameters: names of the parameters whose gradients are not finite, for each rank.
        sample_ids: data set indices of the step's samples, for each rank. None if unknown.
    """

    step: int
    epoch: int
    batches: tuple[int, int]
    losses: list[float]
    parameters: list[list[str]]
    sample_ids: list[Ids] | None

    @property
    def bad_losses(self) -> dict[int, float]:
        """Non-finite losses by rank."""
        return {rank: loss for rank, loss in enumerate(self.losses) if not math.isfinite(loss)}

    @property
    def source(self) -> str:
        """`"loss"` or `"gradient"`."""
        return "loss" if self.bad_losses else "gradient"

    @property
    def ranks(self) -> tuple[int, ...]:
        """Ranks with a non-finite loss, or with non-finite gradients if all losses are finite."""
        if self.bad_losses:
            return tuple(self.bad_losses)
        return tuple(rank for rank, names in enumerate(self.parameters) if names)

    @property
    def names(self) -> tuple[str, ...]:
        """Parameters whose gradients are not finite on any rank, in the task's order."""
        names: dict[str, None] = {}  # an ordered set
        for names_of_rank in self.parameters:
            names.update(dict.fromkeys(names_of_rank))
        return tuple(names)

    @property
    def what(self) -> str:
        """Message that names the non-finite value and its ranks, such as `the loss is nan on rank 0`."""
        if self.source == "gradient":
            return f"the gradient is not finite on rank {_listed(self.ranks)}, the loss is"
        losses = ", ".join(f"{loss} on rank {rank}" for rank, loss in self.bad_losses.items())
        return f"the loss is {losses}"

    @property
    def text(self) -> str:
        """Message with all details."""
        first, last = self.batches
        batches = f"batch {first}" if first == last else f"batches {first} to {last}"
        parts = [f"at step {self.step} (epoch {self.epoch}, {batches}) {self.what}"]
        if self.names:
            parts.append(f"gradients that are not finite: {_listed(self.names, _MAX_SHOWN_PARAMETERS)}")
        if self.sample_ids is not None:
            for rank, ids in enumerate(self.sample_ids):
                parts.append(f"samples of rank {rank}: {_listed(ids, _MAX_SHOWN_SAMPLES)}")
        return "; ".join(parts)


def _listed(items: Sequence[object], max_items: int = 8) -> str:
    """Return the first items as text, and the number of the others."""
    text = ", ".join(str(item) for item in items[:max_items])
    if len(items) > max_items:
        text += f" and {len(items) - max_items} more"
    return text


class BufferCopies:
    """Copies of a module's buffers before a forward pass, such as BatchNorm's running statistics.

    A forward pass with a NaN corrupts them even without an optimizer step. All are copied each time, on their devices,
    because torch 2.13 does not increase a tensor's version when BatchNorm changes it.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        # Inference tensors are omitted: outside of inference mode, torch refuses in-place changes of them, so a forward
        # cannot corrupt them.
        self._buffers = [buffer for buffer in module.buffers() if not buffer.is_inference()]
        self._copies = [buffer.detach().clone() for buffer in self._buffers]

    def refresh(self) -> None:
        """Copy the current values."""
        if self._buffers:
            torch._foreach_copy_(self._copies, self._buffers)

    def restore(self) -> None:
        """Restore the values of the last `refresh`."""
        if self._buffers:
            with torch.no_grad():
                torch._foreach_copy_(self._buffers, self._copies)
