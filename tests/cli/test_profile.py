"""`trainwright profile`: slow parts are named, parts sum to the step, and training is that of an ordinary fit."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from trainwright.cli.main import main
from trainwright.cli.profile import advice
from trainwright.profilers.step_parts import OTHER, PARTS, communication_shares

_PROJECT = """
import time

import torch
from torch.utils.data import DataLoader, Dataset

import trainwright as tw

TASKS = []


class Sleeps(Dataset):
    def __init__(self, seconds):
        self.seconds = seconds

    def __len__(self):
        return 24

    def __getitem__(self, i):
        time.sleep(self.seconds)
        return torch.ones(4) * (i % 7)


class Data(tw.DataModule):
    def __init__(self, seconds: float = 0.0):
        super().__init__()
        self.seconds = seconds

    def train_dataloader(self):
        return DataLoader(Sleeps(self.seconds), batch_size=4, shuffle=True)


class SlowSGD(torch.optim.SGD):
    def __init__(self, params, seconds):
        super().__init__(params, lr=0.001)
        self.seconds = seconds

    def step(self, closure=None):
        time.sleep(self.seconds)
        return super().step(closure)


class Net(tw.TaskModule):
    def __init__(self, seconds: float = 0.0, nap: float = 0.0, factor: float = 1.0):
        super().__init__()
        self.seconds, self.nap, self.factor = seconds, nap, factor
        self.layer = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        TASKS.append(self)

    def training_step(self, batch, batch_idx):
        with self.trainer.profiler.profile("own"):
            loss = self.layer(batch).square().mean() * self.factor
        self.log("loss", loss)
        return loss

    def on_before_optimizer_step(self, optimizer):
        time.sleep(self.nap)

    def validation_step(self, batch, batch_idx):  # without data: a notice
        pass

    def configure_callbacks(self):
        return tw.ModelCheckpoint(every_n_train_steps=1)

    def configure_optimizers(self):
        optimizer = SlowSGD(self.parameters(), self.seconds)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 5)]


class Naps(tw.Callback):
    def __init__(self, seconds: float = 0.0):
        self.seconds = seconds

    def on_train_batch_end(self, trainer, task, outputs, batch, batch_idx):
        time.sleep(self.seconds)
"""
_CONFIG = """
seed_everything: 7
trainer:
  accelerator: cpu
  devices: 1
  callbacks:
    - {class_path: ModelCheckpoint}
    - {class_path: LearningRateMonitor}
    - {class_path: profiled_project.Naps}
task: {class_path: profiled_project.Net}
data: {class_path: profiled_project.Data}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "profiled_project.py").write_text(_PROJECT)
    (tmp_path / "config.yaml").write_text(_CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("profiled_project", None)


def _profile(capsys: pytest.CaptureFixture[str], *words: str, steps: int = 5) -> dict[str, Any]:
    assert main(["profile", "config.yaml", "--steps", str(steps), "--json", *words]) == 0
    text = capsys.readouterr().out
    return json.loads(text)  # and nothing else, such as a notice


_NAPS = "trainer.callbacks=[{class_path: profiled_project.Naps, init_args: {seconds: 0.02}}]"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "part", "told"),
    [
        ("data.seconds=0.005", "data wait", "% of a step with num_workers=0: set num_workers="),
        ("task.seconds=0.02", "optimizer", "parameter tensors: pass fused=True (or foreach=True) to SlowSGD"),
        (_NAPS, "callbacks", "Naps takes 2"),
        ("task.nap=0.02", "callbacks", "the task's on_before_optimizer_step takes 2"),
    ],
)
def test_the_slow_part_is_named(word: str, part: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = _profile(capsys, word)
    assert found["largest"] == part
    assert found["parts"][part] >= 18
    assert found["advice"][0].startswith(f"{part} is ")
    assert told in found["advice"][0]


def test_parts_sum_to_the_measured_step(capsys: pytest.CaptureFixture[str]) -> None:
    found = _profile(capsys, "data.seconds=0.001", steps=8)
    assert found["steps"] == 8
    assert found["parts"].keys() == {*PARTS, OTHER}
    assert sum(found["parts"].values()) == pytest.approx(found["step_ms"])
    assert min(found["parts"].values()) >= 0
    assert found["parts"][OTHER] < 0.5 * found["step_ms"]  # little is left out


@pytest.mark.filterwarnings("ignore:loss is nan")
def test_losses_that_are_not_finite_are_text(capsys: pytest.CaptureFixture[str]) -> None:
    found = _profile(capsys, "task.factor=.nan")
    assert set(found["losses"]) == {"NaN"}


@pytest.mark.slow
def test_weights_are_those_of_a_fit_of_as_many_steps_and_nothing_is_written(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _profile(capsys)
    assert {path.name for path in folder.iterdir()} - {"__pycache__"} == {"config.yaml", "profiled_project.py"}
    words = ["trainer.max_steps=8", "trainer.max_epochs=-1", "trainer.callbacks=null", "trainer.logger=false"]
    assert main(["fit", "--config", "config.yaml", *words]) == 0
    tasks = sys.modules["profiled_project"].TASKS
    assert len(tasks) == 2
    torch.testing.assert_close(tasks[0].state_dict(), tasks[1].state_dict(), rtol=0, atol=0)


def test_the_table_names_the_largest_part(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "config.yaml", "--steps", "2", "--warmup", "1", "data.seconds=0.005"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]  # after the notice
    assert lines[0].startswith("Mean of 2 steps after 1 warm-up steps: ")
    assert [line[:14].strip() for line in lines[2:10]] == [*PARTS[:-1], OTHER]
    assert lines[10] == "Largest part: data wait."


@pytest.mark.slow
@pytest.mark.distributed
def test_several_processes_have_communication_and_a_slowest_rank(capsys: pytest.CaptureFixture[str]) -> None:
    found = _profile(capsys, "trainer.devices=2", "trainer.strategy=ddp")
    assert found["world_size"] == 2
    assert found["parts"]["communication"] > 0
    assert sum(found["parts"].values()) == pytest.approx(found["step_ms"])
    assert found["slowest_rank"] in (0, 1)


def test_a_collective_counts_for_the_part_that_it_overlaps() -> None:
    events = [("part:forward", 0, 10), ("part:backward", 10, 30), ("gloo:all_reduce", 25, 35), ("other", 0, 40)]
    assert communication_shares(events) == {"forward": 0, "backward": 0.25}
    nested = [("part:forward", 0, 10), ("part:callbacks", 2, 4), ("nccl:broadcast", 2, 6)]
    assert communication_shares(nested) == {"forward": 0.25, "callbacks": 1}


_FACTS = {
    "num_workers": 2,
    "prefetch_factor": None,
    "batch_size": 4,
    "pin_memory": False,
    "accumulate": 2,
    "compile": True,
    "is_cpu": False,
    "is_32": True,
    "parameters": 300,
    "unfused": None,
}


def _advice(part: str, ms: float = 7.0, step_ms: float = 10.0, **facts: Any) -> list[str]:
    result = {
        "step_ms": step_ms,
        "parts": {**dict.fromkeys((*PARTS, OTHER), 0.0), part: ms},
        "callbacks": {"Slow": ms},
        "longest_wait_ms": facts.pop("longest", ms),
    }
    return advice(result, {**_FACTS, **facts})


def test_advice_depends_on_what_is_set_and_measured() -> None:
    assert "precision" in _advice("forward", compile=False)[0]
    assert "precision" not in _advice("forward", compile=False, is_32=False)[0]
    assert _advice("backward", is_32=False)[0].endswith("which is computation")
    assert "pin_memory" in _advice("host to device")[0]
    assert "transfer_batch_to_device" in _advice("host to device", is_cpu=True)[0]
    assert "num_workers" not in _advice("data wait", 0.4, num_workers=0)[0]
    assert "num_workers=" in _advice("data wait", num_workers=0)[0]
    assert "less work per sample" in _advice("data wait")[0]
    assert "prefetch_factor" not in _advice("data wait")[0]
    assert "prefetch_factor=4" in _advice("data wait", longest=70.0)[0]


def test_wrong_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "config.yaml", "--steps", "0"]) == 2
    assert "expected at least 1 of each" in capsys.readouterr().err
    assert main(["profile", "config.yaml", "--step", "5"]) == 2
    assert "unknown option --step. Did you mean '--steps'?" in capsys.readouterr().err
    assert main(["profile", "config.yaml", "trainer.limit_train_batches=0"]) == 2
