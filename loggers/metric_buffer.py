"""The buffer that `log` fills: values stay on their device until the loop flushes them.

`log` never waits for a device and never communicates. The loop calls `flush_step` every few steps for the latest
values, and `flush_epoch` at the end of an epoch for the aggregates. Both methods copy numbers once per device, and
exchange them in one collective, which every rank must join even if it has logged nothing. Metric objects of
torchmetrics need a further copy, and communicate themselves. Memory does not grow with the number of steps, except for
user-defined reductions, which receive all values of an epoch.

A name has a `MetricSlot` for each stage, which holds its values between two flushes.
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
from trainwright.loggers.log_checks import (
    check_logged_for_one_loader,
    check_name,
    check_not_logged_in_stage,
    check_same_loader,
    check_same_settings,
)
from trainwright.loggers.metric_options import LogOptions, Reduction, same_function
from trainwright.loggers.metric_slot import (
    FOLD_EVERY,
    HostReads,
    MetricSlot,
    is_metric_object,
    reset_metric,
    restored_slot,
    slot_states,
    to_number,
)
from trainwright.loggers.metric_values import (
    Entry,
    Exchange,
    Flushed,
    epoch_entries,
    gather_entries,
    module_paths,
    new_of_epoch,
    objects_payload,
    put_combined,
    put_objects,
    read_steps,
    step_values,
    with_step_value,
)

EpochStage = Literal["train", "validate", "test", "predict"]
_STAGES: tuple[EpochStage, ...] = ("train", "validate", "test", "predict")
# A hook of an epoch and a step may log the same name with other options, so their slots have different keys.
_HOOK_SUFFIX = "\0hook"  # no name of a metric ends like this


class _StageMetrics:
    """The `MetricSlot`s of one stage."""

    def __init__(self) -> None:
        self.slots: dict[str, MetricSlot] = {}  # by key: the name, the loader's suffix and for hooks `_HOOK_SUFFIX`
        self.by_name: dict[str, MetricSlot] = {}  # the slot of the latest call for each name
        self.num_dataloaders = 1


class DivertedCall(NamedTuple):
    """The arguments of a recorded call of `log`.

    `log` builds it from a tuple of options, so the fields after `batch_size` have the order of `LogOptions`.
    """

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
        in_step: True from the first to the last step of a training epoch, without its validations, and during each
            batch of an evaluation, with the hooks of the batch.
        batch: the current micro-batch, which determines the weight in a mean. Set it to None after the batch, otherwise
            the buffer keeps it alive. None outside of a batch.
        share: weight of this rank's part of the batch in a mean over the ranks that split its sequences. The weights
            are 1 on average. None if the batch is not split. 0 if the batch is padding of a rank without data.
        dataloader_idx: index of the batch's evaluation loader; None with a single loader and outside of evaluations.
        diverted: list to which `log` appends its calls instead of logging the values. A pipeline sets it,
            because only its last stage logs: every rank repeats the calls after the step. None disables it.
    """

    def __init__(self) -> None:
        self.diverted: list[DivertedCall] | None = None
        self.in_step: bool = False
        self.batch: Any = None
        self.share: float | None = None
        self.dataloader_idx: int | None = None
        self._stage: EpochStage | None = None
        self._stages: dict[EpochStage, _StageMetrics] = {stage: _StageMetrics() for stage in _STAGES}
        # The slots of the current stage by name. While closed it is an empty dict, so that each call of `log` calls
        # `_open`, which raises the error.
        self._by_name: dict[str, MetricSlot] = {}
        self._closed_hook = ""  # the hook in which nothing can be logged; empty if `log` may be called
        self._rows = EvaluationRows()

    def state_dict(self, owner: nn.Module | None = None) -> dict[str, Any]:
        """Return the aggregates of the training epoch so far. Waits for the device.

        Of a metric object it contains the name in `owner` (the task) only, not the state.
        """
        paths = module_paths(owner)
        used: dict[str, MetricSlot] = {}
        for key, slot in self._stages["train"].slots.items():
            has_values = slot.has_epoch_values or slot.last is not None
            if has_values or id(slot.metric) in paths:
                used[key] = slot
        states = slot_states(used)
        for key, slot in used.items():
            states[key]["metric"] = paths.get(id(slot.metric))
        return states

    def load_state_dict(self, states: Mapping[str, Any], device: torch.device, owner: nn.Module | None = None) -> None:
        """Restore the result of `state_dict` onto this rank's device. Call it after `begin`."""
        metrics = self._stages["train"]
        metrics.by_name.clear()  # on_train_start may have logged
        modules = {} if owner is None else dict(owner.named_modules())
        for key, state in states.items():
            slot = restored_slot(state, device)
            # Restore the object here: the epoch may have ended before its last validation, without another `log`.
            slot.metric = modules.get(state.get("metric"))  # checkpoints of early versions have no "metric"
            slot.last_metric = slot.metric
            metrics.slots[key] = slot

    @property
    def stage(self) -> EpochStage | None:
        """The stage whose metrics `log` adds to and the flushes return; None before the first `begin`."""
        return self._stage

    def begin(self, stage: EpochStage, *, num_dataloaders: int = 1) -> None:
        """Start an epoch of `stage`, which becomes the current stage.

        Values of an unfinished epoch of this stage are discarded, and rows of an evaluation that were not flushed.
        Values of other stages, and step values that were not flushed yet, are kept.

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
        self._stage = stage
        self._closed_hook = ""
        self._by_name = self._stages[stage].by_name

    def close(self, where: str) -> None:
        """Make `log` raise an error until `begin` or `switch` is called, because no flush follows.

        Args:
            where: the hook, or another place, that the error names.
        """
        self._closed_hook = where
        self._by_name = {}

    @contextlib.contextmanager
    def closed_in(self, where: str) -> Iterator[None]:
        """Make `log` raise an error within the context; see `close`."""
        hook_before = self._closed_hook
        by_name_before = self._by_name
        self.close(where)
        try:
            yield
        finally:
            self._closed_hook = hook_before
            self._by_name = by_name_before

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
            batch_size: the value's weight in a mean. Default: None, the length of the current batch, or 1 outside of a
                batch.
            rank_zero_only: use the value of rank 0 on every rank. Default: False.
            metric_attribute: Accepted without effect: metrics of torchmetrics are recognized by type. Default: None.

        Raises:
            LoggedValueError: the value is not a single number.
            LogPlaceError: no epoch has begun, or the buffer is closed (see `close`).
            ConfigurationError: the name or an option is not valid, or options contradict each other or an earlier call
                in the same epoch. Or one metric object is logged in several stages or for several loaders, or one name
                gets two metric objects in an epoch.
        """
        # In the order of the fields of `LogOptions` and `DivertedCall`.
        arguments = (prog_bar, logger, on_step, on_epoch, reduce_fx, sync_dist, add_dataloader_idx, rank_zero_only)
        if self.diverted is not None:
            copied = value.detach().clone() if isinstance(value, Tensor) else value
            self.diverted.append(DivertedCall(name, copied, batch_size, *arguments))
            return
        # Checks and defaults depend on these options and the name only. They run again when one of them changes.
        options = (*arguments, self.in_step, self.dataloader_idx)
        slot = self._by_name.get(name) if isinstance(name, str) else None
        if slot is None or slot.options != options:
            slot = self._open(name, value, options)
        # The first two cases are the most frequent ones.
        number: float | Tensor
        if type(value) is Tensor and not value.dim() and slot.metric is None:
            number = value.detach().clone()  # see to_number for why a copy
        elif type(value) is float and slot.metric is None:
            number = value
        elif slot.metric is not None or is_metric_object(value):
            slot.observe(value)
            return
        else:
            number = to_number(name, value)
        # A weight of 0 removes padding from a mean only. It must not count in a sum, a minimum or a maximum over ranks
        # either.
        is_padding = self.share == 0 and self.batch is not None
        if slot.on_step and not (is_padding and slot.sync_step):
            slot.last = number
            slot.needs_row = True
            if slot.weigh_step:
                slot.last_weight = self._weight(batch_size)
        if slot.on_epoch and not is_padding:
            slot.values.append(number)
            slot.weights.append(self._weight(batch_size) if slot.weigh else 1)
            if len(slot.values) >= FOLD_EVERY:
                slot.fold()

    def _weight(self, batch_size: float | Tensor | None) -> float:
        if batch_size is None:
            batch_size = 1 if self.batch is None else find_batch_size(self.batch)
        if isinstance(batch_size, Tensor) and batch_size.device.type == "cpu" and batch_size.numel() == 1:
            batch_size = batch_size.item()  # does not wait, because the tensor is on the host
        if isinstance(batch_size, (int, float)) and batch_size >= 0:
            if self.share is None or self.batch is None:
                return batch_size
            return batch_size * self.share
        raise ConfigurationError(
            f"log(batch_size={batch_size!r}): expected a number of samples, 0 or more, on the host."
        )

    def _open(self, name: str, value: object, raw_options: tuple[Any, ...]) -> MetricSlot:
        """Return the slot for `name`, after the checks that `log` skips while its options stay the same.

        `raw_options` are the fields of `LogOptions`.
        """
        stage = self._check_place(name)
        if isinstance(value, Tensor):
            to_number(name, value)  # the fast path of `log` does not check the dtype
        options = LogOptions(*raw_options)
        settings = options.settings(name, is_train=stage == "train")
        metrics = self._stages[stage]
        loader = options.dataloader_idx if metrics.num_dataloaders > 1 else None
        has_suffix = options.add_dataloader_idx and loader is not None
        suffix = f"/dataloader_idx_{loader}" if has_suffix else ""
        if is_metric_object(value):
            for other_stage, other_metrics in self._stages.items():
                if other_stage != stage:
                    check_not_logged_in_stage(name, value, stage, other_stage, other_metrics.slots.values())
            if has_suffix:
                check_logged_for_one_loader(name, value, suffix, self._slots_of_stage())
        # A hook of the epoch and steps have separate slots for the same name, whose values are not added. `flush_epoch`
        # returns the value of the later slot that has one.
        key = name + suffix if options.in_step else name + suffix + _HOOK_SUFFIX
        slot = metrics.slots.get(key)
        if slot is None:
            slot = MetricSlot(name, suffix, settings)
            slot.can_reconfigure = True
            metrics.slots[key] = slot
        if same_function(slot.settings.reduction, settings.reduction):
            # Keep the first function object, so that the settings compare equal.
            settings = settings._replace(reduction=slot.settings.reduction)
        if slot.can_reconfigure:
            slot.reconfigure(settings)
            slot.loader = loader
        else:
            check_same_settings(slot, settings, stage)
            has_loaders = slot.loader is not None and loader is not None
            if has_loaders and is_metric_object(value):
                if loader != slot.loader:
                    slot.loader = None  # one metric object aggregates over all loaders
            elif has_loaders:
                check_same_loader(slot, loader)
        slot.options = raw_options
        metrics.by_name[name] = slot
        return slot

    def _check_place(self, name: str) -> EpochStage:
        """Check the name and that it can be logged now. Return the stage."""
        check_name(name)
        if self._closed_hook:
            raise LogPlaceError(
                f"log({name!r}) in {self._closed_hook}: values logged there are not aggregated. Call it in a *_step or "
                "in a hook of an epoch up to its on_*_epoch_end; trainer.log_now({name: number}) sends numbers to the "
                "loggers immediately."
            )
        if self._stage is None:
            raise LogPlaceError(f"log({name!r}): no epoch has begun. Call it in a *_step or in a hook of an epoch.")
        return self._stage

    def _drop_older_steps(self) -> None:
        """Drop pending step values of names for which a hook of the epoch has logged a later value."""
        slots = {} if self._stage is None else self._stages[self._stage].slots
        for key, slot in slots.items():
            # `slot.key` does not contain the suffix of hooks, so it is the key of the step's slot.
            if key.endswith(_HOOK_SUFFIX) and slot.has_epoch_values and slot.key in slots:
                slots[slot.key].last = None

    def _slots_of_stage(self) -> list[MetricSlot]:
        return [] if self._stage is None else list(self._stages[self._stage].slots.values())

    def peek(self) -> Flushed:
        """Return this rank's step values since the last flush. Later calls of `peek_new` omit them, except for metric
        objects, whose values may have changed.

        The next flush returns them too. Waits for the device. Not collective.
        """
        return read_steps(self._slots_of_stage())

    def peek_new(self) -> Flushed:
        """Return this rank's values that no earlier `peek` or `peek_new` has returned, and those of all metric objects.

        These are step values and, outside of steps, the epoch's aggregates so far. The next flush returns them too.
        Waits for the device if there are such values. Not collective.
        """
        of_stage = self._slots_of_stage()
        slots: list[MetricSlot] = []
        if self._stage != "train":
            # Training values may wait for a flush during a validation. Its own values of the same key replace them.
            keys = {slot.key for slot in of_stage}
            slots += [slot for slot in self._stages["train"].slots.values() if slot.key not in keys]
        slots += of_stage
        flushed = read_steps(slot for slot in slots if slot.has_unread_step)
        if not self.in_step:
            of_epoch = new_of_epoch(of_stage)
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
        self._rows.add(step, place, self._slots_of_stage())
        return self._rows.read(has_ranks=exchange is not None) if self._rows.is_full else {}

    def flush_step(self, exchange: Exchange | None = None, last: StepResult | None = None) -> Flushed:
        """Return the latest value of each metric that was logged on_step since the last flush. Waits for each device
        once. With `exchange` it is collective: every rank calls it at the same step.

        Args:
            exchange: all-gathers a small picklable dict, in the order of the ranks. It is called exactly once, even if
                nothing was logged. Default: None, for one process.
            last: result of the last step, which is read together with the values. Default: None.
        """
        reads = HostReads()
        last_step: dict[str, list[float]] = {}
        if last is not None and last.loss is not None:
            last_step["loss"] = reads.add(last.loss)
        if last is not None and last.grad_norm is not None:
            last_step["grad_norm"] = reads.add(last.grad_norm)
        waiting: list[tuple[MetricSlot, Entry, list[float]]] = []
        for slot in self._slots_of_stage():
            if slot.last is not None:
                for entry, value in step_values(slot):
                    waiting.append((slot, entry, reads.add(value)))
            slot.last = None
            slot.seen_step = None
        reads.read()
        flushed = Flushed(last_step={name: number for name, (number,) in last_step.items()})
        flushed.rows = self._rows.read(has_ranks=exchange is not None)
        synced: dict[str, Entry] = {}
        reductions: dict[str, Reduction | None] = {}
        for slot, entry, (number,) in waiting:
            if exchange is not None and (slot.settings.sync_dist is True or entry.main_only):
                key = entry.name + entry.suffix
                synced[key] = with_step_value(entry, number, slot.last_weight)
                reductions[key] = slot.settings.reduction
            else:
                flushed.put(entry, number, "step")
        if exchange is not None:
            self._flush_over_ranks(exchange, flushed, synced, reductions)
        return flushed

    def _flush_over_ranks(
        self,
        exchange: Exchange,
        flushed: Flushed,
        synced: Mapping[str, Entry],
        reductions: Mapping[str, Reduction | None],
    ) -> None:
        """Add this step's values of all ranks to `flushed`: metrics, the mean loss and rows of an evaluation."""
        gathered = exchange(
            {
                "metrics": {key: tuple(entry) for key, entry in synced.items()},
                "loss": flushed.last_step.get("loss"),
                "rows": self._rows.payload(),
            }
        )
        put_combined(flushed, gather_entries(gathered), reductions, "step")
        losses = [of_rank["loss"] for of_rank in gathered if of_rank["loss"] is not None]
        if losses:
            flushed.last_step["loss"] = sum(losses) / len(losses)
        for step, row in self._rows.combine([of_rank["rows"] for of_rank in gathered]).items():
            flushed.rows.setdefault(step, {}).update(row)

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

        Raises:
            ConfigurationError: the ranks reduce a key differently.
            TaskError: a user-defined reduction does not return a number.
        """
        slots = [slot for slot in self._slots_of_stage() if slot.on_epoch]
        local_keys = {slot.key for slot in slots if slot.settings.sync_dist is False}
        local: dict[str, list[Entry]] = {}
        shared: dict[str, tuple[Any, ...]] = {}
        for key, entry in epoch_entries(slots).items():
            if key in local_keys and not entry.main_only:
                local[key] = [entry]
            else:
                shared[key] = tuple(entry)
        objects = {slot.key: slot for slot in self._slots_of_stage() if slot.metric is not None}
        payload = {"metrics": shared, "objects": objects_payload(objects, owner)}
        gathered = [payload] if exchange is None else exchange(payload)
        reductions: dict[str, Reduction | None] = {}
        # A step and a hook of the epoch may each have a slot with this key. Slots with values are last in this order,
        # so that their reduction replaces that of a slot without values.
        for slot in sorted(slots, key=lambda slot: slot.has_epoch_values):
            reductions[slot.key] = slot.settings.reduction
        flushed = Flushed()
        put_combined(flushed, local, reductions, "epoch")
        put_combined(flushed, gather_entries(gathered), reductions, "epoch")
        put_objects(flushed, objects, gathered, owner)
        self._drop_older_steps()
        if keep:
            for slot in slots:
                # `peek_new` would return this rank's aggregates, but those of all ranks were returned already.
                slot.seen_epoch = slot.epoch_count
            return flushed
        for slot in slots:
            slot.clear_epoch()
        for slot in objects.values():  # after all are computed: one object may be logged under two names
            reset_metric(slot.metric)
            slot.metric = None
        return flushed
