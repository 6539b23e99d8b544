"""Files that are hashed while they are written, and the order in which they reach the disk."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch

from tests.checkpoint.snapshots import same, small_snapshot, write_small
from trainwright.checkpoint import (
    load_named_optimizer_state,
    named_optimizer_state,
    read_checkpoint,
    set_fault_hook,
    write_checkpoint,
)
from trainwright.checkpoint.disk.durable import FileEntry, HashingFile
from trainwright.checkpoint.format.manifests import hash_file
from trainwright.core.host.folders import is_in_use, lock_folder, mark_in_use

LARGE = 40 * 2**20  # above what is hashed in a thread, and above what is handed to the disk early


@pytest.fixture(autouse=True)
def _no_hook_left() -> Iterator[None]:
    yield
    set_fault_hook(None)


@pytest.mark.parametrize("size", [0, LARGE], ids=["inline", "thread"])
def test_a_large_file_has_the_size_and_hash_of_its_bytes(tmp_path: Path, size: int) -> None:
    data = os.urandom(2**20) * (LARGE // 2**20)
    with HashingFile(tmp_path / "a", size=size) as file:
        file.write(data[: LARGE // 3])
        file.write(memoryview(data)[LARGE // 3 :])
    assert (tmp_path / "a").read_bytes() == data
    assert file.entry == FileEntry(LARGE, hash_file(tmp_path / "a"))


def test_the_hashing_thread_ends_with_a_write_that_fails(tmp_path: Path) -> None:
    def fail(event: str, path: Path) -> None:
        if event == "write":
            raise OSError("broken")

    before = threading.active_count()
    set_fault_hook(fail)
    with pytest.raises(OSError, match="broken"), HashingFile(tmp_path / "a", size=LARGE) as file:
        file.write(bytes(LARGE))
    assert threading.active_count() == before


def test_a_system_that_refuses_the_hint_to_start_writing_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused: list[int] = []

    def refuse(*arguments: int) -> None:
        refused.append(arguments[2])
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "posix_fadvise", refuse, raising=False)
    monkeypatch.setattr(os, "POSIX_FADV_DONTNEED", 4, raising=False)
    with HashingFile(tmp_path / "a") as file:
        file.write(bytes(LARGE))
    assert refused
    assert file.entry.size == LARGE


def test_all_files_of_a_checkpoint_are_written_before_the_first_is_synced(tmp_path: Path) -> None:
    events: list[tuple[str, Path]] = []
    set_fault_hook(lambda event, path: events.append((event, path)))
    write_small(tmp_path)
    files = [(event, path.name) for event, path in events if path.name != "manifest.json"]
    last_write = max(index for index, (event, _) in enumerate(files) if event == "write")
    first_sync = min(index for index, (event, _) in enumerate(files) if event == "fsync")
    assert last_write < first_sync


def test_an_optimizer_loaded_from_mapped_files_shares_nothing_with_them(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    names: dict[torch.Tensor, str] = {parameter: name for name, parameter in model.named_parameters()}
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    saved = named_optimizer_state(optimizer, names)
    path = write_checkpoint(tmp_path / "a", small_snapshot(optimizers=[saved]))
    other = torch.optim.Adam(model.parameters())
    mapped = read_checkpoint(path, copy_model=False)
    load_named_optimizer_state(other, mapped.optimizers[0], names)
    for file in path.glob("optimizer/*.safetensors"):
        file.write_bytes(bytes(file.stat().st_size))  # in place: whatever is still mapped now reads as zeros
    assert same(named_optimizer_state(other, names), saved)


@pytest.mark.parametrize("block", [lock_folder, mark_in_use], ids=["alone", "held"])
def test_a_process_that_was_forked_meanwhile_does_not_keep_a_folder(
    block: Callable[[Path], AbstractContextManager[None]], tmp_path: Path
) -> None:
    """A loader's worker may be forked while a thread writes a checkpoint, and inherits what is open then."""
    read, write = os.pipe()
    with block(tmp_path):
        child = os.fork()
        if child == 0:
            os.close(write)
            os.read(read, 1)  # until the parent has looked
            os._exit(0)
    try:
        assert not is_in_use(tmp_path)
    finally:
        os.close(write)
        os.waitpid(child, 0)
