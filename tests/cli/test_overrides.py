"""Files and overrides as plain dicts and text: reading, merging, swapping classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainwright.cli.configs.overrides import read_command_line, read_configs, swap_classes
from trainwright.core.errors import ConfigurationError


def test_the_class_after_a_help_option_is_its_value() -> None:
    assert read_command_line(["--model.help", "project.Net"]).flags == ["--model.help=project.Net"]
    found = read_command_line(["--trainer.strategy.help", "run.yaml", "--model.help", "seed_everything=1"])
    assert found.flags == ["--trainer.strategy.help", "--model.help"]
    assert found.configs == [Path("run.yaml")]
    assert found.assignments == [("seed_everything", "1")]


def _write(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_later_files_win_key_by_key_and_replace_lists(tmp_path: Path) -> None:
    first = _write(tmp_path, "a.yaml", "trainer: {max_epochs: 1, devices: 2, callbacks: [A, B]}\nseed_everything: 1\n")
    second = _write(tmp_path, "b.yaml", "trainer: {max_epochs: 5, callbacks: [C]}\n")
    assert read_configs([first, second]) == {
        "trainer": {"max_epochs": 5, "devices": 2, "callbacks": ["C"]},
        "seed_everything": 1,
    }


def test_a_later_file_that_changes_a_class_drops_the_old_arguments(tmp_path: Path) -> None:
    first = _write(tmp_path, "a.yaml", "task: {class_path: m.A, init_args: {lr: 1, depth: 3}}\n")
    second = _write(tmp_path, "b.yaml", "task: {class_path: m.B, init_args: {lr: 2}}\n")
    assert read_configs([first, second])["task"] == {"class_path": "m.B", "init_args": {"lr": 2}}


@pytest.mark.parametrize(("text", "says"), [("- a\n- b\n", "holds a list"), ("a: [1\n", "is not YAML")])
def test_a_file_that_is_no_mapping_is_an_error_that_names_it(tmp_path: Path, text: str, says: str) -> None:
    path = _write(tmp_path, "bad.yaml", text)
    with pytest.raises(ConfigurationError, match=rf"bad\.yaml.* {says}"):
        read_configs([path])


def _config() -> dict[str, Any]:
    adam = {"class_path": "torch.optim.AdamW", "init_args": {"lr": 0.3, "weight_decay": 0.5}}
    return {"task": {"class_path": "task.Mine", "init_args": {"width": 8, "optimizer": adam}}}


@pytest.mark.parametrize("key", ["task.optimizer", "task.init_args.optimizer", "task.optimizer.class_path"])
def test_another_optimizer_starts_from_its_own_defaults_and_a_note_says_what_went(key: str) -> None:
    config = _config()
    left, notes = swap_classes(config, [(key, "torch.optim.SGD"), ("task.optimizer.momentum", "0.9")])
    assert config["task"]["init_args"]["optimizer"] == {"class_path": "torch.optim.SGD"}
    assert left == [("task.optimizer.momentum", "0.9")]
    assert len(notes) == 1
    assert "lr=0.3" in notes[0]
    assert "weight_decay=0.5" in notes[0]
