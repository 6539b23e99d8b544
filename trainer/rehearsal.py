"""Steps that are tried out within a run: whatever they change is put back, and nobody hears of them."""

from __future__ import annotations

from collections.abc import Callable, Sized
from contextlib import ExitStack
from types import TracebackType
from typing import Any, cast

from torch.utils.data import IterableDataset

from trainwright.callbacks.hook_table import HookTable
from trainwright.core.errors import ConfigurationError, TrainwrightError
from trainwright.core.memory import clear_device_cache, is_out_of_memory
from trainwright.core.rng import isolate_rng
from trainwright.core.run import Run, SaveRequest, Trial
from trainwright.core.state import Group, SkipRestOfEpoch
from trainwright.data.combined import leaves_of
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_values import without_ranks
from trainwright.trainer import evaluation
from trainwright.trainer.facts import RunFacts
from trainwright.trainer.rewind import Rewind

_FITS, _FULL, _FAILED = "fits", "full", "failed"
_METHODS = {
    "train": "train_dataloader",
    "validate": "val_dataloader",
    "test": "test_dataloader",
    "predict": "predict_dataloader",
}


class Rehearsal:
    """Takes a run out of itself for some steps; see `Run.rehearse` and `core.run.Rehearsal` for the promise.

    Everything that the loop holds is exchanged for something fresh on entering and put back on leaving; what is changed
    in place (weights, optimizers, generators, the task's attributes) is copied to the host and copied back after each
    try, so that every try begins alike.

    Args:
        run: the Trainer, at a step boundary.
        alone: steps run without the other ranks.
        remakes_loaders: loaders are made anew for each try, and for the run once the rehearsal has ended in order.
    """

    def __init__(self, run: RunFacts, *, alone: bool, remakes_loaders: bool) -> None:
        self._run = run
        self._alone = alone
        self._remakes = remakes_loaders
        self._kind = "train" if run.stage == "fit" else str(run.stage)
        self._stack = ExitStack()
        self._at_end: list[Callable[[], None]] = []

    def __enter__(self) -> Rehearsal:
        run = self._run
        if not run.at_step_boundary:
            raise ConfigurationError("steps can only be tried out between two steps of a run, not within one.")
        if self._remakes and self._kind in run._sources.given:
            raise ConfigurationError(
                f"the {self._kind} loader was handed to the Trainer ready-made, so that its batch size cannot change. "
                f"Define {_METHODS[self._kind]}(self) in the task or in a data module, with a loader that is made from "
                "the attribute that holds the batch size."
            )
        self._processes = run.strategy.processes
        self._was_made = run._train_data
        with ExitStack() as stack:  # whatever has been exchanged is put back when a later line fails
            stack.enter_context(isolate_rng(run.strategy.device))
            self._exchange(stack)
            stack.enter_context(run.strategy.rehearsal(alone=self._alone))
            if self._alone:
                run.exchange = None
            self._stack = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, traceback)
        clear_device_cache(garbage_collection=True)
        self._attach()
        if kind is not None:
            return
        for action in self._at_end:
            action()
        if self._remakes:
            self._renew_loaders()

    def _attach(self) -> None:
        run = self._run
        run.strategy.attach(cast(Run, run), run.hooks, run.metrics)

    def _exchange(self, stack: ExitStack) -> None:
        """Give the run fresh things to work on, and have the old ones put back."""
        run, task = self._run, self._run.task
        attributes, state, muted = dict(vars(run)), run.state.to_dict(), [logger.muted for logger in run.loggers]

        def put_back() -> None:
            vars(run).clear()
            vars(run).update(attributes)
            run.state.load_dict(state)
            for logger, was in zip(run.loggers, muted, strict=True):
                logger.muted = was

        schedulers = [config.scheduler for config in run.lr_scheduler_configs]
        generators = [*_generators_of(run._sources.given)]
        module = None if run.datamodule is None else dict(vars(run.datamodule))
        self._memory = Rewind(task, run.optimizers, schedulers, generators)
        stack.callback(put_back)
        stack.callback(self._rewind, module)
        self._module = module
        self._state = state
        run.hooks = HookTable((), task)
        run.metrics = MetricBuffer()
        run.logging = None
        run.safe_point = _NoSaves()
        run._eval_data, run._callback_metrics, run._logged_metrics, run._progress_bar_metrics = {}, {}, {}, {}
        for logger in run.loggers:
            logger.muted = True

    def _rewind(self, module: dict[str, Any] | None) -> None:
        self._memory.rewind()
        self._run.state.load_dict(self._state)
        if module is not None:
            vars(self._run.datamodule).clear()
            vars(self._run.datamodule).update(module)

    def _renew_loaders(self) -> None:
        """Have the run's loaders made anew, at the same place in the data. Collective where making one is."""
        run, state = self._run, self._run.state
        run._train_data = run._validation = None
        run._eval_data.clear()
        if self._was_made is not None and run.stage == "fit":
            place = self._was_made.loader.position(state.batch_in_epoch) if state.batch_in_epoch else None
            run.train_data().begin_epoch(state.epoch, place)

    # What it is for

    def at_end(self, action: Callable[[], None]) -> None:
        """Call `action` once everything is put back; see `core.run.Rehearsal`."""
        self._at_end.append(action)

    def capacity(self) -> int | None:
        """Return the largest batch that the data can fill on every rank; see `core.run.Rehearsal`."""
        run, lengths = self._run, []
        for kind in ("train", "validate") if self._kind == "train" else (self._kind,):
            if kind == self._kind or run.has_validation:
                made = run._sources.make(kind, run.task)
                loaders = leaves_of(getattr(made, "iterables", made))
                # A validation set may be smaller than a batch, unless what does not fill one is left out.
                wanted = [one for one in loaders if kind == self._kind or getattr(one, "drop_last", False)]
                lengths += [length for one in wanted if (length := _num_samples(one)) is not None]
        mine = min(lengths) // run.strategy.dp_size if lengths else None
        told = [found for found in self._processes.gather_object(mine) if found is not None]
        return min(told) if told else None

    def try_out(self, num_steps: int) -> Trial:
        """Run some steps of the present stage and say how they ended; see `core.run.Rehearsal`."""
        clear_device_cache(garbage_collection=True)
        failure: Exception | None = None
        size: int | None = None
        status, reason = _FITS, ""
        try:
            size = self._prepare()
            with without_ranks(self._run.task):
                self._run_steps(num_steps)
        except Exception as error:  # noqa: BLE001  # told to the other ranks, which wait for this one, and then raised
            status, reason = (_FULL if is_out_of_memory(error) else _FAILED), f"{type(error).__name__}: {error}"
            failure = None if status == _FULL else error
        self._forget()
        told: list[tuple[str, str]] = self._processes.gather_object((status, reason))
        if failure is not None:
            raise failure
        for rank, (other, text) in enumerate(told):
            if other == _FAILED:
                raise TrainwrightError(f"rank {rank} failed while steps were tried out: {text}")
        found = next((text for other, text in told if other == _FULL), "")
        return Trial(fits=all(other == _FITS for other, _ in told), batch_size=size, reason=found)

    def train(self, num_steps: int, *, before_step: Callable[[int], None], after_step: Callable[[float], bool]) -> int:
        """Train some steps, reading each one's loss; see `core.run.Rehearsal`."""

        def read(loss: Any) -> bool:
            share = float("nan") if loss is None else float(loss)
            told = self._processes.gather_object(share)
            return after_step(sum(told) / len(told))

        try:
            self._prepare()
            return self._train(num_steps, before_step, read, validates=False)
        finally:
            self._forget()

    # The steps

    def _run_steps(self, num_steps: int) -> None:
        if self._kind == "train":
            self._train(num_steps, _ignore, _go_on)
        else:
            evaluation.evaluate(self._run, self._kind, max_batches=num_steps)  # type: ignore[arg-type]  # a stage's name

    def _prepare(self) -> int | None:
        """Make the loaders and attach the strategy; returns the loader's batch size."""
        run = self._run
        run._train_data = run._validation = None
        run._eval_data.clear()
        run.task._sink = run.metrics
        self._attach()
        if self._kind == "train":
            return run.train_data().loader.batch_size
        return run.evaluation_data(self._kind).loaders[0].batch_size

    def _train(
        self,
        num_steps: int,
        before_step: Callable[[int], None],
        after_step: Callable[[Any], bool],
        *,
        validates: bool = True,
    ) -> int:
        run, state, metrics = self._run, self._run.state, self._run.metrics
        done, ends = 0, False
        metrics.begin("train")
        run.fire("on_train_start")
        run.fire("on_train_epoch_start")
        while done < num_steps and not ends:
            state.batch_in_epoch = state.step_in_epoch = state.samples_in_epoch = 0
            metrics.in_step = True
            first = done
            try:
                for group in run.train_data().groups(state, run.accumulate_grad_batches):
                    before_step(done)
                    loss = self._step(group)
                    done += 1
                    ends = after_step(loss) or done == num_steps
                    del loss, group
                    if ends:
                        break
            except SkipRestOfEpoch:
                run.strategy.discard_gradients()
            metrics.in_step = False
            ends |= done == first  # an epoch without a step: so are all that follow
        if validates and run.has_validation:
            evaluation.evaluate(run, "validate", max_batches=num_steps)
        run.fire("on_train_epoch_end")
        metrics.flush_epoch(run.exchange)
        run.fire("on_train_end")
        return done

    def _step(self, group: Group) -> Any:
        """One optimizer step, as the loop does it, heard by the task's own hooks only; returns the detached loss."""
        run, hooks, strategy, task, state = (
            self._run,
            self._run.hooks,
            self._run.strategy,
            self._run.task,
            self._run.state,
        )
        loss = strategy.forward_backward(group)
        if loss is not None:
            for hook in hooks.on_before_optimizer_step:
                for optimizer in run.optimizers:
                    hook(run, task, optimizer)
            strategy.optimizer_step(run.clip)
        state.step += loss is not None or strategy.stepped_by_hand
        state.step_in_epoch += 1
        state.batches += len(group.batches)
        state.batch_in_epoch += len(group.batches)
        for hook in hooks.on_train_batch_end:
            hook(run, task, group.last_output, group.last_batch, state.batch_in_epoch - 1)
        return loss

    def _forget(self) -> None:
        """Drop what the steps made and put back what they changed, so that the next try begins like this one."""
        run = self._run
        run._train_data = run._validation = None
        run._eval_data.clear()
        run.metrics = MetricBuffer()
        run.strategy.discard_gradients()
        self._attach()
        self._rewind(self._module)
        clear_device_cache(garbage_collection=True)


class _NoSaves:
    """Takes the place of a run's safe point: wishes are dropped, since the steps that had them did not happen."""

    waiting = False

    def add_action(self, action: Callable[[], None]) -> None:
        """Drop it."""

    def add_save(self, request: SaveRequest) -> None:
        """Drop it."""

    def settle(self) -> None:
        """Do nothing."""

    def finish(self) -> None:
        """Do nothing."""

    def save_now(self, path: Any, *, weights_only: bool, storage_options: Any = None) -> None:
        """Write nothing."""

    def emergency_save(self, request: SaveRequest) -> None:
        """Write nothing."""


def _ignore(_: int) -> None:
    return None


def _go_on(_: Any) -> bool:
    return False


def _num_samples(loader: Any) -> int | None:
    """Return the samples of a loader's data set; None when there is no telling."""
    dataset = getattr(loader, "dataset", None)
    if not isinstance(dataset, Sized) or isinstance(dataset, IterableDataset):
        return None
    return len(dataset)


def _generators_of(given: dict[str, Any]) -> list[Any]:
    """Return the generators that ready-made loaders hold: reading an epoch draws from them."""
    found = []
    for loader in [part for each in given.values() for part in leaves_of(getattr(each, "iterables", each))]:
        for part in (loader, getattr(loader, "sampler", None), getattr(loader, "batch_sampler", None)):
            found.append(getattr(part, "generator", None))
            found.append(getattr(getattr(part, "sampler", None), "generator", None))
    return [generator for generator in found if generator is not None]
