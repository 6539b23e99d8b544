"""W&B, offline for real and with a stand-in for what needs its server."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.loggers.wandb_file import read_run
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.loggers import RunInfo, WandbLogger


class FakeRun:
    def __init__(self, *, resumed: bool = False, last_step: int | None = None, **options: Any) -> None:
        self.options = options
        self.id = options.get("id") or "made-up"
        self.project = options.get("project")
        self.resumed = resumed
        self.summary = {} if last_step is None else {"trainer/global_step": last_step}
        self.history: list[dict[str, Any]] = []
        self.axes: list[tuple[str, Any]] = []
        self.artifacts: list[tuple[Any, list[str]]] = []
        self.exit_code: int | None = None

    def define_metric(self, name: str, step_metric: str | None = None, step_sync: bool | None = None) -> None:
        self.axes.append((name, step_metric))

    def log(self, values: dict[str, Any]) -> None:
        self.history.append(values)

    def log_artifact(self, artifact: Any, aliases: list[str]) -> None:
        self.artifacts.append((artifact, aliases))

    def finish(self, exit_code: int) -> None:
        self.exit_code = exit_code


class FakeArtifact:
    def __init__(self, name: str, type: str, metadata: dict[str, Any]) -> None:
        self.name, self.paths, self.options = name, list[str](), dict[str, Any]()

    def add_dir(self, path: str, **options: Any) -> None:
        self.paths.append(path)
        self.options = options

    add_file = add_dir


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Put a stand-in where `require_package("wandb")` finds the package; `runs` are those that were made."""
    package = SimpleNamespace(run=None, runs=[], make={}, Artifact=FakeArtifact)
    package.Settings, package.errors = SimpleNamespace, SimpleNamespace(CommError=ConnectionError)

    def init(**options: Any) -> FakeRun:
        package.runs.append(FakeRun(**package.make, **options))
        return package.runs[-1]  # type: ignore[no-any-return]

    package.init = init
    monkeypatch.setattr("trainwright.loggers.wandb_logger.require_package", lambda *args, **options: package)
    return package


def test_curves_have_the_optimizer_step_as_their_axis(fake: SimpleNamespace, tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    logger.start(RunInfo(tmp_path))
    logger.log_metrics({"loss": 1.0}, 50)
    assert fake.runs[0].axes == [("trainer/global_step", None), ("*", "trainer/global_step")]
    assert fake.runs[0].history == [{"loss": 1.0, "trainer/global_step": 50}]
    assert logger.state_dict() == {"id": "made-up"}
    assert logger.version == "made-up"


def test_evaluation_steps_have_an_axis_of_their_own(fake: SimpleNamespace, tmp_path: Path) -> None:
    fake.make = {"resumed": True, "last_step": 150}
    logger = WandbLogger(save_dir=tmp_path)
    logger.start(RunInfo(tmp_path))
    fake.runs[0].summary["trainer/validate_step"] = 3
    for step in (3, 4, 5):
        logger.log_evaluation_step(
            {"loss_step": 1.0, "epoch": 0, **({"late": 2.0} if step == 5 else {})}, step, "validate"
        )
    logger.log_evaluation_step({"test_loss": 3.0}, 0, "test")
    axes = [
        ("loss_step", "trainer/validate_step"),
        ("late", "trainer/validate_step"),
        ("test_loss", "trainer/test_step"),
    ]
    assert fake.runs[0].axes[2:] == axes
    assert fake.runs[0].history == [
        {"loss_step": 1.0, "epoch": 0, "trainer/validate_step": 4},
        {"loss_step": 1.0, "late": 2.0, "epoch": 0, "trainer/validate_step": 5},
        {"test_loss": 3.0, "trainer/test_step": 0},
    ]


def test_a_state_that_comes_too_late_is_reported(fake: SimpleNamespace, tmp_path: Path) -> None:
    logger = WandbLogger(save_dir=tmp_path)
    logger.start(RunInfo(tmp_path))
    with pytest.warns(TrainwrightWarning, match=r"WandbLogger\(id='abc'\)"):
        logger.load_state_dict({"id": "abc"})


def test_a_run_that_others_opened_is_used_and_left_open(fake: SimpleNamespace, tmp_path: Path) -> None:
    fake.run = FakeRun(id="theirs")
    logger = WandbLogger(save_dir=tmp_path)
    with pytest.warns(TrainwrightWarning, match="is already open"):
        logger.start(RunInfo(tmp_path))
    logger.log_metrics({"loss": 1.0}, 1)
    logger.finish("success")
    assert fake.runs == []
    assert len(fake.run.history) == 1
    assert fake.run.exit_code is None


def test_a_server_that_does_not_answer_leaves_an_offline_run(fake: SimpleNamespace, tmp_path: Path) -> None:
    init = fake.init

    def away(**options: Any) -> FakeRun:
        if options.get("mode") != "offline":
            assert options["settings"].init_timeout <= 10
            raise ConnectionError("refused")
        return init(**options)  # type: ignore[no-any-return]

    fake.init = away
    logger = WandbLogger(save_dir=tmp_path)
    with pytest.warns(TrainwrightWarning, match="refused. The run is recorded offline; send it with `wandb sync`"):
        logger.start(RunInfo(tmp_path))
    logger.log_metrics({"loss": 1.0}, 0)
    assert fake.runs[0].history == [{"loss": 1.0, "trainer/global_step": 0}]


@pytest.mark.parametrize(
    ("log_model", "at_once", "in_all"), [("all", ["step-1", "step-2"], ["step-1", "step-2"]), (True, [], ["step-2"])]
)
def test_log_model_uploads_each_checkpoint_or_the_last_one_at_the_end(
    log_model: Any, at_once: list[str], in_all: list[str], fake: SimpleNamespace, tmp_path: Path
) -> None:
    def uploaded() -> list[Any]:
        return [(artifact.paths, aliases) for artifact, aliases in fake.runs[0].artifacts]

    def expected(names: list[str]) -> list[Any]:
        return [([str(tmp_path / name)], ["latest", name, "best"]) for name in names]

    logger = WandbLogger(save_dir=tmp_path, log_model=log_model)
    logger.start(RunInfo(tmp_path))
    for name in ("step-1", "step-2"):
        (tmp_path / name).mkdir()
        logger.log_checkpoint(tmp_path / name, aliases=("best",))
    assert uploaded() == expected(at_once)
    logger.finish("success")
    assert uploaded() == expected(in_all)


@pytest.mark.parametrize(
    "options",
    [
        {"offline": True, "log_model": True},
        {"id": "a", "version": "b"},
        {"log_model": "best"},
        {"add_file_policy": "copied"},
    ],
)
def test_options_that_contradict_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="WandbLogger"):
        WandbLogger(**options)


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.requires("wandb", "its own format")
def test_config_images_text_and_status_are_read_back_offline(tmp_path: Path) -> None:
    logger = WandbLogger("night", tmp_path, offline=True, project="proj", id="abc123")
    logger.start(RunInfo(tmp_path))
    logger.log_hyperparams({"lr": 0.5, "net": {"sizes": (1, 2)}})
    logger.log_image("im", torch.rand(1, 4, 5), 1)
    logger.log_text("note", "hello", 2)
    logger.log_image(key="pair", images=[torch.rand(3, 4, 5), torch.rand(3, 4, 5)], caption=["a", "b"], step=3)
    logger.log_text("rows", columns=["question", "answer"], data=[["1 + 1", "2"]], step=4)
    logger.finish("failed")
    run = read_run(tmp_path)
    assert (run["id"], run["project"], run["name"], run["exit_code"]) == ("abc123", "proj", "night", 1)
    assert run["config"]["lr"] == 0.5
    assert run["config"]["net"] == {"sizes": [1, 2]}
    image, note = run["history"][0], run["history"][1]
    assert (image["im/height"], image["im/width"], image["trainer/global_step"]) == (4, 5, 1)
    assert note["note/nrows"] == 1
    assert run["history"][2]["pair/captions"] == ["a", "b"]
    assert run["history"][3]["rows/ncols"] == 2


def test_a_resumed_history_gets_no_step_twice(fake: SimpleNamespace, tmp_path: Path) -> None:
    fake.make = {"resumed": True, "last_step": 150}
    logger = WandbLogger(save_dir=tmp_path)
    logger.load_state_dict({"id": "abc"})
    logger.start(RunInfo(tmp_path))
    for step in (110, 150, 160):
        logger.log_metrics({"loss": 1.0}, step)
    assert fake.runs[0].options["id"] == "abc"
    assert fake.runs[0].options["resume"] == "allow"
    assert [row["trainer/global_step"] for row in fake.runs[0].history] == [160]
