from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.callbacks import ModelCheckpoint
from trainwright.loggers import CSVLogger, Logger, TensorBoardLogger
from trainwright.utilities import rank_zero_only


class OfLightning(Logger):
    """As Lightning's documentation writes one, but for the import; its `__init__` does not call the base's."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    @property
    def name(self) -> str:
        return "mine"

    @property
    def version(self) -> str:
        return "0.1"

    @property
    def experiment(self) -> list[Any]:
        return self.calls

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.calls.append(("hyperparams", dict(params)))

    @rank_zero_only
    def log_metrics(self, *, step: int, metrics: Any) -> None:
        self.calls.append(("metrics", step, sorted(metrics)))

    @rank_zero_only
    def save(self) -> None:
        super().save()
        self.calls.append("save")

    @rank_zero_only
    def finalize(self, status: str) -> None:
        super().finalize(status)  # type: ignore[arg-type]  # as it is written there
        self.calls.append(("finalize", status))

    def after_save_checkpoint(self, checkpoint_callback: Any) -> None:
        self.calls.append(("saved", type(checkpoint_callback).__name__))


class WithHyperparameters(RegressionTask):
    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(lr)
        self.save_hyperparameters()


def test_a_logger_written_for_lightning_works_unchanged(tmp_path: Path) -> None:
    logger = OfLightning()
    logger.log_metrics(metrics={"early": 1.0}, step=0)
    trainer = quiet_trainer(
        max_steps=2, log_every_n_steps=1, logger=logger, callbacks=ModelCheckpoint(tmp_path), default_root_dir=tmp_path
    )
    trainer.fit(WithHyperparameters(), regression_loader(4))
    assert logger.calls[:2] == [("metrics", 0, ["early"]), ("hyperparams", {"lr": 0.05})]
    assert [call[1] for call in logger.calls if call[0] == "metrics"][1:3] == [0, 1]
    assert ("saved", "ModelCheckpoint") in logger.calls
    assert logger.calls[-2:] == ["save", ("finalize", "success")]
    assert logger.experiment is logger.calls
    assert (logger.group_separator, logger.save_dir, logger.root_dir) == ("/", None, None)


def test_save_and_finalize_flush_and_close_a_logger(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path)
    logger.log_metrics({"a": 1.0}, 0)
    logger.save()
    assert logger.metrics_file.read_text() == "step,a\n0,1.0\n"
    logger.finalize("success")
    assert not logger.is_started
    assert TensorBoardLogger(tmp_path, sub_dir="events").sub_dir == Path("events")
    board = TensorBoardLogger(tmp_path)
    board.log_hyperparams({"lr": 0.1})
    assert board.hparams == {"lr": 0.1}
    board.finalize("success")
