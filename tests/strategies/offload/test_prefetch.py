"""Weights that are brought ahead of their use, and copies beside a computation: in order, and nothing left running."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from trainwright.core.errors import CheckpointError
from trainwright.strategies.offload import prefetch
from trainwright.strategies.offload.copy_stream import CopyStream, Fetched, PinnedBuffers
from trainwright.strategies.offload.host_storage import HostStorage
from trainwright.strategies.offload.prefetch import Prefetcher


class Part:
    def __init__(self, value: int, num_bytes: int = 10, error: Exception | None = None) -> None:
        self.value, self.num_bytes, self.error = value, num_bytes, error
        self.fetched_by: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    stays_on_host = False

    def fetch(self) -> Fetched:
        self.gate.wait(30)
        self.fetched_by.append(threading.current_thread().name)
        if self.error is not None:
            raise self.error
        return Fetched({"weight": torch.tensor(self.value)})


@pytest.fixture(autouse=True)
def _short_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefetch, "_IDLE_S", 0.05)


def _begin_use(prefetcher: Prefetcher, number: int) -> int:
    value = int(prefetcher.acquire(number).use()["weight"])
    prefetcher.follow(number)
    return value


def _take(prefetcher: Prefetcher, numbers: Sequence[int]) -> list[int]:
    values = []
    for number in numbers:
        values.append(_begin_use(prefetcher, number))
        prefetcher.release()
    return values


def _until(condition: Iterator[bool]) -> None:
    """Wait for what another thread does, as long as a loaded machine may take."""
    end = time.monotonic() + 30
    while not next(condition):
        assert time.monotonic() < end
        time.sleep(0.002)


def _idle(prefetcher: Prefetcher, in_use: int = 0) -> None:
    for _ in range(in_use):
        prefetcher.release()
    _until(prefetcher._reader is None for _ in itertools.count())


def _parts(prefetcher: Prefetcher, count: int, **options: int) -> tuple[list[Part], list[int]]:
    parts = [Part(value, **options) for value in range(count)]
    return parts, [prefetcher.add(part) for part in parts]


def test_the_order_of_the_first_pass_is_fetched_ahead_in_the_second() -> None:
    prefetcher = Prefetcher(10)
    parts, numbers = _parts(prefetcher, 3)
    _take(prefetcher, numbers)
    assert [part.fetched_by for part in parts] == [["MainThread"]] * 3
    _begin_use(prefetcher, numbers[0])
    _until(bool(parts[1].fetched_by[1:]) for _ in itertools.count())
    assert _begin_use(prefetcher, numbers[1]) == 1
    assert parts[1].fetched_by == ["MainThread", "prefetch"]
    _idle(prefetcher, in_use=2)


def test_no_more_is_fetched_ahead_than_the_budget_allows() -> None:
    prefetcher = Prefetcher(25)
    parts, numbers = _parts(prefetcher, 6)
    _take(prefetcher, numbers)
    _begin_use(prefetcher, numbers[0])
    _until(len(parts[2].fetched_by) == 2 for _ in itertools.count())
    assert [len(part.fetched_by) for part in parts] == [2, 2, 2, 1, 1, 1]
    assert prefetcher._held_bytes <= 25
    _begin_use(prefetcher, numbers[5])
    assert list(prefetcher._jobs) == numbers[1:3]  # nothing new before half of the budget is free
    _idle(prefetcher, in_use=2)


def test_an_error_of_the_reader_is_met_by_whoever_needs_the_weights() -> None:
    prefetcher = Prefetcher(10)
    parts, numbers = _parts(prefetcher, 2)
    _take(prefetcher, numbers)
    parts[1].error = CheckpointError("the file is gone")
    _begin_use(prefetcher, numbers[0])
    with pytest.raises(CheckpointError, match="the file is gone"):
        prefetcher.acquire(numbers[1])
    parts[1].error = None
    assert _begin_use(prefetcher, numbers[1]) == 1
    _idle(prefetcher, in_use=2)


def test_buffers_of_the_host_are_on_the_host_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert HostStorage("cpu").empty(4, torch.float32).device.type == "cpu"
        assert PinnedBuffers(8, pinned=False).acquire().device.type == "cpu"


class FakeEvent:
    def __init__(self, at: tuple[str, int]) -> None:
        self.at = at

    def synchronize(self) -> None:
        FakeStream.log.append(("host", "waits for", self.at))


class FakeStream:
    """Writes down what a device's stream is asked for; an event is (stream, how much it has been given)."""

    present: list[FakeStream] = []  # noqa: RUF012  # the streams that are entered, the computing one first
    log: list[Any] = []  # noqa: RUF012  # of all streams

    def __init__(self, name: str = "copies", device: torch.device | None = None) -> None:
        self.name, self.given = name, 0

    def record_event(self) -> Any:
        return FakeEvent((self.name, self.given))

    def wait_event(self, event: Any) -> None:
        FakeStream.log.append((self.name, "waits for", event.at))

    def __enter__(self) -> None:
        FakeStream.present.append(self)

    def __exit__(self, *_: Any) -> None:
        FakeStream.present.pop()


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> CopyStream:
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: FakeStream.present[-1])
    monkeypatch.setattr(FakeStream, "present", [FakeStream("computes")])
    monkeypatch.setattr(FakeStream, "log", [])
    return CopyStream(torch.device("cuda", 0))


def test_a_buffer_is_used_again_while_another_is_free() -> None:
    buffers = PinnedBuffers(8, pinned=False)
    first, second = buffers.acquire(), buffers.acquire()
    buffers.release(first, None)
    assert buffers.acquire() is not first
    buffers.release(second, None)
    assert buffers.acquire() is first


def _run() -> None:
    stream = FakeStream.present[-1]
    stream.given += 1
    FakeStream.log.append((stream.name, "runs", stream.given))


def test_what_is_copied_from_stays_until_the_computation_has_waited(copies: CopyStream) -> None:
    source = torch.ones(2)
    alive = weakref.ref(source)
    copies.queue(_run, source=source)
    del source
    assert alive() is not None
    copies.release()
    assert FakeStream.log[-1] == ("computes", "waits for", ("copies", 1))
    assert alive() is None
