from __future__ import annotations

import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.checkpoint.conftest import S3
from tests.checkpoint.snapshots import files_of, write_small
from trainwright.checkpoint import service_requests, verify
from trainwright.checkpoint.format.reader import open_checkpoint
from trainwright.checkpoint.remote import (
    RemoteIndex,
    download_checkpoint,
    fetch_checkpoint,
    fetch_newest,
    find_remote,
    upload_checkpoint,
)
from trainwright.core.errors import CheckpointError, TrainwrightWarning


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_of(folder)}


def _remote_files(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    return sorted(path.removeprefix(root).lstrip("/") for path in files.find(root)) if files.exists(root) else []


def _change(url: str, data: bytes) -> None:
    files, path = fsspec.core.url_to_fs(url)
    files.pipe_file(path, data)


class Writes:
    """What is written to fsspec's memory, in order; fails once `left` files were begun."""

    def __init__(self) -> None:
        self.paths: list[str] = []
        self.left: int | None = None


@pytest.fixture
def writes(monkeypatch: pytest.MonkeyPatch) -> Writes:
    writes, begin = Writes(), MemoryFileSystem._open

    def counted(files: MemoryFileSystem, path: str, mode: str = "rb", **options: Any) -> Any:
        if mode == "wb":
            if writes.left == len(writes.paths):
                raise OSError("the network is gone")
            writes.paths.append(path)
        return begin(files, path, mode, **options)

    monkeypatch.setattr(MemoryFileSystem, "_open", counted)
    return writes


@pytest.mark.slow
def test_what_was_uploaded_comes_back_the_same(url: str, tmp_path: Path) -> None:
    local = write_small(tmp_path / "run", 3)
    there = upload_checkpoint(local, url)
    assert there == f"{url}/{local.name}"
    back = download_checkpoint(there, tmp_path / "back")
    assert back == tmp_path / "back" / local.name
    assert _contents(back) == _contents(local)
    assert verify(back) == []
    assert download_checkpoint(there, tmp_path / "back") == back
    (back / "more").touch()
    (back / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match="it is not replaced"):
        download_checkpoint(there, tmp_path / "back")


def test_a_local_copy_is_used_again_unless_it_is_damaged(memory: str, writes: Writes, tmp_path: Path) -> None:
    local = write_small(tmp_path / "run", 3)
    there = upload_checkpoint(local, memory)
    written = list(writes.paths)
    assert upload_checkpoint(local, memory) == there
    assert writes.paths == written
    copy = fetch_checkpoint(there, tmp_path / "copies")
    weights = next(copy.rglob("*.safetensors"))
    number = weights.stat().st_ino
    assert fetch_checkpoint(there, tmp_path / "copies") == copy
    assert weights.stat().st_ino == number
    weights.write_bytes(b"damaged")
    assert fetch_checkpoint(there, tmp_path / "copies") == copy
    assert _contents(copy) == _contents(local)


def test_the_newest_is_fetched_that_is_whole_and_of_the_kind(memory: str, tmp_path: Path) -> None:
    run = tmp_path / "run"
    first, second, third = (
        write_small(run, step, kind=kind) for step, kind in ((5, "full"), (2, "weights"), (3, "full"))
    )
    for local in (second, third, first):
        upload_checkpoint(local, memory)
    newest = fetch_newest(memory, tmp_path / "copies")
    assert newest is not None
    assert newest.name == third.name  # by the time of writing
    assert fetch_newest(memory, tmp_path / "copies", than=open_checkpoint(third)) is None
    assert fetch_newest(memory, tmp_path / "copies", than=open_checkpoint(second)) is not None
    file = next(path for path in _remote_files(memory) if path.startswith(third.name) and "safetensors" in path)
    _change(f"{memory}/{file}", b"damaged")
    with pytest.warns(TrainwrightWarning, match="Falling back to an older checkpoint"):
        assert fetch_newest(memory, tmp_path / "others").name == second.name  # type: ignore[union-attr]
    with pytest.warns(TrainwrightWarning, match="Falling back to an older checkpoint"):
        assert fetch_newest(memory, tmp_path / "others", kind="full").name == first.name  # type: ignore[union-attr]
    with pytest.raises(CheckpointError, match=third.name):
        fetch_newest(memory, tmp_path / "others", skip_damaged=False)


def test_wherever_an_upload_breaks_no_checkpoint_is_there_and_the_next_one_succeeds(
    memory: str, writes: Writes, tmp_path: Path
) -> None:
    index = RemoteIndex(memory, run="mine")
    local = write_small(tmp_path / "run", 1)
    for allowed in range(len(files_of(local)) + 1):  # the first is the index, and the last the manifest
        writes.paths, writes.left = [], allowed
        with pytest.raises(CheckpointError, match="could not write"):
            index.upload(local)
        assert find_remote(memory) == []
        writes.left = None
        if allowed > 0:
            assert [entry.name for entry in index.entries()] == [local.name]
            index.delete(local.name)
        assert _remote_files(f"{memory}/{local.name}") == []
    writes.paths = []
    index.upload(local)
    assert [item.manifest.step for item in find_remote(memory)] == [1]
    assert [path.endswith("manifest.json") for path in writes.paths[1:]] == [False] * 8 + [True]


@pytest.mark.parametrize("change", ["other", "short", "gone"])
def test_a_download_of_damaged_files_leaves_nothing(change: str, memory: str, tmp_path: Path) -> None:
    name = "optimizer/optimizer-00000.safetensors"
    there = upload_checkpoint(write_small(tmp_path / "run", 1), memory)
    files, path = fsspec.core.url_to_fs(f"{there}/{name}")
    data = files.cat_file(path)
    if change == "gone":
        files.rm_file(path)
    else:
        _change(f"{there}/{name}", data[:-1] if change == "short" else data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=f"damaged: {name}"):
        download_checkpoint(there, tmp_path / "back")
    assert list((tmp_path / "back").iterdir()) == []


def test_another_checkpoint_of_the_name_is_replaced_only_when_asked(memory: str, tmp_path: Path) -> None:
    first = write_small(tmp_path / "one", 1, name="last", kind="full")
    second = write_small(tmp_path / "two", 2, name="last", kind="weights")
    upload_checkpoint(first, memory)
    with pytest.raises(CheckpointError, match="holds another checkpoint"):
        upload_checkpoint(second, memory)
    assert find_remote(memory)[0].manifest.step == 1
    there = upload_checkpoint(second, memory, replace=True)
    assert _remote_files(there) == sorted(_contents(second))


def test_another_runs_checkpoints_are_never_deleted(memory: str, tmp_path: Path) -> None:
    RemoteIndex(memory, run="other").upload(write_small(tmp_path / "other", 1, name="theirs"))
    upload_checkpoint(write_small(tmp_path / "loose", 2, name="nobodys"), memory)
    mine = RemoteIndex(memory, run="mine")
    mine.upload(write_small(tmp_path / "mine", 3, name="ours"))
    assert mine.keep_last(0) == ["ours"]
    for name in ("theirs", "nobodys", "../elsewhere"):
        with pytest.raises(CheckpointError, match="not among this run's uploads"):
            mine.delete(name)
    assert [item.manifest.step for item in find_remote(memory)] == [1, 2]


def test_a_run_does_not_upload_over_another_runs_checkpoint(memory: str, tmp_path: Path) -> None:
    RemoteIndex(memory, run="other").upload(write_small(tmp_path / "one", 1, name="last"))
    mine = RemoteIndex(memory, run="mine")
    with pytest.raises(CheckpointError, match="not uploaded by this run"):
        mine.upload(write_small(tmp_path / "two", 2, name="last"), replace=True)
    assert mine.entries() == []


_ENTRY = '{"format_version": 1, "checkpoints": [{"name": "%s", "step": 1, "created": "", "kind": "full"}]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", r"index\.mine\.json"),
        ('{"format_version": 1, "checkpoints": [{"name": "a"}]}', r"index\.mine\.json"),
        (_ENTRY % "../other", "its folder"),
    ],
)
def test_an_index_that_is_damaged_or_names_something_elsewhere_is_an_error(
    text: str, message: str, memory: str
) -> None:
    _change(f"{memory}/index.mine.json", text.encode())
    with pytest.raises(CheckpointError, match=message):
        RemoteIndex(memory, run="mine")


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: RemoteIndex("memory://x", run="../x"), "expected letters"),
        (lambda: find_remote("runs/1"), "is not a URL"),
        (lambda: find_remote("nosuch://x"), "nosuch"),
    ],
)
def test_what_is_no_name_and_no_url_is_refused(ask: Callable[[], Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        ask()


@S3
def test_a_service_that_accepts_and_never_answers_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service_requests, "ANSWER_SECONDS", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        began = time.monotonic()
        with pytest.raises(CheckpointError, match=r"could not .*run.*did not answer within 0\.2 s\. Check the network"):
            find_remote("s3://bucket/run", storage_options={"endpoint_url": address, "key": "k", "secret": "s"})
        assert time.monotonic() - began < 10


def test_a_checkpoint_that_is_damaged_on_the_disk_gets_no_manifest(memory: str, tmp_path: Path) -> None:
    local = write_small(tmp_path / "run", 1)
    data = (local / "trainer.json").read_bytes()
    (local / "trainer.json").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=r"trainer\.json has changed"):
        upload_checkpoint(local, memory)
    assert find_remote(memory) == []
