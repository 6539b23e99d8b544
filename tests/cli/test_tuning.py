"""`trainwright profile --apply`: what gains and keeps the losses is kept, and written into a new configuration."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import yaml

from trainwright.cli.main import main
from trainwright.cli.remedies import REMEDIES, change
from trainwright.cli.tuning import TrialError, TrialRun, TriedChange, Tuning, judge

_PROJECT = """
import time

import torch
from torch.utils.data import DataLoader, Dataset

import trainwright as tw


class Sleeps(Dataset):
    def __len__(self):
        return 4096

    def __getitem__(self, i):
        time.sleep(0.005)
        return torch.ones(4) * (i % 7)


class Data(tw.DataModule):
    def __init__(self, num_workers: int = 0, batch_size: int = 4):
        super().__init__()
        self.options = {"num_workers": num_workers, "batch_size": batch_size}

    def train_dataloader(self):
        return DataLoader(Sleeps(), shuffle=True, **self.options)


class Net(tw.TaskModule):
    def __init__(self, fused: bool = False):
        super().__init__()
        self.fused = fused
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.001, fused=self.fused)


class Threads(Net):
    def training_step(self, batch, batch_idx):
        return 0 * super().training_step(batch, batch_idx) + torch.get_num_threads()


class Fails(Net):
    def training_step(self, batch, batch_idx):
        raise RuntimeError("no kernel")
"""
_CONFIG = """
trainer: {accelerator: cpu, devices: 1}
task: {class_path: tuned_project.Net}
data: {class_path: tuned_project.Data}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "tuned_project.py").write_text(_PROJECT)
    (tmp_path / "config.yaml").write_text(_CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    sys.modules.pop("tuned_project", None)


def _trials(*step_ms: float, losses: Sequence[float] = (2.0, 1.0)) -> list[TrialRun]:
    return [TrialRun(each, losses) for each in step_ms]


@pytest.mark.parametrize(
    ("after", "tolerance", "result"),
    [
        (_trials(5, 5.5, 5.2), 1e-3, "kept"),
        (_trials(9.6, 9.8, 9.7), 1e-3, "not kept: no gain beyond the noise (9.5 to 10.5 ms without, 9.6 to"),
        (_trials(12, 13, 14), 1e-3, "not kept: slower"),
        (_trials(5, 5, 5, losses=(2.0, 1.01)), 1e-3, "not kept: losses differ by more than 0.001"),
        (_trials(5, 5, 5, losses=(2.0, 1.01)), 5e-2, "kept"),
        (_trials(5, 5, 5, losses=(9.0,)), None, "kept"),
    ],
)
def test_a_change_is_kept_if_it_gains_and_losses_agree(
    after: list[TrialRun], tolerance: float | None, result: str
) -> None:
    row = judge("x=1", _trials(10, 9.5, 10.5), after, tolerance)
    assert row.result.startswith(result)
    assert row.kept == (result == "kept")
    assert (row.before, row.unit) == (10, "ms")


def test_losses_that_cannot_be_compared_keep_nothing() -> None:
    before, after = _trials(10, 10, losses=()), _trials(5, 5, losses=())
    assert judge("x=1", before, after, 1e-3).result == "not kept: the steps return no loss to compare"
    before = [TrialRun(10, (2.0,)), TrialRun(10, (1.0,))]
    assert judge("x=1", before, before[:1] + _trials(5, losses=(1.0,)), 1e-3).kept is False
    assert "equal runs differ by" in judge("x=1", before, _trials(5, 5, losses=(2.0,)), 1e-3).result


def test_batch_sizes_compare_as_many_samples() -> None:
    row = judge("data.batch_size=8", _trials(10, 10), _trials(12, 12), None, (4, 8))
    assert row.kept
    assert row.gain == pytest.approx(40)
    assert (row.before, row.after, row.unit) == (400, pytest.approx(4000 / 6), "/s")


def test_changes_are_those_of_arguments_that_exist_and_are_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.get_num_threads", lambda: 4)
    monkeypatch.setattr("trainwright.cli.remedies.usable_cores", lambda: 8)
    optimizer = {"class_path": "torch.optim.SGD", "init_args": {"fused": None, "foreach": True}}
    config = {
        "trainer": {"compile": False, "precision": "16-mixed", "strategy": "auto"},
        "task": {"class_path": "x.Net", "init_args": {"optimizer": optimizer}},
        "data": {"class_path": "x.Data", "init_args": {"num_workers": 0, "prefetch_factor": None, "batch_size": 4}},
    }
    assert {name: change(config, name) for name in REMEDIES if name != "pin_memory"} == {
        "workers": (["data.init_args.num_workers=2"], (1, 1)),
        "prefetch": "not tried: num_workers is not set",
        "persistent": "not tried: data has no argument persistent_workers",
        "fused": (["task.init_args.optimizer.init_args.fused=true"], (1, 1)),
        "foreach": "not tried: it is True already",
        "channels_last": "not tried: task has no argument channels_last",
        "buckets": "not tried: trainer has no argument bucket_cap_mb",
        "regional": (["trainer.compile=regional"], (1, 1)),
        "compile": (["trainer.compile=true"], (1, 1)),
        "threads": (["OMP_NUM_THREADS=2", "OMP_NUM_THREADS=8"], (1, 1)),
        "bf16": "not tried: it is 16-mixed already",
        "batch_size": (["data.init_args.batch_size=8"], (4, 8)),
    }


def test_a_batch_size_is_doubled_where_it_is_set() -> None:
    config = {"data": {"batch_size": None, "train": {"batch_size": 4}}}
    assert change(config, "batch_size") == (["data.train.batch_size=8"], (4, 8))


def _measures(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Replace trial runs by numbers: 2 and 4 workers and larger batches gain, compile fails, bf16 changes losses."""
    seen = []

    def trial(self: Tuning, overrides: Sequence[str] = ()) -> TrialRun:
        seen.append(tuple(overrides))
        if "trainer.compile=true" in overrides:
            raise TrialError("no compiler")
        gains = {"data.init_args.num_workers=2": 3, "data.init_args.num_workers=4": 2, "OMP_NUM_THREADS=1": 1}
        ms = 10.0 - sum(gains.get(word, 0) for word in overrides)
        return TrialRun(ms, [1.0, 1.5 if "trainer.precision=bf16-mixed" in overrides else 1.0])

    monkeypatch.setattr(Tuning, "trial", trial)
    return seen


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:This DataLoader will create")  # more workers than cores
def test_kept_changes_add_up_and_are_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = _measures(monkeypatch)
    monkeypatch.setattr("torch.get_num_threads", lambda: 2)
    assert main(["profile", "config.yaml", "--apply", "--json", "trainer.max_epochs=7", "trainer.strategy=ddp"]) == 0
    found = json.loads(capsys.readouterr().out)
    kept = ["data.num_workers=2", "data.num_workers=4"]
    assert [row["remedy"] for row in found["rows"] if row["kept"]] == kept
    results = {row["remedy"]: row["result"] for row in found["rows"]}
    assert results["trainer.compile=true"] == "not kept: failed: no compiler"
    assert results["data.batch_size=8"] == "proposed: it changes training; --apply batch_size"
    told = "proposed: OMP_NUM_THREADS=1 trainwright fit …, or launch --num_cpu_threads_per_process 1"
    assert results["OMP_NUM_THREADS=1"] == told
    assert results["trainer.strategy.bucket_cap_mb=50"].startswith("not kept: no gain")
    assert (found["total"]["before"], found["total"]["after"]) == (10, 5)
    both = ("data.init_args.num_workers=2", "data.init_args.num_workers=4")
    assert seen[:3] == [(), (), both[:1]]  # alternating, after a first trial
    assert (*both, "trainer.precision=bf16-mixed") in seen
    text = Path("config.tuned.yaml").read_text()
    assert "# data.num_workers=4: 28.6 % of a step's time" in text
    assert f"# OMP_NUM_THREADS=1: 20.0 % of a step's time, {told}\n" in text
    written = yaml.safe_load(text)
    assert written["data"]["init_args"] == {"num_workers": 4, "batch_size": 4}
    assert (written["trainer"]["max_epochs"], written["seed_everything"]) == (7, None)
    assert Path("config.yaml").read_text() == _CONFIG
    assert main(["plan", "config.tuned.yaml"]) == 0


def test_a_remedy_that_cannot_be_tried_has_a_row_also_after_a_kept_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    gains = iter([9.0, 1.0, 9.0, 1.0])  # without and with the change, twice
    monkeypatch.setattr(Tuning, "trial", lambda self, overrides=(): TrialRun(next(gains), [1.0]))
    monkeypatch.setattr(Tuning, "config", lambda self: {"task": {"fused": False}, "trainer": {}})
    tuning = Tuning([], 1, 1, 2, lambda row: None)
    tuning.attempt("fused", named=False)
    tuning.attempt("buckets", named=False)
    assert [row.result for row in tuning.rows] == [
        "kept; start +0.0 s",
        "not tried: trainer has no argument bucket_cap_mb",
    ]


def test_the_total_counts_samples_of_the_batch_size_that_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(self: Tuning, overrides: Sequence[str] = ("data.train.batch_size=8",)) -> dict[str, object]:
        return {"data": {"batch_size": None, "train": {"batch_size": 8 if overrides else 4}}}

    monkeypatch.setattr(Tuning, "config", config)
    monkeypatch.setattr(Tuning, "trial", lambda self, overrides=(): TrialRun(10.0, [1.0]))
    tuning = Tuning([], 1, 1, 2, lambda row: None)
    tuning.rows = [TriedChange("workers", "", kept=True), TriedChange("batch_size", "", kept=True)]
    total = tuning.total()
    assert total is not None
    assert (total.before, total.after, total.unit) == (400.0, 800.0, "/s")


def test_a_failed_trial_of_all_kept_changes_leaves_the_total_without_times(monkeypatch: pytest.MonkeyPatch) -> None:
    def trial(self: Tuning, overrides: Sequence[str] = ()) -> TrialRun:
        raise TrialError("RuntimeError: out of memory")

    monkeypatch.setattr(Tuning, "config", lambda self, overrides=(): {})
    monkeypatch.setattr(Tuning, "trial", trial)
    tuning = Tuning([], 1, 1, 2, lambda row: None)
    tuning.rows = [TriedChange("workers", "", kept=True), TriedChange("fused", "", kept=True)]
    total = tuning.total()
    assert total == TriedChange("total", "not measured: failed: RuntimeError: out of memory")


def test_nothing_is_tried_that_would_end_after_the_time(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _measures(monkeypatch)
    clock = iter(range(0, 10_000, 7))  # seconds: each call of the clock is 7 s later
    monkeypatch.setattr("trainwright.cli.tuning.perf_counter", lambda: next(clock))
    assert main(["profile", "config.yaml", "--apply", "workers", "compile", "--minutes", "0.15", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["remedy"], row["kept"]) for row in found["rows"]] == [
        ("data.num_workers=2", True),
        ("data.num_workers=4", False),
        ("trainer.compile=true", False),
    ]
    assert found["rows"][1]["result"] == "not tried: it would take longer than --minutes 0.15"


def test_a_batch_size_that_is_named_is_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    _measures(monkeypatch)
    monkeypatch.setitem(REMEDIES, "batch_size", REMEDIES["batch_size"].__class__("data", "batch_size", _double, None))
    assert main(["profile", "config.yaml", "--apply", "batch_size", "--output", "out/fast.yaml"]) == 0
    assert yaml.safe_load(Path("out/fast.yaml").read_text())["data"]["init_args"] == {"num_workers": 0, "batch_size": 8}


def _double(size: int) -> int:
    return 2 * size


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--apply", "worker"], "--apply='worker' is unknown. Did you mean 'workers'?"),
        (["--apply", "persistent"], "persistent: not tried: data has no argument persistent_workers"),
        (["--apply", "--output", "config.yaml"], "is a file of the configuration"),
        (["--apply", "--output", "tuned_project.py"], "was not written by --apply"),
        (["--output", "x.yaml"], "--output, --repeats and --minutes are options of --apply"),
        (["--minutes", "3"], "--output, --repeats and --minutes are options of --apply"),
        (["--apply", "--minutes", "0"], "--minutes 0: expected a positive number"),
    ],
)
def test_wrong_options_are_refused_before_a_trial(
    words: list[str], told: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = _measures(monkeypatch)
    assert main(["profile", "config.yaml", *words]) == 2
    assert told in capsys.readouterr().err
    assert not seen


@pytest.mark.slow
def test_a_trial_runs_with_its_number_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    tuning = Tuning(["config.yaml", "task=tuned_project.Threads"], 1, 1, 2, lambda row: None)
    assert tuning.trial(["OMP_NUM_THREADS=2"]).losses[0] == 2.0


@pytest.mark.slow
def test_a_configuration_that_cannot_train_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "config.yaml", "--apply", "task=tuned_project.Fails"]) == 2
    assert "a trial run of the configuration failed: RuntimeError: no kernel" in capsys.readouterr().err
    assert not (folder / "config.tuned.yaml").exists()
