"""Progress of a run, micro-batches and results of its steps, skipped data, and checks of saved states."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim.lr_scheduler import ChainedScheduler, SequentialLR

from trainwright.core.errors import CheckpointError


@dataclass(slots=True)
class TrainState:
    """Progress of a training run. It is JSON-compatible and saved in every checkpoint.

    Attributes:
        step: completed optimizer steps. Steps of several optimizers on the same micro-batches count as one step.
        batches: micro-batches consumed by one data-parallel rank.
        epoch: number of finished epochs, which is the 0-based index of the current epoch.
        batch_in_epoch: micro-batches consumed by one rank in the current epoch.
        step_in_epoch: optimizer steps completed in the current epoch.
        samples: samples consumed, over all ranks. If several ranks read batches of unknown sizes, it is this rank's
            count times the number of ranks, unless `max_samples` or an interval needs the exact number.
        samples_in_epoch: samples consumed in the current epoch, over all ranks. With epoch and seed, it defines the
            position in the data.
        tokens: tokens consumed, over all ranks (see `TaskModule.num_tokens`).
        seconds: wall-clock seconds spent in training, over all sessions of the run.
        epoch_done: the current epoch's last batch has been consumed and the epoch's end hooks have run.
        validation_owed: the validation of this step was interrupted. A resume runs it first.
        validation_batches: batches of completed validations that one rank evaluated, without sanity checks.
        test_batches: the same for tests.
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
    validation_batches: int = 0
    test_batches: int = 0

    @property
    def epoch_of_last_batch(self) -> int:
        """The 0-based epoch of the last micro-batch; 0 before the first."""
        return self.epoch if self.batch_in_epoch else max(self.epoch - 1, 0)

    def begin_next_epoch(self) -> None:
        """Close the current epoch and move to the start of the next one."""
        self.epoch += 1
        self.batch_in_epoch = 0
        self.step_in_epoch = 0
        self.samples_in_epoch = 0
        self.epoch_done = False

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-compatible dict."""
        return {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}

    def load_dict(self, values: dict[str, Any]) -> None:
        """Set the fields from the result of `to_dict`. Unknown keys of newer versions are ignored.

        Raises:
            CheckpointError: a count is not a number, negative or not finite. No field has been set.
        """
        # Check all values before setting one: an error leaves the state unchanged. A field that an older version did
        # not save keeps its current value.
        for f in dataclasses.fields(self):
            value = values.get(f.name, 0)
            is_count = isinstance(value, (int, float)) and 0 <= value < math.inf
            if not is_count:
                raise CheckpointError(f"the saved progress is damaged: {f.name} is {value!r}.")
        for f in dataclasses.fields(self):
            if f.name in values:
                setattr(self, f.name, values[f.name])


@dataclass(slots=True)
class StepResult:
    """Result of one optimizer step.

    Attributes:
        loss: detached 0-dim tensor on the device: this rank's contribution to the weighted mean loss of the step's
            micro-batches. None if every micro-batch was skipped.
        grad_norm: 0-dim tensor on the device, the total gradient norm before clipping; None if not computed.
    """

    loss: torch.Tensor | None
    grad_norm: torch.Tensor | None = None


@dataclass
class Group:
    """Micro-batches of one optimizer step, still on the host.

    Attributes:
        batches: this rank's micro-batches, in order; at least one.
        first_idx: the index of `batches[0]` in its epoch (the `batch_idx` of hooks).
        is_last: True for the last group of the epoch.
        num_samples: number of samples of the group over all ranks. If None, this rank's samples are counted.
        weights: weight of each micro-batch in the mean over the group and all ranks, times the number of data-parallel
            ranks. None is `1 / len(batches)` for each. Padding has weight 0.
        num_real: number of micro-batches over all ranks that are not padding. None if no rank has padding.
        index: index of the current or last micro-batch in `batches`. The step sets it and the following fields.
        last_output: detached `outputs` of the last micro-batch, if a hook uses them. Empty if the micro-batch was
            skipped.
        last_batch: the last micro-batch on the device, if a hook uses it. Else None.
    """

    batches: list[Any]
    first_idx: int
    is_last: bool = False
    num_samples: int | None = None
    weights: list[float] | None = None
    num_real: int | None = None
    index: int = field(default=0, init=False, repr=False)
    last_output: dict[str, Any] = field(default_factory=dict, init=False, repr=False)
    last_batch: Any = field(default=None, init=False, repr=False)


@dataclass(frozen=True, slots=True)
class SkippedData:
    """Training data that was consumed without changing weights.

    Attributes:
        reason: the reason, as text.
        epoch: 0-based.
        step: completed optimizer steps when the data was skipped.
        first_batch: index of the first micro-batch in its epoch (the `batch_idx` of hooks).
        num_batches: micro-batches of one rank. None is the remainder of the epoch.
        unit: unit of `start` and `stop`: `"samples"` or `"micro_batches"` over all ranks, or `"batch"` (of one rank) if
            the loader supports no other unit.
        start: first position of the range in the epoch.
        stop: end of the range, exclusive. None is the epoch's end.
        sample_ids: data set indices for each rank, in order. None if unknown.
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
        """Return whether the skipped data overlaps other data of an epoch.

        Args:
            epoch: 0-based epoch of the other data.
            before: result of `PreparedLoader.position` at the start of the other data: positions by unit.
            after: the same at its end.
        """
        if self.epoch != epoch or self.unit not in before or self.unit not in after:
            return False
        begins_before_stop = self.stop is None or before[self.unit] < self.stop
        return begins_before_stop and after[self.unit] > self.start

    def to_dict(self) -> dict[str, Any]:
        """Return the fields as a JSON-compatible dict."""
        return dataclasses.asdict(self)


class SkipRestOfEpoch(Exception):
    """Signal that an `on_train_batch_start` hook returned -1: the epoch ends before the current micro-batch."""


def class_names(objects: Iterable[object]) -> list[str]:
    """Return the classes of objects whose states are saved, for `compare_classes`.

    A schedule that consists of others, such as a SequentialLR, is `"SequentialLR(LinearLR, CosineAnnealingLR)"`.
    """
    names = []
    for obj in objects:
        name = type(obj).__qualname__
        if isinstance(obj, SequentialLR | ChainedScheduler):
            name += f"({', '.join(class_names(obj._schedulers))})"
        names.append(name)
    return names


def compare_classes(kind: str, objects: Iterable[object], saved: Sequence[str] | None, origin: object) -> None:
    """Check that objects have the classes of the objects whose states were saved in their places.

    Numbers of objects are not compared.

    Args:
        kind: the objects, for the message, such as `"learning-rate schedule"`.
        objects: the objects, in the order of the saved states.
        saved: the result of `class_names` when the states were saved. None for a checkpoint of an early version.
        origin: the checkpoint, for the message.

    Raises:
        CheckpointError: a class differs.
    """
    for number, (name, saved_name) in enumerate(zip(class_names(objects), saved or (), strict=False)):
        if name != saved_name:
            raise CheckpointError(
                f"{origin} holds the state of {saved_name} as {kind} {number}, which is a {name} here. Use the same "
                "classes in the same order."
            )


def scheduler_state(scheduler: Any) -> dict[str, Any]:
    """Return a learning-rate schedule's `state_dict` without the function `anneal_func` that SWALR of torch 2.9 adds.

    A checkpoint cannot contain functions. SWALR's constructor sets this function again. It is also removed inside a
    SequentialLR or ChainedScheduler, whose state has the key `_schedulers`.
    """
    state: dict[str, Any] = _without_functions(scheduler.state_dict())
    return state


def _without_functions(state: object) -> Any:
    if not isinstance(state, dict):
        return state
    plain = {key: value for key, value in state.items() if key != "anneal_func" or not callable(value)}
    inner_states = plain.get("_schedulers")
    if isinstance(inner_states, list):
        plain["_schedulers"] = [_without_functions(inner) for inner in inner_states]
    return plain
