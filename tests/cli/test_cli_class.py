"""The CLI class: a script's command line with links, defaults, optimizers and hooks."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.utils.data import DataLoader, TensorDataset

from trainwright import CLI, ConfigurationError, DataModule, EarlyStopping, TaskModule, TrainwrightWarning
from trainwright.callbacks import Timer
from trainwright.cli import OptimizerCallable, ReduceLROnPlateau, SaveConfigCallback
from trainwright.cli.configs.save_config_callback import resolved_yaml


class Net(TaskModule):
    def __init__(self, width: int = 2, lr: float = 0.1, batch_size: int = 1, tag: str = "") -> None:
        super().__init__()
        self.width, self.lr, self.batch_size, self.tag = width, lr, batch_size, tag
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.layer(batch[0]).square().mean())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0])


class OwnOptimizer(Net):
    """One with its own optimizer, which a configuration may name."""

    def __init__(self, optimizer: OptimizerCallable = lambda p: torch.optim.AdamW(p, lr=0.5), width: int = 2) -> None:
        super().__init__(width)
        self.make = optimizer

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


class Points(DataModule):
    def __init__(self, batch_size: int = 4, num_features: int = 2) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.num_columns = num_features

    def train_dataloader(self) -> Any:
        return DataLoader(TensorDataset(torch.ones(8, self.num_columns)), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader


QUIET = {
    "accelerator": "cpu", "devices": 1, "logger": False, "enable_checkpointing": False, "enable_progress_bar": False,
    "enable_model_summary": False, "max_epochs": 1,
}  # fmt: skip


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))


def cli(*words: str, of: type[CLI] = CLI, model: Any = Net, data: Any = Points, **options: Any) -> CLI:
    defaults = {**QUIET, **options.pop("trainer_defaults", {})}
    return of(model, data, trainer_defaults=defaults, args=list(words), **options)


def test_run_false_builds_and_leaves_running_to_the_script() -> None:
    made = cli("--model.width=2", "--data.batch_size=8", "--trainer.max_epochs=2", "--optimizer=SGD", run=False)
    assert (made.model.width, made.datamodule.batch_size, made.trainer.max_epochs) == (2, 8, 2)
    assert made.subcommand is None
    assert made.config.model.width == 2
    made.trainer.fit(made.model, datamodule=made.datamodule)
    assert made.trainer.global_step == 2


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["fit", "predict"])
def test_the_first_word_names_the_stage(stage: str) -> None:
    made = cli(stage, "--optimizer=SGD", "--optimizer.lr=0.1")
    assert made.subcommand == stage
    assert made.config[stage].model.width == 2
    assert made.trainer.global_step == (2 if stage == "fit" else 0)


def test_a_file_with_one_stage_names_the_stage(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("fit:\n  model: {width: 2}\n  optimizer: {class_path: torch.optim.SGD}\n")
    made = cli("--config", "config.yaml")
    assert made.subcommand == "fit"
    (saver,) = [each for each in made.trainer.callbacks if isinstance(each, SaveConfigCallback)]
    assert saver.already_saved


def test_a_printed_configuration_omits_the_default_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli("predict", "--print_config")
    assert "Default" not in capsys.readouterr().out


def test_a_file_of_lightnings_form_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(
        "seed_everything: 3\n"
        "trainer:\n  max_epochs: 1\n  profiler: null\n  plugins: null\n  model_registry: null\n"
        "  enable_autolog_hparams: true\n"
        "  callbacks:\n    - class_path: lightning.pytorch.callbacks.EarlyStopping\n"
        "      init_args: {monitor: val_loss}\n"
        "model: {width: 2, lr: 1e-2}\ndata: {batch_size: 2}\n"
        "optimizer:\n  class_path: torch.optim.Adam\n  init_args: {lr: 0.25}\n"
        "lr_scheduler:\n  class_path: lightning.pytorch.cli.ReduceLROnPlateau\n  init_args: {monitor: val_loss}\n"
        "ckpt_path: null\n"
    )
    made = cli("fit", "--config", "config.yaml", "--data.batch_size", "4")
    assert made.model.lr == 0.01
    assert made.datamodule.batch_size == 4
    (stopping,) = [each for each in made.trainer.callbacks if isinstance(each, EarlyStopping)]
    assert stopping.monitor == "val_loss"
    (config,) = made.trainer.lr_scheduler_configs
    assert isinstance(config.scheduler, ReduceLROnPlateau)
    assert config.scheduler.optimizer.param_groups[0]["lr"] == 0.25


def _make_timer(interval: str = "step") -> Timer:
    return Timer(interval=interval)


def test_links_defaults_and_user_defined_arguments() -> None:
    class Linked(CLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.link_arguments("data.batch_size", "model.batch_size")
            parser.link_arguments("data.num_columns", "model.width", apply_on="instantiate")
            parser.set_defaults({"model.lr": 0.75, "data.num_features": 3})
            parser.add_argument("--note", default="none")
            parser.add_lightning_class_args(EarlyStopping, "stopping")
            parser.add_lightning_class_args(_make_timer, "timer")
            parser.set_defaults({"stopping.monitor": "val_loss", "stopping.patience": 5})

        def before_instantiate_classes(self) -> None:
            self.config.note += "!"

    made = cli("--data.batch_size=2", "--note=hello", "--stopping.patience=7", of=Linked, run=False)
    assert (made.model.batch_size, made.model.lr, made.model.width, made.datamodule.num_columns) == (2, 0.75, 3, 3)
    assert made.config.note == "hello!"
    (stopping,) = [each for each in made.trainer.callbacks if isinstance(each, EarlyStopping)]
    assert stopping.patience == 7
    assert any(isinstance(each, Timer) for each in made.trainer.callbacks)


def test_an_optimizer_linked_to_the_task() -> None:
    class Keeps(Net):
        def __init__(self, optimizer_init: dict[str, Any], width: int = 2) -> None:
            super().__init__(width)
            self.optimizer_init = optimizer_init

    class Links(CLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.SGD, nested_key="sgd", link_to="model.optimizer_init")

    made = cli("--sgd.lr=0.5", of=Links, model=Keeps, run=False)
    assert made.model.optimizer_init["class_path"] == "torch.optim.sgd.SGD"
    assert made.model.optimizer_init["init_args"]["lr"] == 0.5


def test_the_configuration_selects_the_class_of_the_model() -> None:
    made = cli(f"--model={__name__}.OwnOptimizer", "--model.width=3", model=Net, subclass_mode_model=True, run=False)
    assert type(made.model) is OwnOptimizer
    assert cli(f"--model={__name__}.Net", "--model.lr=0.5", model=None, data=None, run=False).model.lr == 0.5
    with pytest.raises(ConfigurationError, match="no model is configured"):
        cli(model=None, data=None, run=False)


def test_stages_have_hooks_and_can_be_overridden() -> None:
    calls = []

    class Hooked(CLI):
        def before_fit(self) -> None:
            calls.append("before")

        def after_fit(self) -> None:
            calls.append(f"after {self.trainer.global_step}")

        def validate(self, model: Any, **arguments: Any) -> None:
            calls.append(f"validate {arguments['verbose']}")

    cli("fit", "--optimizer=SGD", of=Hooked)
    cli("validate", "--verbose=false", of=Hooked)
    assert calls == ["before", "after 2", "validate False"]


def test_the_users_own_file_is_kept_and_saving_can_be_extended_or_left_out(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {lr: 0.5}\n")
    noted = []

    class Noting(SaveConfigCallback):
        def save_config(self, trainer: Any, task: Any, stage: str) -> None:
            noted.append(yaml.safe_load(self.parser.dump(self.config))["model"]["lr"])

    cli("fit", "--config=config.yaml", "--optimizer=SGD", save_config_callback=Noting)
    assert noted == [0.5]
    assert (tmp_path / "config.yaml").read_text() == "model: {lr: 0.5}\n"
    assert (tmp_path / "config.resolved.yaml").is_file()
    cli("fit", "--optimizer=SGD", "--trainer.default_root_dir=other", save_config_callback=None)
    assert not (tmp_path / "other/config.yaml").exists()


def test_a_second_file_of_the_user_is_kept_too(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("model: {lr: 0.5}\n")
    (tmp_path / "config.resolved.yaml").write_text("mine: 1\n")
    cli("fit", "--config=config.yaml", "--optimizer=SGD")
    assert (tmp_path / "config.resolved.yaml").read_text() == "mine: 1\n"
    assert "lr: 0.5" in (tmp_path / "config.resolved.resolved.yaml").read_text()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["fit", "--model.lrr=1"], "Did you mean '--model.lr'?"),
        (["fit", "--optimizer=SGD", "--optimizer.momentu=1"], "has no argument 'momentu'. Did you mean 'momentum'?"),
        (["fitt"], "name the stage to run: fit, validate, test, predict. Did you mean 'fit'?"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        cli(*words)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_configured_optimizer_replaces_the_tasks_with_a_warning() -> None:
    with pytest.warns(TrainwrightWarning, match="configure_optimizers is not called"):
        made = cli("fit", "--optimizer=SGD", "--optimizer.lr=0.5", model=OwnOptimizer)
    assert type(made.trainer.optimizers[0]) is torch.optim.SGD


def test_two_optimizers_without_link_to_are_an_error() -> None:
    class Adds(CLI):
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_optimizer_args(torch.optim.Adam, nested_key="adam")
            parser.add_optimizer_args(torch.optim.SGD, nested_key="sgd")

    with pytest.raises(ConfigurationError, match=r"one optimizer, and adam, sgd were.*link_to='model\.optimizer_init'"):
        cli("--sgd.lr=0.5", of=Adds, run=False)


def test_values_that_yaml_cannot_represent_are_omitted_also_in_lists() -> None:
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    parser.add_argument("--values", type=list[Any], default=[1, lambda: 2, {"function": lambda: 3, "number": 4}])
    written = yaml.safe_load(resolved_yaml(parser, parser.parse_args([])))
    assert written == {"values": [1, {"number": 4}]}
