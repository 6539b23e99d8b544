"""Two models that have nothing to do with each other train in one run, each in an engine of its own."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.callbacks.fake_run import FakeRun
from tests.helpers.distributed import run_distributed
from trainwright import DeepSpeedStrategy, TaskModule
from trainwright.callbacks.hook_table import HookTable
from trainwright.core.process import detect
from trainwright.core.state import Group
from trainwright.strategies import Precision
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.steps.gradients import GradientClip

_STEPS = 4


class Regression(TaskModule):
    """A small network; each kind begins with weights of its own."""

    def __init__(self, seed: int, width: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.net = nn.Sequential(nn.Linear(4, width), nn.Tanh(), nn.Linear(width, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return functional.mse_loss(self.net(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


def _batches(rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rank)
    inputs = [torch.randn(3, 4, generator=generator) for _ in range(_STEPS)]
    return [(x, x.sum(dim=1, keepdim=True).sin()) for x in inputs]


class Driven:
    """An engine that a user-written loop drives, beside others."""

    def __init__(self, task: TaskModule, stage: int) -> None:
        self.task = task
        run: Any = FakeRun([], Path())
        run.task, run.lr_scheduler_configs = task, []
        object.__setattr__(task, "_run", run)
        settings = EngineSettings("cpu", [0, 1], 1, Precision.parse("32-true"))
        self.engine = DeepSpeedStrategy(stage=stage).engine(settings)
        self.engine.start(detect())
        self.engine.prepare(task, lambda: [task.configure_optimizers()], run)  # type: ignore[list-item]
        self.engine.attach(run, HookTable((), task), SimpleNamespace(batch=None))

    def step(self, batch: Any, idx: int) -> float:
        loss = self.engine.step.forward_backward(Group([batch], idx))
        assert loss is not None
        self.engine.step.optimizer_step(GradientClip(0.5))
        return float(loss)


def _train(stages: tuple[int, int], order: str) -> dict[str, Any]:
    rank = detect().rank
    driven = {"first": Driven(Regression(1, 12), stages[0])} if "first" in order else {}
    if "second" in order:
        driven["second"] = Driven(Regression(2, 20), stages[1])
    losses: dict[str, list[float]] = {name: [] for name in driven}
    for idx, batch in enumerate(_batches(rank)):
        for name, each in driven.items():
            losses[name].append(each.step(batch, idx))
    weights = {name: each.engine.state.full_parameters() for name, each in driven.items()}
    for each in reversed(driven.values()):
        each.engine.processes.barrier()
        each.engine.close()
    return {"losses": losses, "weights": weights}


def _both_and_each(stages: tuple[int, int]) -> list[dict[str, Any]]:
    return [_train(stages, order) for order in ("first second", "first", "second")]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("stages", [(2, 3), (1, 1), (3, 3)])
def test_two_disjoint_models_train_as_each_would_alone(stages: tuple[int, int]) -> None:
    for both, first, second in run_distributed(_both_and_each, 2, stages, init=False, timeout=240):
        assert both["losses"] == first["losses"] | second["losses"]
        for name, alone in (("first", first), ("second", second)):
            assert both["weights"][name].keys() == alone["weights"][name].keys()
            for key, tensor in alone["weights"][name].items():
                assert torch.equal(both["weights"][name][key], tensor)
        assert both["losses"]["first"] != both["losses"]["second"]
