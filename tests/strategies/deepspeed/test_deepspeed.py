"""DeepSpeed: what each rank holds and shows, what it saves, and what it would do wrong without a word."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.strategies.fsdp.sharded import Blocks, assert_trained_alike, batches, train
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.strategies.deepspeed.step import EngineOptimizer
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.distributed


_OPTIONS: dict[str, dict[str, Any]] = {
    "states": {"stage": 1},
    "gradients, in small buckets": {"stage": 2, "reduce_bucket_size": 20, "allgather_bucket_size": 20},
    "parameters, group by group": {"stage": 3, "sub_group_size": 40, "overlap_comm": False},
    "every parameter": {
        "config": {
            "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, "reduce_bucket_size": 30},
            "zero_allow_untested_optimizer": True,
        }
    },
}


class Inside(Callback):
    def __init__(self) -> None:
        self.empty = 0
        self.numel = 0

    def on_train_end(self, trainer: Any, task: Any) -> None:
        self.numel = sum(p.numel() for group in trainer.optimizers[0].param_groups for p in group["params"])
        states = trainer.optimizers[0].state.values()
        self.numel += sum(state["exp_avg"].numel() for state in states)
        self.empty = sum(p.numel() == 0 for p in task.parameters())


class Whole(Callback):
    """Asks for whole gradients and parameters in each step."""

    def __init__(self) -> None:
        self.gradients: list[dict[str, torch.Tensor]] = []
        self.parameters: list[dict[str, torch.Tensor]] = []

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        self.gradients.append({n: g.clone() for n, g in trainer.strategy.state.full_gradients().items()})

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        self.parameters.append({n: p.clone() for n, p in trainer.strategy.state.full_parameters().items()})


class _LeavesGroup(Blocks):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if self.current_epoch == 0 and batch_idx == (5 if self._run.world_size == 1 else 3) else None


def _train_with_all() -> dict[str, Any]:
    found = {}
    for name, options in _OPTIONS.items():
        inside, whole = Inside(), Whole()
        found[name] = train(DeepSpeedStrategy(**options), 2, callbacks=[inside, whole])
        found[name] |= {"empty": inside.empty, "held": inside.numel}
        found[name] |= {"gradients": whole.gradients, "parameters": whole.parameters}
    found["left"] = [
        train(DeepSpeedStrategy(stage=stage), 2, _LeavesGroup(), accumulate_grad_batches=2) for stage in (2, 3)
    ]
    return found


@pytest.fixture(scope="module")
def trained() -> list[dict[str, Any]]:
    return run_distributed(_train_with_all, 2, timeout=290, init=False)


def test_each_rank_holds_its_pieces_only(trained: list[dict[str, Any]]) -> None:
    total = sum(p.numel() for p in Blocks().parameters() if p.requires_grad)
    assert max(found["states"]["held"] for found in trained) < 1.2 * total  # values and one state, of one half
    assert trained[0]["every parameter"]["empty"] > 5


@pytest.mark.parametrize("name", _OPTIONS)
def test_gradients_and_parameters_can_be_seen_whole_in_each_step(name: str, trained: list[dict[str, Any]]) -> None:
    whole = Whole()
    train("single", 1, callbacks=[whole])
    for found in trained:
        for kind, expected in (("gradients", whole.gradients), ("parameters", whole.parameters)):
            assert [list(step) for step in found[name][kind]] == [list(step) for step in expected]
            torch.testing.assert_close(found[name][kind], expected, rtol=0, atol=1e-5)


def test_a_group_that_is_left_between_its_micro_batches_leaves_no_gradient_behind(trained: list[Any]) -> None:
    alone = train("single", 1, _LeavesGroup())
    for number in range(2):
        assert_trained_alike([found["left"][number] for found in trained], alone)


class Factored(Blocks):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adafactor([p for p in self.parameters() if p.requires_grad])


class Thawing(Blocks):
    def __init__(self, begins: bool) -> None:
        super().__init__()
        self.begins = begins
        self.blocks[1].requires_grad_(begins)

    def on_train_epoch_start(self) -> None:
        self.blocks[1].requires_grad_(self.begins == (self.current_epoch % 2 == 0))

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class _ReturnsNone(Blocks):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)


def _try_all() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for stage in (1, 3):
        with pytest.raises(ConfigurationError) as refused:
            quiet_trainer(devices="auto", strategy=DeepSpeedStrategy(stage=stage)).fit(Factored(), batches())
        found[f"adafactor {stage}"] = str(refused.value)
        for begins in (False, True):
            trainer = quiet_trainer(devices="auto", strategy=DeepSpeedStrategy(stage=stage), max_epochs=2)
            with pytest.raises(TaskError) as failed:
                trainer.fit(Thawing(begins), batches())
            found[f"thawing {stage} {begins}"] = str(failed.value), trainer.global_step
    with pytest.raises(TaskError) as none:
        quiet_trainer(devices="auto", strategy="deepspeed_stage_2", max_epochs=1).fit(_ReturnsNone(), batches())
    found["none"] = str(none.value)
    return found


@pytest.fixture(scope="module")
def tried() -> list[dict[str, Any]]:
    return run_distributed(_try_all, 2, timeout=240, init=False)


def test_an_optimizer_that_looks_at_whole_matrices_is_refused(tried: list[dict[str, Any]]) -> None:
    for found in tried:
        assert "Adafactor needs full matrices" in found["adafactor 1"]
        assert "Adafactor needs full matrices" in found["adafactor 3"]


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize(("begins", "what"), [(False, "unfrozen"), (True, "frozen")])
def test_what_is_frozen_or_thawed_later_is_an_error_before_the_step(
    stage: int, begins: bool, what: str, tried: list[dict[str, Any]]
) -> None:
    for found in tried:
        message, steps = found[f"thawing {stage} {begins}"]
        assert f"blocks.1.norm.weight was {what} after" in message
        assert steps == 4  # those of the first epoch


def test_a_step_without_a_loss_is_an_error(tried: list[dict[str, Any]]) -> None:
    assert all("Return a zero loss" in found["none"] for found in tried)


def test_the_optimizer_of_a_task_can_be_copied() -> None:
    optimizer = EngineOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1), engine=None)
    assert copy.copy(optimizer).param_groups is optimizer.param_groups
