"""The helper that starts ranks: results, environment, failures, and the promise that nothing hangs or is left over."""

from __future__ import annotations

import os
import signal

import pytest
import torch.distributed as dist

from tests.helpers.distributed import RankError, run_distributed

pytestmark = pytest.mark.distributed


def _raise_on_rank_one() -> None:
    if dist.get_rank() == 1:
        raise ValueError("the second rank is unhappy")
    dist.barrier()


def _kill_rank_zero() -> None:
    if os.environ["RANK"] == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def test_an_exception_is_raised_again_with_its_rank_and_traceback() -> None:
    with pytest.raises(RankError, match="rank 1 of 2 failed") as caught:
        run_distributed(_raise_on_rank_one)
    assert "_raise_on_rank_one" in str(caught.value)
    assert caught.value.rank == 1
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_rank_that_dies_without_a_word_is_named_with_its_exit_code() -> None:
    with pytest.raises(RankError, match="rank 0 of 2 died with exit code -9"):
        run_distributed(_kill_rank_zero, 2, init=False)
