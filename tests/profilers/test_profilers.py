from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import Batch, RegressionTask, regression_loader
from trainwright.callbacks import Callback
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from trainwright.profilers.pytorch import CycleProfile

_REGIONS = {
    "run_training_batch",
    "[Strategy]SingleDeviceStrategy.training_step",
    "[Strategy]SingleDeviceStrategy.backward",
    "[TaskModule]RegressionTask.optimizer_step",
    "[Loader]train_dataloader_next",
}


class _Listens(Callback):
    def on_train_batch_end(self, trainer: Any, task: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass


def _fit(profiler: Any, task: RegressionTask | None = None, **arguments: Any) -> Any:
    torch.manual_seed(0)
    task = RegressionTask() if task is None else task
    trainer = quiet_trainer(max_epochs=1, profiler=profiler, **arguments)
    trainer.fit(task, regression_loader(8), regression_loader(2))
    return trainer


def test_simple_counts_hooks_steps_and_waits() -> None:
    profiler = SimpleProfiler()
    _fit(profiler, callbacks=[_Listens()])
    totals = profiler.totals
    assert totals.keys() >= {*_REGIONS, "[Callback]_Listens.on_train_batch_end"}
    assert {name: totals[name][0] for name in ("run_training_batch", "[Callback]_Listens.on_train_batch_end")} == {
        "run_training_batch": 8,
        "[Callback]_Listens.on_train_batch_end": 8,
    }
    _, total, own = totals["run_training_batch"]
    assert 0 <= own < total
    assert sum(profiler.recorded_durations["run_training_batch"]) == pytest.approx(total)


@pytest.mark.parametrize("profiler", ["simple", "advanced", "pytorch"])
def test_training_is_bit_equal(profiler: str, tmp_path: Path) -> None:
    weights = []
    for each in (None, profiler):
        trainer = _fit(each, default_root_dir=tmp_path, accumulate_grad_batches=2, gradient_clip_val=0.1)
        weights.append(weights_of(trainer.model))
    assert_equal_weights(*weights)


def test_advanced_writes_the_functions_of_each_action(tmp_path: Path) -> None:
    _fit(AdvancedProfiler(tmp_path, "calls", line_count_restriction=5, dump_stats=True))
    text = (tmp_path / "fit-calls.txt").read_text()
    assert "Profile of [Strategy]SingleDeviceStrategy.training_step" in text
    assert list(tmp_path.glob("fit-calls-0-*training_step.prof"))


def test_a_profiler_without_a_trainer_writes_its_summary(tmp_path: Path) -> None:
    profiler = SimpleProfiler(tmp_path, "own")
    with profiler.profile("load"):
        pass
    profiler.describe()
    assert "load" in (tmp_path / "own.txt").read_text()


def test_a_trace_has_the_regions_and_the_table_the_flops(tmp_path: Path) -> None:
    profiler = PyTorchProfiler(tmp_path, schedule={"wait": 1, "active": 2, "repeat": 2}, with_flops=True)
    _fit(profiler)
    assert _names(tmp_path / "fit-profile-0.json") >= _REGIONS | {"[Module]net: Sequential"}
    assert (tmp_path / "fit-profile-0-1.json").exists()
    assert "FLOPs of a step" in (tmp_path / "fit-profile.txt").read_text()


def _names(path: Path) -> set[str]:
    return {event["name"] for event in json.loads(path.read_text())["traceEvents"] if "name" in event}


def _fit_two(folder: str) -> None:
    trainer = quiet_trainer(max_epochs=1, devices="auto", strategy="ddp", profiler=PyTorchProfiler(folder))
    trainer.fit(RegressionTask(), regression_loader(16))


@pytest.mark.distributed
def test_the_merged_trace_has_a_lane_for_each_rank(tmp_path: Path) -> None:
    run_distributed(_fit_two, 2, str(tmp_path))
    wanted = {name.replace("SingleDevice", "DDP") for name in _REGIONS}
    for rank in range(2):
        assert _names(tmp_path / f"fit-profile-{rank}.json") >= wanted
    events = json.loads((tmp_path / "fit-profile-merged.json").read_text())["traceEvents"]
    lanes: dict[int, set[int]] = {0: set(), 1: set()}
    for event in events:
        if event["name"] == "process_name":
            lanes[int(event["args"]["name"].split()[1].rstrip(":"))].add(event["pid"])
    assert all(lanes.values())
    assert not lanes[0] & lanes[1]
    with_steps = {event["pid"] for event in events if event["name"] == "run_training_batch"}
    assert all(with_steps & of_rank for of_rank in lanes.values())


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_what_the_machine_lacks_is_an_error_or_a_warning(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="needs an NVIDIA GPU"):
        _fit(PyTorchProfiler(tmp_path, emit_nvtx=True))
    with pytest.raises(ConfigurationError, match=r"'cuda' cannot be recorded on this machine\. Supported: cpu"):
        _fit(PyTorchProfiler(tmp_path, activities=[torch.profiler.ProfilerActivity.CUDA]))
    with pytest.warns(TrainwrightWarning, match="needs CUDA; no snapshot is written"):
        _fit(PyTorchProfiler(tmp_path, memory_snapshot=True))


def test_a_second_export_to_the_same_file_keeps_the_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    with CycleProfile(None, activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        torch.ones(2).sum()
    for target in (path, path, tmp_path / "copy.json"):
        profile.export_chrome_trace(str(target))
    assert path.stat().st_size > 0
    assert path.read_bytes() == (tmp_path / "copy.json").read_bytes()


def test_a_schedule_that_never_becomes_active_is_told(tmp_path: Path) -> None:
    with pytest.warns(TrainwrightWarning, match=r"recorded no step: the loop ran 8 steps, .* active after 100 steps"):
        _fit(PyTorchProfiler(tmp_path, schedule={"wait": 100, "active": 1}))


@pytest.mark.parametrize("stage", ["validate", "test", "predict"])
def test_the_other_stages_have_a_table(stage: str, capsys: pytest.CaptureFixture[str]) -> None:
    class Predicts(RegressionTask):
        def predict_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            return self(batch[0])

    profiler = SimpleProfiler()
    getattr(quiet_trainer(profiler=profiler), stage)(Predicts(), regression_loader(6))
    assert profiler.totals[f"[Strategy]SingleDeviceStrategy.{_STEP_OF[stage]}"][0] == 6
    waits = next(calls for name, (calls, *_) in profiler.totals.items() if name.startswith("[Loader]"))
    assert waits in (6, 7)  # also for the end of the data
    assert f"Profile of {stage} on rank 0" in capsys.readouterr().out


_STEP_OF = {"validate": "validation_step", "test": "test_step", "predict": "predict_step"}


def test_wrong_arguments_name_the_nearest() -> None:
    with pytest.raises(ConfigurationError, match=r"unknown profiler 'simpel'.*'simple'"):
        quiet_trainer(profiler="simpel")
    with pytest.raises(ConfigurationError, match=r"no key 'aktive'.*'active'"):
        PyTorchProfiler(schedule={"aktive": 1})
    with pytest.raises(ConfigurationError, match="has no 'active'"):
        PyTorchProfiler(schedule={"wait": 1})
    with pytest.raises(ConfigurationError, match=r"'cpu_tme_total'.*'cpu_time_total'"):
        PyTorchProfiler(sort_by_key="cpu_tme_total")
    with pytest.raises(ConfigurationError, match=r"no argument 'with_flop'.*'with_flops'"):
        PyTorchProfiler(with_flop=True)
    with pytest.raises(ValueError, match="not started"):
        SimpleProfiler().stop("x")


@pytest.mark.slow
def test_each_cycle_has_a_memory_timeline_without_traces_too(tmp_path: Path) -> None:
    schedule = {"wait": 1, "active": 1, "repeat": 2}
    _fit(PyTorchProfiler(tmp_path, memory_timeline=True, export_to_chrome=False, schedule=schedule))
    names = {path.name for path in tmp_path.glob("*.json")}
    assert names == {"fit-profile-0-memory.json", "fit-profile-0-1-memory.json"}
