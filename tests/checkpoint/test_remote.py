"""Checkpoints on remote file systems: whole or not there, and only a run's own are ever deleted."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from tests.checkpoint.conftest import S3
from tests.checkpoint.snapshots import files_of, write_small
from tests.checkpoint.webhdfs_server import SERVED, FileServer
from trainwright.checkpoint import service_requests, verify
from trainwright.checkpoint.remote import RemoteIndex, download_checkpoint, find_remote, upload_checkpoint
from trainwright.core.errors import CheckpointError, MissingPackageError
from trainwright.core.host.folders import is_url


def _contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in files_of(folder)}


def _remote_files(url: str) -> list[str]:
    files, root = fsspec.core.url_to_fs(url)
    files.invalidate_cache()
    return sorted(path.removeprefix(root).lstrip("/") for path in files.find(root)) if files.exists(root) else []


def _change(url: str, data: bytes) -> None:
    files, path = fsspec.core.url_to_fs(url)
    files.pipe_file(path, data)


def test_what_was_uploaded_comes_back_the_same(url: str, tmp_path: Path) -> None:
    local = write_small(tmp_path / "run", 3)
    there = upload_checkpoint(local, url)
    assert there == f"{url}/{local.name}"
    back = download_checkpoint(there, tmp_path / "back")
    assert back == tmp_path / "back" / local.name
    assert _contents(back) == _contents(local)
    assert verify(back) == []


def test_complete_checkpoints_are_found_in_order(url: str, tmp_path: Path) -> None:
    assert find_remote(url) == []
    for step in (20, 3, 100):
        upload_checkpoint(write_small(tmp_path / "run", step, name=f"s{step}"), url)
    found = find_remote(url)
    assert [item.manifest.step for item in found] == [3, 20, 100]
    assert [item.url for item in found] == [f"{url}/s{step}" for step in (3, 20, 100)]


def test_a_folder_without_a_manifest_is_no_checkpoint(url: str, tmp_path: Path) -> None:
    there = upload_checkpoint(write_small(tmp_path / "run", 1), url)
    files, path = fsspec.core.url_to_fs(there)
    files.rm_file(f"{path}/manifest.json")
    assert find_remote(url) == []
    with pytest.raises(FileNotFoundError, match="did not finish"):
        download_checkpoint(there, tmp_path / "back")


@SERVED
def test_the_manifest_goes_up_last(server: FileServer, tmp_path: Path) -> None:
    local = write_small(tmp_path / "run", 1)
    upload_checkpoint(local, server.url)
    assert len(server.written) == len(files_of(local))
    assert server.written[-1] == f"{local.name}/manifest.json"
    assert server.written.count(server.written[-1]) == 1


@pytest.mark.slow
@SERVED
def test_wherever_an_upload_breaks_no_checkpoint_is_there_and_the_next_one_succeeds(
    server: FileServer, tmp_path: Path
) -> None:
    local = write_small(tmp_path / "run", 1)
    requests = 2 * len(files_of(local))  # one to create a file, one to fill it
    for allowed in range(requests):
        server.writes_left = allowed
        with pytest.raises(CheckpointError, match="could not write"):
            upload_checkpoint(local, f"{server.url}/{allowed}")
        if allowed < requests - 1:  # the very last one breaks within the manifest, which its seal tells
            assert _remote_files(f"{server.url}/{allowed}/{local.name}").count("manifest.json") == 0
        assert find_remote(f"{server.url}/{allowed}") == []
    server.writes_left = None
    upload_checkpoint(local, f"{server.url}/{requests - 2}")
    assert len(find_remote(f"{server.url}/{requests - 2}")) == 1


@SERVED
def test_a_service_that_loses_bytes_is_found_out_before_the_manifest(server: FileServer, tmp_path: Path) -> None:
    server.truncate = 1
    with pytest.raises(CheckpointError, match=r"arrived with \d+ bytes, expected \d+"):
        upload_checkpoint(write_small(tmp_path / "run", 1), server.url)
    assert find_remote(server.url) == []


@pytest.mark.parametrize("damage", ["has changed", "is missing"])
def test_a_checkpoint_that_is_damaged_on_the_disk_gets_no_manifest(damage: str, memory: str, tmp_path: Path) -> None:
    local = write_small(tmp_path / "run", 1)
    data = (local / "trainer.json").read_bytes()
    (local / "trainer.json").unlink()
    if damage == "has changed":
        (local / "trainer.json").write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(CheckpointError, match=rf"trainer\.json {damage}"):
        upload_checkpoint(local, memory)
    assert find_remote(memory) == []


@pytest.mark.parametrize("name", ["trainer.json", "optimizer/optimizer-00000.safetensors"])
@pytest.mark.parametrize("change", ["other", "short", "gone"])
def test_a_download_of_damaged_files_leaves_nothing(name: str, change: str, memory: str, tmp_path: Path) -> None:
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


def test_a_manifest_that_was_changed_is_refused(memory: str, tmp_path: Path) -> None:
    there = upload_checkpoint(write_small(tmp_path / "run", 1), memory)
    files, path = fsspec.core.url_to_fs(f"{there}/manifest.json")
    _change(f"{there}/manifest.json", files.cat_file(path).replace(b'"step": 1', b'"step": 2'))
    assert find_remote(memory) == []
    with pytest.raises(CheckpointError, match="seal"):
        download_checkpoint(there, tmp_path / "back")


def test_an_upload_of_what_is_there_already_writes_nothing(memory: str, tmp_path: Path) -> None:
    local = write_small(tmp_path / "run", 1)
    there = upload_checkpoint(local, memory)
    _change(f"{there}/trainer.json", b"touched")
    assert upload_checkpoint(local, memory) == there
    files, path = fsspec.core.url_to_fs(f"{there}/trainer.json")
    assert files.cat_file(path) == b"touched"


def test_another_checkpoint_of_the_name_is_replaced_only_when_asked(memory: str, tmp_path: Path) -> None:
    first = write_small(tmp_path / "one", 1, name="last", kind="full")
    second = write_small(tmp_path / "two", 2, name="last", kind="weights")
    upload_checkpoint(first, memory)
    with pytest.raises(CheckpointError, match="holds another checkpoint"):
        upload_checkpoint(second, memory)
    assert find_remote(memory)[0].manifest.step == 1
    there = upload_checkpoint(second, memory, replace=True)
    assert _remote_files(there) == sorted(_contents(second))


def test_a_download_of_what_is_there_already_is_left_alone(memory: str, tmp_path: Path) -> None:
    local = write_small(tmp_path / "run", 1)
    there = upload_checkpoint(local, memory)
    before = (local / "manifest.json").stat().st_mtime_ns
    assert download_checkpoint(there, tmp_path / "run") == local
    assert (local / "manifest.json").stat().st_mtime_ns == before


def test_a_download_replaces_nothing(memory: str, tmp_path: Path) -> None:
    there = upload_checkpoint(write_small(tmp_path / "run", 1, name="last"), memory)
    other = write_small(tmp_path / "other", 2, name="last")
    with pytest.raises(CheckpointError, match="last exists and is not memory://"):
        download_checkpoint(there, tmp_path / "other")
    assert verify(other) == []


def test_a_run_keeps_its_last_uploads(url: str, tmp_path: Path) -> None:
    index = RemoteIndex(url, run="abc")
    for step in (1, 2, 3):
        index.upload(write_small(tmp_path / "run", step, name=f"s{step}"))
    assert index.keep_last(2) == ["s1"]
    assert [item.url for item in find_remote(url)] == [f"{url}/s2", f"{url}/s3"]
    assert [entry.name for entry in RemoteIndex(url, run="abc").entries()] == ["s2", "s3"]
    assert [name for name in _remote_files(url) if name.startswith("s1")] == []


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


def test_what_somebody_else_has_put_under_the_name_is_not_deleted(memory: str, tmp_path: Path) -> None:
    mine = RemoteIndex(memory, run="mine")
    mine.upload(write_small(tmp_path / "one", 1, name="last"))
    upload_checkpoint(write_small(tmp_path / "two", 2, name="last"), memory, replace=True)
    with pytest.raises(CheckpointError, match="no longer what this run uploaded"):
        mine.delete("last")
    assert [item.manifest.step for item in find_remote(memory)] == [2]


def test_a_run_does_not_upload_over_another_runs_checkpoint(memory: str, tmp_path: Path) -> None:
    RemoteIndex(memory, run="other").upload(write_small(tmp_path / "one", 1, name="last"))
    mine = RemoteIndex(memory, run="mine")
    with pytest.raises(CheckpointError, match="not uploaded by this run"):
        mine.upload(write_small(tmp_path / "two", 2, name="last"), replace=True)
    assert mine.entries() == []


def test_a_run_replaces_its_own_upload_when_asked(memory: str, tmp_path: Path) -> None:
    index = RemoteIndex(memory, run="mine")
    index.upload(write_small(tmp_path / "one", 1, name="last"))
    with pytest.raises(CheckpointError, match="replace=True"):
        index.upload(write_small(tmp_path / "two", 2, name="last"))
    index.upload(write_small(tmp_path / "three", 3, name="last"), replace=True)
    assert [item.manifest.step for item in find_remote(memory)] == [3]
    assert [entry.step for entry in index.entries()] == [3]


@SERVED
def test_half_an_upload_can_be_deleted(server: FileServer, tmp_path: Path) -> None:
    index = RemoteIndex(server.url, run="mine")
    server.writes_left = 6  # the index, and a little of the first file
    with pytest.raises(CheckpointError, match="could not write"):
        index.upload(write_small(tmp_path / "run", 1, name="half"))
    server.writes_left = None
    assert [entry.name for entry in index.entries()] == ["half"]
    index.delete("half")
    assert not (server.root / "half").exists()
    assert index.entries() == []


_ENTRY = '{"format_version": 1, "checkpoints": [{"name": "%s", "step": 1, "created": "", "kind": "full"}]}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        *(("{", r"index\.mine\.json"), ("[]", r"index\.mine\.json")),
        ('{"format_version": 99, "checkpoints": []}', r"index\.mine\.json"),
        ('{"format_version": 1, "checkpoints": [{"name": "a"}]}', r"index\.mine\.json"),
        *((_ENTRY % "../other", "its folder"), (_ENTRY % "a/b", "its folder"), (_ENTRY % ".hidden", "its folder")),
    ],
)
def test_an_index_that_is_damaged_or_names_something_elsewhere_is_an_error(
    text: str, message: str, memory: str
) -> None:
    _change(f"{memory}/index.mine.json", text.encode())
    with pytest.raises(CheckpointError, match=message):
        RemoteIndex(memory, run="mine")


@pytest.mark.parametrize("run", ["", "../x", "a b", ".x", "a/b"])
def test_a_run_whose_id_is_no_file_name_is_refused(run: str, memory: str) -> None:
    with pytest.raises(CheckpointError, match="expected letters"):
        RemoteIndex(memory, run=run)


@pytest.mark.parametrize(
    ("path", "remote"),
    [
        ("s3://bucket/run", True),
        ("gs://b", True),
        ("memory://x", True),
        ("simplecache::s3://bucket", True),
        ("runs/1", False),
        ("/abs", False),
        ("C:\\runs", False),
        (Path("s3:/x"), False),
    ],
)
def test_a_url_is_told_from_a_path(path: str | Path, remote: bool) -> None:
    assert is_url(path) is remote


def test_a_path_where_a_url_is_needed_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not a URL"):
        find_remote(str(tmp_path))


def test_an_unknown_service_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="nosuch"):
        find_remote("nosuch://x")


def test_a_missing_package_of_a_service_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "gcsfs", None)
    with pytest.raises(MissingPackageError, match="gcsfs"):
        find_remote("gs://bucket/run")


@SERVED
def test_a_service_that_cannot_be_reached_is_an_error(server: FileServer) -> None:
    url = f"{server.url}/run"
    server.shutdown()
    server.server_close()
    with pytest.raises(CheckpointError, match="could not list"):
        find_remote(url)


@pytest.fixture
def silent_port() -> Iterator[int]:
    """Return the port of a server that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield int(server.getsockname()[1])


@pytest.mark.parametrize("package", [pytest.param("s3fs", marks=S3), pytest.param("webhdfs", marks=SERVED)])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(find_remote, id="list"),
        pytest.param(lambda url, **options: download_checkpoint(url, ".", **options), id="download"),
        pytest.param(lambda url, **options: RemoteIndex(url, run="mine", **options), id="index"),
    ],
)
def test_a_service_that_accepts_and_never_answers_is_an_error(
    package: str, call: Callable[..., Any], silent_port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service_requests, "ANSWER_SECONDS", 0.2)
    url, options = f"webhdfs://127.0.0.1:{silent_port}/run", dict[str, Any]()
    if package == "s3fs":
        url = "s3://bucket/run"
        options = {"endpoint_url": f"http://127.0.0.1:{silent_port}", "key": "k", "secret": "s"}
    began = time.monotonic()
    with pytest.raises(CheckpointError, match=r"could not .*run.*did not answer within 0\.2 s\. Check the network"):
        call(url, storage_options=options)
    assert time.monotonic() - began < 10
