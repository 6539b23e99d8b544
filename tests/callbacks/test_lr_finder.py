from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from tests.helpers.runs import StepRecorder, fitted, quiet_trainer
from tests.helpers.tasks import RegressionTask, StepTask, regression_loader
from trainwright.callbacks import LearningRateFinder
from trainwright.callbacks.lr_finder import LRFinder
from trainwright.checkpoint import read_checkpoint
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.loggers import CSVLogger
from trainwright.trainer.search.tuner import Tuner


def _find(task: Any = None, **options: Any) -> LRFinder:
    found = Tuner(quiet_trainer()).lr_find(task or RegressionTask(), regression_loader(64, 8), **options)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("options", "lrs"),
    [
        ({"min_lr": 1e-6, "max_lr": 1e-2}, [1e-6, 1e-5, 1e-4, 1e-3, 1e-2]),
        ({"min_lr": 0.1, "max_lr": 0.5, "mode": "linear"}, [0.1, 0.2, 0.3, 0.4, 0.5]),
    ],
    ids=["by equal factors", "by equal steps"],
)
def test_learning_rates_go_from_the_smallest_to_the_largest(options: dict[str, Any], lrs: list[float]) -> None:
    assert _find(num_training=5, update_attr=False, **options).results["lr"] == pytest.approx(lrs)


def test_losses_are_a_running_mean_that_starts_with_the_first_loss() -> None:
    losses = iter([4.0, 2.0, 1.0])
    task = StepTask(lambda task, batch, idx: 0 * task.loss(batch) + next(losses))
    found = _find(task, num_training=3, update_attr=False)
    weights = [0.02 * 0.98**2, 0.02 * 0.98, 0.02]
    third = sum(w * x for w, x in zip(weights, [4.0, 2.0, 1.0], strict=True)) / (1 - 0.98**3)
    assert found.results["loss"][0] == pytest.approx(4.0)
    assert found.results["loss"][2] == pytest.approx(third)


def test_too_few_points_give_no_suggestion_but_a_warning() -> None:
    with pytest.warns(TrainwrightWarning, match="0 of 5 points remain"):
        found = _find(num_training=5)
    with pytest.warns(TrainwrightWarning, match="Increase num_training"):
        assert found.suggestion() is None


def test_a_loss_that_explodes_ends_the_test() -> None:
    stopped = _find(min_lr=1e-3, max_lr=1e4, update_attr=False).results["loss"]
    assert 5 < len(stopped) < 100
    assert stopped[-1] > 4 * min(stopped)
    whole = _find(min_lr=1e-3, max_lr=1e4, update_attr=False, early_stop_threshold=None).results["loss"]
    assert len(whole) == 100


@pytest.mark.parametrize("name", ["learning_rate", "speed"])
def test_the_attribute_takes_the_suggestion(name: str) -> None:
    class Task(RegressionTask):
        def __init__(self) -> None:
            super().__init__()
            del self.lr
            setattr(self, name, 0.5)

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=getattr(self, name))

    task = Task()
    found = _find(task, attr_name=name if name == "speed" else "")
    assert getattr(task, name) == found.suggestion()


def test_an_attribute_that_is_nowhere_is_an_error_that_lists_candidates() -> None:
    class Task(RegressionTask):
        def __init__(self) -> None:
            super().__init__()
            del self.lr
            self.rate = 0.5

    with pytest.raises(ConfigurationError, match=r"has no 'lr' or 'learning_rate'.* Task\.rate = 0\.5"):
        _find(Task())


def test_a_callback_searches_before_the_fit_which_uses_what_was_found() -> None:
    finder, recorder = LearningRateFinder(), StepRecorder()
    task = RegressionTask()
    trainer = fitted(task, regression_loader(64, 8), max_epochs=1, callbacks=[finder, recorder])
    assert finder.optimal_lr is not None
    assert task.lr == finder.optimal_lr.suggestion()
    assert recorder.lrs == [[task.lr]] * 8
    assert trainer.global_step == 8


class _WithTwo(RegressionTask):
    def __init__(self, *, automatic: bool) -> None:
        super().__init__()
        self.automatic_optimization = automatic

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(self.net[i].parameters(), 0.1) for i in (0, 3)]


@pytest.mark.parametrize(
    ("automatic", "message"), [(True, "returned 2 optimizers"), (False, "uses manual optimization")]
)
def test_a_task_without_one_learning_rate_is_refused(automatic: bool, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _find(_WithTwo(automatic=automatic))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "exponentail"}, "Did you mean 'exponential'"),
        ({"min_lr": 2.0}, "0 < min_lr < max_lr"),
        ({"method": "test"}, "method='fit'"),
    ],
)
def test_arguments_out_of_range_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        _find(**options)


@pytest.mark.slow
@pytest.mark.requires("matplotlib", reason="it draws the plot")
def test_a_plot_shows_the_losses_and_the_suggestion() -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    found = _find()
    figure = found.plot(suggest=True)
    [axes] = figure.axes
    assert axes.get_xscale() == "log"
    assert list(axes.lines[0].get_ydata()) == found.results["loss"]
    assert axes.lines[1].get_xdata() == [found.suggestion()]
    assert found.plot(ax=axes) is figure
    plt.close(figure)


class _SavesRate(RegressionTask):
    def __init__(self, lr: float = 1e-3) -> None:
        super().__init__()
        self.save_hyperparameters()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


@pytest.mark.filterwarnings("ignore:LearningRateFinder")
def test_a_resumed_run_keeps_the_rate_that_was_found_and_searches_no_second_time(tmp_path: Path) -> None:
    def fit(max_steps: int, ckpt_path: Path | None = None) -> tuple[Any, _SavesRate, LearningRateFinder]:
        finder, task = LearningRateFinder(num_training_steps=40), _SavesRate()
        trainer = quiet_trainer(max_steps=max_steps, callbacks=[finder], default_root_dir=tmp_path)
        trainer.fit(task, regression_loader(64, 8), ckpt_path=ckpt_path)
        return trainer, task, finder

    first, searched, _ = fit(3)
    assert searched.hparams.lr != 1e-3
    path = first.save_checkpoint(tmp_path / "three")
    second, resumed, finder = fit(5, path)
    assert finder.optimal_lr is None
    assert second.global_step == 5
    assert resumed.hparams.lr == second.optimizers[0].param_groups[0]["lr"] == searched.hparams.lr
    again = second.save_checkpoint(tmp_path / "five")
    assert read_checkpoint(again).trainer["hyper_parameters"] == {"lr": searched.hparams.lr}


@pytest.mark.parametrize(
    ("losses", "says"),
    [
        ([3.0, 2.0], "too few for a curve"),
        ([9 - 0.1 * i * i for i in range(8)], "at the end of the tested range. Increase max_lr"),
        ([0.1 * (8 - i) ** 2 for i in range(8)], "at the beginning of the tested range. Decrease min_lr"),
        ([1.0, 2, 1, 2, 1, 2, 1, 2] * 3, "slope there is not larger than the noise.*Increase max_lr"),
    ],
)
def test_a_suggestion_at_the_edge_of_the_range_or_within_noise_is_a_warning(losses: list[float], says: str) -> None:
    found = LRFinder("exponential", 1e-3, 1.0, len(losses))
    found.results = {"lr": [1e-3 * 1.5**i for i in range(len(losses))], "loss": losses}
    with pytest.warns(TrainwrightWarning, match=says):
        assert found.suggestion(skip_begin=0, skip_end=0) is not None


@pytest.mark.filterwarnings("ignore:.*learning rate")
def test_loggers_hear_the_rate_that_was_found(tmp_path: Path) -> None:
    logger, task = CSVLogger(tmp_path, version=0), _SavesRate()
    finder = LearningRateFinder(num_training_steps=40)
    quiet_trainer(max_steps=2, callbacks=[finder], logger=logger).fit(task, regression_loader(64, 8))
    assert task.hparams.lr != 1e-3
    assert yaml.safe_load(Path(logger.log_dir or "", "hparams.yaml").read_text()) == {"lr": task.hparams.lr}


def test_a_loss_that_never_falls_leaves_the_learning_rate_unchanged() -> None:
    task = StepTask(lambda task, batch, idx: 0 * task.loss(batch) + 1.0)
    with pytest.warns(TrainwrightWarning, match=r"does not fall.*lr is unchanged"):
        quiet_trainer(max_steps=1, callbacks=LearningRateFinder()).fit(task, regression_loader(64, 8))
    assert task.lr == 0.05


def test_schedules_go_on_from_the_learning_rate_that_was_found() -> None:
    class Task(RegressionTask):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
            warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: (step + 1) / 4)
            return [optimizer], [{"scheduler": warm_up, "interval": "step"}]

    recorder, task = StepRecorder(), Task()
    quiet_trainer(max_steps=4, callbacks=[LearningRateFinder(), recorder]).fit(task, regression_loader(64, 8))
    assert [lr for [lr] in recorder.lrs] == pytest.approx([task.lr * share for share in (0.25, 0.5, 0.75, 1.0)])
