"""Trackers in user-written loops, read back from what their libraries have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, ConfigurationError
from trainwright.accelerator import trackers
from trainwright.core.errors import TrainwrightWarning
from trainwright.tracking import GeneralTracker, on_main_process
from trainwright.utils import LoggerType


class Recorder(GeneralTracker):
    name = "recorder"
    requires_logging_directory = False

    def __init__(self, fails_in: str = "") -> None:
        self.calls: list[Any] = []
        self._fails_in = fails_in

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    def _record(self, method: str, *values: Any) -> None:
        if method == self._fails_in:
            raise OSError("the server is away")
        self.calls.append((method, *values))

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._record("config", values)

    @on_main_process
    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._record("log", values, step, kwargs)

    def finish(self) -> None:
        self._record("finish")


def _events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    return EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0, "tensors": 0}).Reload()


def test_tensorboard_is_read_back(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("project", config={"lr": 0.1}, init_kwargs={"tensorboard": {"flush_secs": 5}})
    accelerator.log({"loss": torch.tensor(1.5), "val": {"f1": 0.5}, "note": "hello"}, step=3)
    accelerator.log({"loss": 1})
    accelerator.log_images({"digit": torch.rand(1, 3, 4, 4), "pair": [torch.rand(4, 4), torch.rand(4, 4)]}, step=4)
    accelerator.log_table("rows", ["a", "b"], [[1, "x|y"]])
    assert accelerator.get_tracker("tensorboard").run_name == "project"
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("own", 7.0, 0)
    with pytest.warns(TrainwrightWarning, match="cannot log 'many', a Tensor; it is skipped"):
        accelerator.log({"many": torch.rand(3)})
    accelerator.end_training()
    events = _events(tmp_path / "project")
    assert [(one.step, one.value) for one in events.Scalars("loss")] == [(3, 1.5), (4, 1.0)]
    assert [one.value for one in events.Scalars("val/f1")] == [0.5]
    assert [one.value for one in events.Scalars("own")] == [7.0]
    assert events.Tags()["images"] == ["digit", "pair/0", "pair/1"]
    (table,) = events.Tensors("rows/text_summary")
    assert table.tensor_proto.string_val[0].decode() == "| a | b |\n| --- | --- |\n| 1 | x\\|y |"
    assert "lr: 0.1" in (tmp_path / "project/hparams.yaml").read_text()


def test_a_tracker_of_one_s_own_is_called_as_it_is_written(tmp_path: Path) -> None:
    recorder = Recorder()
    accelerator = Accelerator(cpu=True, log_with=[recorder, "tensorboard"], project_dir=tmp_path)
    accelerator.init_trackers("project", config={"lr": 0.1})
    values = {"loss": torch.tensor(1.0)}
    accelerator.log(values, step=2, log_kwargs={"recorder": {"commit": True}})
    accelerator.log_images({"image": [torch.rand(2, 2)]})  # it has no such method
    assert [tracker.name for tracker in accelerator.trackers] == ["recorder", "tensorboard"]
    assert accelerator.get_tracker("recorder") is recorder
    assert accelerator.get_tracker("recorder", unwrap=True) is recorder.calls
    accelerator.end_training()
    accelerator.end_training()
    assert recorder.calls == [("config", {"lr": 0.1}), ("log", values, 2, {"commit": True}), ("finish",)]
    assert recorder.calls[1][1] is values


def test_a_failure_ends_the_use_of_a_tracker_and_nothing_else() -> None:
    recorder, broken = Recorder(), Recorder(fails_in="log")
    broken.name = "broken"
    accelerator = Accelerator(cpu=True, log_with=[broken, recorder])
    accelerator.init_trackers("project")
    with pytest.warns(TrainwrightWarning, match="'broken' failed in log with OSError: the server is away"):
        accelerator.log({"loss": 1.0}, step=0)
    accelerator.log({"loss": 2.0}, step=1, log_kwargs={"broken": {"commit": True}})
    assert accelerator.get_tracker("broken") is broken
    assert accelerator.trackers == [recorder]
    accelerator.end_training()
    assert [call[0] for call in recorder.calls] == ["log", "log", "finish"]


class Away(Recorder):
    """A tracker whose server is away."""

    name = "away"

    def start(self) -> None:
        raise OSError("the server is away")


def test_a_tracker_that_failed_is_replaced_by_an_object_that_does_nothing() -> None:
    accelerator = Accelerator(cpu=True, log_with=Away())
    with pytest.warns(TrainwrightWarning, match="'away' failed in start"):
        accelerator.init_trackers("project")
    for unwrap in (False, True):
        with pytest.warns(
            TrainwrightWarning, match="'away' failed at its start: what get_tracker returns does nothing"
        ):
            accelerator.get_tracker("away", unwrap=unwrap).log({"a": 1})


def test_a_wrong_call_is_an_error_and_disables_nothing(tmp_path: Path) -> None:
    recorder = Recorder()
    accelerator = Accelerator(cpu=True, log_with=[recorder, "tensorboard"], project_dir=tmp_path)
    with pytest.raises(ConfigurationError, match=r"init_trackers\('project'\) first"):
        accelerator.log({"loss": 1.0})
    with pytest.raises(ConfigurationError, match=r"init_kwargs='tensorbord'.*Did you mean 'tensorboard'"):
        accelerator.init_trackers("project", init_kwargs={"tensorbord": {}})
    with pytest.raises(ConfigurationError, match=r"no option 'flush_sec'\. Did you mean 'flush_secs'"):
        accelerator.init_trackers("project", init_kwargs={"tensorboard": {"flush_sec": 1}})
    with pytest.raises(ConfigurationError, match=r"init_kwargs=\{'mlflow'.* is wrong: .*'uri'"):
        Accelerator(cpu=True, log_with="mlflow").init_trackers("project", init_kwargs={"mlflow": {"uri": "x"}})
    accelerator.init_trackers("project")
    with pytest.raises(ConfigurationError, match="expected a mapping"):
        accelerator.log([1, 2])  # type: ignore[arg-type]  # it is wrong on purpose
    with pytest.raises(ConfigurationError, match="step='a'"):
        accelerator.log({"a": 1}, step="a")  # type: ignore[arg-type]  # it is wrong on purpose
    with pytest.raises(ConfigurationError, match=r"log_kwargs=.* is not supported"):
        accelerator.log({"loss": 1.0}, log_kwargs={"tensorboard": {"commit": True}})
    with pytest.raises(ConfigurationError, match="get_tracker='wandb'"):
        accelerator.get_tracker("wandb")
    with pytest.warns(TrainwrightWarning, match="cannot log 'a', an object; it is skipped") as caught:
        accelerator.log({"a": object(), "b": [1]}, step=0)
    assert len(caught) == 1
    assert [tracker.name for tracker in accelerator.trackers] == ["recorder", "tensorboard"]
    accelerator.end_training()


@pytest.mark.parametrize("kind", [trackers.TensorBoardTracker, trackers.DVCLiveTracker, trackers.MLflowTracker])
def test_a_tracker_may_be_created_before_the_accelerator(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "PartialState", None)
    assert not kind("project" if kind is trackers.TensorBoardTracker else None).logger.muted


def test_no_run_remains_open_after_a_configuration_error() -> None:
    class Strict(Recorder):
        def store_init_configuration(self, values: dict[str, Any]) -> None:
            raise ConfigurationError("wrong")

    recorder = Strict()
    accelerator = Accelerator(cpu=True, log_with=recorder)
    with pytest.raises(ConfigurationError, match="wrong"):
        accelerator.init_trackers("project", {"lr": 1})
    assert recorder.calls == [("finish",)]
    assert accelerator.trackers == []


def test_a_step_may_be_a_number_of_another_type(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True, log_with="tensorboard", project_dir=tmp_path)
    accelerator.init_trackers("project")
    tracker: Any = accelerator.get_tracker("tensorboard")
    steps: list[object] = []
    monkeypatch.setattr(tracker.logger, "log_image", lambda name, image, step: steps.append(step))
    tracker.log_images({"a": torch.zeros(1, 2, 2, 3)}, step=torch.tensor(2))
    accelerator.end_training()
    assert steps == [2]
    assert type(steps[0]) is int


def test_options_of_a_tracker_that_is_not_used_are_ignored_without_trackers() -> None:
    Accelerator(cpu=True).init_trackers("project", init_kwargs={"wandb": {"entity": "team"}})


class InFolder(Recorder):
    name = "in_folder"
    requires_logging_directory = True

    def __init__(self, project: str, folder: str | None = None, **options: Any) -> None:
        super().__init__()
        self.arguments = (project, folder, options)


def test_a_registered_tracker_is_known_by_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trackers, "LOGGER_TYPE_TO_CLASS", dict(trackers.LOGGER_TYPE_TO_CLASS))
    trackers.register_tracker_class(InFolder)
    with pytest.raises(ConfigurationError, match="needs a folder"):
        Accelerator(cpu=True, log_with="in_folder")
    accelerator = Accelerator(cpu=True, log_with="in_folder", project_dir=tmp_path)
    accelerator.init_trackers("project", init_kwargs={"in_folder": {"tag": 1}})
    assert accelerator.get_tracker("in_folder").arguments == ("project", str(tmp_path), {"tag": 1})
    with pytest.warns(TrainwrightWarning, match="now creates a InFolder instead of a InFolder"):
        trackers.register_tracker_class(InFolder)
    for wrong in (dict, GeneralTracker, Incomplete):
        with pytest.raises(ConfigurationError):
            trackers.register_tracker_class(wrong)  # type: ignore[arg-type]


class Incomplete(GeneralTracker):
    name = "incomplete"


@pytest.mark.parametrize(
    ("log_with", "text"),
    [
        ("tensorbord", "Did you mean 'tensorboard'"),
        ([object()], "sub-class of GeneralTracker"),
        ("tensorboard", "Pass project_dir="),
        (Incomplete(), "Incomplete has no requires_logging_directory, no tracker"),
    ],
)
def test_a_wrong_tracker_is_an_error(log_with: Any, text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        Accelerator(cpu=True, log_with=log_with)


def _log(folder: Path) -> int:
    recorder = Recorder()
    accelerator = Accelerator(cpu=True, log_with=["tensorboard", recorder], project_dir=folder)
    accelerator.init_trackers("project")
    accelerator.log({"rank": accelerator.process_index}, step=0)
    accelerator.get_tracker("tensorboard", unwrap=True).add_scalar("own", accelerator.process_index, 0)
    accelerator.end_training()
    return len(recorder.calls)


@pytest.mark.distributed
def test_the_first_process_logs(tmp_path: Path) -> None:
    assert run_distributed(_log, 2, tmp_path, init=False) == [2, 0]
    events = _events(tmp_path / "project")
    assert [one.value for one in events.Scalars("rank")] == [0.0]
    assert [one.value for one in events.Scalars("own")] == [0.0]


def test_all_are_those_that_can_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "trainwright.accelerator.trackers.find_spec", lambda name: name if name in ("tensorboard", "wandb") else None
    )
    recorder = Recorder()
    assert Accelerator(cpu=True, log_with=[recorder, "all"]).log_with == [recorder, LoggerType.WANDB]
    both = Accelerator(cpu=True, log_with="all", project_dir=".").log_with
    assert both == [LoggerType.TENSORBOARD, LoggerType.WANDB]
