"""The buffer that `log` fills: values stay on their device until the loop flushes them.

`log` never waits for a device and never communicates. The loop calls `flush_step` every few steps for the latest
values, and `flush_epoch` at the end of an epoch for the aggregates. Both methods copy values once per device, and
communicate in one collective, which every rank must join even if it has logged nothing. Memory does not grow with the
number of steps.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from trainwright.core.errors import ConfigurationError, LogPlaceError
from trainwright.core.state import StepResult
from trainwright.core.tree import batch_size as find_batch_size
from trainwright.loggers.evaluation_rows import EvaluationRows, Place, Rows
from trainwright.loggers.metric_slot import (
    FOLD_EVERY,
    HostReads,
    MetricSettings,
    MetricSlot,
    Reduction,
    is_metric_object,
    parse_reduction,
    reset_metric,
    restored_slot,
    same_function,
    slot_states,
    to_number,
)
from trainwright.loggers.metric_values import (
    Entry,
    Exchange,
    Flushed,
    entry_of,
    epoch_entries,
    gather_entries,
    new_of_epoch,
    put_combined,
    put_objects,
    read_steps,
    step_values,
    with_step_value,
)

EpochStage = Literal["train", "validate", "test", "predict"]
_STAGES: tuple[EpochStage, ...] = ("train", "validate", "test", "predict")
_OF_EPOCH_HOOK = "\0hook"  # no name of a metric ends so


class _StageMetrics:
    """The `MetricSlot`s of one stage: by key, and by the name that `log` receives, for fast access.

    Hooks of an epoch have other keys than steps, which end in `_OF_EPOCH_HOOK`.
    """

    def __init__(self) -> None:
        self.slots: dict[str, MetricSlot] = {}
        self.by_name: dict[str, MetricSlot] = {}
        self.num_dataloaders = 1


class DivertedCall(NamedTuple):
    """The arguments of a recorded call of `log`."""

    name: str
    value: object
    batch_size: int | None
    prog_bar: bool
    logger: bool
    on_step: bool | None
    on_epoch: bool | None
    reduce_fx: Reduction
    sync_dist: bool | None
    add_dataloader_idx: bool
    rank_zero_only: bool

    def repeat(self, buffer: MetricBuffer) -> None:
        """Log the value now."""
        buffer.log(**self._asdict())


class MetricBuffer:
    """Buffer of the values that tasks and callbacks log. The loop sets its attributes.

    Attributes:
        in_step: True during a training or evaluation step (or a hook of one batch).
        batch: the current micro-batch, which determines the weight in a mean. Set it to None after the batch, otherwise
            the buffer keeps it alive.
        share: weight of this rank's part of the batch in a mean over the ranks that split its sequences. The weights
            are 1 on average. None if the batch is not split. 0 if the batch is padding of a rank without data.
        dataloader_idx: index of the batch's evaluation loader; None with a single loader and outside of evaluations.
        diverted: list that records calls of `log` instead of logging. None logs.
    """

    def __init__(self) -> None:
        self.diverted: list[DivertedCall] | None = None
        self.in_step: bool = False
        self.batch: Any = None
        self.share: float | None = None
        self.dataloader_idx: int | None = None
        self._stage: EpochStage | None = None
        self._stages: dict[EpochStage, _StageMetrics] = {stage: _StageMetrics() for stage in _STAGES}
        self._by_name: dict[str, MetricSlot] = {}
        self._closed = ""  # the hook in which nothing can be logged
        self._rows = EvaluationRows()

    def state_dict(self, owner: nn.Module | None = None) -> dict[str, Any]:
        """Return the aggregates of the training epoch so far. Waits for the device.

        Of a metric object it contains the name in `owner` (the task) only, not the state.
        """
        paths = {} if owner is None else {id(module): path for path, module in owner.named_modules()}
        kept = {
            key: slot
            for key, slot in self._stages["train"].slots.items()
            if slot.has_epoch_values or slot.last is not None or id(slot.metric) in paths
        }
        states = slot_states(kept)
        for key, slot in kept.items():
            states[key]["metric"] = paths.get(id(slot.metric))
        return states

    def load_state_dict(self, states: Mapping[str, Any], device: torch.device, owner: nn.Module | None = None) -> None:
        """Restore the result of `state_dict` onto this rank's device. Call it after `begin`."""
        metrics = self._stages["train"]
        metrics.by_name.clear()  # on_train_start may have logged
        modules = {} if owner is None else dict(owner.named_modules())
        for key, state in states.items():
            slot = metrics.slots[key] = restored_slot(state, device)
            # The rest of the epoch may not log the object again: it may have ended before its last validation.
            slot.metric = slot.last_metric = modules.get(state.get("metric"))  # early versions have no name

    @property
    def stage(self) -> EpochStage | None:
        """The stage whose metrics `log` adds to and the flushes return; None before the first `begin`."""
        return self._stage

    def begin(self, stage: EpochStage, *, num_dataloaders: int = 1) -> None:
        """Start an epoch of `stage`, which becomes the current stage.

        Values of an unfinished epoch of this stage are discarded. Values of other stages, and step values that were not
        flushed yet, are kept.

        Args:
            stage: `"train"`, `"validate"`, `"test"` or `"predict"`.
            num_dataloaders: number of loaders. With several, `/dataloader_idx_N` is appended to keys. Default: 1.
        """
        self.switch(stage)
        metrics = self._stages[stage]
        metrics.num_dataloaders = num_dataloaders
        metrics.by_name.clear()
        self._rows = EvaluationRows()
        for slot in metrics.slots.values():
            slot.begin_epoch()

    def switch(self, stage: EpochStage) -> None:
        """Make `stage` the current stage without a new epoch, for example `"train"` after a validation."""
        self._stage, self._closed = stage, ""
        self._by_name = self._stages[stage].by_name

    def close(self, where: str) -> None:
        """Make `log` raise an error until `begin` or `switch` is called. Values logged in the hook `where` would be
        lost.
        """
        self._closed, self._by_name = where, {}

    @contextlib.contextmanager
    def closed_in(self, where: str) -> Iterator[None]:
        """Make `log` raise an error within the context; see `close`."""
        before = self._closed, self._by_name
        self.close(where)
        try:
            yield
        finally:
            self._closed, self._by_name = before

    def log(
        self,
        name: str,
        value: object,
        *,
        prog_bar: bool = False,
        logger: bool = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: Reduction = "mean",
        sync_dist: bool | None = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
        metric_attribute: str | None = None,
    ) -> None:
        """Log one value. Does not communicate and does not wait for a device.

        Args:
            name: the metric's name.
            value: a number, a tensor with one element (copied, without its graph), or a torchmetrics Metric or
                MetricCollection, which is computed at the epoch's flush and then reset. If its result is a dict, each
                entry is named `name/key`.
            prog_bar: pass it to the progress bar. Default: False.
            logger: pass it to the loggers. Default: True.
            on_step: keep the latest value for `flush_step`. Default: None, which is True in a training step.
            on_epoch: aggregate over the epoch for `flush_epoch`. Default: None, which is True except in a training
                step. With `on_step` and `on_epoch`, names end in `_step` and `_epoch`.
            reduce_fx: the epoch's aggregate: `"mean"` (weighted by batch size), `"sum"`, `"min"`, `"max"`, torch's
                function of that name, or a function from a 1-D float64 host tensor of all values (of all ranks) to one
                number. Only such a function needs memory that grows with the epoch. Default: `"mean"`.
            sync_dist: True reduces step and epoch values over ranks, False neither. Default: None, which reduces only
                epoch values. Metric objects reduce by themselves, except with False.
            add_dataloader_idx: with several evaluation loaders, append `/dataloader_idx_N` to the key. With False, only
                one loader may log the name, except for a metric object that aggregates over all loaders. Default: True.
            batch_size: the value's weight in a mean. Default: None, the length of the current batch.
            rank_zero_only: use the value of rank 0 on every rank. Default: False.
            metric_attribute: Accepted without effect: metrics of torchmetrics are recognized by type. Default: None.

        Raises:
            TaskError: the value is not a single number, or no epoch has begun.
            ConfigurationError: options contradict each other or an earlier call in the same epoch.
        """
        given = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only)
        if self.diverted is not None:
            kept_value = value.detach().clone() if isinstance(value, Tensor) else value
            self.diverted.append(DivertedCall(name, kept_value, batch_size, *given))
            return
        options = (*given, self.in_step, self.dataloader_idx)
        slot = self._by_name.get(name) if isinstance(name, str) else None
        if slot is None or slot.options != options:
            slot = self._open(name, value, options)
        kept: float | Tensor
        if type(value) is Tensor and not value.dim() and slot.metric is None:
            kept = value.detach().clone()  # see to_number for why a copy
        elif type(value) is float and slot.metric is None:
            kept = value
        elif slot.metric is not None or is_metric_object(value):
            slot.observe(value)
            return
        else:
            kept = to_number(name, value)
        if slot.on_step:
            slot.last = kept
            slot.is_new = True
            if slot.weigh_step:
                slot.last_weight = self._weight(batch_size)
        if slot.on_epoch and (self.share != 0 or self.batch is None):  # not for padding
            slot.values.append(kept)
            slot.weights.append(self._weight(batch_size) if slot.weigh else 1)
            if len(slot.values) >= FOLD_EVERY:
                slot.fold()

    def _weight(self, batch_size: float | Tensor | None) -> float:
        if batch_size is None:
            batch_size = 1 if self.batch is None else find_batch_size(self.batch)
        if isinstance(batch_size, Tensor) and batch_size.device.type == "cpu" and batch_size.numel() == 1:
            batch_size = batch_size.item()  # reading it does not synchronize with a device
        if isinstance(batch_size, (int, float)) and batch_size >= 0:
            return batch_size if self.share is None or self.batch is None else batch_size * self.share
        raise ConfigurationError(
            f"log(batch_size={batch_size!r}): expected a number of samples, 0 or more, on the host."
        )

    def _open(self, name: str, value: object, options: tuple[Any, ...]) -> MetricSlot:
        """Find or create the slot for `name`. Check that `options` agree with each other and with earlier calls."""
        *_, add_index, _, in_step, index = options
        if not isinstance(name, str) or not name:
            raise ConfigurationError(f"log got the name {name!r}; a metric's name is non-empty text.")
        if any("\ud800" <= letter <= "\udfff" for letter in name):
            raise ConfigurationError(f"log got the name {name!r}, which no file can hold; remove its lone surrogates.")
        if "/dataloader_idx_" in name:
            raise ConfigurationError(
                f"log got the name {name!r}; the index of the loader is appended with several loaders. Remove "
                "'/dataloader_idx_' from the name."
            )
        if self._closed:
            raise LogPlaceError(
                f"log({name!r}) in {self._closed}: values logged there are not aggregated. Call it in a *_step or in "
                "a hook of an epoch up to its on_*_epoch_end; trainer.log_now({name: number}) sends numbers to the "
                "loggers immediately."
            )
        if self._stage is None:
            raise LogPlaceError(f"log({name!r}): no epoch has begun. Call it in a *_step or in a hook of an epoch.")
        if isinstance(value, Tensor):
            to_number(name, value)  # a dtype that cannot be logged is refused here, not at every call
        settings = self._settings(name, options)
        metrics = self._stages[self._stage]
        apart = add_index and index is not None and metrics.num_dataloaders > 1
        suffix = f"/dataloader_idx_{index}" if apart else ""
        if isinstance(value, nn.Module) and is_metric_object(value):
            self._refuse_shared_metric(name, suffix if apart else None, value)
        # Values of an epoch's hook do not add to those that steps have logged under the same name: the later counts.
        key = name + suffix if in_step else name + suffix + _OF_EPOCH_HOOK
        slot = metrics.slots.get(key)
        if slot is None:
            slot = metrics.slots[key] = MetricSlot(name, suffix, settings)
            slot.is_free = True
        before = slot.settings.reduction
        if same_function(before, settings.reduction):
            settings = settings._replace(reduction=before)
        if slot.is_free:
            # The state in a checkpoint has no function: its values belong to the one that is passed now.
            if before != settings.reduction and (before is not None or isinstance(settings.reduction, str)):
                slot.clear_epoch()
            slot.configure(settings)
            slot.loader = index if metrics.num_dataloaders > 1 else None
        elif slot.settings != settings:
            changed = [
                f"{field}={getattr(slot.settings, field)!r} before, {getattr(settings, field)!r} now"
                for field in MetricSettings._fields
                if getattr(slot.settings, field) != getattr(settings, field)
            ]
            raise ConfigurationError(
                f"log({name!r}) was called with other options in the same {self._stage} epoch: {'; '.join(changed)} "
                "(defaults depend on the hook that calls log). Use the same options, or another name."
            )
        elif slot.loader is not None and index is not None and index != slot.loader:
            if not is_metric_object(value):
                raise ConfigurationError(
                    f"log({name!r}, add_dataloader_idx=False) was called for dataloaders {slot.loader} and {index}, "
                    "whose values would mix. Give each loader's metric its own name, or remove add_dataloader_idx."
                )
            slot.loader = None  # one metric object is for all of them
        slot.options = options
        metrics.by_name[name] = slot
        return slot

    def _settings(self, name: str, options: tuple[Any, ...]) -> MetricSettings:
        prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, _, main_only, in_step, _ = options
        training_step = self._stage == "train" and in_step
        step = training_step if on_step is None else bool(on_step)
        epoch = not training_step if on_epoch is None else bool(on_epoch)
        if not step and not epoch:
            raise ConfigurationError(
                f"log({name!r}, on_step={on_step}, on_epoch={on_epoch}) would have no effect. Set on_step=True or "
                "on_epoch=True."
            )
        if step and not in_step and (self._stage == "train" or self.batch is None):
            raise ConfigurationError(
                f"log({name!r}, on_step=True) was called outside a step, where there is no step to log it for. Remove "
                "on_step, or call it in a *_step or a hook of a batch."
            )
        reduction, sync = parse_reduction(name, reduce_fx), None if sync_dist is None else bool(sync_dist)
        return MetricSettings(step, epoch, bool(prog_bar), bool(logger), reduction, sync, bool(main_only))

    def _refuse_shared_metric(self, name: str, suffix: str | None, metric: nn.Module) -> None:
        """Raise if training and evaluations, or several loaders, log one object. `suffix` is None for one loader."""
        parts = set(map(id, metric.modules()))
        for stage, metrics in self._stages.items():
            logged = [slot.last_metric for slot in metrics.slots.values() if slot.last_metric is not None]
            if stage != self._stage and any(id(part) in parts for each in logged for part in each.modules()):
                raise ConfigurationError(
                    f"log({name!r}): one metric object, or a part of it, is logged in the stages {stage!r} and "
                    f"{self._stage!r}, so that its values would mix. Create one object for each stage."
                )
        for other in self._by_slots():
            if suffix is not None and other.metric is metric and other.suffix != suffix:
                raise ConfigurationError(
                    f"log({name!r}): one metric object is logged for several dataloaders, so that its values would "
                    f"mix ({other.suffix} and {suffix}). Create one object for each loader, or pass "
                    "add_dataloader_idx=False to aggregate over all of them."
                )

    def _drop_older_steps(self) -> None:
        """Drop pending step values of names for which a hook of the epoch has logged a later value."""
        slots = {} if self._stage is None else self._stages[self._stage].slots
        for key, slot in slots.items():
            if key.endswith(_OF_EPOCH_HOOK) and slot.has_epoch_values and slot.key in slots:
                slots[slot.key].last = None

    def _by_slots(self) -> list[MetricSlot]:
        return [] if self._stage is None else list(self._stages[self._stage].slots.values())

    def peek(self) -> Flushed:
        """Return this rank's step values since the last flush. Later calls of `peek_new` omit them.

        Waits for the device. Not collective.
        """
        return read_steps(self._by_slots())

    def peek_new(self) -> Flushed:
        """Return this rank's values that no earlier `peek` or `peek_new` has returned.

        These are step values and, outside of steps, the epoch's aggregates so far. The next flush returns them too.
        Waits for the device if there are such values. Not collective.
        """
        own = self._by_slots()
        logged = {slot.key for slot in own}  # in an evaluation, its values replace older ones of training
        train = [] if self._stage == "train" else self._stages["train"].slots.values()
        held = [*(slot for slot in train if slot.key not in logged), *own]
        flushed = read_steps(slot for slot in held if slot.seen_step is not slot.last)
        if not self.in_step:
            of_epoch = new_of_epoch(own)
            flushed.callback.update(of_epoch.callback)
            flushed.logged.update(of_epoch.logged)
            flushed.prog_bar.update(of_epoch.prog_bar)
        return flushed

    def end_evaluation_step(self, step: int, place: Place, exchange: Exchange | None) -> Rows:
        """Keep what a batch of an evaluation has logged on_step, as a row for the loggers. Not collective.

        Args:
            step: number of earlier evaluation steps of the run.
            place: the indices of the loader and of its batch.
            exchange: as in `flush_step`, which is called later. It is not called.

        Returns:
            Rows that were read because many values were pending. `flush_step` returns the others.
        """
        self._rows.add(step, place, self._by_slots())
        return self._rows.read(has_ranks=exchange is not None) if self._rows.is_full else {}

    def flush_step(self, exchange: Exchange | None = None, last: StepResult | None = None) -> Flushed:
        """Return the latest value of each metric that was logged on_step since the last flush. Waits for each device
        once. With `exchange` it is collective: every rank calls it at the same step.

        Args:
            exchange: all-gathers a small picklable dict, in the order of the ranks. It is called exactly once, even if
                nothing was logged. Default: None, for one process.
            last: result of the last step, which is read together with the values. Default: None.
        """
        reads, shared, reductions = HostReads(), dict[str, Entry](), dict[str, Reduction | None]()
        facts = {} if last is None else {"loss": last.loss, "grad_norm": last.grad_norm}
        of_last = {name: reads.add(value) for name, value in facts.items() if value is not None}
        waiting: list[tuple[MetricSlot, Entry, list[float]]] = []
        for slot in self._by_slots():
            if slot.last is not None:
                waiting += [(slot, entry, reads.add(value)) for entry, value in step_values(slot)]
            slot.last = slot.seen_step = None
        reads.read()
        flushed = Flushed(last_step={name: value for name, (value,) in of_last.items()})
        flushed.rows = self._rows.read(has_ranks=exchange is not None)
        for slot, entry, (value,) in waiting:
            if exchange is not None and (slot.settings.sync_dist is True or entry.main_only):
                name = entry.name + entry.suffix
                shared[name] = with_step_value(entry, value, slot.last_weight)
                reductions[name] = slot.settings.reduction
            else:
                flushed.put(entry, value, "step")
        if exchange is not None:
            metrics = {name: tuple(entry) for name, entry in shared.items()}
            facts_of_rank = {"metrics": metrics, "loss": flushed.last_step.get("loss"), "rows": self._rows.payload()}
            gathered = exchange(facts_of_rank)
            put_combined(flushed, gather_entries(gathered), reductions, "step")
            shares = [each["loss"] for each in gathered if each["loss"] is not None]
            if shares:
                flushed.last_step["loss"] = sum(shares) / len(shares)
            for at, row in self._rows.combine([each["rows"] for each in gathered]).items():
                flushed.rows.setdefault(at, {}).update(row)
        return flushed

    def flush_epoch(
        self, exchange: Exchange | None = None, *, keep: bool = False, owner: nn.Module | None = None
    ) -> Flushed:
        """Return the aggregates of the current stage's epoch and reset them.

        Waits for each device once, and once more if metric objects were logged. Collective if `exchange` is passed.
        Metric objects reduce over ranks by themselves, in an order that the exchange determines. A metric object that
        only some ranks have logged must be a module of `owner`. Otherwise it is computed from those ranks, with a
        warning.

        Args:
            exchange: see `flush_step`. Keys that only some ranks have logged appear on all ranks. Default: None.
            keep: do not reset the aggregates, because a later fit continues the epoch. Default: False.
            owner: the task. Default: None.
        """
        slots = [slot for slot in self._by_slots() if slot.on_epoch]
        entries = epoch_entries(slots)
        objects = {slot.key: slot for slot in self._by_slots() if slot.metric is not None}
        by_use = sorted(slots, key=lambda slot: slot.has_epoch_values)  # of two slots of one key, the used one decides
        reductions = {slot.key: slot.settings.reduction for slot in by_use}
        stay_here = {slot.key for slot in slots if slot.settings.sync_dist is False}
        alone = {key for key, entry in entries.items() if key in stay_here and not entry.main_only}
        paths = {} if owner is None else {id(module): path for path, module in owner.named_modules()}
        payload = {
            "metrics": {key: tuple(entry) for key, entry in entries.items() if key not in alone},
            "objects": {
                key: (paths.get(id(slot.metric)), tuple(entry_of(slot)))
                for key, slot in objects.items()
                if slot.on_epoch and slot.settings.sync_dist is not False
            },
        }
        gathered = [payload] if exchange is None else exchange(payload)
        flushed = Flushed()
        put_combined(flushed, {key: [entries[key]] for key in entries if key in alone}, reductions, "epoch")
        put_combined(flushed, gather_entries(gathered), reductions, "epoch")
        put_objects(flushed, objects, gathered, owner)
        self._drop_older_steps()
        if keep:
            for slot in slots:  # this rank's own aggregates are not new: those of all ranks were returned
                slot.seen_epoch = slot.epoch_count
            return flushed
        for slot in slots:
            slot.clear_epoch()
        for slot in objects.values():  # after all are computed: one object may be logged under two names
            reset_metric(slot.metric)
            slot.metric = None
        return flushed
