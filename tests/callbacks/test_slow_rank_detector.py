from __future__ import annotations

import time
import warnings
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_data, regression_loader
from trainwright.callbacks import SlowRankDetector


class Slow(RegressionTask):
    """Slow in one part on the last rank; slow communication is a backward that takes long everywhere."""

    def __init__(self, part: str) -> None:
        super().__init__()
        self.part = part

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if self.part == "forward" and self.trainer.global_rank == 1:
            time.sleep(0.02)
        return super().training_step(batch, batch_idx)

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        if self.part == "communication":
            time.sleep(0.05)


class SlowData(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        if torch.distributed.get_rank() == 1:
            time.sleep(0.02)
        return regression_data()[index]


def _train(part: str) -> tuple[list[str], list[dict[str, float]]]:
    detector = SlowRankDetector(every_n_steps=8)
    trainer = quiet_trainer(devices="auto", strategy="ddp", max_steps=17, callbacks=detector)
    loader = torch.utils.data.DataLoader(SlowData()) if part == "data" else regression_loader()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        trainer.fit(Slow(part), loader)
    texts = [str(one.message) for one in seen if "slow" in str(one.message)]
    return texts, detector.seconds


def _train_all() -> list[Any]:
    return [_train(part) for part in ("forward", "data", "communication")]


@pytest.mark.distributed
def test_what_is_slow_is_named_once() -> None:
    by_part = zip(*run_distributed(_train_all, 2), strict=True)
    expected = {
        "forward": "rank 1 is slow in computing: ",
        "data": "rank 1 is slow in waiting for data: ",
        "backward": "communication is slow: ",
    }
    for (key, text), ((texts, seconds), (others, same)) in zip(expected.items(), by_part, strict=True):
        assert len(texts) == 1, texts
        assert texts[0].startswith(text)
        assert others == []
        assert seconds == same
        assert seconds[1][key] > 0.015


def test_one_process_is_measured_alone() -> None:
    detector = SlowRankDetector(every_n_steps=16)
    quiet_trainer(max_epochs=1, callbacks=detector).fit(RegressionTask(), regression_loader())
    (found,) = detector.seconds
    assert all(value > 0 for value in found.values())
