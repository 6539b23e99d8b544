from __future__ import annotations

from pathlib import Path

import fsspec
import pytest
import torch

from tests.checkpoint.conftest import S3
from tests.checkpoint.snapshots import files_of, write_small
from tests.checkpoint.test_remote_runs import FirstStep, fit, uninterrupted
from tests.helpers.runs import assert_equal_weights, weights_of
from trainwright.checkpoint.remote import download_checkpoint, find_remote, upload_checkpoint
from trainwright.core.errors import CheckpointError, TrainwrightWarning

pytestmark = [S3, pytest.mark.engines]
PART_BYTES = 5 * 2**20  # the smallest part that S3 accepts


def write_large(folder: Path) -> Path:
    """Write a checkpoint whose model is a file of two parts."""
    return write_small(folder, 1, model={"w": torch.arange(3_200_000, dtype=torch.float32)})


def test_a_file_in_several_parts_arrives_unchanged(s3: str, tmp_path: Path) -> None:
    local = write_large(tmp_path / "run")
    there = upload_checkpoint(local, s3, storage_options={"default_block_size": PART_BYTES})
    files, root = fsspec.core.url_to_fs(there)
    tags = {item["ETag"].strip('"').rpartition("-")[2] for item in files.find(root, detail=True).values()}
    assert "2" in tags
    back = download_checkpoint(there, tmp_path / "back")
    assert [path.read_bytes() for path in files_of(back)] == [path.read_bytes() for path in files_of(local)]


def test_an_upload_of_another_client_is_found_despite_a_cached_listing(s3: str, tmp_path: Path) -> None:
    upload_checkpoint(write_small(tmp_path / "run", 1), s3)
    files, root = fsspec.core.url_to_fs(s3)
    assert len(files.ls(root)) == 1
    upload_checkpoint(write_small(tmp_path / "run", 2), s3, storage_options={"skip_instance_cache": True})
    assert len(files.ls(root)) == 1  # this client's cache
    assert [item.manifest.step for item in find_remote(s3)] == [1, 2]


def test_a_missing_bucket_is_an_error_before_the_first_step_and_is_not_created(s3: str, tmp_path: Path) -> None:
    missing = f"{s3}-missing"
    with pytest.raises(CheckpointError, match=r"the bucket '.*-missing' does not exist"):
        fit(tmp_path, f"{missing}/run", 1, callbacks=[first := FirstStep()])
    assert first.step is None
    with pytest.raises(CheckpointError, match=r"could not write .*bucket does not exist"):
        upload_checkpoint(write_small(tmp_path / "run"), f"{missing}/run")
    assert not fsspec.filesystem("s3").exists(missing)


@pytest.mark.slow
def test_last_skips_a_damaged_remote_checkpoint_for_an_older_one(s3: str, tmp_path: Path) -> None:
    fit(tmp_path / "a", f"{s3}/run", 2, save_top_k=-1)
    files, root = fsspec.core.url_to_fs(f"{s3}/run/epoch=1/trainer.json")
    files.rm_file(root)
    with pytest.raises(CheckpointError, match=r"trainer\.json is missing"):
        fit(tmp_path / "b", f"{s3}/run", 3, ckpt_path=f"{s3}/run/epoch=1")
    with pytest.warns(TrainwrightWarning, match=r"trainer\.json is missing.*Falling back to an older checkpoint"):
        trainer = fit(tmp_path / "b", f"{s3}/run", 3, ckpt_path="last", callbacks=[first := FirstStep()])
    assert first.step == 9
    assert_equal_weights(weights_of(trainer.task), uninterrupted(tmp_path / "c", 3))
