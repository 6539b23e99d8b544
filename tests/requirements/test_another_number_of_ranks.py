"""The place is counted in samples of all ranks, so a run resumes on another number of ranks."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
from torch.utils.data import DataLoader, DistributedSampler

from tests.helpers.distributed import run_distributed
from tests.requirements.resumable import NoisySamples, make_loader, train
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.data import LoaderOptions, prepare_loader
from trainwright.data.prepared import PreparedLoader

_N = 53


def _phase(folder: Path, kind: str, batch_size: int, until: int, resume: bool) -> list[list[int]]:
    loader: Any = make_loader(kind, _N, 0, shuffle=True, batch_size=batch_size)
    newest = max(folder.glob("step=*"), key=lambda path: int(path.name[5:]), default=None)
    with warnings.catch_warnings():
        # The generators start anew, which is said; what they draw is not looked at here.
        warnings.filterwarnings("ignore", ".*process\\(es\\) and is resumed by", TrainwrightWarning)
        return train(loader, folder, newest if resume else None, max_steps=until, max_epochs=1).steps


def _run(folder: Path, kind: str, phases: list[tuple[int, int, int]]) -> list[list[int]]:
    """Run phases of (ranks, batch size, last step); returns the samples of each step over all ranks, in order."""
    steps = []
    for number, (world, batch_size, until) in enumerate(phases):
        by_rank = run_distributed(_phase, world, folder, kind, batch_size, until, number > 0, init=False, timeout=120)
        steps += [list(itertools.chain.from_iterable(of_ranks)) for of_ranks in zip(*by_rank, strict=True)]
    return steps


@pytest.mark.slow
@pytest.mark.distributed
def test_two_and_three_ranks_share_an_epoch_in_the_steps_of_one(tmp_path: Path) -> None:
    alone = _phase(tmp_path / "alone", "plain", 12, -1, False)
    assert _run(tmp_path / "ranks", "plain", [(2, 6, 2), (3, 4, -1)]) == alone


def _loader(source: Any, rank: int, world: int, **settings: Any) -> PreparedLoader:
    return prepare_loader(source, LoaderOptions(rank=rank, world=world, lockstep=False, **settings))


def test_a_sampler_that_divides_the_data_itself_goes_on_with_as_many_ranks_only() -> None:
    def loader(rank: int, world: int) -> PreparedLoader:
        data = NoisySamples(_N)
        return _loader(DataLoader(data, 2, sampler=DistributedSampler(data, world, rank)), rank, world)

    place = loader(0, 4).position(3)
    loader(1, 4).set_epoch(0, place)
    with pytest.raises(ConfigurationError, match="interrupted in the middle of an epoch on 4 ranks"):
        loader(0, 2).set_epoch(0, place)


def _resume_stream(folder: Path, resume: int | None) -> str:
    ckpt_path = None if resume is None else folder / f"step={resume}"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*process\\(es\\) and is resumed by", TrainwrightWarning)
        warnings.filterwarnings("ignore", ".*is stateful, and the loader states of 2 rank", TrainwrightWarning)
        try:
            train(make_loader("stream", 8, 0), folder, ckpt_path, max_epochs=1 if resume is None else 2)
        except ConfigurationError as error:
            return str(error)
    return ""


@pytest.mark.slow
@pytest.mark.distributed
def test_places_of_streams_cannot_be_divided_which_is_said_before_training_starts(tmp_path: Path) -> None:
    run_distributed(_resume_stream, 2, tmp_path, None, init=False, timeout=90)
    message = _resume_stream(tmp_path, 1)
    assert "the checkpoint holds one loader state for each of 2 rank(s), which cannot be divided among 1" in message
    assert "at the end of an epoch" in message
    assert "map-style" in message
    assert _resume_stream(tmp_path, 2) == ""  # which this is
