"""Where a run stands: the one clock that every interval, logger and checkpoint reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(slots=True)
class TrainState:
    """Progress of a training run; JSON-able, saved in every checkpoint.

    Attributes:
        step: completed optimizer steps, and nothing else; several optimizers stepping in one group are one step.
        batches: micro-batches consumed by one data-parallel rank.
        epoch: finished epochs; during an epoch, its 0-based index.
        batch_in_epoch: micro-batches consumed by one rank in the present epoch.
        step_in_epoch: optimizer steps completed in the present epoch.
        samples: samples consumed, over all ranks. Where several ranks read batches of sizes that arithmetic does not
            give, it is this rank's count times the ranks, unless `max_samples` or an interval needs it exact.
        samples_in_epoch: the same in the present epoch; together with the seed this is the place in the data.
        tokens: tokens consumed, over all ranks (see `TaskModule.num_tokens`).
        seconds: wall-clock seconds spent in training, over all sessions of the run.
        epoch_done: the present epoch's last batch has been consumed and its end hooks have run.
        validation_owed: the validation of this step was broken off, and is the first thing that a resume does.
    """

    step: int = 0
    batches: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    step_in_epoch: int = 0
    samples: int = 0
    samples_in_epoch: int = 0
    tokens: int = 0
    seconds: float = 0.0
    epoch_done: bool = False
    validation_owed: bool = False

    @property
    def epoch_of_last_batch(self) -> int:
        """The 0-based epoch that the last micro-batch was of; 0 before the first."""
        return self.epoch if self.batch_in_epoch else max(self.epoch - 1, 0)

    def begin_next_epoch(self) -> None:
        """Close the present epoch and stand at the start of the next one."""
        self.epoch += 1
        self.batch_in_epoch = 0
        self.step_in_epoch = 0
        self.samples_in_epoch = 0
        self.epoch_done = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-able dict."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def load_dict(self, values: dict[str, Any]) -> None:
        """Take the fields from `values` (see `to_dict`); unknown keys are left for a newer version to read."""
        for f in dataclasses.fields(self):
            if f.name in values:
                setattr(self, f.name, values[f.name])


@dataclass(slots=True)
class StepResult:
    """What one optimizer step gave.

    Attributes:
        loss: 0-dim tensor on the device, detached: this rank's share of the group's weighted mean loss.
        grad_norm: 0-dim tensor on the device, the total gradient norm before clipping; None when not computed.
    """

    loss: torch.Tensor | None
    grad_norm: torch.Tensor | None = None


@dataclass
class Group:
    """The micro-batches of one optimizer step, still on the host, as the data source hands them over.

    Attributes:
        batches: this rank's micro-batches, in order; at least one.
        first_idx: the index of `batches[0]` in its epoch (the `batch_idx` that hooks see).
        is_last: no group of this epoch follows.
        num_samples: how many samples the group consumed over all ranks; None: count this rank's.
        weights: weight of each micro-batch in the mean over the group and all ranks, times the number of
            data-parallel ranks; None: `1 / len(batches)` each. A weight of 0 marks padding.
        index: place in `batches` of the micro-batch that runs, or ran last.
        last_output: the `outputs` of the last micro-batch, detached, kept only while somebody listens; empty where it
            was skipped.
        last_batch: the last micro-batch on the device, kept only while somebody listens.
    """

    batches: list[Any]
    first_idx: int
    is_last: bool = False
    num_samples: int | None = None
    weights: list[float] | None = None
    index: int = field(default=0, init=False, repr=False)
    last_output: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    last_batch: Any = field(default=None, init=False, repr=False)


@dataclass(frozen=True, slots=True)
class SkippedData:
    """Training data that was consumed and changed no weight.

    Attributes:
        reason: why, in words.
        epoch: 0-based.
        step: completed optimizer steps when it was left out.
        first_batch: index in its epoch of the first micro-batch (the `batch_idx` that hooks see).
        num_batches: micro-batches of one rank; None: all that were left of the epoch.
        unit: what `start` and `stop` count from the epoch's start, over all ranks: `"samples"`, `"micro_batches"`, or
            `"batch"` (of one rank) where the loader knows no better.
        start, stop: the place in the epoch's order, `stop` not included; None: the epoch's end.
        sample_ids: for each rank the indices in the data set, in order; None: not known one by one.
    """

    reason: str
    epoch: int
    step: int
    first_batch: int
    num_batches: int | None
    unit: str
    start: int
    stop: int | None
    sample_ids: list[list[int | str]] | None = None

    def overlaps(self, epoch: int, before: Mapping[str, int], after: Mapping[str, int]) -> bool:
        """Tell whether it shares data with what lies between two places in an epoch (see `PreparedLoader.position`)."""
        if self.epoch != epoch or self.unit not in before or self.unit not in after:
            return False
        return after[self.unit] > self.start and (self.stop is None or before[self.unit] < self.stop)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-able dict."""
        return dataclasses.asdict(self)


class SkipRestOfEpoch(Exception):
    """An `on_train_batch_start` hook returned -1: the epoch ends before the present micro-batch."""
