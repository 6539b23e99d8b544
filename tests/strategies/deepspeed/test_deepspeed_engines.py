"""DeepSpeed's own optimizers, schedulers and number formats, models that are cut as they are built, and the host."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.helpers.deepspeed_operations import needs_operation
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import SaveAtEnd, quiet_trainer
from tests.strategies.fsdp.sharded import Blocks, assert_trained_alike, batches, train
from trainwright.callbacks.weight_averaging import EMAWeightAveraging
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import ConfigurationError
from trainwright.strategies.deepspeed.placeholders import DummyOptim, DummyScheduler
from trainwright.strategies.deepspeed.strategy import DeepSpeedStrategy

pytestmark = pytest.mark.distributed


class Named(Blocks):
    def configure_optimizers(self) -> Any:
        optimizer = DummyOptim([p for p in self.parameters() if p.requires_grad], lr=self.lr, weight_decay=0.01)
        return {"optimizer": optimizer, "lr_scheduler": DummyScheduler(optimizer, warmup_num_steps=4)}


class Scheduled(Blocks):
    def configure_optimizers(self) -> Any:
        optimizer = DummyOptim([p for p in self.parameters() if p.requires_grad], lr=self.lr)
        return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)]


def config(stage: int) -> dict[str, Any]:
    rise = {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto", "warmup_type": "linear"}
    return {
        "zero_optimization": {"stage": stage},
        "optimizer": {"type": "AdamW", "params": {"lr": "auto", "weight_decay": "auto", "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": rise},
        "train_micro_batch_size_per_gpu": "auto",
    }


def _named(folder: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    strategy = DeepSpeedStrategy(config(3))
    whole = train(strategy, 2, Named())
    train(strategy, 2, Named(), max_epochs=1, save_to=folder)
    continued = train(strategy, 2, Named(), ckpt_path=folder)
    return {**whole, "continued": continued["weights"]}


def _as_in_one_process(rates: list[float]) -> dict[str, Any]:
    """The same optimizer, with the rates that DeepSpeed's schedule has given, by plain PyTorch."""

    class Plain(Blocks):
        def configure_optimizers(self) -> Any:
            parameters = [p for p in self.parameters() if p.requires_grad]
            optimizer = torch.optim.AdamW(parameters, lr=self.lr, weight_decay=0.01)
            rise = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: [*rates, 0.0][step] / self.lr)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rise, "interval": "step"}}

    return train("single", 1, Plain())


@pytest.mark.filterwarnings("ignore:.*:UserWarning")
def test_an_optimizer_and_a_schedule_of_the_configuration_train_and_continue(tmp_path: Path) -> None:
    by_rank = run_distributed(_named, 2, tmp_path / "half", timeout=280, init=False)
    rates = by_rank[0]["rates"]
    alone = _as_in_one_process(rates)
    assert rates == sorted(rates)
    assert 0 < rates[-1] < 0.05
    for rank in by_rank:
        torch.testing.assert_close(rank["weights"], alone["weights"], rtol=0, atol=1e-5)
        torch.testing.assert_close(rank["continued"], rank["weights"], rtol=0, atol=0)
    saved = read_checkpoint(tmp_path / "half").optimizers[0]
    assert saved["class"] == "AdamW"
    assert set(saved["groups"][0]) == {*torch.optim.AdamW([torch.zeros(1)]).param_groups[0]}


class Damped(Blocks):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        from deepspeed.utils import safe_get_full_grad, safe_set_full_grad

        for parameter in self.parameters():
            if parameter.requires_grad:
                safe_set_full_grad(parameter, 0.01 * safe_get_full_grad(parameter))


def _damped() -> list[Any]:
    warnings.simplefilter("ignore")
    strategy = DeepSpeedStrategy(stage=2, offload_optimizer=True)
    return [train(strategy, 1, task, max_epochs=1)["reported"][0] for task in (Blocks(), Damped())]


@pytest.mark.engines
@needs_operation("CPUAdamBuilder")
def test_an_offloaded_optimizer_clips_the_gradients_that_a_hook_has_changed() -> None:
    ((norm, damped),) = run_distributed(_damped, 1, timeout=280, init=False)
    assert damped == pytest.approx(0.01 * norm, rel=1e-4)


class Teacher(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(17)
            self.net = nn.Sequential(nn.Linear(5, 64), nn.Tanh(), nn.Linear(64, 5))
        self.requires_grad_(False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)


class Student(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.teacher = Teacher()
        self.held: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.held.append(sum(parameter.numel() for parameter in self.teacher.parameters()))
        with torch.no_grad():
            wanted = self.teacher(batch)
        return (self(batch) - wanted).square().mean()


def _distil(path: Path) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    task = Student()
    zero = {"stage": 2, "stage3_param_persistence_threshold": 0}
    strategy = DeepSpeedStrategy({"zero_optimization": zero}, frozen_modules=("Teacher",))
    found = train(strategy, 2, task) | {"held": task.held}
    train(strategy, 2, Student(), max_epochs=1, callbacks=[SaveAtEnd(path)])
    return found | {"continued": train(strategy, 2, Student(), ckpt_path=path)["weights"]}


def test_a_frozen_teacher_in_pieces_beside_a_whole_student_trains_as_in_one_process(tmp_path: Path) -> None:
    alone = train("single", 1, Student())
    by_rank = run_distributed(_distil, 2, tmp_path / "distilled", timeout=290, init=False)
    assert_trained_alike(by_rank, alone)
    total = sum(parameter.numel() for parameter in Teacher().parameters())
    for found in by_rank:
        assert max(found["held"]) < total / 2  # what is not gathered has no elements
        torch.testing.assert_close(found["continued"], alone["weights"], rtol=0, atol=1e-5)


def test_averaged_weights_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="EMAWeightAveraging averages the trained weights"):
        quiet_trainer(strategy="deepspeed_stage_1", callbacks=[EMAWeightAveraging()])


class _Returns(Blocks):
    def __init__(self, optimizers: Any) -> None:
        super().__init__()
        self.returned = optimizers

    def configure_optimizers(self) -> Any:
        return self.returned(self)


class _Sparse(_Returns):
    def __init__(self, optimizers: Any) -> None:
        super().__init__(optimizers)
        self.words = nn.Embedding(4, 2, sparse=True)


def _sgd(task: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(task.parameters(), lr=0.1)


_UNSCHEDULED = {key: value for key, value in config(2).items() if key != "scheduler"}
_ON_DISK = {"stage": 3, "offload_parameters": True, "offload_params_device": "nvme"}
_REFUSED: list[tuple[Callable[[], Blocks], dict[str, Any], str]] = [
    (lambda: _Returns(lambda task: [_sgd(task), _sgd(task)]), {"stage": 2}, "returned 2 optimizers"),
    (lambda: _Returns(lambda task: torch.optim.LBFGS(task.parameters())), {"stage": 2}, "LBFGS evaluates"),
    (lambda: _Returns(_sgd), {"stage": 2, "offload_optimizer": True}, "DeepSpeedCPUAdam"),
    (Scheduled, {"config": _UNSCHEDULED}, "LambdaLR was created with a DummyOptim"),
    (Blocks, {"config": config(2)}, "has an 'optimizer'"),
    (Blocks, _ON_DISK, "configure_model"),
    (Blocks, {"stage": 2, "moe_leaf_modules": ("Block",)}, "has no effect at stage=2"),
    (Blocks, {"stage": 2, "frozen_modules": ("Block",)}, "has requires_grad=True"),
    (lambda: _Sparse(_sgd), {"stage": 1}, "words has sparse=True"),
]


def _refuse() -> list[str]:
    texts = []
    for make, options, _ in _REFUSED:
        with pytest.raises(ConfigurationError) as raised:
            quiet_trainer(devices="auto", strategy=DeepSpeedStrategy(**options), max_epochs=1).fit(make(), batches())
        texts.append(str(raised.value))
    return texts


def test_what_an_engine_cannot_train_is_said_before_there_is_one() -> None:
    (texts,) = run_distributed(_refuse, 1, timeout=280, init=False)
    for text, (_, _, expected) in zip(texts, _REFUSED, strict=True):
        assert expected in text
