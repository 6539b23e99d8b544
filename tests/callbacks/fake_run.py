"""A run without a Trainer: it keeps the clock, fires events in the loop's order, and notes what callbacks ask for."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from trainwright.callbacks.callback import Callback
from trainwright.callbacks.hook_table import HookTable
from trainwright.core.run import SaveRequest, SchedulerConfig, Stage, Trial
from trainwright.core.state import Group, StepResult, TrainState
from trainwright.core.task import TaskModule


def pass_time(now: list[float], seconds: float) -> Any:
    """Return a function for `FakeRun.fit` by which each call takes so long by the fixture `now`."""
    return lambda run: now.__setitem__(0, now[0] + seconds)


def logged_in_turn(name: str, values: Sequence[float]) -> Callable[[FakeRun], None]:
    """Return a function for `FakeRun.fit` that logs the next of `values` at each call."""
    left = iter(values)
    return lambda run: run.callback_metrics.update({name: next(left)})


class Task(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.backbone = nn.Linear(4, 4)  # which no step uses
        self.batch_size = 1
        self.lr = 0.1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x)
        return out

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self(batch).square().mean()


class FakeTrialSteps:
    def __enter__(self) -> FakeTrialSteps:
        return self

    def __exit__(self, *_: object) -> None:
        for action in self.actions:
            action()

    def __init__(self) -> None:
        self.actions: list[Callable[[], None]] = []

    def at_end(self, action: Callable[[], None]) -> None:
        self.actions.append(action)

    def capacity(self) -> int | None:
        return 8

    def try_out(self, num_steps: int) -> Trial:
        return Trial(fits=True, batch_size=None, reason="")

    def train(self, num_steps: int, *, before_step: Callable[[int], None], after_step: Callable[[float], bool]) -> int:
        for step in range(num_steps):
            before_step(step)
            after_step(1.0 / (1 + math.exp((step - num_steps / 2) / 5)))  # falls most in the middle
        return num_steps


class FakeRun:
    """Enough of `Run` for callbacks; `fit` drives it.

    Further arguments set attributes. Saved checkpoints are made as empty folders at the safe point, and removed ones
    are deleted, as a Trainer would.
    """

    def __init__(
        self, callbacks: Sequence[Callback], root: Path, *, rank: int = 0, world_size: int = 1, **attributes: Any
    ) -> None:
        self.state = TrainState()
        self.stage: Stage | None = "fit"
        self.sanity_checking = False
        self.should_stop = self.interrupted = False
        self.epoch_closes = True

        self.callbacks: list[Any] = list(callbacks)
        self.loggers: list[Any] = ["a logger"]
        self.datamodule: Any = None
        self.optimizers: list[Optimizer] = []
        self.lr_scheduler_configs: list[SchedulerConfig] = []
        self.default_root_dir = str(root)
        self.accumulate_grad_batches = 1
        self.count_tokens = False
        self.log_every_n_steps = 1
        self.max_epochs = -1
        self.max_steps = -1
        self.fast_dev_run: bool | int = False
        self.barebones = False
        self.task = Task()
        self.num_training_batches: int | float = 0
        self.train_batch_size: int | None = None
        self.num_val_batches: list[int | float] = [2]
        self.num_eval_batches: list[int | float] = [2]
        self.estimated_stepping_batches: int | float = 0
        self.has_validation = False
        self.callback_metrics: dict[str, float] = {}
        self.progress_bar_metrics: dict[str, float] = {}
        self.global_rank = self.local_rank = rank
        self.world_size = world_size
        self.is_global_zero = rank == 0
        self.device = torch.device("cpu")
        self.batches_per_group = 1
        self.strategy: Any = None
        # What was asked for
        self.requests: list[SaveRequest] = []
        self.written: list[tuple[int, SaveRequest]] = []
        self.emergencies: list[SaveRequest] = []
        self.stops: list[tuple[int, str]] = []
        self.rollbacks: list[tuple[int, int, str]] = []  # (at step, before step, reason)

        self.logged: list[tuple[int, dict[str, float]]] = []
        self.printed: list[str] = []
        self._actions: list[Callable[[], None]] = []
        assert attributes.keys() <= vars(self).keys()
        vars(self).update(attributes)

    # What it answers

    @property
    def checkpoint_dir(self) -> Path:
        return Path(self.default_root_dir, "checkpoints")

    @property
    def current_epoch(self) -> int:
        return self.state.epoch

    @property
    def global_step(self) -> int:
        return self.state.step

    def log_now(self, metrics: Mapping[str, float]) -> None:
        self.logged.append((self.state.step, dict(metrics)))

    def show_now(self, metrics: Mapping[str, float]) -> None:
        self.callback_metrics.update(metrics)

    def broadcast(self, value: Any, src: int = 0) -> Any:
        assert self.world_size > 1, "one process has nobody to talk to"
        return value

    def at_step_end(self, action: Callable[[], None]) -> None:
        self._actions.append(action)

    def request_save(self, request: SaveRequest) -> None:
        self.requests.append(request)

    def wrote_into(self, folder: Path) -> bool:
        return False

    def remote_names(self, url: str) -> list[str]:
        return []

    def pass_training_data(self) -> None:
        pass

    def emergency_save(self, request: SaveRequest) -> None:
        self.emergencies.append(request)

    def request_stop(self, reason: str, *, closes_epoch: bool = True) -> None:
        self.stops.append((self.state.epoch, reason))
        self.should_stop = True

    def request_rollback(self, reason: str, *, before_step: int) -> None:
        self.rollbacks.append((self.state.step, before_step, reason))

    def print(self, *values: Any) -> None:
        self.printed.append(" ".join(map(str, values)))

    def task_optimizers(self) -> Sequence[Any]:
        return self.optimizers

    def gather_tensor(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def cut_like(self, value: Any, like: torch.Tensor) -> Any:
        return value

    def trial_steps(self, *, alone: bool, remakes_loaders: bool = False) -> FakeTrialSteps:
        return FakeTrialSteps()

    # How it goes on

    def fit(
        self,
        *,
        epochs: int,
        batches: int,
        val_every: int | None = None,
        on_step: Callable[[FakeRun], None] | None = None,
        on_validation: Callable[[FakeRun], None] | None = None,
        on_epoch_end: Callable[[FakeRun], None] | None = None,
    ) -> None:
        """Train up to `epochs` epochs of `batches` steps; the functions given log what a task would.

        `val_every`: steps between validations; None: at the epoch's end when `has_validation`.
        """
        self.stage = "fit"
        self.num_training_batches = batches
        self.hooks = HookTable(self.callbacks, self.task)
        self._fire("setup", "fit")
        self._fire("on_fit_start")
        self._fire("on_train_start")
        while self.state.epoch < epochs and not self.should_stop:
            self._fire("on_train_epoch_start")
            while self.state.batch_in_epoch < batches and not self.should_stop:
                self._step(on_step)
                step = self.state.step_in_epoch
                if self.has_validation and (step % val_every == 0 if val_every else step == batches):
                    self._validate(on_validation)
                if step < batches:
                    self.step_end()
            if on_epoch_end is not None:
                on_epoch_end(self)
            self._fire("on_train_epoch_end")
            self.step_end()
            self.state.begin_next_epoch()
        self._fire("on_train_end")
        self.step_end()
        self._fire("on_fit_end")
        self._fire("teardown", "fit")

    def step_end(self) -> None:
        actions, self._actions = self._actions, []
        for action in actions:
            action()
        requests, self.requests = self.requests, []
        for request in requests:
            self.written.append((self.state.step, request))
            if self.is_global_zero:
                self._write(request)

    def saved_names(self) -> list[str]:
        folder = self.checkpoint_dir
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def _write(self, request: SaveRequest) -> None:
        folder = request.folder or self.checkpoint_dir
        (folder / request.name).mkdir(parents=True, exist_ok=True)
        for name in request.remove:
            (folder / name).rmdir()

    def _step(self, on_step: Callable[[FakeRun], None] | None) -> None:
        group = Group([torch.zeros(2, 4)] * self.batches_per_group, self.state.batch_in_epoch)
        self._fire("on_train_step_start", group)
        self.state.step += 1
        self.state.step_in_epoch += 1
        self.state.batches += self.batches_per_group
        self.state.batch_in_epoch += self.batches_per_group
        self.state.samples += 2 * self.batches_per_group
        if self.count_tokens:
            self.state.tokens += 8 * self.batches_per_group
        if on_step is not None:
            on_step(self)
        self._fire("on_train_step_end", StepResult(None))

    def _validate(self, on_validation: Callable[[FakeRun], None] | None) -> None:
        self._fire("on_validation_start")
        for index in range(int(sum(self.num_eval_batches))):
            self._fire("on_validation_batch_end", None, None, index)
        if on_validation is not None:
            on_validation(self)
        self._fire("on_validation_end")

    def _fire(self, event: str, *args: Any) -> None:
        for hook in getattr(self.hooks, event):
            hook(self, self.task, *args)
