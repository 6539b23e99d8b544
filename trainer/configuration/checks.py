"""Checks of tasks, callbacks and data modules before a stage starts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from typing import Any, Literal, overload

from trainwright.callbacks.callback import EVENTS, Callback
from trainwright.callbacks.hook_table import check_hook_names
from trainwright.core.errors import ArgumentTypeError, ConfigurationError
from trainwright.core.hooks import DataHooks, TaskHooks
from trainwright.core.names.foreign_names import check_owner
from trainwright.core.run import Stage
from trainwright.core.signatures import check_signatures, overrides
from trainwright.core.task import TaskModule
from trainwright.data.datamodule import DataModule
from trainwright.strategies.capabilities import REFUSALS
from trainwright.strategies.select import Selection


def _public_names(*classes: type) -> tuple[str, ...]:
    """Return the public names that the classes define themselves, each once, in order."""
    names: dict[str, None] = {}  # an ordered set
    for cls in classes:
        for name in vars(cls):
            if not name.startswith("_"):
                names[name] = None
    return tuple(names)


_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
# Names that a misspelt hook may have meant.
_KNOWN_TASK_NAMES = _public_names(TaskHooks, DataHooks, TaskModule)
_KNOWN_DATA_NAMES = _public_names(DataModule, DataHooks)
_KNOWN_CALLBACK_NAMES = _public_names(Callback)
# Names of a task whose signatures are checked.
_TASK_HOOKS = (
    *vars(TaskHooks),
    *vars(DataHooks),
    *_STEPS,
    "configure_callbacks",
    "configure_model",
    "shard_units",
    "tensor_parallel_plan",
    "num_items",
    "num_tokens",
    "backward",
    "configure_gradient_clipping",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
)
# Words in the names of hooks, by the stages that call these hooks. A stage calls no hook with a word that only other
# stages have.
_WORDS: dict[str, frozenset[str]] = {
    "fit": frozenset({"train", "training", "sanity", "fit", "val", "validation"}),
    "validate": frozenset({"val", "validation"}),
    "test": frozenset({"test"}),
    "predict": frozenset({"predict"}),
}
_WORDS_OF_STAGES = frozenset().union(*_WORDS.values())
# Further words of hooks that only `fit` calls.
_ONLY_FIT = frozenset({"optimizer", "optimizers", "backward", "gradient", "scheduler", "items", "grad", "tokens"})


def _not_a_task_error(task: object, stage: Stage) -> ArgumentTypeError:
    """Return the error for an object that is not a TaskModule. An object of Lightning raises its own error."""
    check_owner(task)
    if isinstance(task, type) and issubclass(task, TaskModule):
        found = f"the class {task.__name__}. Pass an instance: {task.__name__}(…)."
    elif any(isinstance(getattr(task, name, None), TaskModule) for name in ("_orig_mod", "module")):
        found = "a wrapped task. Pass the task itself; devices= and compile= wrap it."
    else:
        found = (
            f"a {type(task).__name__}, but needs a TaskModule. Sub-class trainwright.TaskModule and make the module an "
            "attribute."
        )
    return ArgumentTypeError(f"{stage}() received {found}")


def check_task(
    task: object,
    stage: Stage,
    accumulate: int,
    *,
    clips: bool,
    on_nonfinite: str | None = None,
    counts_tokens: bool = False,
) -> None:
    """Check that a task can run a stage.

    Args:
        task: the object that the user passed.
        stage: the stage to start.
        accumulate: micro-batches per optimizer step.
        clips: gradients are clipped.
        on_nonfinite: the Trainer's argument.
        counts_tokens: a limit or interval is in tokens.

    Raises:
        ArgumentTypeError: `task` is not a TaskModule.
        ConfigurationError: the task cannot run the stage.
    """
    if not isinstance(task, TaskModule):
        raise _not_a_task_error(task, stage)
    name = type(task).__name__
    if "_modules" not in vars(task):  # `nn.Module.__init__` sets it
        raise ConfigurationError(f"{name}.__init__ does not call super().__init__(). Call it first.")
    check_hook_names(task, TaskModule, _KNOWN_TASK_NAMES)
    check_signatures(task, TaskModule, _called_in(stage, _TASK_HOOKS))
    if counts_tokens and not callable(task.num_tokens):
        raise ConfigurationError(
            f"{name}.num_tokens is a {type(task.num_tokens).__name__}, but lengths in tokens need a method that "
            "counts the tokens of a batch. Rename the attribute, and define num_tokens(self, batch)."
        )
    if stage == "fit":
        _check_training(task, accumulate, clips=clips, on_nonfinite=on_nonfinite)
    elif stage in ("validate", "test"):
        wanted = "validation_step" if stage == "validate" else "test_step"
        if not overrides(task, wanted, TaskModule):
            raise ConfigurationError(f"{name} has no {wanted}. Define {wanted}(self, batch, batch_idx).")


def _check_training(task: TaskModule, accumulate: int, *, clips: bool, on_nonfinite: str | None) -> None:
    """Check that a task defines what `fit` needs, and that manual optimization fits the Trainer's arguments."""
    name = type(task).__name__
    if not overrides(task, "training_step", TaskModule):
        raise ConfigurationError(f"{name} has no training_step. Define training_step(self, batch, batch_idx).")
    if not overrides(task, "configure_optimizers", TaskModule):
        raise ConfigurationError(
            f"{name} has no configure_optimizers. Define it, for example: "
            "return torch.optim.AdamW(self.parameters(), lr=1e-3)"
        )
    if task.automatic_optimization:
        return
    manual = f"but {name} uses manual optimization (automatic_optimization is False)"
    if accumulate > 1:
        raise ConfigurationError(
            f"accumulate_grad_batches={accumulate}, {manual}. Accumulate in training_step and set "
            "accumulate_grad_batches=1."
        )
    if clips:
        raise ConfigurationError(
            f"gradient_clip_val is set, {manual}. Call self.clip_gradients(optimizer, …) in training_step instead."
        )
    if on_nonfinite is not None:
        raise ConfigurationError(
            f"on_nonfinite={on_nonfinite!r}, {manual}, so its optimizers step before the Trainer can check the loss. "
            "Check it in training_step, on every rank, and set on_nonfinite=None."
        )


@overload
def one_task(stage: Literal["fit"], task: TaskModule | None, model: TaskModule | None) -> TaskModule:
    """Return the task from `task` or `model`."""


@overload
def one_task(stage: Stage, task: TaskModule | None, model: TaskModule | None) -> TaskModule | None:
    """Return the task from `task` or `model`, or None."""


def one_task(stage: Stage, task: TaskModule | None, model: TaskModule | None) -> TaskModule | None:
    """Return the task from `task` or `model`; None if both are None.

    Raises:
        ConfigurationError: both are passed and differ.
        ArgumentTypeError: `fit` receives neither.
    """
    if task is not None and model is not None and task is not model:
        raise ConfigurationError(f"{stage}() received two tasks, as task= and as model=. Pass only one of them.")
    if task is None:
        task = model
    if task is None and stage == "fit":
        raise ArgumentTypeError("fit() needs a task: pass a TaskModule as its first argument, or as task= or model=.")
    return task


def check_datamodule(datamodule: DataModule, stage: Stage) -> None:
    """Check the names and arguments of a data module's hooks.

    Raises:
        ConfigurationError: a hook is misspelt, or cannot be called.
    """
    check_hook_names(datamodule, DataModule, _KNOWN_DATA_NAMES)
    hooks = [name for name in _KNOWN_DATA_NAMES if callable(inspect.getattr_static(DataModule, name))]
    check_signatures(datamodule, DataModule, _called_in(stage, hooks))


def _called_in(stage: Stage, hooks: Iterable[str]) -> list[str]:
    """Return the hooks that a stage may call.

    `test` calls `setup` and `on_test_start`, and does not call `on_train_start` or `configure_optimizers`.
    """
    other_words = _WORDS_OF_STAGES - _WORDS[stage]
    if stage != "fit":
        other_words |= _ONLY_FIT
    called = []
    for name in hooks:
        is_of_other_stage = not other_words.isdisjoint(name.split("_"))
        if not name.startswith("__") and not is_of_other_stage:
            called.append(name)
    return called


def check_callbacks(callbacks: list[Any], stage: Stage | None = None) -> None:
    """Check the types, hook names and state keys of callbacks.

    Args:
        callbacks: the callbacks known so far.
        stage: the stage to start, for which signatures of hooks are checked. Default: None, no check of signatures.

    Raises:
        ConfigurationError: a callback is invalid.
    """
    keys: dict[str, Any] = {}
    for callback in callbacks:
        if not isinstance(callback, Callback):
            check_owner(callback)
            raise ConfigurationError(
                f"callbacks contains a {type(callback).__name__}, which is not a trainwright.Callback. Pass instances "
                "of sub-classes of Callback."
            )
        check_hook_names(callback, Callback, _KNOWN_CALLBACK_NAMES)
        if stage is not None:
            check_signatures(callback, Callback, _called_in(stage, (*EVENTS, "state_dict", "load_state_dict")))
        key = callback.state_key
        other = keys.get(key)
        if other is not None and (callback.state_dict() or other.state_dict()):
            raise ConfigurationError(
                f"two callbacks have the state_key {key!r}, so a checkpoint could store the state of only one. Give "
                "each its own state_key."
            )
        keys[key] = callback


def check_needs(callbacks: list[Any], selection: Selection, task: TaskModule | None = None) -> None:
    """Check that a strategy supports the callbacks and the task to train.

    Args:
        callbacks: the callbacks known so far.
        selection: the strategy and its settings.
        task: the task to train. Default: None, for evaluations or if it is not known yet.

    Raises:
        ConfigurationError: the strategy lacks a capability.
    """
    strategy = selection.strategy
    name = type(strategy).__name__
    for callback in callbacks:
        for need in callback.needs:  # names of capabilities
            is_met = getattr(strategy.capabilities, need)
            if need == "independent_steps" and selection.runs_alone:
                is_met = True  # a single rank waits for no other
            if not is_met:
                raise ConfigurationError(f"{type(callback).__name__} {REFUSALS[need].format(strategy=name)}")
    if task is None:
        return
    if not task.automatic_optimization and not strategy.capabilities.manual_optimization:
        raise ConfigurationError(f"{type(task).__name__} {REFUSALS['manual_optimization'].format(strategy=name)}")
    strategy.check_task(task, selection.settings)


def check_graphs(loggers: list[Any], selection: Selection) -> None:
    """Check that the main rank can run the task without the other ranks if a logger logs the task's graph.

    Raises:
        ConfigurationError: a forward under the strategy is collective.
    """
    strategy = selection.strategy
    name = type(strategy).__name__
    forward_is_collective = strategy.capabilities.lockstep_evaluation and not selection.runs_alone
    for logger in loggers:
        if logger.wants_graph and forward_is_collective:
            raise ConfigurationError(
                f"{type(logger).__name__}(log_graph=True) runs the task on the main rank only, but a forward under "
                f"{name} needs all ranks. Set log_graph=False, or log the graph in a run with devices=1."
            )


def has_step(task: TaskModule, name: str) -> bool:
    """Return whether the task defines the step `name`, such as `"validation_step"`. False for other names."""
    return name in _STEPS and overrides(task, name, TaskModule)
