"""A resumed run draws what the uninterrupted one drew, saving draws nothing, and a lost state is an error."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from tests.requirements.resumable import WORKERS, NoisySamples, make_loader, noisy, resume_after_every_step, train
from trainwright.callbacks.callback import Callback
from trainwright.core.errors import ConfigurationError
from trainwright.data import LoaderOptions, prepare_loader

_N = 8


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=[pytest.mark.distributed, pytest.mark.exhaustive])])
@pytest.mark.parametrize("kind", ["plain", "stream"])
def test_losses_are_bit_equal_after_a_resume(kind: str, workers: int, tmp_path: Path) -> None:
    make = lambda: make_loader(kind, _N, workers, shuffle=kind == "plain")  # noqa: E731
    whole = resume_after_every_step(make, tmp_path, range(2, 7, 2), deterministic=True)
    other = train(make(), tmp_path / "other", seed=4)
    assert other.losses != whole.losses  # the noise is there: it depends on the seed


class _Look(Callback):
    """Writes down the three global generators' next draws, without drawing, at each end of a step."""

    def __init__(self, *, saves: bool) -> None:
        self.saves = saves
        self.seen: list[tuple[Any, ...]] = []

    def on_train_step_end(self, trainer: Any, task: Any, result: Any) -> None:
        if self.saves:
            before = self._state()
            trainer.save_checkpoint(Path(trainer.default_root_dir) / f"by-hand-{trainer.global_step}")
            assert self._state() == before
        self.seen.append(self._state())

    @staticmethod
    def _state() -> tuple[Any, ...]:
        return random.getstate(), np.random.get_state()[1].tobytes(), torch.get_rng_state().numpy().tobytes()  # type: ignore[index]


def test_saving_never_changes_a_generator(tmp_path: Path) -> None:
    saving, silent = _Look(saves=True), _Look(saves=False)
    torch.manual_seed(5)
    random.seed(5)
    np.random.seed(5)
    one = train(make_loader("plain", _N, 0), tmp_path / "a", callbacks=[saving], default_root_dir=tmp_path)
    random.seed(5)
    np.random.seed(5)
    other = train(make_loader("plain", _N, 0), tmp_path / "b", callbacks=[silent])
    assert one.losses == other.losses
    assert saving.seen == silent.seen


class _Draws(Callback):
    """Writes down what was drawn for each sample."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, int], list[float]] = {}

    def on_train_step_start(self, trainer: Any, task: Any, group: Any) -> None:
        for batch in group.batches:
            for index, *draws in batch.tolist():
                known = self.of.setdefault((trainer.current_epoch, int(index)), draws)
                assert known == draws


def _draws(workers: int, folder: Path, ckpt_path: Path | None = None, **arguments: Any) -> _Draws:
    draws = _Draws()
    loader = make_loader("plain", _N, workers, shuffle=True)
    train(loader, folder, ckpt_path, per_sample_rng=True, callbacks=[draws], **arguments)
    return draws


def _draws_on_rank(folder: Path) -> dict[tuple[int, int], list[float]]:
    return _draws(0, folder).of


@pytest.mark.slow
@pytest.mark.distributed
def test_draws_are_a_function_of_seed_epoch_and_sample(tmp_path: Path) -> None:
    alone = _draws(0, tmp_path / "alone").of
    assert len(alone) == 2 * _N
    assert len({number for draws in alone.values() for number in draws}) == 3 * 2 * _N
    assert _draws(2, tmp_path / "workers").of == alone
    first, second = run_distributed(_draws_on_rank, 2, tmp_path / "ranks", init=False, timeout=90)
    assert first | second == alone
    for workers in (0, 2):
        resumed = _draws(workers, tmp_path / f"resumed-{workers}", tmp_path / "alone" / "step=3").of
        assert resumed == {sample: alone[sample] for sample in resumed}
        assert len(resumed) == 2 + _N


def _batches(loader: Any, **settings: Any) -> torch.Tensor:
    ready = prepare_loader(loader, LoaderOptions(per_sample_rng=True, seed=1, **settings))
    ready.set_epoch(2)
    return torch.stack([row for batch in ready.iterate() for row in batch.reshape(-1, 4)])


class _ManyAtOnce(NoisySamples):
    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        return [self[index] for index in list(indices)]


class _Collate:
    def __call__(self, samples: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([samples[0][:3], torch.rand(1)])


@pytest.mark.slow
def test_every_way_to_fetch_a_sample_draws_the_same_with_and_without_workers() -> None:
    expected = _batches(DataLoader(NoisySamples(_N), 3))
    for make in (
        lambda w: DataLoader(NoisySamples(_N), 2, **WORKERS[w]),
        lambda w: DataLoader(NoisySamples(_N), None, **WORKERS[w]),
        lambda w: DataLoader(_ManyAtOnce(_N), 4, **WORKERS[w]),
        lambda w: DataLoader(NoisySamples(_N), batch_sampler=[(0, 1, 2), (3,), (4, 5, 6, 7)], **WORKERS[w]),
    ):
        for workers in (0, 2):
            assert torch.equal(_batches(make(workers)), expected)
    alone = _batches(DataLoader(NoisySamples(_N), 1, collate_fn=_Collate()))
    assert torch.equal(_batches(DataLoader(NoisySamples(_N), 1, collate_fn=_Collate(), **WORKERS[2])), alone)


def test_an_iterable_has_no_samples_to_derive_draws_from() -> None:
    with pytest.raises(ConfigurationError, match="per_sample_rng=True, but train_dataloader reads an iterable"):
        prepare_loader(make_loader("stream", _N, 0), LoaderOptions(per_sample_rng=True))


def test_an_index_that_identifies_no_sample_is_refused() -> None:
    loader = DataLoader(NoisySamples(_N), batch_sampler=[[1.5]])
    with pytest.raises(ConfigurationError, match="an index of type float does not identify a sample"):
        _batches(loader)


def test_anything_with_an_index_draws_by_it() -> None:
    class Batches:
        def __len__(self) -> int:
            return _N

        def __getitem__(self, index: int) -> torch.Tensor:
            return noisy(index)

    before = torch.get_rng_state()
    expected = _batches(DataLoader(NoisySamples(_N), 3))
    assert torch.equal(_batches(Batches()), expected)
    assert torch.equal(torch.get_rng_state(), before)
