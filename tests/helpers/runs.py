"""A Trainer that does nothing besides training, and what a run did, step by step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule
from trainwright.strategies.registry import STRATEGIES
from trainwright.strategies.shards import gather_full
from trainwright.trainer.trainer import Trainer

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


def quiet_trainer(**arguments: Any) -> Trainer:
    """Return a Trainer on one CPU process without loggers, checkpoints, bars and summaries by default.

    `devices="auto"` takes the processes that a launcher (`run_distributed`) has started. A sharded model leaves its
    full weights on every rank, where tests read them.
    """
    callbacks = arguments.get("callbacks") or []
    callbacks = callbacks if isinstance(callbacks, list) else [callbacks]
    settings = {**QUIET, **arguments}
    if "enable_checkpointing" not in arguments and any(hasattr(c, "best_model_path") for c in callbacks):
        settings["enable_checkpointing"] = None
    if "strategy" in settings:
        settings["strategy"] = _with_full_weights(settings["strategy"])
    return Trainer(**settings)


def fitted(task: TaskModule, *loaders: Any, ckpt_path: Any = None, **arguments: Any) -> Trainer:
    trainer = quiet_trainer(**arguments)
    trainer.fit(task, *loaders, ckpt_path=ckpt_path)
    return trainer


def _with_full_weights(strategy: Any) -> Any:
    made = STRATEGIES.get(strategy)() if strategy in ("fsdp", "tp") else strategy
    if not hasattr(made, "weights_after_stage") or made.weights_after_stage != "main":
        return strategy
    return made.with_options(weights_after_stage="all")


def weights_of(task: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return copies of a module's parameters and buffers by name."""
    return {name: tensor.detach().clone() for name, tensor in task.state_dict().items()}


def assert_equal_weights(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    """Fail unless names, dtypes and every bit agree."""
    torch.testing.assert_close(first, second, rtol=0, atol=0)


class SaveAtEnd(Callback):
    """Saves while the model lies as it is trained; after a stage it is whole again."""

    def __init__(self, path: Path, weights_only: bool = False) -> None:
        self.path, self.weights_only = path, weights_only

    def on_train_end(self, trainer: Any, task: Any) -> None:
        trainer.save_checkpoint(self.path, weights_only=self.weights_only)


class StepRecorder(Callback):
    """Write down each optimizer step's loss, learning rates and gradient norm.

    Attributes:
        losses: this rank's weighted loss of each step.
        lrs: for each step the learning rate of every parameter group of every optimizer, as the step used it.
        norms: total 2-norm of the accumulated, unscaled gradients of each step, before clipping.
        reported: the norms that the Trainer itself reports; None where it computes none.
    """

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.lrs: list[list[float]] = []
        self.norms: list[float] = []
        self.reported: list[float | None] = []

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        if optimizer is not trainer.optimizers[0]:
            return
        grads = [gather_full(p.grad, p.grad.device, keep=True) for p in task.parameters() if p.grad is not None]
        self.norms.append(float(torch.nn.utils.get_total_norm(grads)))
        self.lrs.append([group["lr"] for each in trainer.optimizers for group in each.param_groups])

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.losses.append(float(result.loss))
        self.reported.append(None if result.grad_norm is None else float(result.grad_norm))
