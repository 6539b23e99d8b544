"""Copies beside a computation wait for it, and it for them, where they must and nowhere else."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch

from tests.strategies.offload.late_stream import copy_to
from trainwright.strategies.offload.copy_stream import CopyStream, PinnedBuffers
from trainwright.strategies.offload.host_storage import HostStorage


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


class FakeEvent:
    def __init__(self, at: tuple[str, int]) -> None:
        self.at = at

    def synchronize(self) -> None:
        FakeStream.log.append(("host", "waits for", self.at))


def run() -> None:
    """Give the present stream something to do."""
    stream = FakeStream.present[-1]
    stream.given += 1
    FakeStream.log.append((stream.name, "runs", stream.given))


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> CopyStream:
    monkeypatch.setattr(torch, "Stream", FakeStream)
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: FakeStream.present[-1])
    monkeypatch.setattr(FakeStream, "present", [FakeStream("computes")])
    monkeypatch.setattr(FakeStream, "log", [])
    return CopyStream(torch.device("cuda", 0))


def test_a_copy_begins_after_the_computation_so_far(copies: CopyStream) -> None:
    run()
    event = copies.queue(run)
    run()
    copies.join(event)
    assert FakeStream.log == [
        ("computes", "runs", 1),
        ("copies", "waits for", ("computes", 1)),
        ("copies", "runs", 1),
        ("computes", "runs", 2),
        ("computes", "waits for", ("copies", 1)),
    ]


def test_a_copy_may_begin_after_a_mark(copies: CopyStream) -> None:
    run()
    mark = copies.mark()
    run()
    copies.queue(run, after=mark)
    assert FakeStream.log[2:] == [("copies", "waits for", ("computes", 1)), ("copies", "runs", 1)]


def test_the_host_waits_for_one_copy_or_for_all(copies: CopyStream) -> None:
    first = copies.queue(run)
    copies.queue(run)
    copies.wait(first)
    copies.synchronize()
    copies.synchronize()  # there is nothing more
    assert [entry[2] for entry in FakeStream.log if entry[0] == "host"] == [("copies", 1), ("copies", 2)]


def test_what_is_copied_from_stays_until_the_computation_has_waited(copies: CopyStream) -> None:
    source = torch.ones(2)
    alive = weakref.ref(source)
    copies.queue(run, source=source)
    del source
    assert alive() is not None
    copies.release()
    assert FakeStream.log[-1] == ("computes", "waits for", ("copies", 1))
    assert alive() is None


def test_on_the_host_copies_are_made_at_once() -> None:
    copies, target = CopyStream(torch.device("cpu")), torch.zeros(2)
    source = torch.ones(2)
    event = copies.queue(lambda: copy_to(target, source))
    assert torch.equal(target, source)
    assert copies.fetch(source) == (source, None)
    for wait in (copies.join, copies.wait):
        wait(event)
    assert copies.num_queued == 2


def test_buffers_of_the_host_are_on_the_host_whatever_the_default_device_is() -> None:
    with torch.device("meta"):
        assert HostStorage("cpu").empty(4, torch.float32).device.type == "cpu"
        assert PinnedBuffers(8, pinned=False).acquire().device.type == "cpu"


def test_a_buffer_made_in_inference_mode_can_be_filled_outside_of_it() -> None:
    with torch.inference_mode():
        buffer = PinnedBuffers(8, pinned=False).acquire()
    buffer.fill_(3)
    assert buffer.sum() == 24
