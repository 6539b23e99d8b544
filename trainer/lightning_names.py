"""Lightning's names for what a Trainer was given and for where its run stands: one line each, read-only."""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Generic, NoReturn, TypeVar

import torch

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.task import TaskModule
from trainwright.loggers import resolve_loggers
from trainwright.loggers.logger import Logger
from trainwright.trainer.evaluation_runner import EvaluationRunner

T = TypeVar("T")

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

    def __get__(self, trainer: Any, owner: type | None = None) -> T:
        if trainer is None:
            return self  # type: ignore[return-value]  # the descriptor itself, for documentation tools
        found: Any = trainer.settings.arguments[self._name]
        return self._unset if found is None else found  # type: ignore[return-value]  # None where T allows it

    def __set__(self, trainer: Any, value: T) -> NoReturn:
        raise AttributeError(f"trainer.{self._name} cannot be changed; pass Trainer({self._name}={value!r}).")


class LightningNames(EvaluationRunner):
    """The attributes by which code that was written for Lightning reads a Trainer."""

    check_val_every_n_epoch = Argument[int | None]()
    enable_autolog_hparams = Argument[bool]()
    gradient_clip_algorithm = Argument[str | None]()
    gradient_clip_val = Argument[int | float | None]()
    limit_predict_batches = Argument[int | float](unset=1.0)
    limit_test_batches = Argument[int | float](unset=1.0)
    limit_train_batches = Argument[int | float](unset=1.0)
    limit_val_batches = Argument[int | float](unset=1.0)
    min_epochs = Argument[int | None]()
    min_steps = Argument[int | None]()
    overfit_batches = Argument[int | float]()
    profiler = Argument[None]()
    reload_dataloaders_every_n_epochs = Argument[int]()
    val_check_interval = Argument[Any](unset=1.0)

    # What it is made of

    @property
    def lightning_module(self) -> TaskModule:
        """The task, by the name that people who come from Lightning know."""
        return self.task

    @property
    def model(self) -> TaskModule | None:
        """The task, which no strategy replaces by a wrapper; None before the first verb."""
        return self._task

    @property
    def logger(self) -> Any | None:
        """The first logger, or None. Set it to a logger, several, a name, True or False between two verbs."""
        return self.loggers[0] if self.loggers else None

    @logger.setter
    def logger(self, logger: Logger | Iterable[Logger] | bool | str | None) -> None:
        if self.stage is not None:
            raise ConfigurationError(f"trainer.logger cannot be changed while {self.stage}() runs. Set it before.")
        self.loggers = resolve_loggers(False if logger is None else logger, self.default_root_dir)

    @property
    def accelerator(self) -> str:
        """The kind of device that is computed on, as torch calls it."""
        return self.strategy.device_type

    @property
    def device_ids(self) -> list[int]:
        """Indices of the devices of this node."""
        return list(self.strategy.device_indices)

    @property
    def node_rank(self) -> int:
        """Rank of this node among the nodes."""
        return self.strategy.processes.topology.node_rank

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int] | None:
        """How many ranks the data is divided among and which of them this is; None for one."""
        return None if self.exchange is None else {"num_replicas": self.strategy.dp_size, "rank": self.strategy.dp_rank}

    @property
    def scaler(self) -> torch.amp.GradScaler | None:
        """The loss scaler of 16-bit mixed precision during a fit, or None."""
        return self.strategy.scaler

    @property
    def checkpoint_callbacks(self) -> list[Any]:
        """Every ModelCheckpoint."""
        return [callback for callback in self.callbacks if hasattr(callback, "best_model_path")]

    @property
    def early_stopping_callbacks(self) -> list[Any]:
        """Every EarlyStopping."""
        return [callback for callback in self.callbacks if hasattr(callback, "stopped_epoch")]

    # Its data

    @property
    def train_dataloader(self) -> Any:
        """What training reads, as the user made it; None before it is made."""
        return None if self._train_data is None else self._train_data.given

    @property
    def val_dataloaders(self) -> Any:
        """What validation reads, as the user made it; None before it is made."""
        return self._given("validate")

    @property
    def test_dataloaders(self) -> Any:
        """What a test reads, as the user made it; None before it is made."""
        return self._given("test")

    @property
    def predict_dataloaders(self) -> Any:
        """What a prediction reads, as the user made it; None before it is made."""
        return self._given("predict")

    def _given(self, kind: str) -> Any:
        return self._eval_data[kind].given if kind in self._eval_data else None

    @property
    def num_sanity_val_batches(self) -> list[int | float]:
        """Batches of each validation loader that are tried before training."""
        most = float("inf") if self.num_sanity_val_steps == -1 else self.num_sanity_val_steps
        return [min(most, number) for number in self.num_val_batches]

    @property
    def enable_validation(self) -> bool:
        """Whether `fit` validates: a validation_step, a loader, and a limit above 0."""
        return self._task is not None and self.has_validation

    @property
    def val_check_batch(self) -> int | float | None:
        """Training batches between two validations; None before they are known, or where another unit counts."""
        return None if self._validation is None else self._validation.num_batches_between

    # Where it stands

    @property
    def is_last_batch(self) -> bool:
        """Whether the training micro-batch that runs, or ran last, is its epoch's last."""
        group = self._group
        return group is not None and group.is_last and group.index == len(group.batches) - 1

    @property
    def received_sigterm(self) -> bool:
        """Whether this process was sent SIGTERM during the present fit."""
        return self.preemption.signal == signal.SIGTERM

    if not TYPE_CHECKING:  # or type checkers would take any name

        def __getattr__(self, name: str) -> NoReturn:
            if hasattr(type(self), name):
                object.__getattribute__(self, name)  # raises what its own code raised
            if name in INTERNALS:
                raise AttributeError(f"trainer.{name} does not exist here: {INTERNALS[name]}.")
            raise AttributeError(f"{type(self).__name__!r} has no attribute {name!r}.{nearest(name, dir(type(self)))}")
