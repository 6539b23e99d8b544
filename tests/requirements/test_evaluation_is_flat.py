"""An evaluation holds no outputs: ten times the data, the same peak of memory."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask
from trainwright.callbacks import BasePredictionWriter
from trainwright.callbacks.callback import Callback

_OUTPUT_BYTES = 64 * 1024
_FEW = 30
STAGES = pytest.mark.parametrize(
    ("stage", "writes"), [("validate", False), ("test", False), ("predict", False), ("predict", True)]
)


class _Task(RegressionTask):
    """Returns 64 KiB for each batch, logs on step and epoch, and remembers nothing."""

    def _evaluate(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        if not self.trainer.predicting:  # nobody would read it in a prediction
            self.log("loss", self.loss(batch), on_step=True, on_epoch=True)
        return self(batch[0]).expand(1, _OUTPUT_BYTES // 4) * 1.0

    validation_step = test_step = predict_step = _evaluate  # type: ignore[assignment]  # returns what it computed


def _place_and_bytes(storage: torch.UntypedStorage) -> tuple[int, int] | None:
    """Return where memory lies and its size; None for meta and fake tensors' that earlier tests may have left."""
    if storage.device.type != "cpu":
        return None
    try:
        return storage.data_ptr(), storage.nbytes()
    except RuntimeError:  # of a fake tensor: it says a size and a device, and has no memory
        return None


class _Weighs(Callback):
    """Adds up the storages of all live tensors at every 15th batch, and keeps the largest sum."""

    def __init__(self) -> None:
        self.peak_bytes = 0

    def _weigh(self, batch_idx: int) -> None:
        if batch_idx % 15 == 14:
            tensors = (o for o in gc.get_objects() if issubclass(type(o), torch.Tensor))
            found = [o.untyped_storage() for o in tensors if o.layout == torch.strided]  # others have none
            self.peak_bytes = max(self.peak_bytes, sum(dict(filter(None, map(_place_and_bytes, found))).values()))

    def on_validation_batch_end(
        self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        self._weigh(batch_idx)

    on_test_batch_end = on_predict_batch_end = on_validation_batch_end


class _Writer(BasePredictionWriter):
    """Takes every batch, keeps none."""

    def write_on_batch_end(self, *args: Any) -> None:
        pass


class _Repeated:
    """The same batch over and over: the data itself takes no memory."""

    def __init__(self, num: int) -> None:
        self.num = num
        self.batch = [torch.ones(1, 4), torch.zeros(1, 1)]

    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Batch:
        if index >= self.num:
            raise IndexError(index)
        return self.batch


def _evaluate(stage: str, num_batches: int, callbacks: list[Callback]) -> None:
    options = {"return_predictions": False} if stage == "predict" else {"verbose": False}
    getattr(quiet_trainer(callbacks=callbacks), stage)(_Task(), _Repeated(num_batches), **options)


@pytest.mark.slow
@STAGES
def test_ten_times_the_data_takes_the_same_tensors(stage: str, writes: bool) -> None:
    peaks = []
    for num_batches in (_FEW, 10 * _FEW):
        weighs = _Weighs()
        gc.collect()
        gc.freeze()  # what earlier tests have left is not counted, nor is it looked at
        _evaluate(stage, num_batches, [weighs, _Writer()] if writes else [weighs])
        peaks.append(weighs.peak_bytes)
    assert peaks[1] - peaks[0] < _OUTPUT_BYTES  # not one output more
