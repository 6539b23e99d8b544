"""A pipeline trains, evaluates and saves as one process does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer, weights_of
from trainwright.callbacks.callback import Callback
from trainwright.cli.parity_tape import GRADIENT, LOSS, NORM, PARAMETER, StepTape, Tape, Tolerance, compare
from trainwright.core.errors import ConfigurationError, TaskError
from trainwright.core.task import TaskModule
from trainwright.strategies.megatron.runner import SCHEDULES
from trainwright.strategies.megatron.stages import find_stages
from trainwright.strategies.megatron.strategy import MegatronStrategy

_WIDTH, _VOCABULARY, _LENGTH = 8, 12, 6
_EXACT = Tolerance(atol=1e-7, rtol=1e-5)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.mix(self.norm(x))) * mask


class Language(nn.Module):
    """A language model with a tied embedding, positions of its own, and a mask that every layer gets."""

    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.randn(_LENGTH, _WIDTH))
        self.embed = nn.Embedding(_VOCABULARY, _WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.norm, self.head = nn.LayerNorm(_WIDTH), nn.Linear(_WIDTH, _VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions[: tokens.shape[1]]
        mask = (tokens > 0).unsqueeze(-1).to(x.dtype)
        for block in self.blocks:
            x = block(x, mask)
        return self.head(self.norm(x))


class Speaker(TaskModule):
    """Predicts the next token; counts tokens as items."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.model = Language()
        self.drawn: list[float] = []

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits, targets = self.model(tokens[:, :-1]), tokens[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)

    def num_items(self, batch: Any) -> Any:
        return (batch[:, 1:] > 0).sum()

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.drawn.append(float(torch.rand(())))
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), batch_size=len(batch))
        self.log("rows", float(len(batch)), reduce_fx="sum")

    def predict_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.model(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.02)


class Scaled(Speaker):
    """Multiplies the logits by a parameter that is in no stage, and has one that no step uses."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.ones(1))

    def loss(self, tokens: torch.Tensor) -> torch.Tensor:
        logits, targets = self.model(tokens[:, :-1]) * self.scale, tokens[:, 1:]
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=0)


class Stepping(Speaker):
    """Steps its optimizer itself, and keeps the index of the last micro-batch of each step."""

    def __init__(self) -> None:
        super().__init__()
        self.last: list[int] = []

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        self.last.append(batch_idx)
        super().optimizer_step(epoch, batch_idx, optimizer, optimizer_closure)


def batches(lengths: tuple[int, ...] = (6,) * 12) -> list[torch.Tensor]:
    """Return micro-batches of three rows of tokens, some of them 0."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(0, _VOCABULARY, (3, length), generator=generator) for length in lengths]


class Held(Callback):
    def on_train_start(self, trainer: Any, task: Any) -> None:
        self.drawn = float(torch.rand(()))
        self.names = {name for name, parameter in task.named_parameters() if not parameter.is_meta}


def train(
    folder: Path, strategy: Any, *, task: Any = None, data: Any = None, val: Any = None, **options: Any
) -> dict[str, Any]:
    """Train, validate after each epoch, and predict if the task does; return what can be compared."""
    folder.mkdir(exist_ok=True)
    task, held, val = task or Speaker(), Held(), batches((6,) * 5) if val is None else val
    options = {"max_epochs": 1, "gradient_clip_val": 0.5, "callbacks": [StepTape(folder, 4, seed=0), held], **options}
    trainer = quiet_trainer(devices=1 if strategy == "single" else "auto", strategy=strategy, **options)
    trainer.fit(task, batches() if data is None else data, val)
    predicts = type(task).predict_step is not TaskModule.predict_step
    return {
        "tape": Tape.read(type(trainer.strategy).__name__, folder), "held": held.names, "weights": weights_of(task),
        "metrics": {name: float(value) for name, value in trainer.callback_metrics.items()},
        "predictions": trainer.predict(task, val) if predicts else [],
        "drawn": [held.drawn, *(task.drawn if isinstance(task, Speaker) else [])],
        "last": task.last if isinstance(task, Stepping) else [],
    }  # fmt: skip


def assert_same(found: dict[str, Any], one: dict[str, Any], exact: Tolerance = _EXACT) -> None:
    result = compare(one["tape"], found["tape"], exact)
    assert result.equal, result.found
    assert set(result.worst) == {LOSS, NORM, GRADIENT, PARAMETER}
    torch.testing.assert_close(found["weights"], one["weights"], rtol=exact.rtol, atol=10 * exact.atol)
    assert found["metrics"] == pytest.approx(one["metrics"], rel=1e-5, abs=1e-5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pipeline")


_MIXED = (6, 4, 6, 3, 5, 6, 4, 4, 2, 6, 5)  # of several lengths, and the last step has fewer micro-batches


@pytest.fixture(scope="module")
def one(folder: Path) -> dict[str, Any]:
    return {
        "even": train(folder / "one", "single"),
        "mixed": train(folder / "one-mixed", "single", task=Stepping(), data=batches(_MIXED)),
        "scaled": train(folder / "one-scaled", "single", task=Scaled()),
    }


@pytest.fixture(scope="module")
def two(folder: Path) -> list[dict[str, Any]]:
    def runs() -> dict[str, Any]:
        def run(name: str, data: Any = None, task: Any = None, **options: Any) -> dict[str, Any]:
            torch.seed()  # another one on every rank
            return train(folder / name, MegatronStrategy(pp=2, **options), task=task, data=data)

        return {
            **{name: run(name, schedule=name) for name in SCHEDULES},
            "mixed": run("mixed", batches(_MIXED), Stepping()),
            "selective": run("selective", recompute="selective"),
            "scaled": run("scaled", task=Scaled()),
        }

    return run_distributed(runs, 2, init=False, timeout=180)


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("name", "data"),
    [*((name, "even") for name in (*SCHEDULES, "selective")), ("mixed", "mixed"), ("scaled", "scaled")],
)
def test_every_step_is_that_of_one_process(name: str, data: str, one: Any, two: Any) -> None:
    for found in (two[0][name], two[1][name]):
        assert_same(found, one[data])
        torch.testing.assert_close(found["predictions"], one[data]["predictions"], rtol=1e-5, atol=1e-5)
        assert found["last"] == one[data]["last"]


@pytest.mark.distributed
def test_a_rank_holds_its_own_stage_and_draws_as_the_others(two: Any) -> None:
    shared = {"model.positions", "model.embed.weight"}  # the model reads the first one itself; the other is tied
    first, second = (rank["1f1b"]["held"] for rank in two)
    assert first & second == shared
    assert {name.rpartition(".")[0] for name in first - shared} == {
        f"model.blocks.{i}.{part}" for i in (0, 1, 2) for part in ("norm", "mix")
    }
    assert "model.norm.weight" in second
    assert two[0]["1f1b"]["drawn"] == two[1]["1f1b"]["drawn"]
    assert len(set(two[0]["1f1b"]["drawn"])) == 13


def test_layers_are_divided_by_their_parameters() -> None:
    task = Speaker()
    stages = find_stages(task, 2, None)
    assert stages[0] == [task.model.embed, *task.model.blocks[:3]]  # the last stage has the head, too
    assert stages[1] == [*task.model.blocks[3:], task.model.norm, task.model.head]
    assert find_stages(task, 2, ["model.blocks.1"])[0] == [task.model.embed, task.model.blocks[0]]
    wide = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 40), nn.Linear(40, 4), nn.Linear(4, 4))
    assert [len(stage) for stage in find_stages(wide, 2, None)] == [2, 2]
    nested = nn.ModuleList(nn.Sequential(*(nn.Linear(2, 2) for _ in range(4))) for _ in range(3))
    with pytest.raises(ConfigurationError, match=r"at least 4 layers.* layers has 3\. Use fewer stages"):
        find_stages(nn.ModuleDict({"layers": nested}), 4, None)


@pytest.mark.parametrize(
    ("arguments", "devices", "message"),
    [
        ({"pp": 5}, 5, "has no ModuleList or Sequential of at least 5 layers"),
        ({"pp": 3, "split_points": ["model.blocks.1"]}, 3, r"divide a model into 2 stages.*has 3.*2 name"),
        ({"pp": 2, "split_points": ["model.block.1"]}, 2, r"is not a layer. Did you mean 'model.blocks.1'"),
        ({"pp": 2, "schedule": "1f2b"}, 2, "schedule='1f2b' is unknown. Did you mean '1f1b'"),
        ({"pp": 2, "dp_shard": 2}, 6, "Start 4, or choose pp=2, dp_shard=3 or pp=3, dp_shard=2 for 6 processes"),
    ],
)
def test_what_cannot_be_divided_is_refused_before_a_process_starts(arguments: Any, devices: int, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        quiet_trainer(strategy=MegatronStrategy(**arguments), devices=devices, max_steps=1).fit(Speaker(), batches())


class Twice(Speaker):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.loss(batch) + self.loss(batch)


class Leaky(Speaker):
    def __init__(self) -> None:
        super().__init__()
        self.model.forward = self._forward  # type: ignore[method-assign]  # as a subclass would define it

    def _forward(self, tokens: torch.Tensor) -> torch.Tensor:
        model = self.model
        x = first = model.embed(tokens)
        for block in model.blocks:
            x = block(x, first)
        return model.head(model.norm(x))


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("task", "message"),
    [(Twice, "called the model twice"), (Leaky, "argument 1 of Block .* comes from another pipeline stage")],
)
def test_a_model_that_a_pipeline_cannot_run_is_refused_in_its_first_step(task: Any, message: str) -> None:
    def run() -> str:
        trainer = quiet_trainer(devices="auto", strategy=MegatronStrategy(pp=2), max_steps=1, accumulate_grad_batches=2)
        try:
            trainer.fit(task(), batches())
        except (TaskError, RuntimeError) as error:  # of this rank, or as another one has gone
            return str(error)
        return ""

    found = run_distributed(run, 2, init=False, timeout=60)
    with pytest.raises(TaskError, match=message):
        raise TaskError(" ".join(found))
