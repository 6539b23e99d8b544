"""Checkpoints of user-written loops: continued exactly, under every other strategy, and by the Trainer."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from tests.contracts.test_own_loop import Net, data, make_optimizer
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from trainwright import DeepSpeedPlugin, TaskModule
from trainwright.accelerator.accelerator import Accelerator
from trainwright.accelerator.project import ProjectConfiguration
from trainwright.checkpoint import read_checkpoint, write_checkpoint
from trainwright.core.errors import CheckpointError, ConfigurationError, TrainwrightWarning
from trainwright.strategies import DeepSpeedStrategy, FSDPStrategy, Strategy, TensorParallelStrategy

_GLOBAL_BATCH, _STEPS = 4, 6
_Make = Callable[[], "Strategy | str"]
_STRATEGIES: dict[str, tuple[_Make, int]] = {
    "single": (lambda: "single", 1),
    "ddp": (lambda: "ddp", 2),
    "fsdp": (lambda: "fsdp", 2),
    "fsdp full": (lambda: FSDPStrategy(state_dict_type="full"), 2),
    "tp": (lambda: TensorParallelStrategy(), 2),
    "zero1": (lambda: DeepSpeedStrategy(stage=1), 2),
    "zero3": (lambda: DeepSpeedStrategy(stage=3), 2),
    "fsdp x tp": (lambda: FSDPStrategy(tp=2), 4),
}


def _train(
    name: str, *, save: str | None = None, load: str | None = None, steps: int = _STEPS, async_save: bool = False
) -> dict[str, Any]:
    """Train a loop; save after its last step."""
    configuration = ProjectConfiguration(async_save=async_save)
    accelerator = Accelerator(strategy=_STRATEGIES[name][0](), seed=0, project_config=configuration)
    net, ranks = Net(), accelerator.engine.data_ranks.size
    optimizer = make_optimizer(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    loader = DataLoader(data(_GLOBAL_BATCH * _STEPS), batch_size=_GLOBAL_BATCH // ranks, shuffle=True)
    model, optimizer, loader, scheduler = accelerator.prepare(net, optimizer, loader, scheduler)
    if load is not None:
        accelerator.load_state(load)
    losses = []
    for x, y, _ in loader:
        with accelerator.accumulate(model):
            loss = nn.functional.mse_loss(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        if len(losses) == steps:
            if save is not None:
                accelerator.save_state(save)
            break
    weights = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return {"losses": losses, "weights": weights, "rate": scheduler.get_last_lr()[0]}


def _run(name: str, **options: Any) -> dict[str, Any]:
    found: dict[str, Any] = run_distributed(
        partial(_train, name, **options), _STRATEGIES[name][1], init=False, timeout=240
    )[0]
    return found


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, dict[str, Any]]]:
    """Return the state that a strategy's loop saved after half of its steps, and that loop's result."""
    known: dict[str, tuple[Path, dict[str, Any]]] = {}

    def get(name: str) -> tuple[Path, dict[str, Any]]:
        if name not in known:
            path = tmp_path_factory.mktemp("states") / "half"
            known[name] = path, _run(name, save=str(path), steps=_STEPS // 2)
        return known[name]

    return get


@pytest.fixture(scope="module")
def whole() -> dict[str, Any]:
    """The uninterrupted loop on one device."""
    return _run("single")


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"),
    [("ddp", "tp"), ("tp", "fsdp"), ("fsdp", "single"), ("zero3", "zero1")]
    + [pytest.param(name, name, marks=pytest.mark.exhaustive) for name in _STRATEGIES]
    + [
        pytest.param(writer, reader, marks=pytest.mark.exhaustive)
        for writer, reader in (
            ("single", "fsdp"), ("fsdp", "ddp"), ("fsdp", "fsdp x tp"),
            ("zero1", "single"), ("single", "zero3"), ("zero3", "fsdp"), ("fsdp", "zero1"),
        )
    ],
)  # fmt: skip
def test_a_saved_loop_continues_under_any_strategy(writer: str, reader: str, saved: Any, whole: dict[str, Any]) -> None:
    path, first = saved(writer)
    rest = _run(reader, load=str(path), steps=_STEPS - _STEPS // 2)
    torch.testing.assert_close(first["losses"] + rest["losses"], whole["losses"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(rest["weights"], whole["weights"], rtol=1e-5, atol=1e-6)
    assert rest["rate"] == whole["rate"]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param("single", marks=pytest.mark.exhaustive), "fsdp"])
def test_an_asynchronous_save_is_the_same(name: str, saved: Any, tmp_path: Path) -> None:
    _run(name, save=str(tmp_path / "later"), steps=_STEPS // 2, async_save=True)
    rest = _run(name, load=str(tmp_path / "later"), steps=_STEPS - _STEPS // 2)
    again = _run(name, load=str(saved(name)[0]), steps=_STEPS - _STEPS // 2)
    torch.testing.assert_close(rest, again, rtol=0, atol=0)


_PLUGINS = {"first": DeepSpeedPlugin(zero_stage=2), "second": DeepSpeedPlugin(zero_stage=3)}


def _train_several(name: str, path: str, *, saves: bool) -> dict[str, Any]:
    """Train two models after each other with a frozen third; save after half of the steps, or load and do the rest."""
    engine: dict[str, Any] = {"deepspeed_plugins": _PLUGINS} if name == "deepspeed" else {"strategy": name}
    accelerator = Accelerator(seed=0, **engine)
    nets = [Net(), Net(), Net().requires_grad_(False)]
    nets[1].head.bias.data += 1.0
    nets[2].head.bias.data += 1.0 if saves else 5.0  # the checkpoint has its weights too
    optimizers: list[Any] = [make_optimizer(net) for net in nets[:2]]
    scale = nn.Parameter(torch.ones(()))
    of_scale = accelerator.prepare(torch.optim.SGD([scale], lr=0.1, momentum=0.9))
    size = _GLOBAL_BATCH // accelerator.num_processes
    loader: Any = accelerator.prepare(DataLoader(data(_GLOBAL_BATCH * _STEPS), batch_size=size, shuffle=True))
    models: list[Any] = []
    for i, net in enumerate(nets):
        if name == "deepspeed":
            accelerator.state.select_deepspeed_plugin("first" if i == 0 else "second")
        if i < 2:
            net, optimizers[i] = accelerator.prepare(net, optimizers[i])
        else:
            net = accelerator.prepare(net)
        models.append(net)
    if not saves:
        accelerator.load_state(path)
    losses: list[float] = []
    for x, y, _ in loader:
        with torch.no_grad():
            target = y + 0.1 * models[2](x)
        for model, optimizer, sign in zip(models[:2], optimizers, (1.0, -1.0), strict=True):
            loss = nn.functional.mse_loss(model(x), sign * target)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(accelerator.reduce(loss.detach(), "mean")))
        scale.grad = torch.ones(())
        of_scale.step()
        if len(losses) == _STEPS:  # half of them: each step has two losses
            break
    if saves:
        accelerator.save_state(path)
    momentum = float(of_scale.state[scale]["momentum_buffer"])
    weights = [{k: v.clone() for k, v in accelerator.get_state_dict(model).items()} for model in models]
    accelerator.end_training()
    return {"losses": losses, "weights": weights, "momentum": momentum}


def _several(name: str, path: str, *, saves: bool) -> dict[str, Any]:
    work = partial(_train_several, name, path, saves=saves)
    found: dict[str, Any] = run_distributed(work, 1 if name == "single" else 2, init=False, timeout=240)[0]
    return found


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*holds no parameter of a prepared model")
@pytest.mark.parametrize(
    ("writer", "reader"),
    [
        ("deepspeed", "deepspeed"),
        pytest.param("deepspeed", "single", marks=pytest.mark.exhaustive),
        pytest.param("single", "deepspeed", marks=pytest.mark.exhaustive),
        pytest.param("deepspeed", "fsdp", marks=pytest.mark.exhaustive),
    ],
)
def test_several_models_continue_under_any_strategy(writer: str, reader: str, tmp_path: Path) -> None:
    first = _several(writer, str(tmp_path / "half"), saves=True)
    rest = _several(reader, str(tmp_path / "half"), saves=False)
    _several("single", str(tmp_path / "expected"), saves=True)
    wanted = _several("single", str(tmp_path / "expected"), saves=False)
    torch.testing.assert_close(rest, wanted, rtol=1e-4, atol=1e-5)
    assert rest["momentum"] > first["momentum"]


class _Task(TaskModule):
    """The same training in a Trainer; its weights have the names of the net."""

    def __init__(self) -> None:
        super().__init__()
        net = Net()
        self.embed, self.blocks, self.head = net.embed, net.blocks, net.head

    forward = Net.forward

    def shard_units(self) -> list[nn.Module]:
        return list(self.blocks)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return nn.functional.mse_loss(self(batch[0]), batch[1])

    def configure_optimizers(self) -> Any:
        optimizer = make_optimizer(self)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7), "interval": "step"}]


def _fit(strategy: str, path: str | None, save: str | None, epochs: int) -> dict[str, Any]:
    task = _Task()
    trainer = quiet_trainer(max_epochs=epochs, strategy=strategy, devices="auto")
    batch_size = _GLOBAL_BATCH // (1 if strategy == "single" else 2)
    trainer.fit(task, DataLoader(data(_GLOBAL_BATCH * _STEPS), batch_size=batch_size), ckpt_path=path)
    if save is not None:
        trainer.save_checkpoint(save)
    return {"step": trainer.global_step, "weights": {k: v.clone() for k, v in task.state_dict().items()}}


def _moments(path: Path) -> Any:
    return read_checkpoint(path).optimizers[0]["state"]["embed.weight"]["step"]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*random number generators start from scratch")
@pytest.mark.parametrize(
    ("writer", "reader"), [("fsdp", "single"), pytest.param("single", "fsdp", marks=pytest.mark.exhaustive)]
)
def test_a_trainer_continues_a_loop(writer: str, reader: str, saved: Any, tmp_path: Path) -> None:
    path, _ = saved(writer)
    count = 1 if reader == "single" else 2
    save = tmp_path / "after"
    found = run_distributed(_fit, count, reader, str(path), str(save), 1, init=False, timeout=240)[0]
    assert found["step"] == _STEPS // 2 + _STEPS  # an epoch from its beginning
    assert float(_moments(save)) == found["step"]


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(
    ("writer", "reader"), [("single", "fsdp"), pytest.param("fsdp", "ddp", marks=pytest.mark.exhaustive)]
)
def test_a_loop_continues_a_trainer(writer: str, reader: str, tmp_path: Path) -> None:
    count = 1 if writer == "single" else 2
    path = tmp_path / "fitted"
    fitted = run_distributed(_fit, count, writer, None, str(path), 1, init=False, timeout=240)[0]
    found = run_distributed(_continue, 2, reader, str(path), init=False, timeout=240)[0]
    torch.testing.assert_close(found["weights"], fitted["weights"], rtol=0, atol=0)
    assert found["rate"] == pytest.approx(0.05 * 0.7**3)
    assert "checkpoint of a Trainer" in found["warning"]


def _continue(name: str, path: str) -> dict[str, Any]:
    accelerator = Accelerator(strategy=_STRATEGIES[name][0](), seed=0)
    net = Net()
    optimizer = make_optimizer(net)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.7)
    model, optimizer, scheduler = accelerator.prepare(net, optimizer, scheduler)
    with pytest.warns(TrainwrightWarning) as caught:
        accelerator.load_state(path)
    weights = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    accelerator.end_training()
    return {"weights": weights, "rate": scheduler.get_last_lr()[0], "warning": str(caught[0].message)}


# Names, limits and hooks


def _loop(tmp_path: Path, **project: Any) -> tuple[Accelerator, nn.Module]:
    configuration = ProjectConfiguration(project_dir=str(tmp_path), automatic_checkpoint_naming=True, **project)
    accelerator = Accelerator(cpu=True, project_config=configuration)
    net = nn.Linear(2, 1)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    return accelerator, net


def test_states_are_numbered_and_the_oldest_are_deleted(tmp_path: Path) -> None:
    accelerator, net = _loop(tmp_path, total_limit=2)
    for value in range(4):
        nn.init.constant_(net.bias, float(value))
        assert accelerator.save_state() == str(tmp_path / "checkpoints" / f"checkpoint_{value}")
    left = sorted(each.name for each in (tmp_path / "checkpoints").glob("[!.]*"))
    assert left == ["checkpoint_2", "checkpoint_3"]
    later, net = _loop(tmp_path)
    later.load_state()
    assert (net.bias.item(), later.save_iteration) == (3.0, 4)
    later.save_state()


def test_a_folder_is_named_once(tmp_path: Path) -> None:
    accelerator, _ = _loop(tmp_path)
    with pytest.raises(ConfigurationError, match="both name the folder"):
        accelerator.save_state(tmp_path / "own")
    with pytest.raises(FileNotFoundError, match="no valid state"):
        accelerator.load_state()
    with pytest.raises(ConfigurationError, match="needs a folder"):
        Accelerator(cpu=True).save_state()
    with pytest.raises(ConfigurationError, match="name two folders"):
        Accelerator(cpu=True, project_dir="a", project_config=ProjectConfiguration(project_dir="b"))
    with pytest.raises(ConfigurationError, match="automatic_checkpoint_naming=True needs a folder"):
        Accelerator(cpu=True, project_config=ProjectConfiguration(automatic_checkpoint_naming=True))
    configuration = ProjectConfiguration(automatic_checkpoint_naming=True)
    named = Accelerator(cpu=True, project_dir=tmp_path / "named", project_config=configuration)
    assert Path(named.save_state()) == tmp_path / "named/checkpoints/checkpoint_0"


@pytest.mark.parametrize("async_save", [False, True])
def test_hooks_write_and_read_models_by_themselves(tmp_path: Path, async_save: bool) -> None:
    accelerator, net = _loop(tmp_path, async_save=async_save)

    def save(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        (Path(output_dir) / "own").mkdir()
        torch.save(models[0].state_dict(), Path(output_dir) / "own" / "net.pt")
        weights.pop()

    def load(models: list[nn.Module], input_dir: str) -> None:
        models.pop().load_state_dict(torch.load(Path(input_dir) / "own" / "net.pt"))

    handle = accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    nn.init.constant_(net.bias, 5.0)
    path = Path(accelerator.save_state())
    nn.init.zeros_(net.bias)
    accelerator.load_state()
    assert net.bias.item() == 5.0
    assert read_checkpoint(path).model == {}
    handle.remove()
    accelerator.save_state()
    accelerator.end_training()
    assert not (path.parent / "checkpoint_1" / "own").exists()


def test_what_a_hook_changes_in_a_state_dict_is_saved(tmp_path: Path) -> None:
    accelerator, net = _loop(tmp_path)

    def double(models: list[nn.Module], weights: list[Any], output_dir: str) -> None:
        weights[0]["bias"] = 2 * weights[0]["bias"]

    handle = accelerator.register_save_state_pre_hook(double)
    nn.init.constant_(net.bias, 5.0)
    accelerator.save_state()
    accelerator.load_state()
    assert net.bias.item() == 10.0
    handle.remove()
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: weights.append({}))
    with pytest.raises(ConfigurationError, match="Change a state dict in place"):
        accelerator.save_state()
    assert len(list((tmp_path / "checkpoints").glob("[!.]*"))) == 1
    assert not list((tmp_path / "checkpoints").glob(".*tmp*"))


def test_a_failed_hook_leaves_nothing(tmp_path: Path) -> None:
    accelerator, _ = _loop(tmp_path)
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: (Path(folder) / "manifest.json").touch())
    with pytest.raises(CheckpointError, match=r"'manifest\.json'"):
        accelerator.save_state()
    assert list((tmp_path / "checkpoints").iterdir()) == []


# A state that does not fit


class _Counter:
    """A registered object with a state."""

    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self) -> dict[str, int]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.count = state["count"]


class _OtherCounter(_Counter):
    pass


def _whole_loop(
    sizes: tuple[int, ...] = (2, 3),
    optimizer_class: Any = torch.optim.AdamW,
    scheduler_class: Any = torch.optim.lr_scheduler.StepLR,
    objects: tuple[_Counter, ...] = (),
    loads: bool = False,
) -> tuple[Accelerator, list[Any]]:
    """Return a loop after one step, and everything whose state a load would change."""
    torch.manual_seed(1 if loads else 0)
    accelerator = Accelerator(cpu=True, seed=0)
    models = [nn.Linear(2, size) for size in sizes]
    optimizer = optimizer_class([parameter for model in models for parameter in model.parameters()], lr=0.1)
    scheduler = scheduler_class(optimizer, 5)
    loader: Any = DataLoader(data(8), batch_size=2)
    optimizer, scheduler, loader = accelerator.prepare(optimizer, scheduler, loader)
    for model in models:
        accelerator.prepare(model)
    accelerator.register_for_checkpointing(*objects)
    accelerator.kept = iter(loader)  # type: ignore[attr-defined]  # within a pass
    next(accelerator.kept)  # type: ignore[attr-defined]
    accelerator.backward(sum(model(torch.ones(1, 2)).sum() for model in models))
    optimizer.step()
    scheduler.step()
    return accelerator, [*models, optimizer, scheduler, *objects]


def _states(parts: list[Any]) -> Any:
    return copy.deepcopy([part.state_dict() for part in parts])


_LR = torch.optim.lr_scheduler


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sizes": (2, 4)}, r"weight is \(3, 2\) and not \(4, 2\)"),
        ({"sizes": (2,)}, "state of 2 models"),
        ({"optimizer_class": torch.optim.SGD}, "state of AdamW, and this optimizer is SGD"),
        ({"scheduler_class": _LR.CosineAnnealingLR}, "state of StepLR as learning-rate schedule 0"),
        ({"objects": (_OtherCounter(), _Counter())}, "state of _Counter as registered object 0"),
        ({"objects": (_Counter(),)}, "state of 2 others"),
    ],
)
def test_a_state_that_does_not_fit_changes_nothing(options: dict[str, Any], problem: str, tmp_path: Path) -> None:
    accelerator, _ = _whole_loop(objects=(_Counter(1), _OtherCounter(2)))
    path = accelerator.save_state(tmp_path / "state")
    other, parts = _whole_loop(**{"objects": (_Counter(7), _OtherCounter(8))} | options, loads=True)
    before = _states(parts)
    with pytest.raises(CheckpointError, match=problem):
        other.load_state(path)
    torch.testing.assert_close(_states(parts), before, rtol=0, atol=0)


@pytest.mark.parametrize(("place", "count"), [("progress", -1), ("steps", math.nan), ("position", math.inf)])
def test_a_state_with_impossible_counts_changes_nothing(place: str, count: float, tmp_path: Path) -> None:
    accelerator, _ = _whole_loop()
    path = Path(accelerator.save_state(tmp_path / "state"))
    snapshot = read_checkpoint(path)
    if place == "progress":
        snapshot.state["samples"] = count
    elif place == "steps":
        snapshot.trainer["loop"]["steps"] = [count]
    else:
        snapshot.trainer["loop"]["loaders"][0][0]["position"]["batch"] = count
    write_checkpoint(path, snapshot)
    other, parts = _whole_loop(loads=True)
    before = _states(parts)
    with pytest.raises(CheckpointError, match="damaged"):
        other.load_state(path)
    torch.testing.assert_close(_states(parts), before, rtol=0, atol=0)


def test_random_numbers_of_save_hooks_are_not_repeated(tmp_path: Path) -> None:
    accelerator, _ = _whole_loop()
    accelerator.register_save_state_pre_hook(lambda models, weights, folder: torch.rand(3))
    path = accelerator.save_state(tmp_path / "state")
    wanted = torch.rand(4)
    accelerator.load_state(path)
    assert torch.equal(torch.rand(4), wanted)
