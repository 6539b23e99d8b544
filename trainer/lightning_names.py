"""The attributes and methods of a Trainer that Lightning's users and callbacks expect.

`LightningNames` lists them as descriptors: `Argument` reads an argument of the Trainer, `Setting` a setting that can be
changed, and `Fact` the current or last run. `of_run` and `of_part` make methods that call those of the run's parts.
"""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

from trainwright.callbacks.roles import ProgressDisplay, Saver, Stopper
from trainwright.core.errors import nearest
from trainwright.core.metric_value import MetricValue
from trainwright.core.run import SchedulerConfig, Stage
from trainwright.core.state import SkippedData, StepResult, TrainState
from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule
from trainwright.profilers.profiler import Profiler
from trainwright.strategies.engine import Engine
from trainwright.trainer.checkpoints.saves import Saves
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.hooks import StageHooks
from trainwright.trainer.logs import Logs
from trainwright.trainer.manual import ManualOptimization
from trainwright.trainer.recovery.recovery import Recovery
from trainwright.trainer.run import StageRun

T = TypeVar("T")
Part = TypeVar("Part")
P = ParamSpec("P")

# Internal attributes of Lightning's Trainer → advice for the error of `LightningNames.__getattr__`.
INTERNALS = {
    "validate_loop": "use trainer.num_val_batches, trainer.val_dataloaders and trainer.validating",
    "test_loop": "use trainer.num_test_batches, trainer.test_dataloaders and trainer.testing",
    "predict_loop": "use trainer.num_predict_batches, trainer.predict_dataloaders and the result of predict()",
    "precision_plugin": "use trainer.precision for the precision's name and trainer.scaler for the loss scaler",
    "plugins": "use strategy= and precision= of the Trainer",
    "init_module": "create large layers in TaskModule.configure_model, which the strategy calls on the right device; "
    "use trainwright.init_empty_weights outside of a Trainer",
    "signal_connector": "use trainer.received_sigterm, and Trainer(preemption_grace=…, auto_requeue=…) for signals",
}


class Argument(Generic[T]):
    """A read-only attribute of the Trainer with the value of an argument.

    Args:
        unset: value if the argument is None. Default: None.
    """

    def __init__(self, unset: T | None = None) -> None:
        self._unset = unset

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: LightningNames | None, owner: type | None = None) -> T:
        if trainer is None:
            return self  # type: ignore[return-value]  # the descriptor itself, for documentation tools
        value: Any = getattr(trainer.settings.arguments, self._name)
        return self._unset if value is None else value  # type: ignore[return-value]  # None where T allows it

    def __set__(self, trainer: LightningNames, value: T) -> NoReturn:
        raise AttributeError(f"trainer.{self._name} cannot be changed; pass Trainer({self._name}={value!r}).")


class Fact(Generic[T]):
    """A read-only attribute of the Trainer that is read from the current or last run.

    Args:
        read: returns the value for a run.
        doc: docstring of the attribute.
    """

    def __init__(self, read: Callable[[StageRun], T], doc: str) -> None:
        self._read = read
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: LightningNames | None, owner: type | None = None) -> T:
        if trainer is None:
            return self  # type: ignore[return-value]  # the descriptor itself, for documentation tools
        return self._read(trainer.run)

    def __set__(self, trainer: LightningNames, value: T) -> NoReturn:
        raise AttributeError(f"trainer.{self._name} is read-only.")


class Setting(Generic[T]):
    """A setting that can be changed between two stages, and by callbacks before an epoch.

    It is read from and stored in the field of the same name of `trainer.settings`.

    Args:
        doc: docstring of the attribute.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: LightningNames | None, owner: type | None = None) -> T:
        return self if trainer is None else getattr(trainer.settings, self._name)  # type: ignore[return-value]  # as above

    def __set__(self, trainer: LightningNames, value: T) -> None:
        setattr(trainer.settings, self._name, value)


def _loaders(kind: str, noun: str) -> Fact[Any]:
    """Return the attribute with the user's loaders of a kind, such as `"train"`. `noun` names the kind in its docs."""
    return Fact(lambda run: run.data.user_loaders(kind), f"The user's {noun} loaders; None before they are created.")


def _num_batches(kind: str, noun: str) -> Fact[list[int | float]]:
    """Return the attribute with the numbers of batches of the loaders of a kind; see `_loaders`."""
    return Fact(
        lambda run: run.num_batches(kind),
        f"Batches of each {noun} loader on this rank; infinite if unknown. Empty before the loaders are created.",
    )


def _log_dir(run: StageRun) -> str | None:
    """Return the folder of the first logger that has one, or None. Without loggers, return `default_root_dir`."""
    if not run.settings.loggers:
        return str(run.settings.root)
    for logger in run.settings.loggers:
        if logger.log_dir is not None:
            folder: str = logger.log_dir
            return folder
    return None


def _distributed_sampler_kwargs(run: StageRun) -> dict[str, int] | None:
    """Return the arguments of torch's DistributedSampler for this rank, or None for one process."""
    if run.logs.exchange is None:  # one process
        return None
    return {"num_replicas": run.engine.data_ranks.num_readers, "rank": run.engine.data_ranks.reader}


def of_run(method: Callable[Concatenate[StageRun, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method of the Trainer that calls `method` of its run."""
    return of_part(lambda run: run, method)


def of_part(
    find: Callable[[StageRun], Part], method: Callable[Concatenate[Part, P], T]
) -> Callable[Concatenate[Any, P], T]:
    """Return a method of the Trainer that calls `method` of a part of its run."""

    @functools.wraps(method)
    def call(trainer: LightningNames, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(find(trainer.run), *args, **kwargs)

    return call


def _hooks(run: StageRun) -> StageHooks:
    return run.hooks


def _logs(run: StageRun) -> Logs:
    return run.logs


def _manual(run: StageRun) -> ManualOptimization:
    return run.manual


def _saves(run: StageRun) -> Saves:
    return run.saves


def _recovery(run: StageRun) -> Recovery:
    return run.recovery


class ConnectorView:
    """The part of Lightning's `trainer._accelerator_connector` that libraries read.

    Args:
        run: the Trainer's current or last run.
    """

    def __init__(self, run: StageRun) -> None:
        self._run = run

    @property
    def is_distributed(self) -> bool:
        """True if the run has more than one process."""
        return self._run.engine.processes.world_size > 1

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(
            f"trainer._accelerator_connector has no {name!r} here, only is_distributed. Use trainer.strategy, "
            "trainer.world_size, trainer.precision and trainer.device."
        )


class LightningNames:
    """The attributes of a Trainer that callbacks, tasks and code for Lightning read."""

    run: StageRun
    settings: Settings

    # Arguments and settings

    check_val_every_n_epoch = Argument[int | None]()
    enable_autolog_hparams = Argument[bool]()
    fast_dev_run = Argument[bool | int]()
    barebones = Argument[bool]()
    gradient_clip_algorithm = Argument[str | None]()
    gradient_clip_val = Argument[int | float | None]()
    inference_mode = Argument[bool]()
    limit_predict_batches = Argument[int | float](unset=1.0)
    limit_test_batches = Argument[int | float](unset=1.0)
    limit_train_batches = Argument[int | float](unset=1.0)
    limit_val_batches = Argument[int | float](unset=1.0)
    max_rollbacks = Argument[int]()
    max_skipped = Argument[int | None]()
    min_epochs = Argument[int | None]()
    min_steps = Argument[int | None]()
    on_nonfinite = Argument[str | None]()
    overfit_batches = Argument[int | float]()
    reload_dataloaders_every_n_epochs = Argument[int]()
    val_check_interval = Argument[Any](unset=1.0)

    accumulate_grad_batches = Setting[int]("Micro-batches in one optimizer step.")
    profiler = Fact[Profiler](lambda run: run.profiler.profiler, "The profiler; a PassThroughProfiler without one.")
    default_root_dir = Fact[str](lambda run: str(run.settings.root), "Folder for the files of a run.")
    log_every_n_steps = Setting[int]("Steps between two flushes of metrics.")
    num_sanity_val_steps = Setting[int | float]("Validation batches to run before training; infinite for all.")

    # Components

    task = Fact[TaskModule](lambda run: run.task, "The user's task; raises a TaskError before the first stage.")
    lightning_module = Fact[TaskModule](lambda run: run.task, "The task, under Lightning's name.")
    model = Fact[TaskModule | None](
        lambda run: run.hooks.task_or_none, "The task, never a strategy's wrapper; None before the first stage."
    )
    datamodule = Fact[DataModule | None](lambda run: run.data.datamodule, "The data module of this stage, or None.")
    strategy = Fact[Engine](
        lambda run: run.engine, "The engine, which computes steps and communicates with other ranks."
    )
    optimizers = Fact[list[Optimizer]](
        lambda run: run.engine.optimizers, "The optimizers that `configure_optimizers` returned."
    )
    lr_scheduler_configs = Fact[list[SchedulerConfig]](
        lambda run: run.loop.schedules.configs, "The learning-rate schedules and when they step."
    )
    checkpoint_callback = Fact[Any](lambda run: run.hooks.saver, "The first ModelCheckpoint, or None.")
    checkpoint_callbacks = Fact[list[Any]](lambda run: run.hooks.all_of(Saver), "Every ModelCheckpoint.")
    early_stopping_callback = Fact[Any](lambda run: run.hooks.first_of(Stopper), "The first EarlyStopping, or None.")
    early_stopping_callbacks = Fact[list[Any]](lambda run: run.hooks.all_of(Stopper), "Every EarlyStopping.")
    progress_bar_callback = Fact[Any](lambda run: run.hooks.first_of(ProgressDisplay), "The progress bar, or None.")
    accelerator = Fact[str](lambda run: run.engine.settings.device_type, "The device type, under torch's name.")
    device = Fact[torch.device](lambda run: run.engine.device, "The device of this process.")
    device_ids = Fact[list[int]](
        lambda run: list(run.engine.settings.device_indices), "Indices of the devices of this node."
    )
    precision = Fact[str](lambda run: run.engine.precision.name, 'The precision\'s name, such as `"bf16-mixed"`.')
    scaler = Fact[torch.amp.GradScaler | None](
        lambda run: run.engine.scaler, "The loss scaler of float16 mixed precision during a fit, or None."
    )

    # Processes

    global_rank = Fact[int](lambda run: run.engine.processes.rank, "Rank among all processes.")
    local_rank = Fact[int](lambda run: run.engine.processes.local_rank, "Rank among the processes of this node.")
    node_rank = Fact[int](lambda run: run.engine.processes.topology.node_rank, "Rank of this node among the nodes.")
    world_size = Fact[int](lambda run: run.engine.processes.world_size, "Number of processes.")
    num_nodes = Fact[int](lambda run: run.engine.processes.num_nodes, "Number of nodes.")
    num_devices = Fact[int](lambda run: len(run.engine.settings.device_indices), "Processes on this node.")
    is_global_zero = Fact[bool](lambda run: run.engine.is_main, "True on the main process.")
    distributed_sampler_kwargs = Fact[dict[str, int] | None](
        _distributed_sampler_kwargs,
        "Number of ranks that read different data and this process's index among them; None for one process.",
    )

    # Pruning callbacks of optuna-integration and darts read it.
    _accelerator_connector = Fact[ConnectorView](ConnectorView, "Part of Lightning's connector of the same name.")

    # Progress

    state = Fact[TrainState](
        lambda run: run.state, "Training progress and, under Lightning's names, the current stage."
    )
    stage = Fact[Stage | None](lambda run: run.running_stage, "The stage that is running, or None.")
    current_epoch = Fact[int](
        lambda run: run.state.epoch, "0-based index of the current epoch; between fits, the number of completed epochs."
    )
    global_step = Fact[int](lambda run: run.state.step, "Completed optimizer steps.")
    last_step = Fact[StepResult | None](
        lambda run: run.loop.last_step, "Result of the last optimizer step; None before the first and after a rollback."
    )
    training = Fact[bool](
        lambda run: run.running_stage == "fit" and run.evaluation.kind is None,
        "True while training steps run, and False during evaluations.",
    )
    evaluating = Fact[bool](
        lambda run: run.evaluation.kind in ("validate", "test"),
        "True during a validation or test, including the validation before training.",
    )
    sanity_checking = Fact[bool](lambda run: run.evaluation.sanity_checking, "True in the validation before training.")
    validating = Fact[bool](
        lambda run: run.evaluation.kind == "validate" and not run.evaluation.sanity_checking,
        "True during a validation, except the one before training.",
    )
    testing = Fact[bool](lambda run: run.evaluation.kind == "test", "True during a test.")
    predicting = Fact[bool](lambda run: run.evaluation.kind == "predict", "True during a prediction.")
    is_last_batch = Fact[bool](
        lambda run: run.loop.is_last_batch,
        "True if the current or last training micro-batch is the last of its epoch.",
    )
    epoch_closes = Fact[bool](
        lambda run: run.loop.epoch_closes,
        "True if the ending epoch is complete; False if a later `fit` may continue it.",
    )
    interrupted = Fact[bool](lambda run: run.interrupted, "True if Ctrl-C ended the last stage.")
    received_sigterm = Fact[bool](
        lambda run: run.recovery.preemption.signal == signal.SIGTERM,
        "True if this process has received SIGTERM during the current fit.",
    )
    resumed = Fact[bool](lambda run: run.loads.origin is not None, "True if this fit continues a checkpoint.")
    ckpt_path = Fact[str | None](
        lambda run: run.loads.ckpt_path, "The checkpoint that the current or last stage has loaded, or None."
    )
    seed = Fact[int | None](
        lambda run: run.progress.seed, "Seed of the data order; None before the first stage unless it was passed."
    )
    run_id = Fact[str](lambda run: run.progress.run_id, "Identifies this run's checkpoints in a shared folder.")
    num_rollbacks = Fact[int](lambda run: run.progress.num_rollbacks, "Number of rollbacks of the run.")
    skipped_batches = Fact[list[SkippedData]](
        lambda run: run.progress.skipped_batches, "Training data that was read without changing weights, in order."
    )
    checkpoint_dir = Fact[Path](
        lambda run: run.places.folder, "Folder of checkpoints that are saved without a folder of their own."
    )
    log_dir = Fact[str | None](
        _log_dir,
        "The folder of the first logger that has one. Known on the main rank after a stage has started. Without a "
        "logger: `default_root_dir`.",
    )

    # Data, and numbers of batches and steps

    train_dataloader = _loaders("train", "training")
    val_dataloaders = _loaders("validate", "validation")
    test_dataloaders = _loaders("test", "test")
    predict_dataloaders = _loaders("predict", "prediction")
    num_training_batches = Fact[int | float](
        lambda run: run.num_training_batches,
        "Micro-batches of one training epoch on one rank; infinite if unknown. Creates the loader.",
    )
    train_batch_size = Fact[int | None](
        lambda run: run.data.train().loader.batch_size,
        "Micro-batch size of this rank's training loader; None if unknown. Creates the loader.",
    )
    num_val_batches = _num_batches("validate", "validation")
    num_test_batches = _num_batches("test", "test")
    num_predict_batches = _num_batches("predict", "prediction")
    num_eval_batches = Fact[list[int | float]](
        lambda run: run.evaluation.num_batches, "Batches of each loader of the current evaluation, on this rank."
    )
    num_sanity_val_batches = Fact[list[int | float]](
        lambda run: [min(run.settings.num_sanity_val_steps, number) for number in run.num_batches("validate")],
        "Batches of each validation loader to run before training. Empty before the loaders are created.",
    )
    estimated_stepping_batches = Fact[int | float](
        lambda run: run.estimated_stepping_batches,
        "Total number of optimizer steps of `fit`; infinite without a limit.",
    )
    has_validation = Fact[bool](
        lambda run: run.data.has_validation,
        "True if `fit` validates: there are a validation_step, a loader and a limit above 0.",
    )
    enable_validation = Fact[bool](
        lambda run: run.hooks.task_or_none is not None and run.data.has_validation,
        "As `has_validation`. False before the first stage.",
    )
    val_check_batch = Fact[int | float | None](
        lambda run: None if run.loop.validation is None else run.loop.validation.num_batches_between,
        "Training batches between two validations; None if not yet known or for intervals in other units.",
    )

    # Logged values

    callback_metrics = Fact[Mapping[str, MetricValue]](
        lambda run: run.logs.callback_metrics, "The latest value of every logged metric; see `Run.callback_metrics`."
    )
    logged_metrics = Fact[Mapping[str, MetricValue]](
        lambda run: run.logs.logged_metrics, "The latest value of every metric that goes to the loggers."
    )
    progress_bar_metrics = Fact[Mapping[str, float]](
        lambda run: run.logs.progress_bar_metrics, "The latest value of every metric logged with `prog_bar=True`."
    )

    # Methods

    all_gather = of_run(StageRun.all_gather)
    barrier = of_run(StageRun.barrier)
    batch_indices = of_run(StageRun.batch_indices)
    broadcast = of_run(StageRun.broadcast)
    cut_like = of_run(StageRun.cut_like)
    gather_tensor = of_run(StageRun.gather_tensor)
    request_stop = of_run(StageRun.request_stop)
    print = of_part(_hooks, StageHooks.print)
    log_metric = of_part(_logs, Logs.log_metric)
    log_now = of_part(_logs, Logs.log_now)
    show_now = of_part(_logs, Logs.show_now)
    clip_gradients = of_part(_manual, ManualOptimization.clip_gradients)
    manual_backward = of_part(_manual, ManualOptimization.manual_backward)
    no_sync = of_part(_manual, ManualOptimization.no_sync)
    task_optimizers = of_part(_manual, ManualOptimization.task_optimizers)
    at_step_end = of_part(_saves, Saves.at_step_end)
    emergency_save = of_part(_saves, Saves.emergency_save)
    remote_names = of_part(_saves, Saves.remote_names)
    request_save = of_part(_saves, Saves.request)
    wrote_into = of_part(_saves, Saves.wrote_into)
    request_rollback = of_part(_recovery, Recovery.request_rollback)

    if not TYPE_CHECKING:  # type checkers would accept any name otherwise

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error that says what to use instead. Python calls this for missing attributes only."""
            if name == "run":
                raise AttributeError("the Trainer's __init__ has not completed")
            # Python also calls it if the code of an attribute raises an AttributeError. Reading the attribute again
            # raises this error, which names the cause.
            if hasattr(type(self), name):
                object.__getattribute__(self, name)
            if name in INTERNALS:
                raise AttributeError(f"trainer.{name} does not exist here: {INTERNALS[name]}.")
            if name.startswith("_"):
                hint = " Private parts of Lightning's Trainer do not exist here."
            else:
                hint = nearest(name, dir(type(self)))
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}.{hint}")
