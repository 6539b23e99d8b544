"""`trainwright parity`: equal strategies are equal, and the first difference of another one is reported."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import Batch, RegressionTask, regression_data
from trainwright.cli import parity as parity_command
from trainwright.cli.main import main
from trainwright.cli.parity import ParityPlan, load_strategy
from trainwright.cli.parity_tape import (
    COPY,
    GRADIENT,
    LOSS,
    NORM,
    PARAMETER,
    Comparison,
    StepTape,
    Tape,
    Tolerance,
    compare,
)
from trainwright.core.errors import ConfigurationError
from trainwright.processes import launcher
from trainwright.strategies import DDPStrategy

_MICRO_BATCHES = 2
_STEPS = 4
_EXACT = Tolerance.of("32-true", None, None)


class Normed(RegressionTask):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(dropout=0.3, momentum=0.9, **arguments)
        self.norm = nn.BatchNorm1d(4)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(self.norm(inputs))


class Drifting(RegressionTask):
    """Task whose rank 1 changes the last bias before the third step."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.state.step == 2 and self.global_rank == 1:
            with torch.no_grad():
                self.net[3].bias += 1.0


def record(
    folder: Path,
    task: RegressionTask,
    *,
    strategy: str = "single",
    seed: int = 0,
    micro_batches: int = _MICRO_BATCHES,
    data: Any = None,
    **arguments: Any,
) -> Tape:
    """Train four steps in this process or on this rank, and return their record."""
    folder.mkdir(exist_ok=True)
    torch.manual_seed(0)
    trainer = quiet_trainer(
        devices="auto" if strategy != "single" else 1,
        strategy=strategy,
        max_steps=_STEPS,
        max_epochs=-1,
        seed=0,
        callbacks=[StepTape(folder, micro_batches, seed)],
        **arguments,
    )
    trainer.fit(task, data or DataLoader(regression_data(20), batch_size=2, shuffle=True))
    return Tape.read(strategy, folder)


def compared(first: Tape, second: Tape) -> Comparison:
    return compare(first, second, _EXACT)


def kinds(result: Comparison) -> list[str]:
    return list(dict.fromkeys(difference.kind for difference in result.found))


def test_a_run_equals_itself(tmp_path: Path) -> None:
    first, second = (record(tmp_path / name, Normed()) for name in "ab")
    result = compared(first, second)
    assert result.equal
    assert len(result.reference.steps) == len(result.other.steps) == _STEPS + 1  # the initial state and each step
    assert result.worst == dict.fromkeys((LOSS, NORM, GRADIENT, PARAMETER), 0.0)
    assert result.notes() == []


@pytest.mark.parametrize(("changed", "step"), [({"seed": 1}, 0), ({"lr": 0.06}, 1)])
def test_initial_weights_and_optimizer_steps_are_compared(changed: dict[str, Any], step: int, tmp_path: Path) -> None:
    result = compared(record(tmp_path / "a", RegressionTask()), record(tmp_path / "b", RegressionTask(**changed)))
    assert (kinds(result), result.step) == ([PARAMETER], step)


def test_the_first_different_gradient_is_reported_with_its_values_and_index(tmp_path: Path) -> None:
    class Nudged(RegressionTask):
        def on_after_backward(self) -> None:
            if self.trainer.state.step == 1:
                self.net[3].weight.grad[0, 5] += 1.0

    result = compared(record(tmp_path / "a", RegressionTask()), record(tmp_path / "b", Nudged()))
    assert (result.step, result.found[0].what) == (2, "gradient of net.3.weight")
    assert "at [0, 5]; greatest difference 2 " in result.found[0].text  # of two micro-batches


def test_gradients_that_are_rounding_noise_are_reported_and_not_compared(tmp_path: Path) -> None:
    class Noisy(RegressionTask):
        noise = 1e-9

        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(1))

        def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
            return self.loss(batch) + 0 * self.offset.sum()

        def on_after_backward(self) -> None:
            self.offset.grad += self.noise

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters(), lr=0.01, eps=1e-15)

    class Otherwise(Noisy):
        noise = -1e-9

    result = compared(record(tmp_path / "a", Noisy()), record(tmp_path / "b", Otherwise()))
    assert result.equal
    assert "1 of offset" in result.notes()[0]


def test_a_task_with_manual_optimization_is_recorded(tmp_path: Path) -> None:
    class ByHand(RegressionTask):
        def __init__(self, lr: float = 0.05) -> None:
            super().__init__(lr=lr)
            self.automatic_optimization = False

        def training_step(self, batch: Batch, batch_idx: int) -> None:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(self.loss(batch))
            optimizer.step()

    first, same = (record(tmp_path / name, ByHand(), micro_batches=1) for name in "ab")
    result = compared(first, same)
    assert result.equal
    assert GRADIENT in result.worst
    other = compared(first, record(tmp_path / "c", ByHand(lr=0.06), micro_batches=1))
    assert kinds(other) == [PARAMETER]
    with pytest.raises(ConfigurationError, match="uses manual optimization"):
        record(tmp_path / "d", ByHand(), micro_batches=2)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tape]:
    """Tapes of two ranks under ddp: a correct task, and one that changes a parameter on one rank."""
    folder = tmp_path_factory.mktemp("tapes")

    def runs() -> dict[str, Tape]:
        return {
            "normed": record(folder / "normed", Normed(), strategy="ddp"),
            "drifting": record(folder / "drifting", Drifting(), strategy="ddp"),
        }

    return run_distributed(runs, 2, init=False)[0]


@pytest.mark.distributed
def test_dropout_and_batch_normalization_are_the_same_on_any_number_of_ranks(
    two_ranks: dict[str, Tape], tmp_path: Path
) -> None:
    result = compared(record(tmp_path / "one", Normed()), two_ranks["normed"])
    assert result.equal
    assert result.other.processes == 2


@pytest.mark.distributed
def test_a_parameter_that_one_rank_changes_is_found(two_ranks: dict[str, Tape], tmp_path: Path) -> None:
    result = compared(record(tmp_path / "one", Drifting()), two_ranks["drifting"])
    assert result.step == 3
    copies = [(difference.name, difference.text) for difference in result.found if difference.kind == COPY]
    assert copies == [("net.3.bias", "rank 1's copy is not rank 0's")]


_FILE = """
import torch
from torch.utils.data import DataLoader, TensorDataset
from trainwright import DataModule, TaskModule


class Sound(TaskModule):
    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.lr = lr
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 6), torch.nn.Tanh(), torch.nn.Linear(6, 1))

    def training_step(self, batch, batch_idx):
        return (self.net(batch[0]) - batch[1]).square().mean()

    def num_items(self, batch):
        return len(batch[0])

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


class Failing(Sound):
    def configure_optimizers(self):
        raise ValueError("no optimizer today")


class Numbers(DataModule):
    def train_dataloader(self):
        inputs = torch.arange(81.0).view(27, 3).sin()
        return DataLoader(TensorDataset(inputs, inputs.sum(dim=1, keepdim=True)), batch_size=2, shuffle=True)
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "parity_tasks.py").write_text(_FILE)
    (tmp_path / "config.yaml").write_text(
        textwrap.dedent(
            """
            trainer: {accumulate_grad_batches: 2, gradient_clip_val: 0.5, max_epochs: 3, callbacks: [EarlyStopping]}
            task: {class_path: parity_tasks.Sound}
            data: {class_path: parity_tasks.Numbers}
            """
        ).replace("[EarlyStopping]", "[{class_path: EarlyStopping, init_args: {monitor: val_loss}}]")
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.distributed
@pytest.mark.slow
def test_a_pipeline_equals_one_process(project: Path, capfd: pytest.CaptureFixture[str]) -> None:
    meshes = ["single", "megatron:pp=2"]
    arguments = ["--devices", "2", "--steps", "2", "trainer.accumulate_grad_batches=1", "--strategies"]
    code = main(["parity", "config.yaml", *arguments, ",".join(meshes)])
    printed, told = capfd.readouterr()
    assert code == 0, printed + told
    rows = [line.split() for line in printed.splitlines()[2 : 2 + len(meshes)]]
    assert [(row[0], row[1], row[-1]) for row in rows] == [
        ("single", "1", "reference"),
        ("megatron:pp=2", "2", "equal"),
    ]


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "run_module", lambda _, arguments: parity_command.run_plan(Path(arguments[0])))


@pytest.mark.usefixtures("here")
def test_a_task_that_cannot_be_trained_fails(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--data", "parity_tasks:Numbers", "--strategies", "single,single"]
    assert main(["parity", "parity_tasks:Failing", *arguments]) == 1
    printed = capsys.readouterr().out
    assert "single could not train" in printed
    assert "no optimizer today" in printed


@pytest.mark.slow
@pytest.mark.usefixtures("here")
def test_a_strategy_that_cannot_train_is_reported_with_the_others(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken = "trainwright.strategies.fsdp.strategy:NoSuchStrategy"
    assert main(["parity", "config.yaml", "--devices", "1", "--strategies", f"single,single,{broken}"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"^single +1 +.* equal$", printed, re.MULTILINE)
    assert f"{broken} could not train" in printed


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["parity_tasks.py:Sound", "--strategies", "single"], "fewer than two"),
        (["parity_tasks.py:Sound", "--strategies", "single,dpp"], "Did you mean 'ddp'"),
        (["parity_tasks.py"], "names no class and no configuration file"),
        (["nowhere.py:Sound"], "there is no file nowhere.py"),
        (["parity_tasks.py:Sound", "--steps", "0"], "--steps: 0 is not at least 1"),
        (["parity_tasks.py:Sound", "--rtol", "-1"], "--rtol: -1 is not a valid bound"),
        (["parity_tasks.py:Sound", "trainer.devices=4"], "trainer.devices cannot be set here"),
    ],
)
def test_arguments_that_cannot_be_compared_are_errors(
    arguments: list[str], complaint: str, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["parity", *arguments]) == 2
    assert complaint in capsys.readouterr().err


def test_a_strategy_may_be_a_name_a_class_or_an_object() -> None:
    def load(name: str) -> tuple[Any, int]:
        return load_strategy(ParityPlan(name, 3, 1, 0, {}, [], []))

    assert load("single")[1] == 1
    made, devices = load("trainwright.strategies.ddp.strategy:DDPStrategy")
    assert isinstance(made, DDPStrategy)
    assert devices == 3
    with pytest.raises(ConfigurationError, match="a dict is not a Strategy"):
        load("builtins:dict")
