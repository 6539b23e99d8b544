"""The contract holds a pipeline: one forward_backward runs a schedule over all micro-batches of a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from tests.strategies.pipeline_double import StagedTask, TwoStages
from trainwright.callbacks.callback import Callback
from trainwright.checkpoint import read_checkpoint
from trainwright.cli.parity.parity_compare import LOSS, NORM, Tolerance, compare
from trainwright.cli.parity.parity_tape import GRADIENT, PARAMETER, StepTape, Tape

_MICRO_BATCHES = 4  # of a step
_EPOCHS = 4
_HALF = 2
_EXACT = Tolerance(atol=1e-7, rtol=1e-5)
_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class Staged(StagedTask):
    """Two stages of other shapes; what lies above a threshold counts as an item."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            first = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6))
            self.stages = nn.ModuleList([first, nn.Sequential(nn.Tanh(), nn.Linear(6, 1))])

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return the mean squared error over the rows that count."""
        counts = targets > -1
        return ((outputs - targets).square() * counts).sum() / counts.sum()

    def num_items(self, batch: Any) -> torch.Tensor:
        """Count the rows that count."""
        return (batch[1] > -1).sum()

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        """Log the error, and count the rows."""
        self.log("val_loss", self.loss(self(batch[0]), batch[1]), batch_size=len(batch[0]))
        self.log("rows", float(len(batch[0])), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        """Return the outputs."""
        outputs: torch.Tensor = self(batch[0])
        return outputs

    def configure_optimizers(self) -> Any:
        """Return AdamW and a schedule by steps."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.95)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def batches(num: int = 12) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return micro-batches of three rows."""
    generator = torch.Generator().manual_seed(7)
    inputs = [torch.randn(3, 4, generator=generator) for _ in range(num)]
    return [(x, x.sum(dim=1, keepdim=True)) for x in inputs]


class Held(Callback):
    """Notes, while training, which parameters have values on this rank, and the samples it sees."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.seen = 0.0

    def on_train_start(self, trainer: Any, task: Any) -> None:
        self.names = [name for name, parameter in task.named_parameters() if not parameter.is_meta]

    def on_train_batch_start(self, trainer: Any, task: Any, batch: Any, batch_idx: int) -> None:
        self.seen += float(batch[0].sum())


def train(
    folder: Path, strategy: Any, epochs: int = _EPOCHS, *, load: Path | None = None, save: Path | None = None
) -> dict[str, Any]:
    """Train, validate after each epoch and predict; return what can be compared."""
    folder.mkdir(exist_ok=True)
    task, held = Staged(), Held()
    trainer = quiet_trainer(
        devices="auto" if isinstance(strategy, TwoStages) else 1,
        strategy=strategy,
        max_epochs=epochs,
        gradient_clip_val=0.5,
        callbacks=[StepTape(folder, _MICRO_BATCHES, seed=0), held],
    )
    trainer.fit(task, batches(), batches(5), ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    steps = getattr(trainer.strategy, "num_schedule_steps", None)  # a stage has its own copy of the strategy
    return {
        "tape": Tape.read(type(trainer.strategy).__name__, folder),
        "metrics": dict(trainer.callback_metrics),
        "weights": weights_of(task),
        "predictions": trainer.predict(task, batches(5)),
        "held": held,
        "schedule_steps": steps,
    }


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where tapes and checkpoints lie."""
    return tmp_path_factory.mktemp("pipeline")


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    """One process; its checkpoint of half the epochs is `one-half`."""
    train(folder / "one-first", "single", _HALF, save=folder / "one-half")
    return train(folder / "one", "single")


@pytest.fixture(scope="module")
def two(one: dict[str, Any], folder: Path) -> list[dict[str, dict[str, Any]]]:
    """Two ranks, each by what it ran; the checkpoint of half the epochs is `two-half`."""

    def runs() -> dict[str, dict[str, Any]]:
        def run(name: str, *options: Any, **files: Path) -> dict[str, Any]:
            return train(folder / name, TwoStages(Schedule1F1B), *options, **files)

        found = {"1f1b": run("1f1b"), "gpipe": train(folder / "gpipe", TwoStages(ScheduleGPipe))}
        found["first"] = run("first", _HALF, save=folder / "two-half")
        found["second"] = run("second", load=folder / "two-half")
        found["after one"] = run("after-one", load=folder / "one-half")
        return found

    by_rank: list[dict[str, dict[str, Any]]] = run_distributed(runs, 2, init=False, timeout=180)
    return by_rank


@pytest.mark.distributed
@pytest.mark.parametrize("schedule", _SCHEDULES)
def test_every_step_is_that_of_one_process(schedule: str, one: dict[str, Any], two: Any) -> None:
    result = compare(one["tape"], two[0][schedule]["tape"], _EXACT)
    assert result.equal, result.found
    assert len(result.reference.steps) - 1 == _EPOCHS * 12 // _MICRO_BATCHES
    assert set(result.worst) == {LOSS, NORM, GRADIENT, PARAMETER}


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_the_schedule_runs_once_in_a_step_over_all_its_micro_batches(rank: int, one: dict[str, Any], two: Any) -> None:
    assert two[rank]["1f1b"]["schedule_steps"] == len(one["tape"].steps) - 1


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_holds_its_own_stage_and_sees_all_data(rank: int, one: dict[str, Any], two: Any) -> None:
    held = two[rank]["1f1b"]["held"]
    assert held.names
    assert {name[: len("stages.0")] for name in held.names} == {f"stages.{rank}"}
    assert held.seen == pytest.approx(one["held"].seen)


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1])
def test_evaluation_is_that_of_one_process(rank: int, one: dict[str, Any], two: Any) -> None:
    found = two[rank]["1f1b"]
    assert found["metrics"]["val_loss"] == pytest.approx(one["metrics"]["val_loss"], abs=1e-6)
    assert found["metrics"]["rows"] == one["metrics"]["rows"] == 15  # both ranks see them, and they count once
    assert len(one["predictions"]) == 5
    torch.testing.assert_close(found["predictions"], one["predictions"])


@pytest.mark.distributed
def test_after_a_stage_every_rank_has_the_whole_model(one: dict[str, Any], two: Any) -> None:
    for rank in (0, 1):
        torch.testing.assert_close(two[rank]["1f1b"]["weights"], one["weights"], rtol=1e-5, atol=1e-6)


@pytest.mark.distributed
def test_its_checkpoint_is_that_of_one_process_and_both_go_on_from_either(
    one: dict[str, Any], two: Any, folder: Path
) -> None:
    mine, theirs = (read_checkpoint(folder / name) for name in ("one-half", "two-half"))
    torch.testing.assert_close(theirs.model, mine.model, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(theirs.optimizers[0]["state"], mine.optimizers[0]["state"], rtol=1e-5, atol=1e-6)
    for name in ("second", "after one"):
        torch.testing.assert_close(two[0][name]["weights"], one["weights"], rtol=1e-5, atol=1e-6)
        assert two[0][name]["metrics"]["val_loss"] == pytest.approx(one["metrics"]["val_loss"], abs=1e-6)


@pytest.mark.distributed
@pytest.mark.filterwarnings("ignore:.*random number generators start anew:UserWarning")
def test_one_process_goes_on_from_a_pipelines_checkpoint(one: dict[str, Any], two: Any, folder: Path) -> None:
    assert two
    found = train(folder / "from-two", "single", load=folder / "two-half")
    torch.testing.assert_close(found["weights"], one["weights"], rtol=1e-5, atol=1e-6)
