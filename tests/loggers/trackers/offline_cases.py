"""Trackers: what their libraries wrote offline is read back. `test_trackers.py` runs this file."""

from __future__ import annotations

import json
import math
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from matplotlib.figure import Figure

from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.loggers import ClearMLLogger, CometLogger, DVCLiveLogger, MLFlowLogger, SwanLabLogger, TrackioLogger
from trainwright.loggers.logger import RunInfo

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),  # comet_ml leaves a socket open
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
]

Points = list[tuple[int, float]]


def _mlflow(folder: Path) -> Any:
    from mlflow.tracking import MlflowClient

    return MlflowClient(f"sqlite:///{folder.absolute() / 'mlflow.db'}")


def mlflow_points(logger: Any, folder: Path, name: str) -> Points:
    return [(one.step, one.value) for one in _mlflow(folder).get_metric_history(logger.run_id, name)]


def comet_messages(folder: Path) -> list[Any]:
    files = sorted(folder.glob("*.zip"), key=lambda path: path.stat().st_mtime_ns)
    texts = [zipfile.ZipFile(path).read("messages.json").decode() for path in files]
    return [json.loads(line) for text in texts for line in text.splitlines()]


def comet_points(logger: Any, folder: Path, name: str) -> Points:
    found = [one["payload"]["metric"] for one in comet_messages(folder) if one["type"] == "metric_msg"]
    return [(one["step"], float(one["metricValue"])) for one in found if one["metricName"] == name]


def dvclive_points(logger: Any, folder: Path, name: str) -> Points:
    path = folder / f"plots/metrics/{name}.tsv"
    rows = [line.split("\t") for line in path.read_text().splitlines()[1:]] if path.exists() else []
    return [(int(step), float(value)) for step, value in rows]


def trackio_rows(logger: Any) -> list[dict[str, Any]]:
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs(logger.name, logger.version)


def trackio_points(logger: Any, folder: Path, name: str) -> Points:
    return [(row["step"], row[name]) for row in trackio_rows(logger) if name in row]


def swanlab_records(folder: Path) -> list[Any]:
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    records = []
    for path in sorted(folder.glob("*/*.swanlab"), key=lambda path: path.stat().st_mtime_ns):
        reader = DataStoreReader()
        reader.open(path)
        records += [Record.FromString(data) for data in reader]
        reader.close()
    return records


def swanlab_points(logger: Any, folder: Path, name: str) -> Points:
    found = [one.scalar for one in swanlab_records(folder) if one.HasField("scalar")]
    return [(one.step, one.value.number) for one in found if one.key == name]


@dataclass
class Case:
    """One tracker: how it is made offline, and how its points are read back."""

    make: Callable[..., Any]
    points: Callable[[Any, Path, str], Points]
    keeps_infinity: bool = True


CASES = {
    "mlflow": Case(
        lambda folder, **options: MLFlowLogger(save_dir=folder, **options), mlflow_points, keeps_infinity=False
    ),
    "comet_ml": Case(
        lambda folder, **options: CometLogger(online=False, offline_directory=str(folder), project="p", **options),
        comet_points,
    ),
    "dvclive": Case(lambda folder, **options: DVCLiveLogger(folder, **options), dvclive_points),
    "trackio": Case(lambda folder, **options: TrackioLogger(f"p{folder.name}"[:60], **options), trackio_points),
    "swanlab": Case(lambda folder, **options: SwanLabLogger(log_dir=folder, mode="offline", **options), swanlab_points),
}
REASON = "the tracker's library writes the files that are read"


@pytest.fixture(params=[pytest.param(name, marks=pytest.mark.requires(name, REASON)) for name in CASES])
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("DVC_NO_ANALYTICS", "1")
    monkeypatch.setenv("COMET_LOGGING_CONSOLE", "ERROR")


def _started(logger: Any, folder: Path) -> Any:
    logger.start_patience = 60.0  # MLflow creates its tables in the first start
    logger.start(RunInfo(folder))
    return logger


def test_metrics_are_read_back_in_order_under_their_prefix(case: Case, tmp_path: Path) -> None:
    logger = _started(pickle.loads(pickle.dumps(case.make(tmp_path, prefix="exp"))), tmp_path)
    logger.log_hyperparams({"lr": 0.1, "net": {"sizes": [1, 2], "act": max}, "path": Path("a/b"), "none": None})
    logger.log_metrics({"loss": 0.5, "lr": 0.25}, 1)
    logger.log_metrics({"val": 2.0}, 1)
    logger.log_metrics({"loss": 0.125}, 2)
    logger.log_metrics({"odd": math.nan, "high": math.inf}, 3)
    logger.flush()
    logger.finish("success")
    logger.finish("success")
    assert not logger.is_started
    assert case.points(logger, tmp_path, "exp-loss") == [(1, 0.5), (2, 0.125)]
    assert case.points(logger, tmp_path, "exp-lr") == [(1, 0.25)]
    assert case.points(logger, tmp_path, "exp-val") == [(1, 2.0)]
    assert case.points(logger, tmp_path, "loss") == []
    ((step, value),) = case.points(logger, tmp_path, "exp-odd")
    assert step == 3
    assert math.isnan(value)
    ((_, high),) = case.points(logger, tmp_path, "exp-high")
    assert high == math.inf or (not case.keeps_infinity and high > 1e308)


def test_a_run_that_is_resumed_or_started_again_continues_the_same_curves(case: Case, tmp_path: Path) -> None:
    first = _started(case.make(tmp_path), tmp_path)
    for step in range(1, 5):
        first.log_metrics({"loss": 1.0}, step)
    state = json.loads(json.dumps(first.state_dict()))
    assert str(tmp_path) not in json.dumps(state)
    first.finish("failed")
    second = case.make(tmp_path)
    second.load_state_dict(state)
    _started(second, tmp_path)
    assert second.version == first.version
    is_readable = not isinstance(second, (CometLogger, SwanLabLogger))  # while it is offline
    for step in range(3 if is_readable else 5, 7):
        second.log_metrics({"loss": 2.0}, step)
    second.finish("interrupted")
    _started(second, tmp_path).log_metrics({"loss": 3.0}, 7)
    second.finish("success")
    assert second.version == first.version
    expected = [*((step, 1.0) for step in range(1, 5)), (5, 2.0), (6, 2.0), (7, 3.0)]
    assert case.points(second, tmp_path, "loss") == expected


def _log_media(logger: Any, folder: Path) -> None:
    figure = Figure(figsize=(1, 1))
    figure.subplots()
    (folder / "step=3").mkdir()
    (folder / "step=3/model.txt").write_text("weights")
    _started(logger, folder)
    logger.log_hyperparams({"lr": 0.1, "net": {"width": 4}})
    logger.log_image("digit", torch.ones(3, 4, 5), 3)
    logger.log_image("gray", np.zeros((4, 5), dtype=np.uint8), 3)
    logger.log_figure("figure", figure, 3)
    logger.log_checkpoint(folder / "step=3", aliases=("best",))
    if not isinstance(logger, DVCLiveLogger):
        logger.log_text("note", "hello", 3)
        logger.log_table("rows", ["a", "b"], [[1, "x"]], step=3)


@pytest.mark.requires("mlflow", REASON)
def test_mlflow_holds_parameters_artifacts_and_the_status(tmp_path: Path) -> None:
    logger = MLFlowLogger("digits", "night", save_dir=tmp_path, tags={"a": "b"}, log_model="all")
    _log_media(logger, tmp_path)
    logger.log_hyperparams({"lr": 0.5, "new": "a"})
    logger.log_metrics({"val:f1%": 1.0}, 0)
    logger.finish("failed")
    client = _mlflow(tmp_path)
    run = client.get_run(logger.run_id)
    assert (run.info.status, run.info.run_name, run.data.tags["a"]) == ("FAILED", "night", "b")
    assert run.data.params == {"lr": "0.1", "net/width": "4", "new": "a"}
    assert run.data.metrics == {"val_f1_": 1.0}
    assert client.get_experiment(logger.experiment_id).name == "digits"
    folder = tmp_path / "artifacts" / logger.run_id / "artifacts"
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert {name.partition("/")[0] for name in files} == {"images", "texts", "tables", "checkpoints"}
    assert (folder / "texts/note/step_3.txt").read_text() == "hello"
    assert json.loads((folder / "tables/rows/step_3.json").read_text()) == {"columns": ["a", "b"], "data": [[1, "x"]]}


@pytest.mark.requires("mlflow", REASON)
def test_mlflow_skips_written_steps_of_a_metric_whose_name_it_does_not_accept(tmp_path: Path) -> None:
    first = _started(MLFlowLogger(save_dir=tmp_path), tmp_path)
    first.log_metrics({"f1%": 1.0}, 1)
    first.finish("failed")
    second = MLFlowLogger(save_dir=tmp_path)
    second.load_state_dict(first.state_dict())
    _started(second, tmp_path)
    second.log_metrics({"f1%": 2.0}, 1)
    second.log_metrics({"f1%": 3.0}, 2)
    second.finish("success")
    assert mlflow_points(second, tmp_path, "f1_") == [(1, 1.0), (2, 3.0)]


@pytest.mark.requires("comet_ml", REASON)
def test_comet_holds_parameters_and_assets(tmp_path: Path) -> None:
    logger = CometLogger(
        online=False, offline_directory=str(tmp_path), project="digits", log_model=True, tags=["a"], name="night"
    )
    _log_media(logger, tmp_path)
    logger.finish("success")
    messages = comet_messages(tmp_path)
    given = [message["payload"]["param"] for message in messages if message["type"] == "parameter_msg"]
    params = {param["paramName"]: param["paramValue"] for param in given}
    assert (params["lr"], params["net/width"]) == (0.1, 4)
    uploads = [m["payload"]["additional_params"] for m in messages if "additional_params" in m["payload"]]
    assert {"text-sample", "model-element"} <= {one.get("type") for one in uploads}
    assert {one.get("figName") for one in uploads} >= {"digit", "gray", "figure"}
    assert "rows_step_3.csv" in {one.get("fileName") for one in uploads}
    others = {m["payload"]["key"]: m["payload"]["value"] for m in messages if m["type"] == "log_other"}
    assert others["status"] == "success"


@pytest.mark.requires("comet_ml", REASON)
def test_comet_accepts_a_configuration_or_options_but_not_both() -> None:
    with pytest.raises(ConfigurationError, match="experiment_config= and name, tags"):
        CometLogger(experiment_config=object(), tags=["a"], name="night")


@pytest.mark.requires("clearml", REASON)
def test_clearml_warns_of_a_task_that_it_cannot_continue_offline(tmp_path: Path) -> None:
    logger = ClearMLLogger("p", task_id="abc", offline=True)
    with pytest.warns(TrainwrightWarning, match="cannot continue the task abc offline"):
        _started(logger, tmp_path)
    logger.finish("success")


@pytest.mark.requires("dvclive", REASON)
def test_dvclive_holds_parameters_and_images(tmp_path: Path) -> None:
    logger = DVCLiveLogger(tmp_path / "live")
    _log_media(logger, tmp_path)
    logger.log_metrics({"val/loss": 0.5}, 3)
    logger.finish("success")
    assert yaml.safe_load((tmp_path / "live/params.yaml").read_text()) == {"lr": 0.1, "net": {"width": 4}}
    assert json.loads((tmp_path / "live/metrics.json").read_text())["val"] == {"loss": 0.5}
    images = tmp_path / "live/plots/images"
    assert {path.parent.name for path in images.rglob("3.png")} == {"digit", "gray", "figure"}


@pytest.mark.requires("clearml", REASON)
def test_clearml_writes_an_offline_session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CLEARML_CACHE_DIR", str(tmp_path / "cache"))
    logger = pickle.loads(pickle.dumps(ClearMLLogger("digits", "night", offline=True, prefix="a", tags=["b"])))
    _log_media(logger, tmp_path)
    logger.log_metrics({"val/loss": 0.5, "odd": math.nan}, 1)
    logger.log_metrics({"val/loss": 0.25}, 2)
    assert logger.state_dict() == {}
    folder = Path(logger.log_dir)
    logger.finish("success")
    task = json.loads((folder / "task.json").read_text())
    assert (task["name"], task["tags"]) == ("night", ["b"])
    general = task["hyperparams"]["General"]
    assert (general["lr"]["value"], general["net/width"]["value"]) == ("0.1", "4")
    events = [one for line in (folder / "metrics.jsonl").read_text().splitlines() for one in json.loads(line)]
    scalars = [one for one in events if one["type"] == "training_stats_scalar"]
    found = [(one["metric"], one["variant"], one["iter"], one["value"]) for one in scalars]
    assert found == [("a-val", "loss", 1, 0.5), ("a-val", "loss", 2, 0.25)]
    assert {"digit", "gray", "figure"} <= {one["metric"] for one in events if one["type"] != "plot"}
    assert "rows" in {one["metric"] for one in events if one["type"] == "plot"}
    assert "hello" in (folder / "log.jsonl").read_text()


@pytest.mark.requires("trackio", REASON)
def test_trackio_holds_parameters_and_media(tmp_path: Path) -> None:
    from trackio.sqlite_storage import SQLiteStorage
    from trackio.utils import MEDIA_DIR

    logger = TrackioLogger("media", "night")
    _log_media(logger, tmp_path)
    logger.finish("success")
    config = SQLiteStorage.get_run_config("media", "night")
    assert (config["lr"], config["net/width"]) == (0.1, 4)
    found = {key: value for row in trackio_rows(logger) for key, value in row.items()}
    assert found["note"] == "hello"
    assert found["rows"]["_value"] == [{"a": 1, "b": "x"}]
    for name in ("digit", "gray", "figure"):
        assert (MEDIA_DIR / found[name]["file_path"]).exists()


@pytest.mark.requires("swanlab", REASON)
def test_swanlab_holds_parameters_and_media(tmp_path: Path) -> None:
    logger = SwanLabLogger("digits", "night", log_dir=tmp_path / "logs", mode="offline")
    _log_media(logger, tmp_path)
    logger.finish("failed")
    (folder,) = (tmp_path / "logs").glob("run-*")
    config = yaml.safe_load((folder / "files/config.yaml").read_text())
    assert (config["lr"]["value"], config["net/width"]["value"]) == (0.1, 4)
    texts = {path.read_text() for path in (folder / "media/text").iterdir()}
    assert "hello" in texts
    assert any(text.startswith("| a | b |") for text in texts)
    assert len(list((folder / "media/image").iterdir())) == 3
    records = swanlab_records(tmp_path / "logs")
    assert [one.start.project for one in records if one.HasField("start")] == ["digits"]
    assert sum(one.HasField("finish") for one in records) == 1
