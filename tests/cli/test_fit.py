"""`trainwright fit` and its siblings: what is built from a configuration, and what is saved with the run."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

import trainwright
from trainwright.callbacks import Callback
from trainwright.cli.configs.option_groups import TRAINER_GROUPS
from trainwright.cli.fit import build_parser, write_predictions
from trainwright.cli.main import main
from trainwright.core.errors import TaskError
from trainwright.loggers import Logger

INTERRUPTED = False
CALLS: list[tuple[str, Any, dict[str, Any]]] = []


class RecordingTrainer:
    """Stands for the Trainer: remembers what it was built with and what it was asked to do."""

    def __init__(
        self,
        *,
        max_epochs: int | None = None,
        callbacks: list[Callback] | Callback | None = None,
        logger: Logger | list[Logger] | bool | None = None,
        default_root_dir: str | Path | None = None,
        launcher: str = "auto",
    ) -> None:
        self.max_epochs = max_epochs
        self.callbacks = callbacks
        self.logger = logger
        self.default_root_dir = Path(default_root_dir or ".")
        self.launcher = launcher
        self.interrupted = INTERRUPTED
        self.is_global_zero = True

    def _stage(self, stage: str, task: Any, **arguments: Any) -> Any:
        CALLS.append((stage, self, {"task": task, **arguments}))
        return [torch.tensor([1, 2]), torch.tensor([3])] if arguments.get("return_predictions") else None

    fit, validate = partialmethod(_stage, "fit"), partialmethod(_stage, "validate")
    test, predict = partialmethod(_stage, "test"), partialmethod(_stage, "predict")


PROJECT = """
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim import Optimizer

from trainwright import DataModule, TaskModule


class Mine(TaskModule):
    def __init__(
        self,
        lr: float = 0.1,
        width: int = 4,
        optimizer: Callable[[Iterable], Optimizer] = lambda p: torch.optim.AdamW(p, lr=0.5),
    ) -> None:
        super().__init__()
        self.lr = lr
        self.optimizer = optimizer
        self.layer = torch.nn.Linear(width, 1)


class Touch:
    def __init__(self, name: str, mode: int = 1) -> None:
        open(name, "w").close()


class Untyped(TaskModule):
    def __init__(
        self, a: Any = None, b: object = None, c=None, d: list[Any] | None = None, e: Any | None = None
    ) -> None:
        super().__init__()
        self.values = [a, b, c, d, e]


class Numbers(DataModule):
    def __init__(self, batch_size: int = 8) -> None:
        super().__init__()
        self.batch_size = batch_size
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with the module `cli_project` and a configuration, as the working folder; the Trainer is recorded."""
    import sys

    (tmp_path / "cli_project.py").write_text(PROJECT)
    (tmp_path / "config.yaml").write_text(
        textwrap.dedent(
            """
            seed_everything: 7
            trainer:
              max_epochs: 2
              default_root_dir: runs
            task:
              class_path: cli_project.Mine
              init_args:
                lr: 1e-3
                optimizer:
                  class_path: torch.optim.AdamW
                  init_args: {lr: 0.3, weight_decay: 0.25}
            data:
              class_path: cli_project.Numbers
            """
        )
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(trainwright, "Trainer", RecordingTrainer)
    CALLS.clear()
    yield tmp_path
    sys.modules.pop("cli_project", None)


def run(*arguments: str, stage: str = "fit") -> tuple[Any, dict[str, Any]]:
    """Run a command that must succeed; return the Trainer and what it was asked."""
    assert main([stage, *arguments]) == 0
    (name, trainer, asked) = CALLS.pop()
    assert name == stage
    return trainer, asked


def optimizer_of(task: Any) -> Any:
    return task.optimizer(list(task.layer.parameters()))


def test_a_package_in_src_is_imported_without_an_installation(project: Path) -> None:
    (project / "src" / "cli_package").mkdir(parents=True)
    (project / "cli_project.py").rename(project / "src" / "cli_package" / "in_src.py")
    config = (project / "config.yaml").read_text()
    (project / "config.yaml").write_text(config.replace("cli_project.", "cli_package.in_src."))
    _, asked = run("--config", "config.yaml")
    assert type(asked["task"]).__module__ == "cli_package.in_src"


@pytest.mark.usefixtures("project")
def test_a_configuration_builds_trainer_task_and_data() -> None:
    trainer, asked = run("--config", "config.yaml")
    assert trainer.max_epochs == 2
    assert type(asked["task"]).__name__ == "Mine"
    assert asked["task"].lr == 0.001
    assert asked["datamodule"].batch_size == 8
    assert asked["ckpt_path"] is None


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize("stage", ["fit", "validate", "test", "predict"])
def test_every_stage_runs_from_the_same_configuration(stage: str) -> None:
    _, asked = run("--config", "config.yaml", "ckpt_path=last", stage=stage)
    assert asked["ckpt_path"] == "last"


@pytest.mark.usefixtures("project")
def test_fit_is_told_what_to_do_about_its_checkpoint_and_other_stages_read_the_same_file() -> None:
    loading = ["ckpt_path=last", "allow_missing=[optimizer, rng]", "on_damaged=error", "--load_weights_only=true"]
    _, asked = run("--config", "config.yaml", *loading)
    wishes = {name: asked[name] for name in ("allow_missing", "on_damaged", "strict", "load_weights_only")}
    assert wishes == {
        "allow_missing": ["optimizer", "rng"], "on_damaged": "error", "strict": None, "load_weights_only": True
    }  # fmt: skip
    _, asked = run("--config", "runs/config.yaml", stage="validate")
    assert asked["ckpt_path"] == "last"
    assert "on_damaged" not in asked


_SGD = {"lr": 1e-3, "weight_decay": 0.0}  # SGD's own defaults; neither those of the file nor of the task


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("--config config.yaml task.optimizer.lr=0.9", "AdamW", {"lr": 0.9, "weight_decay": 0.25}),
        ("--config config.yaml task.optimizer=SGD task.optimizer.momentum=0.5", "SGD", {**_SGD, "momentum": 0.5}),
        ("--task=cli_project.Mine task.init_args.optimizer=SGD", "SGD", _SGD),
    ],
)
def test_an_optimizer_has_its_own_arguments_and_inherits_none_of_another_class(
    words: str, name: str, expected: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    optimizer = optimizer_of(run(*words.split())[1]["task"])
    assert type(optimizer).__name__ == name
    assert expected.items() <= optimizer.param_groups[0].items()
    assert ("weight_decay=0.25" in capsys.readouterr().err) == ("config.yaml" in words and name == "SGD")


def test_without_a_class_as_its_type_an_argument_keeps_its_mapping(project: Path) -> None:
    spec = {"class_path": "cli_project.Touch", "init_args": {"name": "PWN"}}
    values = {"a": spec, "b": spec, "c": {"x": spec}, "d": [spec, {"x": [spec]}], "e": spec}
    task = {"class_path": "cli_project.Untyped", "init_args": values}
    (project / "config.yaml").write_text(yaml.safe_dump({"task": task}))
    built = run("config.yaml")[1]["task"]
    assert not (project / "PWN").exists()

    def given(value: Any) -> Any:
        """Leave out the defaults of the class."""
        if isinstance(value, list):
            return [given(item) for item in value]
        assert type(value) is dict
        if "class_path" in value:
            return {**value, "init_args": {name: value["init_args"][name] for name in spec["init_args"]}}
        return {name: given(item) for name, item in value.items()}

    assert [given(value) for value in built.values] == list(values.values())


def test_callbacks_and_loggers_can_be_named_without_their_module(project: Path) -> None:
    (project / "extra.yaml").write_text(
        textwrap.dedent(
            """
            trainer:
              callbacks:
                - class_path: ModelCheckpoint
                  init_args: {monitor: val_acc, mode: max}
                - LearningRateMonitor
                - class_path: early_stopping
                  init_args: {monitor: val_loss}
              logger:
                - class_path: CSVLogger
                  init_args: {save_dir: runs}
            """
        )
    )
    trainer, _ = run("--config", "config.yaml", "--config", "extra.yaml", "trainer.callbacks+=ModelCheckpoint")
    built = [type(callback).__name__ for callback in trainer.callbacks]
    assert built == ["ModelCheckpoint", "LearningRateMonitor", "EarlyStopping", "ModelCheckpoint"]
    assert trainer.callbacks[0].monitor == "val_acc"
    assert [type(found).__name__ for found in trainer.logger] == ["CSVLogger"]


def test_predictions_are_written_into_the_run_s_folder_or_elsewhere(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run("--config", "config.yaml", stage="predict")
    assert load_file(project / "runs" / "predictions.safetensors")["predictions"].tolist() == [1, 2, 3]
    assert f"predictions: {Path('runs/predictions.safetensors')} (predictions (3,))" in capsys.readouterr().out
    run("--config", "config.yaml", "--output", "elsewhere.safetensors", stage="predict")
    assert (project / "elsewhere.safetensors").is_file()


@pytest.mark.usefixtures("project")
def test_a_run_that_ctrl_c_has_ended_says_so_by_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "INTERRUPTED", True)
    assert main(["fit", "--config", "config.yaml"]) == 130


def test_print_config_shows_the_settings_and_runs_nothing(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--config", "config.yaml", "task.lr=0.5", "--print_config"]) == 0
    assert CALLS == []
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["task"]["init_args"]["lr"] == 0.5
    assert not (project / "runs").exists()


@pytest.mark.parametrize("stage", ["test", "plan"])
def test_the_help_has_groups_with_a_sentence_each(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = stage if stage != "test" else "test --task=project.Net"
    assert main([*command.split(), "--help"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"usage: trainwright {stage} ")
    assert "\nCheckpoint:\n  The checkpoint that the stage starts from.\n\n  --ckpt_path " in text
    for title, (sentence, names) in TRAINER_GROUPS.items():
        _, _, group = text.partition(f"\n{title}:\n  {sentence}\n\n")
        first = group.partition("\n\n")[0]
        assert [name for name in names if f"  --trainer.{name} " not in first] == []


@pytest.mark.usefixtures("project")
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--config", "nope.yaml"], "nope.yaml"),
        (["--config", "config.yaml", "trainer.max_epoch=3"], "Did you mean '--trainer.max_epochs'?"),
        (["--config", "config.yaml", "ckpt_path=nowhere"], "ckpt_path='nowhere' does not exist"),
        (["--config", "config.yaml", "trainer.callbacks+=EarlyStopping"], "its argument monitor is required"),
        (["trainer.max_epochs=3"], "no task is configured"),
    ],
)
def test_a_mistake_is_one_clean_message_and_nothing_runs(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fit", *arguments]) == 2
    printed = capsys.readouterr().err
    assert says in printed
    assert printed.startswith("trainwright: error: ")
    assert CALLS == []


def test_every_argument_of_the_real_trainer_can_be_set_and_keeps_its_default() -> None:
    import inspect

    parser = build_parser("fit")
    settings = parser.parse_args([])
    for parameter in inspect.signature(trainwright.Trainer).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY:
            assert settings.trainer[parameter.name] == parameter.default


@pytest.mark.parametrize(
    ("word", "value"),
    [
        ("devices=2", "2"),  # which the Trainer reads as 2; text comes before a number in the argument's type
        ("val_check_interval=500 steps", "500 steps"),
        ("fast_dev_run=true", True),
        ("fast_dev_run=3", 3),
        ("logger=false", False),
    ],
)
def test_the_real_trainer_s_arguments_are_read_with_the_type_that_they_mean(word: str, value: Any) -> None:
    name, _, _ = word.partition("=")
    found = build_parser("fit").parse_args([f"--trainer.{word}"]).trainer[name]
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize("output", ["text", torch.tensor(1.0), {"a": [1, 2]}, {1: torch.ones(2)}])
def test_what_cannot_be_joined_is_refused_and_nothing_is_written(tmp_path: Path, output: Any) -> None:
    with pytest.raises(TaskError, match="--output none"):
        write_predictions([output], tmp_path / "p.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_outputs_may_have_their_names_in_another_order_but_not_other_sizes(tmp_path: Path) -> None:
    ones, zeros = torch.ones(1, 2), torch.zeros(1, 2)
    shapes = write_predictions([{"a": ones, "b": zeros}, {"b": zeros, "a": ones}], tmp_path / "p.safetensors")
    assert shapes == {"a": (2, 2), "b": (2, 2)}
    with pytest.raises(TaskError, match=r"outputs 'predictions' .* cannot be concatenated: .*--output none"):
        write_predictions([ones, torch.ones(1, 3)], tmp_path / "q.safetensors")


def test_the_help_of_an_unknown_class_names_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fit", "--trainer.strategy.help", "FSDPStrateg"]) == 2
    assert "FSDPStrateg: no such class is known. Did you mean 'FSDPStrategy'?" in capsys.readouterr().err
    assert main(["fit", "--task.help", "Nowhere"]) == 2
    assert "--task.help Nowhere: no such class is known. Write a path" in capsys.readouterr().err
