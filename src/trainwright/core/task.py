"""TaskModule: the model, its losses and its optimizers in one class that every strategy can train."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.core.errors import ConfigurationError, LogPlaceError, TaskError, TrainwrightWarning
from trainwright.core.exports import ExportMixin
from trainwright.core.hooks import TaskHooks
from trainwright.core.hyperparameters import HyperparametersMixin
from trainwright.core.registry import import_object
from trainwright.core.run import Run, SequenceSplit
from trainwright.core.tree import Batch

# The reader of checkpoints is in a higher layer; it is looked up when a checkpoint is loaded, not imported here.
_LOAD_TASK = "trainwright.checkpoint.load_task:load_task_from_checkpoint"
_RUNTIME_ATTRIBUTES = ("_run", "_sink")  # None in copies and pickles of a task


class TaskModule(HyperparametersMixin, TaskHooks, ExportMixin):
    """Base class of tasks. A sub-class defines `training_step` and `configure_optimizers`.

    Pass a task to `Trainer.fit`. A task is a `torch.nn.Module`: define layers in `__init__` or `configure_model`, and
    call them as usual. State dicts contain your parameter names, without prefixes of strategies or compilers.

    Attributes:
        automatic_optimization: set to False in `__init__` to run backward and the optimizers yourself.
        example_input_array: example arguments of `forward`, for summaries, graphs and exports (see `to_onnx`).
        strict_loading: True raises an error if a checkpoint lacks weights of the task, or has other weights.
    """

    automatic_optimization: bool = True
    example_input_array: Any = None
    strict_loading: bool = True

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)
        # The Trainer, which sets it through the property `trainer` when a stage begins. It remains after the stage.
        self._run: Run | None = None
        # The receiver of logged values, set by `log_into`: a MetricBuffer from the end of a stage's setup to its end,
        # else None.
        self._sink: Any = None

    # For the user to define

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        """Return a micro-batch's loss: a scalar tensor, or a dict with the key `"loss"`. None skips the micro-batch.

        The loss is the mean over the micro-batch's items. The strategy weights micro-batches (see `num_items`).
        """
        raise TaskError(f"{type(self).__name__} has no training_step. Define training_step(self, batch, batch_idx).")

    def validation_step(self, batch: Batch, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one validation batch and `log` metrics."""

    def test_step(self, batch: Batch, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Evaluate one test batch and `log` metrics."""

    def predict_step(self, batch: Batch, batch_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Return the prediction for one batch. Default: `self(batch)`, or `self(batch[0])` for a tuple or list."""
        if type(self).forward is nn.Module.forward:
            raise TaskError(f"{type(self).__name__} has neither predict_step nor forward. Define one of them.")
        return self(batch[0]) if isinstance(batch, (tuple, list)) else self(batch)

    def configure_optimizers(self) -> Any:
        """Return the optimizers and learning-rate schedules.

        Valid results are an optimizer, a list of optimizers, `([optimizers], [schedulers])`, a dict `{"optimizer",
        "lr_scheduler"}`, a list of such dicts, or None to train without an optimizer. A scheduler may be a dict
        `{"scheduler", "interval": "epoch"|"step", "frequency", "monitor", "strict", "name"}`.
        """
        raise TaskError(
            f"{type(self).__name__} has no configure_optimizers. Define it, for example: "
            "return torch.optim.AdamW(self.parameters(), lr=1e-3); return None to train without an optimizer."
        )

    def configure_model(self) -> None:
        """Build large layers here instead of in `__init__`, on the strategy's device. May be called twice."""

    def configure_callbacks(self) -> Any:
        """Return a callback, or a list of callbacks. Each replaces the Trainer's callbacks of the same type."""
        return []

    def shard_units(self) -> Iterable[nn.Module] | None:
        """Return the modules that a sharding strategy shards and gathers one at a time, for example `self.blocks`.

        The steps must call each of these modules (`block(x)`). Parameters of other modules stay gathered during a step.
        Called after the model is built. None uses the strategy's arguments.
        """
        return None

    def pipeline_stages(self) -> Sequence[Sequence[nn.Module]] | None:
        """Return the modules of each stage of a pipeline, in the order in which the model calls them.

        The first argument of each module is the output of the previous module. List a module that several stages use in
        each of these stages. Called after the model is built. None lets the strategy divide the layers.
        """
        return None

    def tensor_parallel_plan(self, mesh: torch.distributed.device_mesh.DeviceMesh) -> Mapping[str, Any] | None:
        """Return the style in which each layer is split over the ranks of a tensor-parallel group.

        Called after the model is built.

        Args:
            mesh: torch's `DeviceMesh` of the run, with the axis `"tp"` and the data-parallel axes.

        Returns:
            Pattern of module names (`"blocks.*.up"`) → a style: `"colwise"`, `"rowwise"`, `"embedding"`,
            `"sequence"`, … (see the strategies' documentation), a torch `ParallelStyle`, or a list of them. None uses
            the strategy's own argument, or a built-in plan for a model of transformers.
        """
        return None

    def num_items(self, batch: Batch) -> int | torch.Tensor | None:
        """Return the number of items over which `training_step` has averaged the loss of this micro-batch.

        Override this method if micro-batches have different numbers of items. For example, return `(batch["labels"] !=
        -100).sum()`. The gradient of a step is then the mean over the items of all micro-batches and ranks. By default,
        every micro-batch has the same weight.
        """
        return None

    def split_sequences(self, batch: Batch, split: SequenceSplit) -> object:
        """Return this rank's part of a batch whose sequences are split over ranks (`FSDPStrategy(cp=…)`).

        `training_step`, `validation_step` and `test_step` receive the result. The default supports batches of
        transformers: dicts with `input_ids`. Tensors of the same length are split along the second dimension.
        `position_ids` are added and, if there are `labels`, also `shift_labels`, which the losses of transformers'
        models use. A task that computes its loss itself must compare its outputs with `batch["shift_labels"]`.

        Override this method for other batches. Before splitting, shift each target to the position of the output that
        predicts it. Pass the positions to the model, because a rank's part is not contiguous.

        Example:
            def split_sequences(self, batch, split):
                tokens = split(batch[:, :-1])
                return tokens, split(batch[:, 1:]), split.positions(batch.shape[1] - 1, batch.device)
        """
        return split.batch(batch)

    def num_tokens(self, batch: Batch) -> int:
        """Return the number of tokens of a micro-batch as a host integer. Default: the elements of its `input_ids`."""
        if isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), torch.Tensor):
            return int(batch["input_ids"].numel())
        raise TaskError(
            f"{type(self).__name__} counts tokens (a length in tokens, or Throughput), but the batch has no "
            "'input_ids'. Define num_tokens(self, batch)."
        )

    # Optimization; each part can be overridden

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward. Override it to change the backward pass."""
        loss.backward(*args, **kwargs)  # type: ignore[no-untyped-call]  # torch has no types here

    def optimizer_step(
        self, epoch: int, batch_idx: int, optimizer: Optimizer, optimizer_closure: Callable[[], Any] | None = None
    ) -> None:
        """Step one optimizer. Override it, for example, for a learning-rate warm-up."""
        optimizer.step(closure=optimizer_closure)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Optimizer) -> None:
        """Clear one optimizer's gradients."""
        optimizer.zero_grad()

    def configure_gradient_clipping(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip one optimizer's gradients, once per step, with the Trainer's arguments. Can be overridden."""
        self.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def lr_scheduler_step(self, scheduler: Any, metric: Any | None) -> None:
        """Step one scheduler. `metric` is the value that the scheduler monitors, or None."""
        if metric is None:
            scheduler.step()
        else:
            scheduler.step(metric)

    # Manual optimization (automatic_optimization = False)

    def optimizers(self, use_pl_optimizer: bool = True) -> Any:
        """Return the optimizer, or a list of several optimizers.

        Args:
            use_pl_optimizer: in manual optimization, wrap the optimizers so that `step` handles precision, hooks and
                the step count. False returns the torch optimizers. Default: True.
        """
        optimizers = self.trainer.task_optimizers() if use_pl_optimizer else self.trainer.optimizers
        return optimizers[0] if len(optimizers) == 1 else list(optimizers)

    def lr_schedulers(self) -> Any:
        """Return the learning-rate scheduler, a list of schedulers, or None."""
        schedulers = [config.scheduler for config in self.trainer.lr_scheduler_configs]
        if not schedulers:
            return None
        return schedulers[0] if len(schedulers) == 1 else schedulers

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        """Run backward in manual optimization and average gradients over ranks. Collective.

        Args:
            loss: the loss.
            *args, **kwargs: further arguments of `backward`.

        Raises:
            TaskError: the task does not use manual optimization.
        """
        self.trainer.manual_backward(loss, *args, **kwargs)

    def no_sync(self) -> contextlib.AbstractContextManager[None]:
        """Disable gradient synchronization of `manual_backward` in a `with` block, for manual accumulation.

        The next `manual_backward` outside of the block averages the accumulated gradients over ranks. Every rank must
        use the block for the same passes. In automatic optimization use `accumulate_grad_batches`.

        Raises:
            TaskError: the task does not use manual optimization.
        """
        return self.trainer.no_sync()

    def clip_gradients(
        self,
        optimizer: Optimizer,
        gradient_clip_val: float | None = None,
        gradient_clip_algorithm: str | None = None,
    ) -> None:
        """Clip one optimizer's gradients.

        Args:
            optimizer: the optimizer.
            gradient_clip_val: maximum norm or absolute value. Default: None, the Trainer's. If that is None too,
                nothing is clipped.
            gradient_clip_algorithm: `"norm"` or `"value"`. Default: None, the Trainer's, or else `"norm"`.

        Raises:
            ConfigurationError: the Trainer has another value or algorithm, or one of them is invalid.
        """
        self.trainer.clip_gradients(optimizer, gradient_clip_val, gradient_clip_algorithm)

    def toggle_optimizer(self, optimizer: Optimizer) -> None:
        """Require gradients for this optimizer's parameters only, until `untoggle_optimizer`.

        Parameters that no optimizer has are not changed.

        Raises:
            TaskError: `untoggle_optimizer` has not been called since the last call.
        """
        if "_toggled" in self.__dict__:
            raise TaskError("toggle_optimizer: another optimizer is toggled; call untoggle_optimizer first.")
        # `id`, because `==` of tensors compares their values.
        kept_ids = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
        disabled: list[nn.Parameter] = []  # frozen parameters are not listed, so that they stay frozen
        for other in self.trainer.optimizers:
            for group in other.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in kept_ids and parameter.requires_grad:
                        parameter.requires_grad_(False)
                        disabled.append(parameter)
        # In the instance's dict only while an optimizer is toggled.
        object.__setattr__(self, "_toggled", disabled)

    def untoggle_optimizer(self, optimizer: Optimizer) -> None:
        """Undo `toggle_optimizer`. `optimizer` is not used."""
        for parameter in self.__dict__.pop("_toggled", ()):
            parameter.requires_grad_(True)

    @contextlib.contextmanager
    def toggled_optimizer(self, optimizer: Optimizer) -> Iterator[None]:
        """Toggle an optimizer during a `with` block; see `toggle_optimizer`."""
        self.toggle_optimizer(optimizer)
        try:
            yield
        finally:
            self.untoggle_optimizer(optimizer)

    # Logging

    def log(
        self,
        name: str,
        value: object,
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[torch.Tensor], torch.Tensor] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: object = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        metric_attribute: str | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log one value. It stays on its device until values are sent to the loggers. Never communicates, never waits.

        Without a Trainer, the value is discarded, with a warning for the first value of this task.

        Args:
            name: the metric's name.
            value: a number, a tensor with one element, or a torchmetrics Metric or MetricCollection.
            prog_bar: show the value in the progress bar. Default: False.
            logger: pass the value to the loggers. None is True. Default: True.
            on_step: log this step's value. Default: None, which is True in a training step, else False.
            on_epoch: log the epoch's aggregate. Default: None, which is False in a training step, else True.
            reduce_fx: the aggregate of an epoch: `"mean"` (weighted by batch size), `"sum"`, `"min"`, `"max"`, or a
                function of the stacked values. Default: `"mean"`.
            enable_graph: Accepted without effect: a logged value keeps no graph. Default: False.
            sync_dist: reduce over ranks. Default: None, which is True for an epoch's aggregate, and False for a step's
                value.
            sync_dist_group: Accepted without effect: values are averaged over all data-parallel ranks. Default: None.
            add_dataloader_idx: append `/dataloader_idx_N` if several loaders are evaluated. Default: True.
            batch_size: the weight in an epoch's mean. Default: None, which is the size of the batch.
            metric_attribute: Accepted without effect: metrics of torchmetrics are recognized by type. Default: None.
            rank_zero_only: use only the main rank's values. Default: False.

        Raises:
            LogPlaceError: a Trainer runs this task, but this hook is outside of an epoch.
            LoggedValueError: `value` is not one number.
            ConfigurationError: arguments contradict each other or an earlier call in the same epoch.
        """
        sink = self._sink
        if sink is None:
            return self._drop_logged(name)
        sink.log(
            name,
            value,
            prog_bar=prog_bar,
            logger=logger is not False,
            on_step=on_step,
            on_epoch=on_epoch,
            reduce_fx=reduce_fx,
            sync_dist=sync_dist,
            add_dataloader_idx=add_dataloader_idx,
            batch_size=batch_size,
            rank_zero_only=rank_zero_only,
            metric_attribute=metric_attribute,
        )

    def _drop_logged(self, name: str) -> None:
        """Warn once that logged values are discarded. Within a stage, raise an error instead."""
        if self._run is not None and self._run.stage is not None:
            raise LogPlaceError(
                f"log({name!r}) in a hook outside of an epoch. Call it in a *_step or in a hook between the "
                "stage's start and its epoch's end."
            )
        if "_has_warned_of_log" not in self.__dict__:
            object.__setattr__(self, "_has_warned_of_log", True)
            warnings.warn(
                f"{type(self).__name__}.log({name!r}): no Trainer is running this task; this and further logged "
                "values are discarded.",
                TrainwrightWarning,
                stacklevel=3,
            )

    def log_dict(
        self,
        dictionary: Mapping[str, Any],
        prog_bar: bool = False,
        logger: bool | None = True,
        on_step: bool | None = None,
        on_epoch: bool | None = None,
        reduce_fx: str | Callable[[torch.Tensor], torch.Tensor] = "mean",
        enable_graph: bool = False,
        sync_dist: bool | None = None,
        sync_dist_group: object = None,
        add_dataloader_idx: bool = True,
        batch_size: int | None = None,
        rank_zero_only: bool = False,
    ) -> None:
        """Log several values, or a MetricCollection, with the options of `log`."""
        for name, value in dictionary.items():
            self.log(
                name,
                value,
                prog_bar=prog_bar,
                logger=logger,
                on_step=on_step,
                on_epoch=on_epoch,
                reduce_fx=reduce_fx,
                enable_graph=enable_graph,
                sync_dist=sync_dist,
                sync_dist_group=sync_dist_group,
                add_dataloader_idx=add_dataloader_idx,
                batch_size=batch_size,
                rank_zero_only=rank_zero_only,
            )

    def print(self, *values: object, **options: object) -> None:
        """Print on the main process only. `options` are those of Python's print."""
        self.trainer.print(*values, **options)

    def all_gather(self, data: object, group: object = None, sync_grads: bool = False) -> Any:
        """Gather tensors (in any containers) of all data-parallel ranks along a new first dimension. Collective.

        Args:
            data: a tensor, or lists, tuples, dicts and dataclasses of tensors.
            group: must be None, which is all data-parallel ranks.
            sync_grads: let gradients flow through the result to the ranks. Default: False.

        Raises:
            ConfigurationError: `group` is not None.
        """
        if group is not None:
            raise ConfigurationError(
                f"all_gather(group={group!r}) is not supported. Remove group, or use torch.distributed.all_gather."
            )
        return self.trainer.all_gather(data, sync_grads)

    # The run

    @property
    def trainer(self) -> Run:
        """The Trainer that runs this task, or has run it last.

        Raises:
            TaskError: no Trainer has run the task yet.
        """
        run = self.__dict__.get("_run")
        if run is None:
            raise TaskError(
                f"{type(self).__name__} is not attached to a Trainer; `trainer` is available once a Trainer runs it."
            )
        return run  # type: ignore[no-any-return]  # nn.Module keeps its attributes in an untyped dict

    @trainer.setter
    def trainer(self, trainer: Run | None) -> None:
        for task in _tasks_in(self):
            task._run = trainer

    # Libraries read and set this private name of Lightning. Unlike `trainer`, it is None without a Trainer.
    @property
    def _trainer(self) -> Run | None:
        return self._run

    @_trainer.setter
    def _trainer(self, trainer: Run | None) -> None:
        self.trainer = trainer

    @property
    def current_epoch(self) -> int:
        """0-based index of the current epoch; 0 without a Trainer."""
        return self._run.current_epoch if self._run is not None else 0

    @property
    def global_step(self) -> int:
        """Completed optimizer steps; 0 without a Trainer."""
        return self._run.global_step if self._run is not None else 0

    @property
    def global_rank(self) -> int:
        """Rank among all processes; 0 without a Trainer."""
        return self._run.global_rank if self._run is not None else 0

    @property
    def local_rank(self) -> int:
        """Rank among the processes of this node; 0 without a Trainer."""
        return self._run.local_rank if self._run is not None else 0

    @property
    def device(self) -> torch.device:
        """The device of the first parameter or buffer; if there is none, the Trainer's, or the CPU without one."""
        for tensor in itertools.chain(self.parameters(), self.buffers()):
            return tensor.device
        return torch.device("cpu") if self._run is None else self._run.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the first floating-point parameter; torch's default if there is none."""
        dtypes = (tensor.dtype for tensor in self.parameters() if tensor.is_floating_point())
        return next(dtypes, torch.get_default_dtype())

    @property
    def on_gpu(self) -> bool:
        """True if the task is on a CUDA device."""
        return self.device.type == "cuda"

    @property
    def fabric(self) -> NoReturn:
        """Not supported: use `Accelerator` for your own loop."""
        raise TaskError("a task has no fabric: Fabric is not supported. Use trainwright.Accelerator for your own loop.")

    @property
    def device_mesh(self) -> NoReturn:
        """Not supported: the mesh is the argument of `tensor_parallel_plan(mesh)`."""
        raise TaskError("a task has no device_mesh: define tensor_parallel_plan(self, mesh), which gets it.")

    def __dir__(self) -> list[str]:
        """Exclude attributes that raise an error, for code that reads every attribute, such as torch's tracing."""
        names = set(super().__dir__())  # type: ignore[no-untyped-call]  # torch has no types here
        names -= {"fabric", "device_mesh"}
        if self._run is None:
            names.discard("trainer")
        return sorted(names)

    @property
    def logger(self) -> Any:
        """The first logger, or None."""
        return next(iter(self.loggers), None)

    @property
    def loggers(self) -> list[Any]:
        """The Trainer's loggers; empty without a Trainer."""
        return list(self._run.loggers) if self._run is not None else []

    def freeze(self) -> Self:
        """Disable gradients of every parameter, put the task into evaluation mode and return it."""
        return self.requires_grad_(False).eval()

    def unfreeze(self) -> Self:
        """Enable gradients of every parameter, put the task into training mode and return the task."""
        return self.requires_grad_(True).train()

    # Loading

    @classmethod
    def load_from_checkpoint(
        cls,
        checkpoint_path: str | Path,
        map_location: torch.device | str | None = None,
        hparams_file: str | Path | None = None,
        strict: bool | None = None,
        weights_only: bool | None = None,
        **overrides: object,
    ) -> Self:
        """Build the task from a checkpoint's hyper-parameters, and load the weights. No pickle is read.

        Args:
            checkpoint_path: folder or URL (`s3://…`) of the checkpoint.
            map_location: device for the task. Default: None, the device on which `__init__` creates the weights.
            hparams_file: a YAML or JSON file of hyper-parameters to use instead of those in the checkpoint.
                Default: None.
            strict: raise an error for missing or unexpected weights. Default: None, which is `strict_loading`.
            weights_only: Accepted without effect: checkpoints contain no pickles. Default: None.
            overrides: arguments of `__init__` that replace, or add to, the saved hyper-parameters.

        Raises:
            FileNotFoundError: the checkpoint does not exist.
            CheckpointError: the checkpoint is damaged, its weights do not fit the task, or `__init__` needs arguments
                that are neither saved nor passed, or does not accept a passed one.
        """
        return import_object(_LOAD_TASK)(  # type: ignore[no-any-return]  # looked up by name; see _LOAD_TASK
            cls,
            checkpoint_path,
            map_location=map_location,
            strict=strict,
            hparams_file=hparams_file,
            hparams_overrides=overrides,
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **dict.fromkeys(_RUNTIME_ATTRIBUTES)}


def _tasks_in(task: TaskModule) -> list[TaskModule]:
    """Return a task and the tasks among its modules, such as those that a distillation task contains."""
    tasks: list[TaskModule] = []
    waiting: list[nn.Module] = [task]
    seen: set[nn.Module] = set()
    # Not `task.modules()`, which is recursive: the Trainer raises a clear error for a model nested too deeply later.
    while waiting:
        module = waiting.pop()
        if module in seen:
            continue
        seen.add(module)
        if isinstance(module, TaskModule):
            tasks.append(module)
        waiting.extend(module.children())
    return tasks


def log_into(task: TaskModule, sink: Any) -> None:
    """Pass the values that a task and the tasks inside it log to `sink`. None discards them."""
    for each in _tasks_in(task):
        each._sink = sink


@contextlib.contextmanager
def logging_into(task: TaskModule, sink: Any) -> Iterator[None]:
    """Pass logged values to `sink` in a `with` block; see `log_into`."""
    previous_sink = task._sink
    log_into(task, sink)
    try:
        yield
    finally:
        log_into(task, previous_sink)
