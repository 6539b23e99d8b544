"""The watch beside each rank: what it says of ranks that stand still, that fail, and that are gone."""

from __future__ import annotations

import datetime
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]  # public, not re-exported

from tests.helpers.distributed import run_distributed
from trainwright.core.errors import ConfigurationError, WorkerError
from trainwright.core.process import Topology
from trainwright.processes import hang_detector
from trainwright.processes.hang_detector import HangDetector
from trainwright.processes.hang_report import Failure, hang_report
from trainwright.processes.process_group import ProcessGroup
from trainwright.processes.rank_position import (
    Position,
    ProcessMark,
    RankPosition,
    activity_of,
    collective_of,
    last_recorded_collective,
)
from trainwright.strategies import DDPStrategy

_ENOUGH_S = 20.0


def eventually(condition: Callable[[], Any], within_s: float = _ENOUGH_S) -> Any:
    """Wait until the condition holds, and return what it gave."""
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not come to pass")


class Ranks:
    """The watches of several ranks in one process, over one store; `steps` is how far each is."""

    def __init__(self, world_size: int, hang_timeout_s: float | None, **options: Any) -> None:
        self.server: Any = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.steps = [0] * world_size
        self.watches = [self._watch(rank, world_size, hang_timeout_s, options) for rank in range(world_size)]
        for watch in self.watches:
            watch.start()

    def client(self) -> Any:
        address = ("127.0.0.1", self.server.port)
        return PrefixStore("watch", TCPStore(*address, is_master=False, wait_for_workers=False))

    def _watch(self, rank: int, world_size: int, hang_timeout_s: float | None, options: dict[str, Any]) -> HangDetector:
        given = {"store_dies_with_rank_0": True, "interrupt_only": False, **options}
        return HangDetector(
            self.client(),
            rank=rank,
            world_size=world_size,
            position=lambda: Position(self.steps[rank], 0, 0, "fit"),
            hang_timeout_s=hang_timeout_s,
            timeout_s=60,
            **given,
        )

    def close(self) -> None:
        for watch in self.watches:
            watch.close()


Start = Callable[..., Ranks]


class Ends(list[int]):
    """The exit codes that the watches asked for."""


@pytest.fixture
def ends(monkeypatch: pytest.MonkeyPatch) -> Ends:
    """Quick watches that do not end this process."""
    found = Ends()

    monkeypatch.setattr(hang_detector.os, "_exit", found.append)
    for name, value in {"_BEAT_S": 0.05, "_GRACE_S": 0.4, "_PATIENCE_S": 1.0, "_ANSWER_S": 1.0, "_ECHO_S": 1.0}.items():
        monkeypatch.setattr(hang_detector, name, value)
    return found


@pytest.fixture
def start(ends: Ends) -> Iterator[Start]:
    started: list[Ranks] = []

    def make(world_size: int = 2, hang_timeout_s: float | None = None, **options: Any) -> Ranks:
        started.append(Ranks(world_size, hang_timeout_s, **options))
        return started[-1]

    yield make
    for ranks in started:
        ranks.close()


@pytest.mark.slow
def test_a_run_that_stands_still_is_reported_once_with_every_rank_and_its_stack(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start(3, hang_timeout_s=0.5)
    ranks.steps[:] = [4, 5, 5]
    time.sleep(1.5)
    text = capfd.readouterr().err
    assert text.count("(hang_timeout)") == 1
    assert "rank 0 is in no collective: fit, step 4" in text
    assert "ranks 1-2 are in no collective: fit, step 5" in text
    assert "A collective fails after 60 s" in text
    assert "in test_a_run_that_stands_still_is_reported_once_with_every_rank_and_its_stack" in text
    assert "trainwright-hang-detector" in text  # the stacks of the other threads as well


@pytest.mark.slow
def test_a_run_that_was_only_slow_is_said_to_have_moved_on_and_is_reported_again_when_it_stands_again(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start(1, hang_timeout_s=0.5)
    for step in (1, 2):
        text = ""

        def said(words: str) -> bool:
            nonlocal text
            text += capfd.readouterr().err
            return words in text

        eventually(lambda: said("(hang_timeout)"))
        ranks.steps[0] = step
        eventually(lambda: said("rank 0 has moved on after"))
        assert f"fit, step {step}" in text.splitlines()[-1]


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named_with_where_it_was_last_seen(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start(2, hang_timeout_s=0.5)
    ranks.steps[1] = 7
    eventually(lambda: "step 7" in ranks.client().get("beat/1").decode())
    ranks.watches[1].close()
    text = ""
    while "A collective fails" not in text:
        text += capfd.readouterr().err
        time.sleep(0.05)
    assert "rank 1 does not answer: its process has ended or is stopped" in text
    assert "last seen: fit, step 7" in text


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as caught:  # noqa: BLE001  # with its traceback
        return caught


def test_an_error_that_follows_another_ranks_names_it_with_its_traceback(start: Start) -> None:
    ranks = start(2)
    ranks.watches[1].leave(_raised(ArithmeticError("seven is odd")))
    echo = RuntimeError("Connection closed by peer")
    ranks.watches[0].leave(_raised(echo))
    (note,) = echo.__notes__
    assert note.startswith("This followed the failure of another rank:\nrank 1:\nTraceback")
    assert note.rstrip().endswith("ArithmeticError: seven is odd")


def test_a_survivor_that_cannot_notice_ends_and_prints_the_cause(
    start: Start, ends: Ends, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start(2)
    ranks.watches[1].leave(_raised(ArithmeticError("seven is odd")))
    ranks.watches[1].close()
    eventually(lambda: ends)
    ranks.close()
    assert set(ends) == {1}
    text = capfd.readouterr().err
    assert text.startswith("trainwright: rank 0 ends after the failure of rank 1.\nrank 1:\n")
    assert "ArithmeticError: seven is odd\n" in text


@pytest.mark.slow
def test_survivors_let_a_failed_rank_finish_its_save_first(
    start: Start, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hang_detector, "activity_of", lambda frames: "saving")
    ranks = start(2)
    ranks.watches[1].leave(_raised(ArithmeticError("seven is odd")))
    time.sleep(1.5)  # longer than a rank that does not save is given
    assert ends == []
    ranks.watches[1].close()
    eventually(lambda: ends)


@pytest.mark.slow
def test_a_rank_that_leaves_on_purpose_has_not_failed(start: Start, ends: Ends) -> None:
    ranks = start(2)
    ranks.watches[1].leave(_raised(SystemExit(143)))
    ranks.watches[1].close()
    assert ranks.client().get("left/1") == b"SystemExit: 143"
    time.sleep(1.0)
    assert ends == []
    assert not ranks.client().check(["failure"])


def test_the_users_own_process_is_interrupted_instead_of_ended(start: Start, ends: Ends) -> None:
    ranks = start(2, interrupt_only=True)
    ranks.watches[1].leave(_raised(ArithmeticError("seven is odd")))
    ranks.watches[1].close()
    with pytest.raises(KeyboardInterrupt) as caught:
        time.sleep(_ENOUGH_S)
    with pytest.raises(WorkerError, match="seven is odd"):
        ranks.watches[0].leave(caught.value)
    assert ends == []


def test_a_process_that_was_killed_is_named_by_its_neighbour_though_its_parent_has_not_heard(start: Start) -> None:
    ranks = start(1)
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with process:
        started = Path(f"/proc/{process.pid}/stat")
        birth = started.read_text().rpartition(")")[2].split()[19] if started.exists() else ""
        mark = ProcessMark(ProcessMark.mine().node, process.pid, birth)
        ranks.client().append(f"node/{mark.node}", json.dumps([1, mark.pid, mark.started]) + "\n")
        time.sleep(0.3)
        assert not mark.is_gone()
        assert not ranks.client().check(["failure"])
        process.kill()
        eventually(lambda: ranks.client().check(["failure"]))
        failure = Failure.from_json(ranks.client().get("failure"))
    assert (failure.rank, failure.gone) == (1, True)
    assert f"rank 1: its process {process.pid}" in failure.text
    assert "has ended without a traceback" in failure.text


def test_when_the_store_dies_with_rank_0_the_others_end(
    start: Start, ends: Ends, capfd: pytest.CaptureFixture[str]
) -> None:
    ranks = start(2)
    ranks.watches[0].close()
    ranks.server = None
    eventually(lambda: ends)
    assert "rank 0: its process, which served the store, has ended." in capfd.readouterr().err


def _call_as(module: str, name: str, then: Callable[[], Any]) -> Any:
    space: dict[str, Any] = {"__name__": module}
    exec(f"def {name}(then):\n    return then()", space)
    return space[name](then)


def _within(*calls: tuple[str, str]) -> Any:
    """Return the frames of this thread within those calls, outermost first."""
    then: Callable[[], Any] = lambda: sys._getframe(1)  # noqa: E731
    for module, name in reversed(calls):
        then = lambda module=module, name=name, inner=then: _call_as(module, name, inner)  # type: ignore[misc]  # noqa: E731
    frame = then()
    found = []
    while frame is not None:
        found.append(frame)
        frame = frame.f_back
    return [frame for frame in found if frame.f_globals["__name__"] != __name__]


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([("user", "training_step")], ""),
        ([("user", "f"), ("torch.distributed", "wrapper"), ("torch.distributed", "all_reduce")], "all_reduce"),
        ([("torch.autograd", "backward"), ("torch.autograd.graph", "_engine_run_backward")], "backward"),
        ([("torch.distributed", "all_reduce"), ("user", "hook")], ""),
    ],
)  # fmt: skip
def test_the_collective_is_the_one_that_the_user_called(calls: list[tuple[str, str]], expected: str) -> None:
    assert collective_of(_within(*calls)) == expected


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        ("trainwright.trainer.checkpoints.saves", "saving"),
        ("trainwright.checkpoint.format.writer", "saving"),
        ("torch.utils.data._utils.fetch", "fetching data"),
        ("user", ""),
    ],
)
def test_what_a_rank_is_busy_with_is_read_from_its_stack(module: str, expected: str) -> None:
    assert activity_of(_within(("trainwright.trainer.trainer", "_fit"), (module, "f"), ("user", "g"))) == expected


def _position(rank: int, waits_in: str, still_s: float = 9.0, place: str = "user.py:1 in f") -> RankPosition:
    return RankPosition(rank, "fit, step 3", still_s, waits_in, "", place, "process 1 on host", "main thread:\n  stack")


def test_ranks_that_stand_alike_share_a_line_and_a_stack() -> None:
    answers = {rank: _position(rank, "all_reduce") for rank in (0, 1, 2, 4)} | {3: _position(3, "")}
    text = hang_report(0, answers, {}, hang_timeout_s=8, timeout_s=60)
    assert "  ranks 0-2, 4 wait in all_reduce: fit, step 3; still for 9 s" in text
    assert "  rank 3 has not arrived: fit, step 3" in text
    assert text.count("stack") == 2
    assert text.index("rank 3, process") < text.index("rank 0, process")  # the one that all wait for comes first


def test_the_name_of_a_collective_is_not_changed_for_several_ranks() -> None:
    answers = {rank: _position(rank, "distribute_tensor") for rank in (0, 1)}
    text = hang_report(0, answers, {}, hang_timeout_s=8, timeout_s=60)
    assert "  ranks 0-1 wait in distribute_tensor: fit, step 3" in text


def test_the_report_names_the_last_collective_of_each_rank() -> None:
    answers = {rank: replace(_position(rank, ""), last_collective="gloo:all_reduce, number 7") for rank in (0, 1)}
    answers[2] = replace(_position(2, ""), last_collective="gloo:all_reduce, number 6")
    text = hang_report(0, answers, {}, hang_timeout_s=8, timeout_s=60)
    assert "  last collective of ranks 0-1: gloo:all_reduce, number 7" in text
    assert "  last collective of rank 2: gloo:all_reduce, number 6" in text


def test_a_build_of_torch_without_distributed_has_no_last_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    monkeypatch.delattr(torch._C, "_distributed_c10d")
    assert last_recorded_collective() == ""


def _last_collective() -> str:
    rank = dist.get_rank()
    groups = [dist.new_group([rank]) for rank in range(dist.get_world_size())]
    for _ in range(rank + 1):
        dist.all_reduce(torch.ones(3), group=groups[rank])
    return last_recorded_collective()


@pytest.mark.requires("torch>=2.13", reason="the flight recorder records collectives of gloo")
@pytest.mark.distributed
def test_the_last_collective_comes_from_the_flight_recorder() -> None:
    found = run_distributed(_last_collective, 2)
    for rank, text in enumerate(found):
        assert f"gloo:all_reduce of [3], number {rank + 1} of group" in text


def test_a_hang_timeout_is_half_of_the_timeout_and_ten_minutes_at_most() -> None:
    minutes = datetime.timedelta(minutes=1)
    assert ProcessGroup(Topology("torchrun"), timeout=6 * minutes).hang_timeout == 3 * minutes
    assert ProcessGroup(Topology("torchrun")).hang_timeout == 10 * minutes
    assert DDPStrategy(hang_timeout="2 min").hang_timeout == 2 * minutes
    assert DDPStrategy(hang_timeout=None).hang_timeout is None


def test_a_hang_timeout_that_would_never_be_reached_is_an_error() -> None:
    with pytest.raises(ConfigurationError, match="hang_timeout='40 min' is not shorter than timeout=0:30:00"):
        DDPStrategy(hang_timeout="40 min")
    with pytest.raises(ConfigurationError, match="soon"):
        DDPStrategy(hang_timeout="soon")


def test_a_rank_that_does_not_come_is_named() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    place = Topology("torchrun", rank=0, world_size=3, master_addr="127.0.0.1", master_port=port)
    group = ProcessGroup(place, timeout=datetime.timedelta(seconds=0.5))
    with pytest.raises(TimeoutError, match=r"ranks 1-2 of 3 did not arrive within 0:00:00\.5"):
        group.open(torch.device("cpu"))
