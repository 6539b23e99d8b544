"""Ranks share the hashing of a checkpoint, and a later attempt at a job takes its own newest valid one."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.snapshots import small_snapshot, write_small
from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.strategies.fsdp.sharded import Blocks, batches
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.checkpoint import read_manifest
from trainwright.checkpoint.format import manifests
from trainwright.checkpoint.run_folder import RunFolder
from trainwright.core.errors import CheckpointError
from trainwright.trainer.checkpoints.auto_resume import Attempt
from trainwright.trainer.checkpoints.load_request import fair_shares, left_by_earlier


def _fit(folder: Path, ckpt_path: Any = None, **arguments: Any) -> str:
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    trainer = quiet_trainer(devices="auto", strategy="fsdp", max_steps=4, callbacks=[saver], default_root_dir=folder)
    trainer.fit(Blocks(), batches(16), ckpt_path=ckpt_path, **arguments)
    return f"went on at {trainer.global_step}"


def _resume(folder: Path, ckpt_path: Any, **arguments: Any) -> tuple[list[str], str, list[str]]:
    """Return which files this rank has hashed, how the run ended, and what was warned of."""
    hashed: list[str] = []
    hash_file = manifests.hash_file

    def noting(path: Path) -> str:
        hashed.append(path.relative_to(folder).as_posix())
        return hash_file(path)

    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        patch.setattr(manifests, "hash_file", noting)
        try:
            ended = _fit(folder, ckpt_path, **arguments)
        except CheckpointError as error:
            ended = str(error)
    return hashed, ended, [str(warning.message) for warning in told]


def _save_and_resume(folder: Path) -> dict[str, Any]:
    _fit(folder)
    found: dict[str, Any] = {"whole": _resume(folder, folder / "step=4")}
    damaged = folder / "step=4" / "optimizer" / "rank-00001.safetensors"
    with damaged.open("r+b") as file:  # each rank does it, to the same effect
        file.seek(-8, os.SEEK_END)
        file.write(b"damaged!")
    found["damaged"] = _resume(folder, folder / "step=4")
    found["fallen back"] = _resume(folder, folder / "step=4", on_damaged="fall_back")
    return found


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the run, and what two ranks that resumed it have found."""
    folder = tmp_path_factory.mktemp("run")
    return folder, run_distributed(_save_and_resume, 2, folder, init=False, timeout=120)


@pytest.mark.distributed
def test_each_file_is_hashed_by_one_rank_and_each_rank_has_its_share(resumed: Any) -> None:
    folder, by_rank = resumed
    parts = read_manifest(folder / "step=4").parts.values()
    sizes = {f"step=4/{file}": entry.size for part in parts for file, entry in part.files.items()}
    shares = [found["whole"][0] for found in by_rank]
    assert sorted(shares[0] + shares[1]) == sorted(sizes)
    loads = [sum(sizes[name] for name in share) for share in shares]
    assert abs(loads[0] - loads[1]) <= max(sizes.values())
    assert min(loads) > 0
    assert [found["whole"][1] for found in by_rank] == ["went on at 4"] * 2


@pytest.mark.distributed
def test_damage_that_any_rank_finds_is_an_error_on_all(resumed: Any) -> None:
    for found in resumed[1]:
        assert "optimizer/rank-00001.safetensors has changed" in found["damaged"][1]


@pytest.mark.distributed
def test_a_damaged_checkpoint_gives_way_to_an_earlier_one_that_all_have_hashed(resumed: Any) -> None:
    _, by_rank = resumed
    assert [found["fallen back"][1] for found in by_rank] == ["went on at 4"] * 2
    assert any("Falling back to" in text and "step=2" in text for text in by_rank[0]["fallen back"][2])
    shares = [found["fallen back"][0] for found in by_rank]
    assert all(any(name.startswith("step=2/") for name in share) for share in shares)


@given(st.lists(st.integers(0, 10**6)), st.integers(1, 9))
def test_shares_hold_every_file_once_and_differ_by_one_file_at_most(sizes: list[int], num: int) -> None:
    shares = fair_shares(sizes, num)
    assert sorted(i for share in shares for i in share) == list(range(len(sizes)))
    loads = [sum(sizes[i] for i in share) for share in shares]
    assert max(loads) - min(loads) <= max(sizes, default=0)


def _write(folder: Path, step: int, job: str) -> Path:
    return write_small(folder, step, trainer={**small_snapshot().trainer, "job": job})


def _left(attempt: Attempt, folder: Path) -> Path | None:
    found = left_by_earlier(attempt, RunFolder(folder))
    return None if found is None else found.path


def test_a_later_attempt_takes_the_newest_checkpoint_of_its_own_job(tmp_path: Path) -> None:
    mine = _write(tmp_path, 1, "mine")
    _write(tmp_path, 2, "another")
    assert _left(Attempt("mine", 1), tmp_path) == mine
    assert _left(Attempt("mine", 0), tmp_path) is None
    assert _left(Attempt("third", 1), tmp_path) is None
