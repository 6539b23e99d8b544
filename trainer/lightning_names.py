"""What can be read from a Trainer, a line for each name, Lightning's and our own; and what callbacks may ask of it."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NoReturn, ParamSpec, TypeVar

import torch
from torch.optim import Optimizer

from trainwright.callbacks.roles import ProgressDisplay, Stopper
from trainwright.core.errors import nearest
from trainwright.core.metric_value import as_values
from trainwright.core.run import SchedulerConfig, Stage
from trainwright.core.state import SkippedData, StepResult, TrainState
from trainwright.core.task import TaskModule
from trainwright.data import DataModule
from trainwright.profilers.profiler import Profiler
from trainwright.strategies.engine import Engine
from trainwright.trainer.configuration.settings import Settings
from trainwright.trainer.run import StageRun

T = TypeVar("T")
P = ParamSpec("P")

# Parts of Lightning's Trainer that are its own machinery, and what answers the questions that they are asked.
INTERNALS = {
    "fit_loop": "trainer.state (epoch, batch_in_epoch, step, batches) says where training stands, trainer.max_epochs "
    "and trainer.max_steps when it ends",
    "validate_loop": "trainer.num_val_batches, trainer.val_dataloaders and trainer.validating tell of a validation",
    "test_loop": "trainer.num_test_batches, trainer.test_dataloaders and trainer.testing tell of a test",
    "predict_loop": "trainer.num_predict_batches and trainer.predict_dataloaders tell of a prediction; predict() "
    "returns what was predicted",
    "precision_plugin": "trainer.precision names the precision, trainer.scaler is its loss scaler",
    "plugins": "strategy= and precision= of the Trainer choose what plugins chose",
    "init_module": "build large layers in TaskModule.configure_model, which the strategy calls where they belong; "
    "trainwright.init_empty_weights is for modules outside of a Trainer",
    "signal_connector": "trainer.received_sigterm; Trainer(preemption_grace=…, auto_requeue=…) say what signals do",
}


class Argument(Generic[T]):
    """An argument of the Trainer that can be read from it as an attribute.

    Args:
        unset: what is read where the argument is None. Default: None.
    """

    def __init__(self, unset: T | None = None) -> None:
        self._unset = unset

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: LightningNames | None, owner: type | None = None) -> T:
        if trainer is None:
            return self  # type: ignore[return-value]  # the descriptor itself, for documentation tools
        found: Any = getattr(trainer.settings.arguments, self._name)
        return self._unset if found is None else found  # type: ignore[return-value]  # None where T allows it

    def __set__(self, trainer: LightningNames, value: T) -> NoReturn:
        raise AttributeError(f"trainer.{self._name} cannot be changed; pass Trainer({self._name}={value!r}).")


class Fact(Generic[T]):
    """Something that the present stage's run, or the last one's, knows, read from the Trainer.

    Args:
        read: takes it from the run.
        doc: what it is.
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
        raise AttributeError(f"trainer.{self._name} can be read, not set.")


class Setting(Generic[T]):
    """A setting that may be changed between two verbs, and by callbacks before an epoch.

    Args:
        doc: what it is.
    """

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, trainer: LightningNames | None, owner: type | None = None) -> T:
        return self if trainer is None else getattr(trainer.settings, self._name)  # type: ignore[return-value]  # as above

    def __set__(self, trainer: LightningNames, value: T) -> None:
        setattr(trainer.settings, self._name, value)


def _all(run: StageRun, role: type) -> list[Any]:
    return [callback for callback in run.callbacks if isinstance(callback, role)]


def _first(run: StageRun, role: type) -> Any:
    return next(iter(_all(run, role)), None)


def _given(stage: str, noun: str) -> Fact[Any]:
    return Fact(lambda run: run.data.given(stage), f"The user's {noun} loaders; None before they are created.")


def _num_batches(stage: str, noun: str) -> Fact[list[int | float]]:
    return Fact(lambda run: run.num_batches(stage), f"Batches of each {noun} loader on one rank.")


def of_run(method: Callable[Concatenate[StageRun, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Return a method of the Trainer that asks its run."""

    @functools.wraps(method)
    def ask(trainer: LightningNames, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return method(trainer.run, *args, **kwargs)

    return ask


class LightningNames:
    """The attributes by which callbacks, tasks and code that was written for Lightning read a Trainer."""

    run: StageRun
    settings: Settings

    # What it was given

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
    profiler = Fact[Profiler](lambda run: run.profiler, "The profiler; a PassThroughProfiler without one.")
    default_root_dir = Fact[str](lambda run: str(run.settings.root), "Where a run's files go.")
    log_every_n_steps = Setting[int]("Steps between two flushes of metrics.")
    num_sanity_val_steps = Setting[int]("Validation batches tried before training; -1: all.")

    # What it is made of

    task = Fact[TaskModule](lambda run: run.task, "The user's task; a TaskError before the first verb.")
    lightning_module = Fact[TaskModule](lambda run: run.task, "The task, by the name that Lightning gives it.")
    model = Fact[TaskModule | None](
        lambda run: run.model, "The task, which no strategy replaces by a wrapper; None before the first verb."
    )
    datamodule = Fact[DataModule | None](lambda run: run.datamodule, "The data module of this stage, or None.")
    strategy = Fact[Engine](lambda run: run.engine, "The engine: it computes steps and holds the processes.")
    optimizers = Fact[list[Optimizer]](lambda run: run.optimizers, "What `configure_optimizers` returned.")
    lr_scheduler_configs = Fact[list[SchedulerConfig]](
        lambda run: run.lr_scheduler_configs, "The learning-rate schedules and when they step."
    )
    checkpoint_callback = Fact[Any](lambda run: run.saver, "The first ModelCheckpoint, or None.")
    checkpoint_callbacks = Fact[list[Any]](lambda run: [*run.savers], "Every ModelCheckpoint.")
    early_stopping_callback = Fact[Any](lambda run: _first(run, Stopper), "The first EarlyStopping, or None.")
    early_stopping_callbacks = Fact[list[Any]](lambda run: _all(run, Stopper), "Every EarlyStopping.")
    progress_bar_callback = Fact[Any](lambda run: _first(run, ProgressDisplay), "The progress bar, or None.")
    accelerator = Fact[str](
        lambda run: run.engine.settings.device_type, "The kind of device that is computed on, as torch calls it."
    )
    device = Fact[torch.device](lambda run: run.engine.device, "The device that this process computes on.")
    device_ids = Fact[list[int]](
        lambda run: list(run.engine.settings.device_indices), "Indices of the devices of this node."
    )
    precision = Fact[str](lambda run: run.engine.precision.name, 'The precision\'s name, such as `"bf16-mixed"`.')
    scaler = Fact[torch.amp.GradScaler | None](
        lambda run: run.engine.scaler, "The loss scaler of 16-bit mixed precision during a fit, or None."
    )

    # Processes

    global_rank = Fact[int](lambda run: run.global_rank, "Rank among all processes.")
    local_rank = Fact[int](lambda run: run.engine.processes.local_rank, "Rank among the processes of this node.")
    node_rank = Fact[int](lambda run: run.engine.processes.topology.node_rank, "Rank of this node among the nodes.")
    world_size = Fact[int](lambda run: run.world_size, "Number of processes.")
    num_nodes = Fact[int](lambda run: run.engine.processes.num_nodes, "Number of nodes.")
    num_devices = Fact[int](lambda run: len(run.engine.settings.device_indices), "Processes on this node.")
    is_global_zero = Fact[bool](lambda run: run.is_main, "Whether this is the main process.")
    distributed_sampler_kwargs = Fact[dict[str, int] | None](
        lambda run: (
            None
            if run.exchange is None
            else {"num_replicas": run.engine.data_ranks.num_readers, "rank": run.engine.data_ranks.reader}
        ),
        "How many ranks the data is divided among and which of them this is; None for one.",
    )

    # Where it stands

    state = Fact[TrainState](lambda run: run.state, "Where training stands, and what runs, in Lightning's words.")
    stage = Fact[Stage | None](lambda run: run.stage, "The stage that is running, or None.")
    current_epoch = Fact[int](
        lambda run: run.state.epoch, "0-based index of the present epoch; between fits, the finished ones."
    )
    global_step = Fact[int](lambda run: run.state.step, "Completed optimizer steps.")
    last_step = Fact[StepResult | None](
        lambda run: run.last_step, "What the last optimizer step gave; None before the first."
    )
    training = Fact[bool](
        lambda run: run.stage == "fit" and run.evaluating is None,
        "Whether training steps are running, not an evaluation between them.",
    )
    evaluating = Fact[bool](
        lambda run: run.evaluating in ("validate", "test"),
        "Whether a validation or a test is running, the validation before training included.",
    )
    sanity_checking = Fact[bool](
        lambda run: run.sanity_checking, "Whether the validation that runs is the one before training."
    )
    validating = Fact[bool](
        lambda run: run.evaluating == "validate" and not run.sanity_checking,
        "Whether a validation is running, other than the one before training.",
    )
    testing = Fact[bool](lambda run: run.evaluating == "test", "Whether a test is running.")
    predicting = Fact[bool](lambda run: run.evaluating == "predict", "Whether a prediction is running.")
    is_last_batch = Fact[bool](
        lambda run: run.loop.is_last_batch,
        "Whether the training micro-batch that runs, or ran last, is its epoch's last.",
    )
    epoch_closes = Fact[bool](
        lambda run: run.loop.epoch_closes,
        "Whether the epoch that ends is over; False when a later `fit` may go on with it.",
    )
    interrupted = Fact[bool](lambda run: run.interrupted, "Whether Ctrl-C ended the last stage.")
    received_sigterm = Fact[bool](
        lambda run: run.preemption.signal == signal.SIGTERM,
        "Whether this process was sent SIGTERM during the present fit.",
    )
    resumed = Fact[bool](lambda run: run.resumed, "Whether this fit continues a checkpoint.")
    ckpt_path = Fact[str | None](
        lambda run: run.ckpt_path, "The checkpoint that this stage, or the last one, has loaded; None: none."
    )
    seed = Fact[int | None](lambda run: run.history.seed, "Of the order of the data; None until a stage has begun.")
    run_id = Fact[str](lambda run: run.history.run_id, "Tells this run's checkpoints from those of others.")
    num_rollbacks = Fact[int](lambda run: run.history.num_rollbacks, "How often the run has gone back to a checkpoint.")
    skipped_batches = Fact[list[SkippedData]](
        lambda run: run.history.skipped_batches, "Training data that was consumed and changed no weight, in its order."
    )
    checkpoint_dir = Fact[Path](lambda run: run.checkpoint_dir, "Where checkpoints go when a request names no folder.")
    log_dir = Fact[str | None](
        lambda run: next((logger.log_dir for logger in run.loggers if logger.log_dir is not None), None),
        "The folder of the first logger that has one; known on the main rank once a stage has started.",
    )

    # Its data, and numbers of batches and steps

    train_dataloader = Fact[Any](
        lambda run: None if run.data.made is None else run.data.made.given,
        "What training reads, as the user made it; None before it is made.",
    )
    val_dataloaders = _given("validate", "validation")
    test_dataloaders = _given("test", "test")
    predict_dataloaders = _given("predict", "prediction")
    num_training_batches = Fact[int | float](
        lambda run: run.num_training_batches,
        "Micro-batches of one training epoch on one rank; infinite when the loader has no length.",
    )
    train_batch_size = Fact[int | None](
        lambda run: run.data.train().loader.batch_size,
        "Samples that this rank's loader puts into a micro-batch; None when it does not tell. Loads the data.",
    )
    num_val_batches = _num_batches("validate", "validation")
    num_test_batches = _num_batches("test", "test")
    num_predict_batches = _num_batches("predict", "prediction")
    num_eval_batches = Fact[list[int | float]](
        lambda run: run.num_eval_batches, "Batches of each loader of the evaluation that is running, on this rank."
    )
    num_sanity_val_batches = Fact[list[int | float]](
        lambda run: [min(run.sanity_steps, number) for number in run.num_batches("validate")],
        "Batches of each validation loader that are tried before training.",
    )
    estimated_stepping_batches = Fact[int | float](
        lambda run: run.estimated_stepping_batches, "Optimizer steps that `fit` will do in all; infinite without bound."
    )
    has_validation = Fact[bool](
        lambda run: run.data.has_validation,
        "Whether `fit` validates: a validation_step, a loader, and a limit above 0.",
    )
    enable_validation = Fact[bool](
        lambda run: run.model is not None and run.data.has_validation,
        "Whether `fit` validates: a validation_step, a loader, and a limit above 0.",
    )
    val_check_batch = Fact[int | float | None](
        lambda run: None if run.loop.validation is None else run.loop.validation.num_batches_between,
        "Training batches between two validations; None before they are known, or where another unit counts.",
    )

    # Logged values

    callback_metrics = Fact[Mapping[str, float]](
        lambda run: run.callback_metrics, "The latest value of every logged metric; see `Run.callback_metrics`."
    )
    logged_metrics = Fact[Mapping[str, float]](
        lambda run: as_values(run.shown.logged), "The latest value of every metric that went to the loggers."
    )
    progress_bar_metrics = Fact[Mapping[str, float]](
        lambda run: run.shown.progress_bar, "The latest value of every metric logged with `prog_bar=True`."
    )

    # What may be asked of it

    all_gather = of_run(StageRun.all_gather)
    at_safe_point = of_run(StageRun.at_safe_point)
    barrier = of_run(StageRun.barrier)
    batch_indices = of_run(StageRun.batch_indices)
    broadcast = of_run(StageRun.broadcast)
    clip_gradients = of_run(StageRun.clip_gradients)
    cut_like = of_run(StageRun.cut_like)
    log_metric = of_run(StageRun.log_metric)
    log_now = of_run(StageRun.log_now)
    manual_backward = of_run(StageRun.manual_backward)
    no_sync = of_run(StageRun.no_sync)
    print = of_run(StageRun.print)
    request_save = of_run(StageRun.request_save)
    request_stop = of_run(StageRun.request_stop)
    show_now = of_run(StageRun.show_now)
    task_optimizers = of_run(StageRun.task_optimizers)
    whole_tensor = of_run(StageRun.whole_tensor)
    wrote_into = of_run(StageRun.wrote_into)

    if not TYPE_CHECKING:  # or type checkers would take any name

        def __getattr__(self, name: str) -> NoReturn:
            if name == "run":
                raise AttributeError("this Trainer is being made")
            if hasattr(type(self), name):
                object.__getattribute__(self, name)  # raises what its own code raised
            if name in INTERNALS:
                raise AttributeError(f"trainer.{name} does not exist here: {INTERNALS[name]}.")
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}.{nearest(name, dir(type(self)))}")
