"""The Trainer: its arguments, its stage methods, and requests of callbacks that are executed immediately.

Each stage method creates a `StageRun` (run.py). stage.py sets it up and tears it down, loop.py trains, evaluation.py
evaluates. lightning_names.py defines further attributes of a Trainer.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

from trainwright.callbacks.callback import Callback
from trainwright.checkpoint.run_folder import OnDamaged
from trainwright.core.duration import Duration
from trainwright.core.errors import ArgumentTypeError, ConfigurationError
from trainwright.core.names.known_arguments import known_arguments
from trainwright.core.process import is_interactive, started_by_trainer
from trainwright.core.rng import isolate_rng
from trainwright.core.run import Stage
from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule
from trainwright.loggers.logger import Logger
from trainwright.loggers.registry import resolve_loggers
from trainwright.profilers.profiler import Profiler
from trainwright.strategies.precision import Precision
from trainwright.strategies.steps.phase import Phase
from trainwright.strategies.strategy import Strategy
from trainwright.trainer.checkpoints.load_request import CkptPath, Default, LoadRequest
from trainwright.trainer.configuration.argument_checks import refuse_of_verb, refuse_unknown
from trainwright.trainer.configuration.arguments import TrainerArguments
from trainwright.trainer.configuration.checks import one_task
from trainwright.trainer.configuration.settings import configure
from trainwright.trainer.data import Sources
from trainwright.trainer.evaluation import Evaluation, Prediction
from trainwright.trainer.fit_loop_view import FitLoopView
from trainwright.trainer.lightning_names import LightningNames
from trainwright.trainer.loop import FitLoop
from trainwright.trainer.recovery.preemption import listen
from trainwright.trainer.run import StageRun
from trainwright.trainer.run_state import RunProgress, RunState
from trainwright.trainer.schedule import Stop
from trainwright.trainer.stage import check_stage, nothing_else_runs, on_this_process

if TYPE_CHECKING:
    from trainwright.trainer.planning.run_plan import Plan
    from trainwright.trainer.search.trial import StageTrialSteps


class Loop(Protocol):
    """The main part of a stage."""

    def run(self) -> Any:
        """Run the stage and return its result."""


MakeLoop = Callable[[StageRun], Loop]


class Trainer(LightningNames):
    """Trainer that fits, evaluates and predicts with a task.

    `trainwright launch` sets the defaults of `strategy`, `precision`, `accumulate_grad_batches` and `compile`.

    Args:
        accelerator: `"auto"`, `"cpu"`, `"gpu"` or a vendor's name.
        strategy: `"auto"`, a name in `strategies.STRATEGIES`, with options as in `"megatron:pp=2:tp=2"`, or a Strategy.
        devices: processes on this node: a count, indices, `-1` or `"auto"`. Without a launcher the Trainer starts them.
        num_nodes: nodes of the run; more than one needs a launcher.
        precision: `"32-true"` (default), `"64-true"`, `"16-true"`, `"bf16-true"`, `"16-mixed"`, `"bf16-mixed"`,
            `"fp8"`, Lightning's and Accelerate's names for them (`32`, `"fp16"`), or an `Fp8(…)` with options.
        logger: True (TensorBoard), False, a name, a Logger or several.
        callbacks: a callback or several.
        fast_dev_run: run this many batches (True: 1) of each loader once, without logs and checkpoints.
        max_epochs: `fit` ends after this many epochs, or at the first other limit that is reached. Default: None, which
            is 1,000 without another limit.
        max_steps: `fit` ends after this many optimizer steps. Default: -1, no limit.
        max_time: `fit` ends after this time, such as `"2 h"`. Default: None, no limit.
        max_samples: `fit` ends after this many samples of all ranks. Default: None, no limit.
        max_tokens: `fit` ends after this many tokens of all ranks. Default: None, no limit.
        min_epochs: stop requests take effect once this and `min_steps` are reached. Default: None.
        min_steps: see `min_epochs`, in optimizer steps. Default: None.
        limit_train_batches: batches of a training epoch: a number, or a fraction. Default: None, all.
        limit_val_batches: batches of a validation: a number, or a fraction. Default: None, all.
        limit_test_batches: batches of a test: a number, or a fraction. Default: None, all.
        limit_predict_batches: batches of a prediction: a number, or a fraction. Default: None, all.
        overfit_batches: train and validate on this number or fraction of batches, unshuffled. 0 disables it.
        val_check_interval: validate after this many batches (int), this fraction of an epoch (float), or a length
            with a unit (`"500 steps"`, a Duration, `{"minutes": 5}`).
        check_val_every_n_epoch: epochs between two validations. None counts `val_check_interval` across epochs.
        num_sanity_val_steps: validation batches to run before training; -1 for all. Default: 2.
        log_every_n_steps: steps between two flushes of metrics from the device to the loggers. Default: 50.
        enable_checkpointing: enable or disable the default `ModelCheckpoint`. Default: None, enabled.
        enable_progress_bar: enable or disable the default progress bar. Default: None, enabled.
        enable_model_summary: enable or disable the default `ModelSummary`. Default: None, enabled.
        accumulate_grad_batches: micro-batches in one optimizer step.
        gradient_clip_val: the largest norm or value of gradients, which are clipped to it. Default: None, no clipping.
        gradient_clip_algorithm: clip by total `"norm"` or by `"value"`. Default: None, by norm.
        deterministic: True uses only deterministic kernels. `"warn"` warns about nondeterministic kernels.
        benchmark: choose kernels by timing them (`torch.backends.cudnn.benchmark`).
        inference_mode: evaluate under `torch.inference_mode` rather than `torch.no_grad`.
        use_distributed_sampler: distribute the data over ranks. Set False if your loaders distribute it.
        per_sample_rng: random numbers of a data set depend only on seed, epoch and sample. About 20 µs per sample.
        detect_anomaly: name the operation that caused a NaN in backward. Slow.
        barebones: disable loggers, checkpoints, progress bar, summary and validation, for benchmarks. A
            `limit_val_batches` that is passed enables validation.
        sync_batchnorm: compute BatchNorm statistics over all processes.
        reload_dataloaders_every_n_epochs: request new loaders after this many epochs. 0 disables it.
        default_root_dir: folder for the files of the run. Default: the current folder.
        enable_autolog_hparams: pass hyper-parameters to the loggers when a fit starts. Default: True.
        profiler: `"simple"`, `"advanced"`, `"pytorch"` or a `trainwright.profilers.Profiler`. Default: None.
        plugins: only None and an empty list are accepted; others raise an error.
        model_registry: only None is accepted; others raise an error.
        compile: True, a mode, or a dict of `torch.compile`'s arguments compiles the step. `"regional"` compiles blocks.
        launcher: the launcher whose environment variables contain the rank: `"auto"`, `"torchrun"`, `"slurm"`, `"mpi"`
            or `"none"`. `"ray"`, with options as in `"ray:max_restarts=2:cpus=4"`, runs each stage in actors of Ray.
        uneven_batches: if a rank has fewer batches than others: `"pad"` repeats its last batch with weight 0, `"stop"`
            ends the epoch of all ranks, `"error"` raises an error.
        on_nonfinite: the action before a step whose loss or gradient is NaN or infinite on any rank: `"raise"`,
            `"skip"` the step, or `"rollback"` to the newest checkpoint and skip the step's data. `"skip"` and
            `"rollback"` read a flag from the device in each step. None: no check.
        max_rollbacks: a run fails after this many rollbacks.
        max_skipped: steps that may be skipped in a row. None allows any number. Default: 100.
        seed: determines the order of the data. Default: torch's initial seed.
        async_save: copy requested checkpoints to host memory and write them while training continues. The copy has the
            size of the state. With False, training waits until they are on the disk.
        on_save_error: if a checkpoint cannot be written: `"raise"` at the next save or the end of the fit, or `"warn"`.
        preemption_grace: the time (seconds, or `"2 min"`) that the machine gives a process after SIGTERM or SIGUSR1.
            A `fit` then saves after the current step, unless earlier saves took longer, and every rank exits with 143.
            None: signals are not handled.
        auto_requeue: requeue the Slurm job after SIGUSR1. `sbatch --signal=USR1@120` makes Slurm send this signal.
        on_interrupt: the action after Ctrl-C has ended a stage cleanly and set `trainer.interrupted`: `"return"`
            (default at a prompt or in a notebook) or `"raise"` (default in a script).

    Raises:
        ConfigurationError: an argument is unknown or invalid, or contradicts another. No device or file has been used.
    """

    @known_arguments(refuse_unknown)
    def __init__(
        self,
        *,
        accelerator: str = "auto",
        strategy: str | Strategy = "auto",
        devices: list[int] | str | int = "auto",
        num_nodes: int = 1,
        precision: Precision | str | int | None = None,
        logger: Logger | Iterable[Logger] | bool | str | None = None,
        callbacks: Sequence[Callback] | Callback | None = None,
        fast_dev_run: int | bool = False,
        max_epochs: int | None = None,
        min_epochs: int | None = None,
        max_steps: int = -1,
        min_steps: int | None = None,
        max_time: str | datetime.timedelta | dict[str, int] | None = None,
        max_samples: int | None = None,
        max_tokens: int | None = None,
        limit_train_batches: int | float | None = None,
        limit_val_batches: int | float | None = None,
        limit_test_batches: int | float | None = None,
        limit_predict_batches: int | float | None = None,
        overfit_batches: int | float = 0.0,
        val_check_interval: int | float | str | Duration | datetime.timedelta | dict[str, int] | None = None,
        check_val_every_n_epoch: int | None = 1,
        num_sanity_val_steps: int | None = None,
        log_every_n_steps: int | None = None,
        enable_checkpointing: bool | None = None,
        enable_progress_bar: bool | None = None,
        enable_model_summary: bool | None = None,
        accumulate_grad_batches: int = 1,
        gradient_clip_val: int | float | None = None,
        gradient_clip_algorithm: str | None = None,
        deterministic: bool | Literal["warn"] | None = None,
        benchmark: bool | None = None,
        inference_mode: bool = True,
        use_distributed_sampler: bool = True,
        per_sample_rng: bool = False,
        profiler: Profiler | str | None = None,
        detect_anomaly: bool = False,
        barebones: bool = False,
        plugins: list[Any] | None = None,
        sync_batchnorm: bool = False,
        reload_dataloaders_every_n_epochs: int = 0,
        default_root_dir: str | Path | None = None,
        enable_autolog_hparams: bool = True,
        model_registry: str | None = None,
        compile: bool | str | dict[str, Any] = False,
        launcher: str = "auto",
        uneven_batches: Literal["pad", "stop", "error"] = "pad",
        on_nonfinite: Literal["raise", "skip", "rollback"] | None = None,
        max_rollbacks: int = 3,
        max_skipped: int | None = 100,
        seed: int | None = None,
        async_save: bool = True,
        on_save_error: Literal["raise", "warn"] = "raise",
        preemption_grace: float | str | None = 30.0,
        auto_requeue: bool = True,
        on_interrupt: Literal["return", "raise"] | None = None,
    ) -> None:
        arguments = TrainerArguments(
            accelerator=accelerator,
            strategy=strategy,
            devices=devices,
            num_nodes=num_nodes,
            precision=precision,
            logger=logger,
            callbacks=callbacks,
            fast_dev_run=fast_dev_run,
            max_epochs=max_epochs,
            min_epochs=min_epochs,
            max_steps=max_steps,
            min_steps=min_steps,
            max_time=max_time,
            max_samples=max_samples,
            max_tokens=max_tokens,
            limit_train_batches=limit_train_batches,
            limit_val_batches=limit_val_batches,
            limit_test_batches=limit_test_batches,
            limit_predict_batches=limit_predict_batches,
            overfit_batches=overfit_batches,
            val_check_interval=val_check_interval,
            check_val_every_n_epoch=check_val_every_n_epoch,
            num_sanity_val_steps=num_sanity_val_steps,
            log_every_n_steps=log_every_n_steps,
            enable_checkpointing=enable_checkpointing,
            enable_progress_bar=enable_progress_bar,
            enable_model_summary=enable_model_summary,
            accumulate_grad_batches=accumulate_grad_batches,
            gradient_clip_val=gradient_clip_val,
            gradient_clip_algorithm=gradient_clip_algorithm,
            deterministic=deterministic,
            benchmark=benchmark,
            inference_mode=inference_mode,
            use_distributed_sampler=use_distributed_sampler,
            per_sample_rng=per_sample_rng,
            profiler=profiler,
            detect_anomaly=detect_anomaly,
            barebones=barebones,
            plugins=plugins,
            sync_batchnorm=sync_batchnorm,
            reload_dataloaders_every_n_epochs=reload_dataloaders_every_n_epochs,
            default_root_dir=default_root_dir,
            enable_autolog_hparams=enable_autolog_hparams,
            model_registry=model_registry,
            compile=compile,
            launcher=launcher,
            uneven_batches=uneven_batches,
            on_nonfinite=on_nonfinite,
            max_rollbacks=max_rollbacks,
            max_skipped=max_skipped,
            seed=seed,
            async_save=async_save,
            on_save_error=on_save_error,
            preemption_grace=preemption_grace,
            auto_requeue=auto_requeue,
            on_interrupt=on_interrupt,
        )
        settings = configure(arguments)
        self.settings = settings
        self.progress = RunProgress(RunState(self), settings.arguments.seed)  # all stages continue it
        self.verb: Stage | None = None  # the current or last stage
        self.status = "initializing"  # of the current or last stage; see TrainerStatus
        # Before the first stage, a run without a stage provides the attributes. Each stage replaces it.
        self.run = StageRun(self, settings, self.progress)
        if settings.preemption_grace_s is not None:
            listen(is_main=settings.selection.topology.rank == 0, requeue=settings.arguments.auto_requeue)

    @known_arguments(partial(refuse_of_verb, "fit"))
    def fit(
        self,
        task: TaskModule | None = None,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        weights_only: bool | None = None,
        *,
        model: TaskModule | None = None,
        load_weights_only: bool = False,
        strict: bool | None = None,
        allow_missing: Iterable[str] = (),
        on_damaged: OnDamaged | None = None,
    ) -> None:
        """Train a task. Collective: every process of the run calls it.

        Args:
            task, model: the task to train. Both names are accepted.
            train_dataloaders: a loader, a list or dict of loaders to combine, or a data module.
            val_dataloaders: one validation loader or several.
            datamodule: a data module to use instead of loaders.
            ckpt_path: a checkpoint to resume from: its path, `"last"` or `"best"`.
            weights_only: Accepted without effect: checkpoints contain no pickles.
            load_weights_only: load only the weights of `ckpt_path`, and start at step 0. Default: False.
            strict: raise an error for missing or unexpected weights. Default: the task's `strict_loading`.
            allow_missing: parts that may be missing and then start from scratch with a warning: `"optimizer"`,
                `"rng"`, `"schedulers"`, `"scaler"`, `"datamodule"`, `"callbacks"`, `"loggers"`.
            on_damaged: `"error"` (default), or `"fall_back"` (default for `"last"`) to the newest valid checkpoint.

        Raises:
            ArgumentTypeError: no task was passed, or another object.
            ConfigurationError, FileNotFoundError, CheckpointError: an argument or the checkpoint is invalid.
        """
        task = one_task("fit", task, model)
        sources = Sources.of("fit", datamodule, train=train_dataloaders, validate=val_dataloaders)
        load = LoadRequest.checked(
            ckpt_path, weights_only=load_weights_only, strict=strict, allow_missing=allow_missing, on_damaged=on_damaged
        )
        self._start("fit", task, sources, load, FitLoop)

    @known_arguments(partial(refuse_of_verb, "validate"))
    def validate(
        self,
        task: TaskModule | None = None,
        dataloaders: object = None,
        ckpt_path: CkptPath = Default.BEST,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        model: TaskModule | None = None,
    ) -> list[dict[str, float]]:
        """Validate a task and return its metrics, one dict per loader. Default task: the last task. Collective.

        `ckpt_path` is a checkpoint to load weights from (a path, `"last"`, `"best"`), or None for the task's current
        weights. Default: the best checkpoint if no task is given and a ModelCheckpoint has a `monitor`, else None.
        `model` is another name of `task`. `weights_only` is accepted without effect.
        """
        return self._evaluate(
            "validate", one_task("validate", task, model), dataloaders, ckpt_path, verbose, datamodule
        )

    @known_arguments(partial(refuse_of_verb, "test"))
    def test(
        self,
        task: TaskModule | None = None,
        dataloaders: object = None,
        ckpt_path: CkptPath = Default.BEST,
        verbose: bool = True,
        datamodule: DataModule | None = None,
        weights_only: bool | None = None,
        *,
        model: TaskModule | None = None,
    ) -> list[dict[str, float]]:
        """Test a task and return its metrics, one dict per loader. Default task: the last task. Collective.

        The arguments are those of `validate`.
        """
        return self._evaluate("test", one_task("test", task, model), dataloaders, ckpt_path, verbose, datamodule)

    @known_arguments(partial(refuse_of_verb, "predict"))
    def predict(
        self,
        task: TaskModule | None = None,
        dataloaders: object = None,
        datamodule: DataModule | None = None,
        return_predictions: bool | None = True,
        ckpt_path: CkptPath = Default.BEST,
        weights_only: bool | None = None,
        *,
        model: TaskModule | None = None,
    ) -> list[Any] | None:
        """Predict with a task. Default task: the last task. Collective. The arguments are those of `validate`.

        Returns:
            The outputs of `predict_step` for all batches of all ranks, in the order of the data. Several loaders give a
            list of lists. None with `return_predictions=False`. `return_predictions=None` means True.
        """
        task = one_task("predict", task, model)
        load = LoadRequest.for_evaluation(ckpt_path, task_given=task is not None)
        if task is None:
            task = self._last_task("predict")
        sources = Sources.of("predict", datamodule, predict=dataloaders)
        make_loop = partial(Prediction, keep=return_predictions is not False)
        predictions: list[Any] | None = self._start("predict", task, sources, load, make_loop)
        return predictions

    @known_arguments(partial(refuse_of_verb, "plan"))
    def plan(
        self,
        task: TaskModule | None = None,
        train_dataloaders: object = None,
        val_dataloaders: object = None,
        datamodule: DataModule | None = None,
        ckpt_path: str | Path | None = None,
        *,
        model: TaskModule | None = None,
        load_weights_only: bool = False,
        strict: bool | None = None,
        allow_missing: Iterable[str] = (),
        on_damaged: OnDamaged | None = None,
        setup_data: bool = False,
    ) -> Plan:
        """Return what `fit` with the same arguments will do, without training. Not collective.

        The task is not changed: a task with `configure_model` is built as a copy on the device `meta`. By default, no
        process is started, no file is written, and no `setup` or `prepare_data` is called. If the data module or task
        with the loaders defines one of these methods, its batches are not known: pass loaders, or `setup_data=True`
        for a data module.

        Args:
            setup_data: call `prepare_data`, `setup` and `teardown` of the data module, which may download and write
                files, and read one batch. Default: False.

        Raises:
            ConfigurationError, FileNotFoundError, CheckpointError: as in `fit`, before devices are used.
            ConfigurationError: `setup_data=True` without a data module.
        """
        from trainwright.trainer.planning.planner import plan_fit, set_up_data  # few runs use it

        task = one_task("fit", task, model)
        sources = Sources.of("fit", datamodule, train=train_dataloaders, validate=val_dataloaders)
        load = LoadRequest.checked(
            ckpt_path, weights_only=load_weights_only, strict=strict, allow_missing=allow_missing, on_damaged=on_damaged
        )
        with isolate_rng():
            check_stage(self.settings, "fit", task, sources, load)
            if not setup_data:
                return plan_fit(self.settings, self.run, task, sources, is_set_up=False)
            if sources.datamodule is None:
                raise ConfigurationError(
                    "plan(setup_data=True) sets up a data module, and there is none. Pass a data module, or remove "
                    "setup_data."
                )
            with set_up_data(sources.datamodule, self):
                return plan_fit(self.settings, self.run, task, sources, is_set_up=True)

    def _evaluate(
        self,
        kind: Literal["validate", "test"],
        task: TaskModule | None,
        loaders: object,
        ckpt_path: CkptPath,
        verbose: bool,
        datamodule: DataModule | None,
    ) -> list[dict[str, float]]:
        """Validate or test. Returns an empty list after Ctrl-C in an interactive session."""
        load = LoadRequest.for_evaluation(ckpt_path, task_given=task is not None)
        if task is None:
            task = self._last_task(kind)
        sources = Sources.of(kind, datamodule, **{kind: loaders})
        make_loop = partial(Evaluation, verbose=verbose)
        metrics: list[dict[str, float]] | None = self._start(kind, task, sources, load, make_loop)
        return metrics or []

    def _last_task(self, stage: Stage) -> TaskModule:
        """Return the task of the last stage, for a `stage` without one."""
        task = self.run.hooks.task_or_none
        if task is None:
            raise ArgumentTypeError(
                f"{stage}() has no task: this Trainer has not run one yet. Pass a TaskModule as its first argument."
            )
        return task

    def _start(
        self,
        stage: Stage,
        task: TaskModule,
        sources: Sources,
        load: LoadRequest,
        make_loop: MakeLoop,
        *,
        is_trial: bool = False,
    ) -> Any:
        """Check a stage, start other processes if necessary, run the stage and return its result on this process.

        Sets `status`. Returns None after Ctrl-C in an interactive session or with `on_interrupt="return"`. A trial (a
        search) restores `run`, `verb` and `status`. Before the first stage, the Trainer keeps the task, data module and
        loaders of the search.
        """
        load = check_stage(self.settings, stage, task, sources, load)
        last_run = self.run
        last_verb = self.verb
        last_status = self.status
        run = self._begin(stage, task, sources, is_trial)
        try:
            if self.settings.selection.starts_processes and not started_by_trainer():
                from trainwright.trainer.ray_stage import run_in_new_processes  # most runs have their processes

                involved = [task, sources.datamodule, *sources.loaders.values(), *self.callbacks, *self.loggers]
                work = partial(Trainer._run_in_process, self, stage, task, sources, load, make_loop, is_trial)
                result = run_in_new_processes(self, work, involved)
            else:
                with on_this_process(run, load):
                    result = make_loop(run).run()
            self.status = "finished"
            return result
        except KeyboardInterrupt:
            run.interrupted = True
            if self._raises_interrupts():
                raise
            return None
        finally:
            run.is_running = False  # also if its processes did not start
            if self.status == "running":  # an error or Ctrl-C, because it is "finished" otherwise
                self.status = "interrupted"
            if is_trial:
                is_first_stage = last_run.hooks.task_or_none is None
                if self.status == "finished" and is_first_stage:
                    self.run = self._after_search(run)
                else:
                    self.run = last_run
                self.verb = last_verb
                self.status = last_status

    def _raises_interrupts(self) -> bool:
        """Return whether a stage's method raises the KeyboardInterrupt of Ctrl-C. Otherwise the method returns."""
        on_interrupt = self.settings.arguments.on_interrupt
        if on_interrupt is None:
            return not is_interactive()
        return on_interrupt == "raise"

    def _after_search(self, searched: StageRun) -> StageRun:
        """Return a run that provides the Trainer's attributes after a search: its task, data module and loaders."""
        run = StageRun(self, self.settings, self.progress, task=searched.task, sources=searched.data.sources)
        run.data.shown = searched.data.shown
        return run

    def _begin(self, stage: Stage, task: TaskModule, sources: Sources, is_trial: bool) -> StageRun:
        """Create the run of a stage and set `run`, `verb` and `status`.

        Raises:
            ConfigurationError: a stage is running; see `nothing_else_runs`.
        """
        with nothing_else_runs(stage, self.run, task):
            progress = self.progress.for_trial(RunState(self, self.state)) if is_trial else self.progress
            self.run = StageRun(self, self.settings, progress, stage, task, sources, is_trial=is_trial)
        self.verb = stage
        self.status = "running"
        return self.run

    def _run_in_process(
        self, stage: Stage, task: TaskModule, sources: Sources, load: LoadRequest, make_loop: MakeLoop, is_trial: bool
    ) -> Any:
        """Run a stage in one of the processes that this Trainer uses, including this one."""
        # The calling process has begun the stage. In another process, the Trainer was unpickled without it.
        run = self.run if self.stage is not None else self._begin(stage, task, sources, is_trial)
        with on_this_process(run, load):
            return make_loop(run).run()

    def __getstate__(self) -> dict[str, Any]:
        """Exclude the run of a stage, so that a Trainer can be sent to another process."""
        return {**vars(self), "run": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Restore the state, with a run without a stage as before the first stage."""
        vars(self).update(state)
        self.progress.state = RunState(self, self.progress.state)  # a pickled RunState is a plain TrainState
        self.run = StageRun(self, self.settings, self.progress)

    # Attributes that can be changed between two stages, and some of them in hooks

    @property
    def callbacks(self) -> list[Callback]:
        """The callbacks of the current or last stage, including the task's own."""
        return self.run.hooks.callbacks

    @callbacks.setter
    def callbacks(self, callbacks: list[Callback]) -> None:
        self.settings.callbacks = callbacks
        self.run.hooks.callbacks = callbacks

    @property
    def loggers(self) -> list[Any]:
        """The loggers."""
        return self.settings.loggers

    @loggers.setter
    def loggers(self, loggers: list[Any]) -> None:
        self.settings.loggers = loggers

    @property
    def logger(self) -> Any | None:
        """The first logger, or None. Between stages, set it to a logger, a list of loggers, a name, True or False."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | Iterable[Logger] | bool | str | None) -> None:
        if self.stage is not None:
            raise ConfigurationError(f"trainer.logger cannot be changed while {self.stage}() runs. Set it before.")
        self.loggers = resolve_loggers(False if logger is None else logger, self.settings.root)

    @property
    def max_epochs(self) -> int:
        """Maximum number of epochs of a fit; -1 for no limit. A change takes effect in the next fit."""
        limit = self.settings.limits.max_epochs
        return -1 if limit is None else limit

    @max_epochs.setter
    def max_epochs(self, max_epochs: int | None) -> None:
        self.settings.limits = self.settings.limits.with_changed("max_epochs", max_epochs)

    @property
    def max_steps(self) -> int:
        """Maximum number of optimizer steps of a fit; -1 for no limit. A change takes effect in the next fit."""
        return self.settings.limits.max_steps

    @max_steps.setter
    def max_steps(self, max_steps: int) -> None:
        self.settings.limits = self.settings.limits.with_changed("max_steps", max_steps)

    @property
    def fit_loop(self) -> FitLoopView:
        """The limits of a fit, which can be set, and its progress, under the names of Lightning's loops."""
        return FitLoopView(self.settings, lambda: self.run)

    @property
    def count_tokens(self) -> bool:
        """True if `state.tokens` is counted. Set it in a callback's `setup`."""
        return self.run.loop.count_tokens

    @count_tokens.setter
    def count_tokens(self, counts: bool) -> None:
        self.run.loop.count_tokens = counts

    @property
    def should_stop(self) -> bool:
        """Set to True to end `fit` after the current step. With several ranks it takes effect within a few steps."""
        return self.run.loop.stop != Stop.NOT

    @should_stop.setter
    def should_stop(self, stop: bool) -> None:
        self.run.loop.stop = Stop.AND_CLOSE_EPOCH if stop else Stop.NOT
        self.run.loop.check_next_step()

    def save_checkpoint(
        self, filepath: str | Path, weights_only: bool | None = None, storage_options: Mapping[str, Any] | None = None
    ) -> Path:
        """Write and publish a checkpoint, between two training steps or after a stage. Collective.

        After a stage other than `fit` the checkpoint contains only weights, and a warning is issued unless
        `weights_only=True`. If a fit has ended within a step, the checkpoint contains the state of the previous step.

        Args:
            filepath: path or URL. With a URL, the local folder is below `default_root_dir/checkpoints`.
            weights_only: exclude the optimizers, progress and generators. Default: False.
            storage_options: options for fsspec, such as credentials, if `filepath` is a URL.

        Returns:
            The local folder of the checkpoint.

        Raises:
            ConfigurationError: no stage has run yet, a training step is in progress, a fit ended while optimizers
                were stepping or within a step on batches of a stateful loader, or `storage_options` is given for a
                path.
            NonFiniteError: a loss or gradient since the last check was not finite (`on_nonfinite`).
            OSError, CheckpointError: this or an earlier checkpoint could not be written.
        """
        run = self.run
        no_stage_has_run = run.logs.group is None and not run.is_trial
        is_between_steps = run.engine.phase is Phase.BETWEEN_STEPS or self.stage is None
        if no_stage_has_run or not is_between_steps:
            raise ConfigurationError("save_checkpoint must be called between two steps of a fit, or after a stage.")
        why = run.contents.half_done()
        if why is not None:
            raise ConfigurationError(
                f"{filepath} cannot be written: the fit ended while {why}. Use an earlier checkpoint."
            )
        return run.saves.save_now(filepath, weights_only=bool(weights_only), storage_options=storage_options)

    def pass_training_data(self) -> None:
        """Run `training_step` on an epoch of data without gradients and logging; see `Run.pass_training_data`."""
        from trainwright.trainer.search.trial import pass_training_data  # few runs use it

        run = self.run
        pass_training_data(run.task, run.engine, run.data.train(), run.state)

    def trial_steps(self, *, alone: bool, remakes_loaders: bool = False) -> StageTrialSteps:
        """Run trial steps and restore all state; see `Run.trial_steps`."""
        from trainwright.trainer.search.trial import StageTrialSteps  # few runs use it

        show = partial(setattr, self, "run")  # the attributes of the Trainer then describe the run of a trial
        return StageTrialSteps(self.run, show, partial(RunState, self), alone=alone, remakes_loaders=remakes_loaders)
