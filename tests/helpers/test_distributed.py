"""The helper that starts ranks: results, environment, failures, and the promise that nothing hangs or is left over."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.helpers.distributed import RankError, run_distributed

pytestmark = pytest.mark.distributed


def _sum_of_ranks(scale: float) -> float:
    value = torch.tensor(float(dist.get_rank() + 1) * scale)
    dist.all_reduce(value)
    return value.item()


def _environment() -> dict[str, str]:
    return dict(os.environ)


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank is unhappy")
    dist.barrier()


def _hang_on_rank_one() -> None:
    if dist.get_rank() == 1:
        time.sleep(60)


def _kill_rank_zero() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def _start_a_child_and_hang(path: str) -> None:
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    Path(path).write_text(str(child.pid))
    time.sleep(60)


def _is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_results_come_back_in_the_order_of_the_ranks() -> None:
    assert run_distributed(lambda: dist.get_rank(), 3) == [0, 1, 2]


def test_the_ranks_share_a_process_group_and_get_the_arguments() -> None:
    assert run_distributed(_sum_of_ranks, 2, 10.0) == [30.0, 30.0]


def test_every_rank_sees_what_torchrun_would_set() -> None:
    first, second = run_distributed(_environment, 2, init=False)
    assert (first["RANK"], first["LOCAL_RANK"], first["WORLD_SIZE"]) == ("0", "0", "2")
    assert (second["RANK"], second["LOCAL_RANK"], second["LOCAL_WORLD_SIZE"]) == ("1", "1", "2")
    assert first["MASTER_PORT"] == second["MASTER_PORT"]


def test_the_environment_of_the_moment_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    run_distributed(_environment, 1, init=False)  # the fork server is running from here on
    monkeypatch.setenv("TRAINWRIGHT_TEST_MOMENT", "now")
    (environment,) = run_distributed(_environment, 1, init=False, env={"TRAINWRIGHT_TEST_EXTRA": "told"})
    assert environment["TRAINWRIGHT_TEST_MOMENT"] == "now"
    assert environment["TRAINWRIGHT_TEST_EXTRA"] == "told"


def test_without_init_there_is_no_process_group() -> None:
    assert run_distributed(lambda: dist.is_initialized(), 2, init=False) == [False, False]


def test_an_exception_is_raised_again_with_its_rank_and_traceback() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        run_distributed(_raise_on_rank_one)
    assert "_raise_on_rank_one" in str(caught.value)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_failure_ends_the_ranks_that_wait_for_it_long_before_the_timeout() -> None:
    start_s = time.monotonic()
    with pytest.raises(RankError):
        run_distributed(_raise_on_rank_one, 2, timeout=60)
    assert time.monotonic() - start_s < 30


def test_a_late_rank_is_ended_and_the_message_says_where_it_was() -> None:
    with pytest.raises(RankError, match=r"ranks \[1\] of 2 were not done after 4 s") as caught:
        run_distributed(_hang_on_rank_one, 2, timeout=4)
    assert "_hang_on_rank_one" in str(caught.value)


def test_a_rank_that_dies_without_a_word_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 died with exit code -9"):
        run_distributed(_kill_rank_zero, 2, init=False)


@pytest.mark.exhaustive
def test_what_a_late_rank_has_started_is_ended_too(tmp_path: Path) -> None:
    note = tmp_path / "pid"
    with pytest.raises(RankError, match="not done"):
        run_distributed(_start_a_child_and_hang, 1, str(note), timeout=4, init=False)
    deadline_s = time.monotonic() + 5
    while _is_running(int(note.read_text())) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    assert not _is_running(int(note.read_text()))


def test_what_a_rank_prints_is_shown_under_its_number(capsys: pytest.CaptureFixture[str]) -> None:
    run_distributed(lambda: print("hello"), 2, init=False)
    shown = capsys.readouterr().out
    assert "[rank 0] hello" in shown
    assert "[rank 1] hello" in shown


def test_a_result_that_cannot_be_pickled_is_an_error_of_its_rank() -> None:
    with pytest.raises(RankError, match="pickle"):
        run_distributed(lambda: (item for item in ()), 1, init=False)
