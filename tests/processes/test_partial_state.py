"""A script's own processes: where each stands, who runs what, who goes first, and what a Trainer does beside it."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import time
from collections.abc import Iterator
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.distributed import run_distributed
from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright import ConfigurationError, DistributedType, PartialState, WorkerError
from trainwright.processes.process_shares import share_of


def test_a_process_that_is_alone_is_first_and_last_and_opens_nothing() -> None:
    state = PartialState(cpu=True)
    assert (state.num_processes, state.process_index, state.local_process_index) == (1, 0, 0)
    assert state.is_main_process
    assert state.is_local_main_process
    assert state.is_last_process
    assert (state.device, state.backend) == (torch.device("cpu"), None)
    assert state.distributed_type is DistributedType.NO
    assert not state.use_distributed
    assert (state.debug, state.fork_launched) == (False, False)
    state.wait_for_everyone()
    with state.main_process_first(), state.local_main_process_first():
        pass
    state.destroy_process_group()
    assert not dist.is_initialized()


def test_a_state_that_was_reset_says_so() -> None:
    state = PartialState(cpu=True)
    PartialState._reset_state()
    assert not state.initialized
    with pytest.raises(AttributeError, match="num_processes since its state was reset"):
        _ = state.num_processes
    with pytest.raises(AttributeError, match="no attribute 'processindex'"):
        _ = state.processindex


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"timout": 3}, "unknown argument 'timout'. Did you mean 'timeout'"),
        ({"timeout": "3 steps"}, "timeout='3 steps' is not a length of time"),
        ({"init_method": "tcp://localhost:1"}, "init_process_group first"),
    ],
)
def test_unknown_wishes_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        PartialState(**arguments)
    assert not PartialState._shared_state


def test_a_pickled_state_is_the_one_of_the_process_that_reads_it() -> None:
    state = PartialState(cpu=True)
    assert pickle.loads(pickle.dumps(state)).__dict__ is state.__dict__
    packed = pickle.dumps(state)
    PartialState._reset_state()
    assert pickle.loads(packed).num_processes == 1


@given(st.integers(0, 40), st.integers(1, 9))
def test_shares_together_are_everything_once_in_order_and_even(length: int, num_processes: int) -> None:
    inputs = list(range(length))
    shares = [share_of(inputs, rank, num_processes) for rank in range(num_processes)]
    assert [item for share in shares for item in share] == inputs
    sizes = [len(share) for share in shares]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


@given(st.integers(1, 40), st.integers(1, 9))
def test_padded_shares_are_equally_long_and_repeat_a_last_sample(length: int, num_processes: int) -> None:
    for rank in range(num_processes):
        plain, padded = (share_of(list(range(length)), rank, num_processes, pad=pad) for pad in (False, True))
        assert len(padded) == -(-length // num_processes)
        assert padded == plain + [plain[-1] if plain else length - 1] * (len(padded) - len(plain))


class _Rows:
    def __init__(self, rows: list[int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def select(self, indices: list[int]) -> _Rows:
        return _Rows([self.rows[index] for index in indices])


@pytest.mark.parametrize("num_processes", [1, 2])
@pytest.mark.parametrize(
    ("inputs", "error", "message"),
    [
        ("a dog", TypeError, "inputs is of type str"),
        (None, TypeError, "inputs is of type NoneType"),
        ({"a": [1], "b": 5}, TypeError, r"inputs\['b'\] is of type int"),
        (torch.tensor(3.0), TypeError, "without a dimension"),
        ({"a": [1, 2], "b": {"c": [1]}}, ConfigurationError, "'a': 2, 'b': 1"),
    ],
)
def test_what_cannot_be_split_is_refused(inputs: Any, error: type[Exception], message: str, num_processes: int) -> None:
    with pytest.raises(error, match=message):
        share_of(inputs, 0, num_processes)


def _recorded(state: PartialState) -> dict[str, Any]:
    found: dict[str, Any] = {
        "place": (state.process_index, state.local_process_index, state.num_processes),
        "roles": (state.is_main_process, state.is_local_main_process, state.is_last_process),
        "type": (state.distributed_type, state.backend, state.use_distributed),
        "group": (dist.get_world_size(), dist.get_rank()),
    }
    with state.split_between_processes(["a dog", "a cat", "a chicken"], apply_padding=True) as prompts:
        found["prompts"] = prompts

    def name() -> str:
        return "ran"

    found["ran"] = [
        state.on_main_process(name)(),
        state.on_last_process(name)(),
        state.on_process(process_index=1)(name)(),
        state.on_local_process(local_process_idx=0)(name)(),
    ]
    with redirect_stdout(io.StringIO()) as text:
        state.print("hello", end="!")
    found["printed"] = text.getvalue()
    with pytest.raises(ConfigurationError, match="process_index=2, but no process has this index"):
        state.on_process(name, process_index=2)
    with pytest.raises(ConfigurationError, match="backend='mpi'"):
        PartialState(backend="mpi")
    return found


def _nested(outer: Any, inner: Any) -> Any:
    @contextlib.contextmanager
    def both() -> Iterator[None]:
        with outer(), inner():
            yield

    return both


def _take_turns(state: PartialState, first: Any) -> tuple[float, float]:
    with first():
        start_s = time.monotonic()
        time.sleep(0.3 if state.is_main_process else 0)
        return start_s, time.monotonic()


def _fail_first(state: PartialState) -> str:
    def body() -> None:
        with state.main_process_first():
            raise ArithmeticError("no such file" if state.is_main_process else "went on")

    with pytest.raises((ArithmeticError, WorkerError)) as caught:
        body()
    return repr(caught.value)


def _live() -> dict[str, Any]:
    state = PartialState(cpu=True, timeout="1 min")
    found = _recorded(state)
    main, local = state.main_process_first, state.local_main_process_first
    found["turns"] = [_take_turns(state, first) for first in (main, local, _nested(main, local), _nested(local, main))]
    found["failure"] = _fail_first(state)
    trainer = quiet_trainer(devices="auto", max_steps=2)
    task = RegressionTask()
    trainer.fit(task, regression_loader(4))
    found["fitted"] = (trainer.world_size, trainer.global_step)
    found["after fit"] = (PartialState().num_processes, dist.is_initialized())
    state.wait_for_everyone()
    found["weights"] = state.processes.gather_object([p.sum().item() for p in task.parameters()])
    state.destroy_process_group()
    found["destroyed"] = not dist.is_initialized()
    state.wait_for_everyone()  # in a new group
    return found


@pytest.fixture(scope="module")
def lives() -> list[dict[str, Any]]:
    return run_distributed(_live, 2, init=False, timeout=120)


@pytest.mark.distributed
def test_each_process_knows_its_place(lives: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(lives):
        assert found["place"] == (rank, rank, 2)
        assert found["group"] == (2, rank)
        assert found["roles"] == (rank == 0, rank == 0, rank == 1)
        assert found["type"] == ("MULTI_CPU", "gloo", True)


@pytest.mark.distributed
def test_each_process_gets_and_runs_what_is_its_own(lives: list[dict[str, Any]]) -> None:
    assert [found["prompts"] for found in lives] == [["a dog", "a cat"], ["a chicken", "a chicken"]]
    assert [found["ran"] for found in lives] == [["ran", None, None, "ran"], [None, "ran", "ran", None]]
    assert [found["printed"] for found in lives] == ["hello!", ""]


@pytest.mark.distributed
def test_one_process_is_done_before_the_others_begin(lives: list[dict[str, Any]]) -> None:
    for first, second in zip(lives[0]["turns"], lives[1]["turns"], strict=True):
        assert first[1] <= second[0]


@pytest.mark.distributed
def test_nobody_waits_for_one_that_failed_while_it_went_first(lives: list[dict[str, Any]]) -> None:
    assert lives[0]["failure"] == "ArithmeticError('no such file')"
    assert "process 0 failed" in lives[1]["failure"]
    assert "ArithmeticError: no such file" in lives[1]["failure"]


@pytest.mark.distributed
def test_a_trainer_uses_the_group_and_leaves_it_open(lives: list[dict[str, Any]]) -> None:
    for found in lives:
        assert found["fitted"] == (2, 2)
        assert found["after fit"] == (2, True)
        assert found["weights"][0] == found["weights"][1]


@pytest.mark.distributed
def test_a_group_that_was_destroyed_is_made_anew_when_it_is_needed(lives: list[dict[str, Any]]) -> None:
    assert all(found["destroyed"] for found in lives)


def _join_the_script_s_own(folder: str, rank: int) -> list[Any]:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    state = PartialState(cpu=True)
    with state.main_process_first():
        place = [state.process_index, state.num_processes, state.backend, state.topology.launcher]
    state.destroy_process_group()
    with pytest.raises(ConfigurationError, match="used no longer exists"):
        state.wait_for_everyone()
    return [*place, state.num_processes]


def _without_a_launcher(folder: str) -> list[Any]:
    rank = int(os.environ["RANK"])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        del os.environ[name]
    return _join_the_script_s_own(folder, rank)


@pytest.mark.distributed
def test_a_group_of_the_script_s_own_is_joined(tmp_path: Path) -> None:
    found = run_distributed(_without_a_launcher, 2, str(tmp_path), init=False)
    assert found == [[rank, 2, "gloo", "none", 2] for rank in range(2)]
