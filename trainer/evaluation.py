"""The loop of validation, testing and prediction, over one or several loaders."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainwright.core.errors import TrainwrightWarning
from trainwright.core.tree import Batch, iterate_tensors, map_tensors, too_deep
from trainwright.data.groups import check_end
from trainwright.data.prepared import PreparedLoader
from trainwright.loggers.evaluation_rows import Place
from trainwright.loggers.metric_values import Flushed
from trainwright.trainer.data import EvaluationData, EvaluationKind
from trainwright.trainer.run import StageRun
from trainwright.trainer.search.replay import StepCalls, replay_batch


class Abandoned(Exception):
    """Exception that ends an evaluation before its last batch. The metrics of the evaluation are discarded."""


# Kind → its name in hooks, steps and `TrainState`: `on_validation_start`, `validation_step`, `validation_batches`.
_EVENTS = {"validate": "validation", "test": "test", "predict": "predict"}


def evaluate(
    run: StageRun,
    kind: EvaluationKind,
    *,
    max_batches: int | None = None,
    keep: bool = False,
    abandon: Callable[[int, int], bool] | None = None,
    when_metrics_known: Callable[[], None] = lambda: None,
) -> tuple[Flushed, list[list[Any]]]:
    """Run the task's step of this kind over the data. Collective: metrics are exchanged at the end.

    Modules are in evaluation mode and gradients are disabled. The modes of the modules are restored at the end.

    Args:
        run: the run.
        kind: `"validate"`, `"test"` or `"predict"`.
        max_batches: maximum number of batches of each loader, in addition to the data's limits. Default: None.
        keep: return the outputs of the step. Default: False.
        abandon: called before each batch with the loader's index and the batch's index. True stops the evaluation. It
            must return the same value on every rank. Default: None, which runs all batches.
        when_metrics_known: called when the metrics are known, before `on_*_end`. Default: does nothing.

    Raises:
        Abandoned: `abandon` returned True. Raised on every rank.

    Returns:
        The metrics of the epoch, and for each loader the outputs of this rank's batches (empty without `keep`). If all
        limits are 0, no hook is called, and there are no metrics and no outputs.
    """
    loop = _EvaluationLoop(run, kind, max_batches, keep, abandon)
    flushed = loop.run(when_metrics_known)
    return flushed, loop.outputs


class _EvaluationLoop:
    """One pass over the data of an evaluation; see `evaluate` for the arguments.

    Attributes:
        outputs: for each loader the outputs of this rank's batches; empty lists without `keep`. Set by `run`.
    """

    def __init__(
        self,
        run: StageRun,
        kind: EvaluationKind,
        max_batches: int | None,
        keep: bool,
        abandon: Callable[[int, int], bool] | None,
    ) -> None:
        self.outputs: list[list[Any]] = []
        self._run = run
        self._kind: EvaluationKind = kind
        self._name = _EVENTS[kind]
        self._max_batches = max_batches
        self._keep = keep
        self._abandon = abandon
        self._metrics = run.logs.metrics
        self._steps = _StepLog(run, kind)

    def run(self, when_metrics_known: Callable[[], None]) -> Flushed:
        """Run the evaluation and return the metrics of the epoch."""
        run = self._run
        run.data.evaluation(self._kind).begin(run.state.epoch)
        data, limits = self._prepare()
        self.outputs = [[] for _ in data.loaders]
        has_batches = any(limit is None or limit > 0 for limit in limits)
        if not has_batches:
            return Flushed()
        outer_stage = self._metrics.stage  # "train" for a validation within a fit; None without a fit
        run.evaluation.kind = self._kind
        run.engine.begin_evaluation()
        inference_mode = run.settings.arguments.inference_mode and run.engine.capabilities.inference_mode
        with self._evaluation_mode(), _no_gradients(inference_mode):
            self._metrics.begin(self._kind, num_dataloaders=len(data.loaders))
            self._metrics.in_step = False
            try:
                return self._run_epoch(when_metrics_known)
            finally:
                run.evaluation.kind = None
                self._metrics.batch = None
                self._metrics.in_step = False
                self._metrics.dataloader_idx = None
                if outer_stage is not None:
                    self._metrics.switch(outer_stage)

    def _prepare(self) -> tuple[EvaluationData, list[int | None]]:
        """Return the data and the batch limit of each loader. Sets `num_eval_batches` of the run."""
        data = self._run.data.evaluation(self._kind)
        limits = [_least(limit, self._max_batches) for limit in data.limits]
        self._run.evaluation.num_batches = [float("inf") if limit is None else limit for limit in limits]
        return data, limits

    def _run_epoch(self, when_metrics_known: Callable[[], None]) -> Flushed:
        run = self._run
        metrics = self._metrics
        name = self._name
        if self._kind == "predict":
            metrics.close("a prediction")  # `log` raises an error that contains this text
        run.hooks.fire(f"on_{name}_start")
        data, limits = self._prepare()  # a callback may have replaced the loaders
        run.hooks.fire(f"on_{name}_epoch_start")
        for dataloader_idx, (loader, limit) in enumerate(zip(data.loaders, limits, strict=True)):
            metrics.dataloader_idx = dataloader_idx if len(data.loaders) > 1 else None
            self._run_loader(dataloader_idx, loader, limit)
        metrics.dataloader_idx = None
        run.hooks.fire(f"on_{name}_epoch_end")
        self._steps.end()
        flushed = metrics.flush_epoch(run.logs.exchange, owner=run.task)
        run.logs.take(flushed, self._kind)
        when_metrics_known()
        metrics.close(f"on_{name}_end")
        run.hooks.fire(f"on_{name}_end")
        return flushed

    def _run_loader(self, dataloader_idx: int, loader: PreparedLoader, limit: int | None) -> None:
        """Run at most `limit` batches of a loader; None runs all."""
        # In lockstep, all ranks run the same number of steps, because a forward is collective.
        in_lockstep = self._run.engine.capabilities.lockstep_evaluation
        num_done = 0
        calls = StepCalls()
        for idx, batch in enumerate(itertools.islice(loader.iterate(), limit)):
            if self._abandon is not None and self._abandon(dataloader_idx, idx):
                raise Abandoned
            num_done = idx + 1
            if in_lockstep and not loader.has_batch(idx):
                self._replay(batch, idx, calls)  # this rank has no more data, and others have
                continue
            # Record this step if the next batch may be padding, for which this step is replayed. Without `counts`, this
            # is not known in advance.
            next_has_data = loader.counts is not None and loader.has_batch(idx + 1)
            recording: AbstractContextManager[None] = contextlib.nullcontext()
            if in_lockstep and not next_has_data:
                recording = calls.record(self._run.task, self._run.trainer)
            output = self._run_batch(batch, idx, recording)
            self._steps.end_batch((dataloader_idx, idx))
            if self._keep:
                self.outputs[dataloader_idx].append(output)
            del output, batch  # frees their memory before the next forward
        check_end(loader, num_done, limit)
        loader.end_pass()

    def _replay(self, batch: Batch, idx: int, calls: StepCalls) -> None:
        """Repeat the communication of this rank's last step, without results."""
        run = self._run
        dataloader_idx = self._metrics.dataloader_idx  # None with a single loader
        replay_batch(run.task, run.engine.step, self._kind, f"{self._name}_step", batch, idx, dataloader_idx, calls)

    def _run_batch(self, batch: Batch, idx: int, recording: AbstractContextManager[None]) -> Any:
        """Run one batch of the current loader and return the output of the step.

        The output is detached if hooks or the caller of `evaluate` receive it.

        Args:
            batch: the batch.
            idx: index of the batch.
            recording: context for the call of the step.
        """
        run = self._run
        metrics = self._metrics
        step = f"{self._name}_step"
        task = run.task
        table = run.hooks.table
        dataloader_idx = metrics.dataloader_idx
        # With a single loader, hooks and steps do not receive its index.
        index_args = () if dataloader_idx is None else (dataloader_idx,)
        batch = run.engine.step.to_device(batch, dataloader_idx or 0)
        metrics.batch = batch
        metrics.in_step = True
        for hook in getattr(table, f"on_{self._name}_batch_start"):
            hook(run.trainer, task, batch, idx, *index_args)
        try:
            with recording:
                output = run.engine.step.evaluate(step, batch, idx, dataloader_idx)
        except Exception as error:
            run.recovery.note_batch(error, step, batch, idx)
            raise
        end_hooks = getattr(table, f"on_{self._name}_batch_end")
        if end_hooks or self._keep:
            try:
                # Detach only if necessary, for example if the step enables gradients itself. Otherwise hooks receive
                # the output itself: it may be the batch, and a callback may change it in place.
                if any(tensor.requires_grad for tensor in iterate_tensors(output)):
                    output = map_tensors(torch.Tensor.detach, output)
            except RecursionError as error:
                raise too_deep(f"the result of {step}") from error
        for hook in end_hooks:
            hook(run.trainer, task, output, batch, idx, *index_args)
        metrics.batch = None
        metrics.in_step = False
        run.evaluation.batches_done += 1
        return output

    @contextlib.contextmanager
    def _evaluation_mode(self) -> Iterator[None]:
        """Set all modules to evaluation mode within the context, then restore their modes, also after an error."""
        run = self._run
        modes = [(module, module.training) for module in run.task.modules()]
        run.hooks.fire(f"on_{self._name}_model_eval")
        run.task.eval()
        try:
            yield
        finally:
            for module, training in modes:
                module.training = training
            run.hooks.fire(f"on_{self._name}_model_train")


class _StepLog:
    """Sends the step values of an evaluation to the loggers, and counts the evaluation steps of the run.

    A sanity check, a trial and a prediction neither log step values nor count.
    """

    def __init__(self, run: StageRun, kind: EvaluationKind) -> None:
        self._run = run
        self._kind = kind
        self._counts = kind != "predict" and not run.evaluation.sanity_checking and not run.is_trial
        self._counter = f"{_EVENTS[kind]}_batches"  # `state.validation_batches` or `state.test_batches`
        # Steps of this kind in the run so far. Stored in `run.state` only by `end`.
        self._num_steps: int = getattr(run.state, self._counter) if self._counts else 0

    def end_batch(self, place: Place) -> None:
        """End the batch at `place` (index of the loader, index of the batch), and log the rows that are complete."""
        run = self._run
        if self._counts and run.settings.loggers:
            rows = run.logs.metrics.end_evaluation_step(self._num_steps, place, run.logs.exchange)
            run.logs.log_evaluation_steps(rows, self._kind)
        self._num_steps += 1

    def end(self) -> None:
        """Log the remaining rows. Collective.

        An abandoned evaluation does not reach this, so that its repetition uses the same step numbers.
        """
        run = self._run
        flushed = run.logs.metrics.flush_step(run.logs.exchange)
        if run.settings.loggers:
            flushed.logged.clear()  # the rows contain these values; `take` would log them again
        run.logs.log_evaluation_steps(flushed.rows, self._kind)
        run.logs.take(flushed, self._kind)
        if self._counts:
            setattr(run.state, self._counter, self._num_steps)


class Evaluation:
    """The loop of the stages `validate` and `test`.

    Args:
        run: the run, set up.
        verbose: print the metrics.
    """

    def __init__(self, run: StageRun, *, verbose: bool) -> None:
        self._run = run
        self._verbose = verbose

    def run(self) -> list[dict[str, float]]:
        """Run the evaluation and return the metrics, one dict per loader. Collective."""
        kind: Any = self._run.stage  # "validate" or "test"
        flushed, outputs = evaluate(self._run, kind)
        results = results_by_loader(flushed, len(outputs))
        if self._verbose:
            self._run.hooks.print(format_results(kind, results))
        return results


class Prediction:
    """The loop of the stage `predict`.

    Args:
        run: the run, set up.
        keep: return the predictions.
    """

    def __init__(self, run: StageRun, *, keep: bool) -> None:
        self._run = run
        self._keep = keep

    def run(self) -> list[Any] | None:
        """Run the prediction and return the outputs of all ranks in the order of the data. Collective.

        With a list or dict of loaders, the result has one list per loader. None without `keep`.
        """
        _, outputs = evaluate(self._run, "predict", keep=self._keep)
        if not self._keep:
            return None
        self._warn_of_missing_predictions(outputs)
        ranks = self._run.engine.data_ranks
        # The `parts` ranks that split one sequence are consecutive and have the same batches. Keep one of each.
        outputs_by_rank = ranks.gather(outputs)[:: ranks.parts]
        merged = in_dataset_order(outputs_by_rank)
        return merged if self._run.data.evaluation("predict").is_list else merged[0]

    def _warn_of_missing_predictions(self, outputs: list[list[Any]]) -> None:
        """Warn on the main rank if its steps have returned None. `outputs` has one list per loader."""
        all_outputs = list(itertools.chain.from_iterable(outputs))
        num_missing = sum(output is None for output in all_outputs)
        if num_missing and self._run.engine.is_main:
            warnings.warn(
                f"{type(self._run.task).__name__}.predict_step returned None for {num_missing} of {len(all_outputs)} "
                "batches. Return the predictions, or pass return_predictions=False.",
                TrainwrightWarning,
                stacklevel=2,
            )


def results_by_loader(flushed: Flushed, num_loaders: int) -> list[dict[str, float]]:
    """Return the metrics as one dict per loader. Metrics that do not belong to one loader are in all dicts.

    A value logged on step and epoch is only included under its full names, such as `loss_epoch`.
    """
    results: list[dict[str, float]] = [{} for _ in range(num_loaders)]
    for key, value in flushed.callback.items():
        if key in flushed.aliases:
            continue
        loader = flushed.loaders.get(key)
        for index in range(num_loaders):
            if loader is None or loader == index:
                results[index][key] = float(value)
    return results


def in_dataset_order(by_rank: list[list[list[Any]]]) -> list[list[Any]]:
    """Merge the outputs of all ranks: batch i of rank r is batch `i × number of ranks + r` of its loader.

    For example, outputs `[[[a0, a2]], [[a1]]]` of two ranks and one loader become `[[a0, a1, a2]]`.

    Args:
        by_rank: outputs by rank and loader. Ranks may have different numbers of outputs.
    """
    merged: list[list[Any]] = []
    for of_loader in zip(*by_rank, strict=True):  # the outputs of each rank for one loader
        in_order = []
        for index in range(max(len(outputs) for outputs in of_loader)):
            for outputs in of_loader:
                if index < len(outputs):
                    in_order.append(outputs[index])
        merged.append(in_order)
    return merged


def _least(limit: int | None, other: int | None) -> int | None:
    """Return the smaller limit; None is no limit."""
    known = [value for value in (limit, other) if value is not None]
    return min(known) if known else None


@contextlib.contextmanager
def _no_gradients(inference_mode: bool) -> Iterator[None]:
    with torch.inference_mode() if inference_mode else torch.no_grad():
        yield


def format_results(kind: str, results: list[dict[str, float]]) -> str:
    """Return the metrics of an evaluation as aligned lines of text, one block per loader."""
    lines: list[str] = []
    for index, metrics in enumerate(results):
        lines.append(f"{kind}" if len(results) == 1 else f"{kind}, loader {index}")
        width = max((len(name) for name in metrics), default=0)
        lines += [f"  {name:<{width}}  {value:.6g}" for name, value in sorted(metrics.items())]
    return "\n".join(lines)
