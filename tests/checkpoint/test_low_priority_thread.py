"""Work beside the training: in order, at the lowest priority, and by whoever waits for it."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator

import pytest
import torch

from trainwright.checkpoint.disk import low_priority_thread
from trainwright.checkpoint.disk.low_priority_thread import LowPriorityThread, Preparation, leaves_cores


@pytest.fixture
def quiet() -> Iterator[LowPriorityThread]:
    quiet = LowPriorityThread()
    yield quiet
    quiet.end()


@pytest.fixture
def starved(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Have the system give the quiet thread no time at all."""
    fed = threading.Event()
    monkeypatch.setattr(low_priority_thread, "run_at_lowest_priority", lambda: fed.wait(30))
    yield
    fed.set()


def fail() -> None:
    raise OSError("broken")


def test_work_is_done_in_order_in_another_thread(quiet: LowPriorityThread) -> None:
    found: list[tuple[int, str]] = []
    quiet.start()
    for number in range(50):
        quiet.put(lambda number=number: found.append((number, threading.current_thread().name)))  # type: ignore[misc]
    quiet.finish()
    assert found == [(number, "trainwright-quiet") for number in range(50)]


def test_before_it_is_started_everything_is_done_at_once(quiet: LowPriorityThread) -> None:
    found: list[threading.Thread] = []
    quiet.put(lambda: found.append(threading.current_thread()))
    assert found == [threading.current_thread()]


@pytest.mark.skipif(sys.platform != "linux", reason="priorities of single threads, as Linux has them")
def test_the_thread_has_the_lowest_priority_and_its_owner_keeps_its_own(quiet: LowPriorityThread) -> None:
    found: list[tuple[int, int]] = []

    def look() -> None:
        found.append((os.sched_getscheduler(0), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())))

    look()
    quiet.start()
    quiet.put(look)
    quiet.finish()
    assert found[1] == (os.SCHED_IDLE, 19)
    look()
    assert found[2] == found[0] != found[1]


def test_whoever_waits_in_a_hurry_does_what_a_starved_thread_cannot(quiet: LowPriorityThread, starved: None) -> None:
    found: list[tuple[int, threading.Thread]] = []
    quiet.start()
    for number in range(3):
        quiet.put(lambda number=number: found.append((number, threading.current_thread())))  # type: ignore[misc]
    assert found == []
    timer = threading.Timer(0.05, quiet.hurry)
    timer.start()
    quiet.finish()
    timer.join()
    assert found == [(number, threading.current_thread()) for number in range(3)]


def test_a_hurry_waits_for_the_work_that_is_being_done(quiet: LowPriorityThread) -> None:
    begun, go_on, found = threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        assert go_on.wait(30)
        found.append("first")

    quiet.start()
    quiet.put(work)
    assert begun.wait(30)
    quiet.hurry()
    timer = threading.Timer(0.05, go_on.set)
    timer.start()
    quiet.put(lambda: found.append("second"))
    timer.join()
    quiet.finish()
    assert found == ["first", "second"]


@pytest.mark.parametrize("started", [False, True])
def test_the_first_error_is_raised_once_and_what_came_after_it_is_dropped(
    quiet: LowPriorityThread, started: bool
) -> None:
    found: list[int] = []
    if started:
        held = threading.Event()
        quiet.start()
        quiet.put(lambda: held.wait(30))
    quiet.put(fail)
    if started:
        quiet.put(lambda: found.append(1))
        held.set()
    with pytest.raises(OSError, match="broken"):
        quiet.finish()
    quiet.finish()
    assert found == []


def test_what_is_dropped_is_not_done(quiet: LowPriorityThread, starved: None) -> None:
    found: list[int] = []
    quiet.start()
    quiet.put(lambda: found.append(1))
    quiet.drop()
    quiet.hurry()
    quiet.finish()
    assert found == []


@pytest.mark.parametrize(
    ("device", "cores", "threads", "processes", "expected"),
    [
        ("cpu", 2, 2, 1, False),
        ("cpu", 2, 1, 1, True),
        ("cpu", 2, 1, 2, False),
        ("cpu", 8, 3, 2, True),
        ("cuda", 2, 2, 2, True),
    ],
)
def test_training_leaves_cores_where_its_threads_are_fewer(
    monkeypatch: pytest.MonkeyPatch, device: str, cores: int, threads: int, processes: int, expected: bool
) -> None:
    monkeypatch.setattr(low_priority_thread, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert leaves_cores(torch.device(device), processes) is expected


def test_a_preparation_ends_between_two_pieces_of_its_work() -> None:
    begun, go_on = threading.Event(), threading.Event()
    done: list[int] = []

    def first() -> None:
        begun.set()
        assert go_on.wait(30)
        done.append(0)

    preparation = Preparation(iter([first, lambda: done.append(1)]))
    assert begun.wait(30)
    threading.Timer(0.1, go_on.set).start()
    preparation.end()
    assert done == [0]
    assert "trainwright-preparation" not in {thread.name for thread in threading.enumerate()}
