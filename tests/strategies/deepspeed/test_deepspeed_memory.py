"""What a rank holds under DeepSpeed at each stage: bytes against the formula of docs/deepspeed.md."""

from __future__ import annotations

import gc
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from trainwright.callbacks.callback import Callback
from trainwright.core.task import TaskModule
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.distributed

RANKS = 2
WIDTH, DEPTH = 512, 8
NUM_PARAMETERS = DEPTH * WIDTH * WIDTH
BUCKET = WIDTH * WIDTH + 1000  # elements; a little more than the largest parameter
CASES = [("32-true", 0), *((precision, stage) for precision in ("32-true", "bf16-mixed") for stage in (1, 2, 3))]


class Deep(TaskModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        output: torch.Tensor = self.net(batch)
        return output.square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def tensors(task: nn.Module) -> Iterator[torch.Tensor]:
    """Yield every tensor of this process, also gradients that no Python object holds."""
    for parameter in task.parameters():
        yield from (value for value in (parameter.grad, getattr(parameter, "grad_accum", None)) if value is not None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of attributes that torch has renamed, which a look at them calls
        yield from (found for found in gc.get_objects() if isinstance(found, torch.Tensor))


class Bytes(Callback):
    """Counts the bytes of all tensors in the second step: within it, before the optimizer steps, and after it."""

    def __init__(self) -> None:
        self.seen: dict[str, int] = {}

    def _count(self, when: str, task: Any) -> None:
        time.sleep(0.05)  # gloo's threads release what they have sent a moment after it is received
        gc.collect()
        storages = [tensor.untyped_storage() for tensor in tensors(task) if tensor.device.type == "cpu"]
        self.seen[when] = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def on_after_backward(self, trainer: Any, task: Any) -> None:
        if trainer.global_step == 1 and "within" not in self.seen:  # the first of two micro-batches
            self._count("within", task)

    def on_before_optimizer_step(self, trainer: Any, task: Any, optimizer: Any) -> None:
        if trainer.global_step == 1:
            self._count("stepping", task)

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if trainer.global_step == 2:
            self._count("between", task)


def _look() -> dict[tuple[str, int], dict[str, int]]:
    warnings.simplefilter("ignore")
    found = {}
    for precision, stage in CASES:
        counter = Bytes()
        strategy = DeepSpeedStrategy(
            {
                "zero_optimization": {
                    "stage": stage, "reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET,
                    "overlap_comm": False, "stage3_param_persistence_threshold": 0,
                },
                "zero_allow_untested_optimizer": True,
            }
        )  # fmt: skip
        trainer = quiet_trainer(
            devices="auto", strategy=strategy, precision=precision, max_steps=2, accumulate_grad_batches=2,
            callbacks=[counter],
        )  # fmt: skip
        trainer.fit(Deep(), [torch.randn(2, WIDTH) for _ in range(8)])
        found[precision, stage] = counter.seen
    return found


@pytest.fixture(scope="module")
def seen() -> list[dict[tuple[str, int], dict[str, int]]]:
    return run_distributed(_look, RANKS, timeout=240, init=False)


def formula(precision: str, stage: int, when: str) -> float:
    """Return the bytes for each parameter that the page says: parameters, copy, Adam's states and gradients."""
    size, n = (4 if precision == "32-true" else 2), RANKS
    if stage == 0:
        return size + 8 + (0 if when == "between" else size)
    if stage == 3:
        return size / n + 4 / n + 8 / n + size / n
    whole = stage == 1 and when == "within"
    return size + 4 / n + 8 / n + (0 if when == "between" else size if whole else size / n)


@pytest.mark.parametrize("when", ["within", "stepping", "between"])
@pytest.mark.parametrize(("precision", "stage"), CASES)
@pytest.mark.exhaustive
def test_a_rank_holds_the_bytes_that_the_formula_says(
    precision: str, stage: int, when: str, seen: list[dict[tuple[str, int], dict[str, int]]]
) -> None:
    expected = formula(precision, stage, when) * NUM_PARAMETERS
    bucket = BUCKET * (4 if precision == "32-true" else 2)  # in which gradients are sent; stage 3 keeps its own
    for rank in seen:
        held = rank[precision, stage][when]
        assert 0.99 * expected < held < 1.01 * expected + bucket
