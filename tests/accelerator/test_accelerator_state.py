"""Saved loops of one's own: what is loaded goes on as if it had never stopped, to the last bit."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader

from tests.checkpoint.foreign import accelerate_folder, trained
from tests.helpers.distributed import run_distributed
from trainwright.accelerator.accelerator import Accelerator
from trainwright.accelerator.gradient_state import GradientAccumulationPlugin
from trainwright.accelerator.handlers import DataLoaderConfiguration
from trainwright.bigmodels.dispatch.loading import load_checkpoint_in_model
from trainwright.bigmodels.saving import save_model
from trainwright.checkpoint.format.manifests import read_manifest, verify
from trainwright.checkpoint.interop.convert import convert_checkpoint
from trainwright.core.errors import CheckpointError, ConfigurationError

pytestmark = pytest.mark.usefixtures("fresh_state")


class Data(Dataset[torch.Tensor]):
    def __init__(self, num: int = 22) -> None:
        self.fetched: list[int] = []
        self.rows = torch.randn(num, 4, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        self.fetched.append(index)
        return self.rows[index]


class Tally:
    def __init__(self) -> None:
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


class Loop:
    def __init__(self, precision: str = "no", num_models: int = 1, **options: Any) -> None:
        torch.manual_seed(6)
        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(2, short_group="mean"),
            mixed_precision=precision,
            seed=7,
            **options,
        )
        self.nets = [
            nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
            for _ in range(num_models)
        ]
        self.data, self.tally = Data(), Tally()
        optimizers: list[Any] = [torch.optim.AdamW(net.parameters(), lr=0.05) for net in self.nets]
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.9) for one in optimizers]
        loader = DataLoader(self.data, batch_size=2, shuffle=True)
        found = self.accelerator.prepare(*self.nets, *optimizers, *schedules, loader)
        self.models, self.optimizers = found[:num_models], found[num_models : 2 * num_models]
        self.schedules, self.loader = found[2 * num_models : -1], found[-1]
        self.accelerator.register_for_checkpointing(self.tally)
        self.first_epoch = 0

    def run(self, num_epochs: int = 3, save_at: int = -1, folder: Path | None = None) -> torch.Tensor:
        """Train to the end, saving once `save_at` optimizer steps are done; returns all weights and buffers."""
        for _ in range(self.first_epoch, num_epochs):
            for batch in self.loader:
                with self.accelerator.accumulate(*self.models):
                    loss: Any = sum(model(batch).square().mean() for model in self.models)
                    self.accelerator.backward(loss)
                    for one in (*self.optimizers, *self.schedules):
                        one.step()
                    for one in self.optimizers:
                        one.zero_grad()
                if self.accelerator.sync_gradients:
                    self.tally.count += 1
                    if self.tally.count == save_at:
                        assert folder is not None
                        self.accelerator.save_state(folder)
        return torch.cat([value.double().flatten() for net in self.nets for value in net.state_dict().values()])


# An epoch has 6 steps: in its middle, and at its end.
@pytest.mark.parametrize(("save_at", "precision"), [(6, "no"), (8, "no"), (4, "fp16")])
def test_a_loaded_loop_goes_on_to_the_last_bit(save_at: int, precision: str, tmp_path: Path) -> None:
    whole = Loop(precision)
    wanted = whole.run(save_at=save_at, folder=tmp_path / "state")
    assert verify(tmp_path / "state") == []
    steps = read_manifest(tmp_path / "state").step
    assert steps == save_at if precision == "no" else steps < save_at  # fp16 has left the first ones out
    again = Loop(precision)
    torch.manual_seed(99)
    again.accelerator.load_state(tmp_path / "state")
    assert again.tally.count == save_at
    again.first_epoch = save_at // 6
    assert torch.equal(again.run(), wanted)
    assert again.data.fetched == whole.data.fetched[-len(again.data.fetched) :]  # nothing that was consumed
    assert len(again.data.fetched) == 3 * 22 - (save_at // 6 * 22 + save_at % 6 * 4)


def test_what_cannot_be_saved_or_loaded_is_an_error(tmp_path: Path) -> None:
    loop = Loop()
    for _ in loop.loader:
        with loop.accelerator.accumulate(*loop.models):
            pass
        with pytest.raises(ConfigurationError, match="within a group of micro-batches"):
            loop.accelerator.save_state(tmp_path / "state")
        break
    assert not (tmp_path / "state").exists()
    with pytest.raises(ConfigurationError, match="int has no state_dict"):
        Accelerator(cpu=True).register_for_checkpointing(3)
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not a checkpoint"):
        Loop().accelerator.save_state(tmp_path)
    assert (tmp_path / "notes.txt").read_text() == "mine"


class _Ordered:
    """A sampler of the user without random numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter((3, 1, 4, 0, 5, 2, 7, 6))


class _Drawn:
    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(8).tolist())


def _order_from(
    torch_seed: int, folder: Path, *, load: bool, stop: int, options: dict[str, Any], **seeds: Any
) -> list[Any]:
    """Return the batches of two epochs from a save after `stop` batches on, or after loading that save."""
    torch.manual_seed(torch_seed)
    accelerator = Accelerator(cpu=True, **seeds)
    loader = accelerator.prepare(DataLoader(list(range(8)), batch_size=2, **options))
    if load:
        accelerator.load_state(folder)
        return [batch.tolist() for _ in range(2 - stop // 4) for batch in loader]
    found = []
    for number, batch in enumerate(batch for _ in range(2) for batch in loader):
        if number == stop:
            accelerator.save_state(folder)  # the loop has received this batch, which the resumed loop does not repeat
        elif number > stop:
            found.append(batch.tolist())
    return found


@pytest.mark.parametrize("stop", [1, 4])
@pytest.mark.parametrize(
    "options",
    [{"shuffle": True}, {"sampler": _Ordered()}, {"sampler": _Drawn()}, {"sampler": RandomSampler(range(8))}, {}],
)
def test_without_a_seed_a_loop_continues_in_the_order_of_the_saved_state(
    options: dict[str, Any], stop: int, tmp_path: Path
) -> None:
    wanted = _order_from(1, tmp_path / "state", load=False, stop=stop, options=options)
    assert _order_from(2, tmp_path / "state", load=True, stop=stop, options=options) == wanted


def test_another_seed_is_an_error_if_the_order_of_a_loader_depends_on_it(tmp_path: Path) -> None:
    for options in ({"shuffle": True}, {"sampler": _Drawn()}, {"sampler": RandomSampler(range(8))}):
        _order_from(1, tmp_path / "state", load=False, stop=1, options=options, seed=7)
        with pytest.raises(CheckpointError, match=r"Pass Accelerator\(seed=7\)"):
            _order_from(1, tmp_path / "state", load=True, stop=1, options=options, seed=8)
    for options in ({"sampler": _Ordered()}, {}):
        wanted = _order_from(1, tmp_path / "state", load=False, stop=1, options=options, seed=7)
        config = DataLoaderConfiguration(data_seed=8)
        found = _order_from(1, tmp_path / "state", load=True, stop=1, options=options, dataloader_config=config)
        assert found == wanted


def _go_on(folder: str) -> list[Any]:
    path = Path(folder)
    wanted = Loop().run(save_at=2, folder=path / "state")
    again = Loop()
    again.accelerator.load_state(path / "state")
    return [wanted, again.run(), again.accelerator.process_index]


@pytest.mark.distributed
def test_two_processes_go_on_to_the_last_bit_and_one_takes_over(tmp_path: Path) -> None:
    found = run_distributed(_go_on, 2, str(tmp_path), init=False, timeout=120)
    assert [rank for _, _, rank in found] == [0, 1]
    for wanted, again, _ in found:
        assert torch.equal(wanted, again)
    alone = Loop()
    alone.accelerator.load_state(tmp_path / "state")
    for _ in alone.loader:
        pass
    assert len(alone.data.fetched) == 22 - 16  # two steps of two micro-batches of two samples on two processes
    for _ in alone.loader:
        pass
    assert sorted(alone.data.fetched[6:]) == list(range(22))


def test_a_state_of_accelerate_is_named_with_what_reads_it(tmp_path: Path) -> None:
    accelerator = Accelerator(cpu=True)
    net = accelerator.prepare(nn.Linear(4, 1))
    save_model(net, tmp_path)
    (tmp_path / "random_states_0.pkl").touch()
    with pytest.raises(CheckpointError, match=r"checkpoint convert \S+ TARGET.*load_checkpoint_in_model"):
        accelerator.load_state(tmp_path)
    load_checkpoint_in_model(net, tmp_path)


def test_a_converted_state_of_accelerate_is_loaded_with_its_optimizer(tmp_path: Path) -> None:
    torch.manual_seed(0)
    net = nn.Linear(3, 1)
    adam = torch.optim.AdamW(net.parameters())
    trained(net, adam)
    accelerate_folder(tmp_path / "state", net, adam, safe=False)
    convert_checkpoint(tmp_path / "state", tmp_path / "converted")
    accelerator = Accelerator(cpu=True)
    other = nn.Linear(3, 1)
    again = torch.optim.AdamW(other.parameters())
    accelerator.prepare(other, again, torch.optim.lr_scheduler.StepLR(again, 1))
    accelerator.register_for_checkpointing(Tally())
    with pytest.warns(match=r"converted from a checkpoint \(accelerate\): .* Registered objects are not restored"):
        accelerator.load_state(tmp_path / "converted")
    assert torch.equal(other.weight, net.weight)
    assert torch.equal(again.state[other.weight]["exp_avg"], adam.state[net.weight]["exp_avg"])


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def _resumed(folder: Path, **options: Any) -> tuple[Loop, list[int]]:
    """Load a state that was saved after 4 of 11 batches of the first epoch. Also return the epoch's order."""
    whole = Loop()
    whole.run(1, save_at=2, folder=folder)
    again = Loop(dataloader_config=DataLoaderConfiguration(**options))
    again.accelerator.load_state(folder)
    return again, whole.data.fetched


def _train_with_continue(loop: Loop) -> None:
    used = [batch for step, batch in enumerate(loop.loader) if step >= 4]
    loop.data.fetched = loop.data.fetched[-2 * len(used) :]


_SCRIPTS: list[tuple[dict[str, Any], Callable[[Loop], Any], str]] = [
    ({}, lambda loop: list(loop.loader), "This pass continues there"),
    ({"use_stateful_dataloader": True}, lambda loop: list(loop.loader), ""),
    ({}, lambda loop: list(loop.accelerator.skip_first_batches(loop.loader, 4)), ""),
    ({"use_stateful_dataloader": False}, lambda loop: list(loop.accelerator.skip_first_batches(loop.loader, 4)), ""),
    ({"use_stateful_dataloader": False}, _train_with_continue, ""),
]


def test_a_loader_with_a_state_is_one_of_torchdata_on_request() -> None:
    loop = Loop(dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    other = pickle.loads(pickle.dumps(loop.loader))
    for loader in (loop.loader, other):
        assert isinstance(loader, StatefulDataLoader)
        assert loader.state_dict()["epoch"] == 0


def test_an_iterable_is_fetched_again_if_the_loader_has_a_state() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.dataloader_config = DataLoaderConfiguration(use_stateful_dataloader=True)
    loader = accelerator.prepare(DataLoader(Stream(), batch_size=2))
    assert isinstance(loader, StatefulDataLoader)
    batches = []
    for batch in loader:
        batches.append(batch.tolist())
        if len(batches) == 2:
            state = loader.state_dict()
    loader.load_state_dict(state)
    assert [batch.tolist() for batch in loader] == batches[2:]
    assert [batch.tolist() for batch in loader] == batches
    with pytest.raises(ConfigurationError, match="differ"):
        accelerator.dataloader_config = DataLoaderConfiguration(data_seed=accelerator._prepared.seed + 1)
    other = Accelerator(cpu=True)
    other.dataloader_config = DataLoaderConfiguration(data_seed=5)
    assert other.prepare(DataLoader(Data(), shuffle=True)).prepared.options.seed == 5


@pytest.mark.parametrize(("options", "train", "line"), _SCRIPTS)
def test_a_script_trains_on_the_rest_of_an_epoch_once(
    options: dict[str, Any], train: Callable[[Loop], Any], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again, order = _resumed(tmp_path / "state", **options)
    train(again)
    assert again.data.fetched == order[8:]
    assert len(caplog.messages) == bool(line)
    assert line in caplog.text


def test_only_the_pass_that_trains_continues(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    again, order = _resumed(tmp_path / "state")
    with torch.no_grad():
        assert len(list(again.loader)) == 11
    again.models[0].eval()
    assert len(list(again.loader)) == 11
    again.accelerator.save_state(tmp_path / "not continued")
    again.models[0].train()
    assert again.data.fetched == order * 2
    assert ["An evaluation reads" in line for line in caplog.messages] == [True, True]
    last = Loop()
    for loop, folder in ((again, None), (last, tmp_path / "not continued")):
        if folder is not None:
            loop.accelerator.load_state(folder)
        loop.data.fetched.clear()
        list(loop.loader)
        assert loop.data.fetched == order[8:]
    assert sum(map(len, again.loader)) == 22  # the next epoch


def test_the_position_of_an_epoch_is_not_that_of_another_epoch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    again, _ = _resumed(tmp_path / "state")
    again.loader.set_epoch(3)
    assert len(list(again.loader)) == 11
    assert "The loop begins epoch 3 instead" in caplog.text


def test_a_script_of_accelerate_skips_by_itself_as_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainwright.accelerator.settings.is_active", lambda: True)
    again, order = _resumed(tmp_path / "state")
    assert not again.accelerator.use_stateful_dataloader
    _train_with_continue(again)
    assert again.data.fetched == order[8:]
