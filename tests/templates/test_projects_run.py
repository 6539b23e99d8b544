"""The projects that `trainwright new` writes, run from end to end in processes of their own, as a user would."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import trainwright
from tests.helpers.selection import mostly_exhaustive

pytestmark = [pytest.mark.slow, pytest.mark.distributed]

TEMPLATES = ["classifier", "finetune", "language-model"]
# peft 0.21 reads a property that transformers 5.23 deprecates.
STRICT = ("-W", "error", "-W", "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
_SOURCES = str(Path(trainwright.__file__).parents[1])


def run(project: Path, *arguments: str, timeout_s: float = 280) -> str:
    """Run Python in the project's folder; return what it printed, or fail with it."""
    # One thread: on a busy machine the threads of small kernels wait for each other many times longer than they work.
    environment = dict(os.environ) | {"PYTHONPATH": _SOURCES, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=project, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def write(folder: Path, template: str) -> Path:
    project = folder / template
    run(folder, "-m", "trainwright", "new", str(project), "--template", template)
    return project


def checkpoints(project: Path) -> list[Path]:
    return sorted(path.parent for path in (project / "runs" / "checkpoints").glob("*/manifest.json"))


@pytest.mark.parametrize("template", mostly_exhaustive(TEMPLATES, keep=["classifier"]))
def test_a_project_s_own_tests_pass(tmp_path: Path, template: str) -> None:
    project = write(tmp_path, template)
    printed = run(project, "-m", "pytest", "-q", "-p", "no:cacheprovider")
    assert re.search(r"\d+ passed", printed)


def learning_rates(project: Path) -> list[float]:
    """Return the learning rates of the newest run, which a resumed run continues."""
    newest = max((project / "runs" / "csv").glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    with (newest / "metrics.csv").open() as lines:
        rows = list(csv.DictReader(lines))
    column = next(name for name in rows[0] if name.startswith("lr"))
    return [float(row[column]) for row in rows if row[column]]


FIT = (*STRICT, "-m", "trainwright", "fit", "--config", "config.yaml", "trainer.log_every_n_steps=1")
TEST = (*STRICT, "-m", "trainwright", "test", "--config", "config.yaml", "--ckpt_path", "best")


@pytest.mark.exhaustive
def test_the_classifier_trains_longer_is_exported_and_searched_without_a_warning(tmp_path: Path) -> None:
    project = write(tmp_path, "classifier")
    run(project, *FIT, "trainer.max_epochs=1")
    run(project, *FIT, "trainer.max_epochs=4", "--ckpt_path", "last")
    rates = learning_rates(project)
    assert rates[0] == pytest.approx(3e-4)
    assert rates[39] < rates[40] == pytest.approx(3e-3)  # the warm-up of 40 steps continued over the resume
    assert rates[40:] == [rates[40]] * 40
    assert "test_acc" in run(project, *TEST)
    assert (project / run(project, *STRICT, "-m", "trainwright", "report", "runs").strip()).is_file()
    for checkpoint in ("best", "last", "runs/checkpoints/last"):
        exported = run(project, *STRICT, "export.py", checkpoint, "digits.pt2")
        assert "digits.pt2 maps (n, 1, 8, 8) to (n, 10)" in exported
    searched = run(project, *STRICT, "sweep.py", "--trials", "2", "--epochs", "1")
    assert "trainwright fit --config config.yaml task.lr=" in searched


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_commands_of_the_classifier_s_readme_run_in_their_order(tmp_path: Path) -> None:
    project = write(tmp_path, "classifier")
    text = re.sub(r"```.*?```", "", (project / "README.md").read_text(), flags=re.DOTALL)
    commands = re.findall(r"^    (\S.*)$", text, re.MULTILINE)
    assert len(commands) >= 10
    python = f'python() {{ "{sys.executable}" "$@"; }}'
    shell = [python, 'trainwright() { python -m trainwright "$@"; }', 'pytest() { python -m pytest "$@"; }']
    shell.append('sbatch() { bash -n "$1"; }')
    script = "import subprocess, sys; subprocess.run(['bash', '-e', '-c', sys.argv[1]], check=True)"
    printed = run(project, "-c", script, "\n".join([*shell, *commands]), timeout_s=550)
    assert "maps (n, 1, 8, 8) to (n, 10)" in printed
    assert re.search(r"\d+ passed", printed)


@pytest.mark.exhaustive
def test_language_models_train_longer_and_are_exported_finetuned_and_tested_without_a_warning(tmp_path: Path) -> None:
    few = ("trainer.limit_train_batches=4", "trainer.limit_val_batches=1")
    writer = write(tmp_path, "language-model")
    run(writer, *FIT, *few, "trainer.max_epochs=1")
    run(writer, *FIT, *few, "trainer.max_epochs=2", "--ckpt_path", "last")
    rates = learning_rates(writer)
    assert rates == sorted(rates)
    assert rates[-1] == pytest.approx(3e-3 * 8 / 50)  # step 8 of a warm-up of 50 steps
    run(writer, "export.py", "last", "exported")

    chat = write(tmp_path, "finetune")
    model = str(writer / "exported")
    models = (f"task.model={model}", f"data.model={model}")
    run(chat, *FIT, *few, *models, "trainer.max_epochs=1")
    run(chat, *FIT, *few, *models, "trainer.max_epochs=4", "--ckpt_path", "last")
    assert learning_rates(chat)[-1] == pytest.approx(1e-3)
    assert "test_loss" in run(chat, *TEST, *models)
    run(chat, "export.py", "best", "exported")
    assert (chat / "exported" / "config.json").is_file()
    searched = run(chat, *STRICT, "sweep.py", "--trials", "2", *models)
    assert f"task.model={model} data.model={model} task.lr=" in searched
    printed = run(chat, *STRICT, "train.py", "--model", model, "--epochs", "1")
    assert re.search(r"test loss: +\d\.\d+ nats per token of an answer", printed)
    assert (chat / "runs" / "checkpoints" / "last").is_symlink()


def losses(project: Path, strategy: str, devices: int) -> list[float]:
    """Train 20 steps with a strategy, and return the logged loss of each."""
    few = ("trainer.max_steps=20", "trainer.log_every_n_steps=1", "trainer.limit_val_batches=2")
    chosen = (f"trainer.strategy={strategy}", f"trainer.devices={devices}", "trainer.accelerator=cpu")
    run(project, "-m", "trainwright", "fit", "--config", "config.yaml", *few, *chosen, timeout_s=120)
    newest = max((project / "runs" / "csv").glob("version_*"), key=lambda path: int(path.name.rpartition("_")[2]))
    with (newest / "metrics.csv").open() as lines:
        return [float(row["train_loss"]) for row in csv.DictReader(lines) if row.get("train_loss")]


_MESHES = {"megatron:pp=2": 2, "megatron:tp=2": 2, "megatron:pp=2:tp=2": 4}


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", list(_MESHES))
def test_the_language_model_trains_in_stages_and_split_as_in_one_process(tmp_path: Path, strategy: str) -> None:
    project = write(tmp_path, "language-model")
    alone = losses(project, "single", 1)
    assert len(alone) == 20
    assert losses(project, strategy, _MESHES[strategy]) == pytest.approx(alone, abs=1e-4, rel=0)
