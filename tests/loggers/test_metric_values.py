from __future__ import annotations

import math
import pickle
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.helpers.distributed import run_distributed
from trainwright.core.errors import ConfigurationError, TaskError, TrainwrightWarning
from trainwright.loggers.metric_buffer import MetricBuffer
from trainwright.loggers.metric_values import Exchange, Flushed


def as_ranks(world_size: int, fn: Callable[[int, Exchange], Any]) -> list[Any]:
    """Call `fn(rank, exchange)` on so many threads, whose exchange is an all-gather that counts its rounds."""
    board: list[dict[str, Any]] = [{} for _ in range(world_size)]
    barrier = threading.Barrier(world_size, timeout=20)

    def work(rank: int) -> Any:
        def exchange(payload: dict[str, Any]) -> list[dict[str, Any]]:
            board[rank] = pickle.loads(pickle.dumps(payload))
            barrier.wait()
            found = list(board)
            barrier.wait()
            return found

        return fn(rank, exchange)

    with ThreadPoolExecutor(world_size) as pool:
        futures = [pool.submit(work, rank) for rank in range(world_size)]
        return [future.result() for future in futures]


def flushed(rank: int, exchange: Exchange, log: Callable[[MetricBuffer, int], None], stage: Any) -> Flushed:
    buffer = MetricBuffer()
    buffer.begin(stage)
    buffer.in_step = True
    log(buffer, rank)
    return buffer.flush_step(exchange) if stage == "train" else buffer.flush_epoch(exchange)


def epochs(
    world_size: int, log: Callable[[MetricBuffer, int], None], stage: str = "validate"
) -> list[dict[str, float]]:
    return [f.callback for f in as_ranks(world_size, lambda rank, exchange: flushed(rank, exchange, log, stage))]


def steps(world_size: int, log: Callable[[MetricBuffer, int], None]) -> list[dict[str, float]]:
    return epochs(world_size, log, "train")


@pytest.mark.parametrize(("kind", "expected"), [("sum", 3.0), ("mean", 1.5), ("min", 1.0), ("max", 2.0)])
def test_synced_step_values_and_epochs_aggregates_are_reduced_over_ranks(kind: str, expected: float) -> None:
    found = steps(2, lambda buffer, rank: buffer.log("m", rank + 1.0, reduce_fx=kind, sync_dist=True))
    assert found == [{"m": expected}] * 2
    found = epochs(2, lambda buffer, rank: buffer.log("m", torch.tensor(rank + 1.0), reduce_fx=kind))
    assert found == [{"m": expected}] * 2


@pytest.mark.parametrize("kind", ["sum", "mean", "min", "max"])
def test_a_batch_of_padding_does_not_count_in_a_synced_step_value(kind: str) -> None:
    def log(buffer: MetricBuffer, rank: int) -> None:
        buffer.batch = [0]
        buffer.share = 0.0 if rank == 1 else None  # rank 1 has no data
        buffer.log("m", 5.0 if rank == 0 else (9.0 if kind == "max" else 1.0), reduce_fx=kind, sync_dist=True)

    assert steps(2, log) == [{"m": 5.0}] * 2


@pytest.mark.parametrize(("kind", "values"), [("min", (1.0, math.nan)), ("max", (math.nan, 1.0))])
def test_a_rank_whose_value_is_nan_makes_the_extreme_nan(kind: str, values: tuple[float, float]) -> None:
    found = epochs(2, lambda buffer, rank: buffer.log("m", values[rank], reduce_fx=kind))
    assert [math.isnan(of_rank["m"]) for of_rank in found] == [True, True]


def test_step_values_by_default_and_aggregates_with_sync_dist_false_are_each_ranks_own() -> None:
    own = [{"m": 1.0}, {"m": 2.0}]
    assert steps(2, lambda buffer, rank: buffer.log("m", rank + 1.0)) == own
    assert steps(2, lambda buffer, rank: buffer.log("m", rank + 1.0, sync_dist=False)) == own
    assert epochs(2, lambda buffer, rank: buffer.log("m", rank + 1.0, sync_dist=False)) == own


@settings(max_examples=25)
@given(st.lists(st.lists(st.tuples(st.floats(-1e3, 1e3), st.integers(1, 9)), max_size=80), min_size=2, max_size=4))
def test_a_mean_over_ranks_is_the_mean_over_all_samples(values: list[list[tuple[float, int]]]) -> None:
    def log(buffer: MetricBuffer, rank: int) -> None:
        for value, size in values[rank]:
            buffer.log("m", torch.tensor(value, dtype=torch.float64), batch_size=size)

    found = epochs(len(values), log)
    pooled = [pair for rank in values for pair in rank]
    if not pooled:
        assert found == [{}] * len(values)
        return
    expected = sum(value * size for value, size in pooled) / sum(size for _, size in pooled)
    assert [rank["m"] for rank in found] == [pytest.approx(expected, rel=1e-9, abs=1e-6)] * len(values)


def test_rank_zero_only_gives_every_rank_the_value_of_rank_0() -> None:
    assert epochs(3, lambda buffer, rank: buffer.log("m", float(rank + 7), rank_zero_only=True)) == [{"m": 7.0}] * 3


def test_ranks_that_reduce_a_key_differently_all_raise() -> None:
    def attempt(rank: int, exchange: Exchange) -> str:
        with pytest.raises(ConfigurationError, match=r"reduce it differently \(max, min\)"):
            flushed(rank, exchange, lambda buffer, rank: buffer.log("m", 1.0, reduce_fx=["min", "max"][rank]), "test")
        return "raised"

    assert as_ranks(2, attempt) == ["raised", "raised"]


def _gather(payload: dict[str, Any]) -> list[dict[str, Any]]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, payload)
    return found


def _metric_objects_on_a_rank() -> tuple[dict[str, float], dict[str, float], list[str]]:
    import warnings

    from torchmetrics import MeanMetric, MetricCollection, SumMetric

    rank = dist.get_rank()
    shared, local, alone = MeanMetric(), SumMetric(), SumMetric()
    owner = torch.nn.ModuleDict({"part": SumMetric()})
    collection = MetricCollection({"mean": MeanMetric(), "sum": SumMetric()})
    buffer = MetricBuffer()
    buffer.begin("validate")
    buffer.in_step = True
    # Ranks see unequal numbers of batches and log in different orders.
    for value in ([1.0, 2.0, 3.0], [10.0])[rank]:
        shared.update(torch.tensor(value))
        local.update(torch.tensor(value))
        collection.update(torch.tensor(value))
        logs = [
            lambda: buffer.log("shared", shared),
            lambda: buffer.log("local", local, sync_dist=False),
            lambda: buffer.log("all", collection),
        ]
        for log in logs if rank == 0 else reversed(logs):
            log()
    if rank == 1:
        alone.update(torch.tensor(5.0))
        buffer.log("alone", alone)
        owner["part"].update(torch.tensor(7.0))
        buffer.log("part", owner["part"])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        first = buffer.flush_epoch(_gather, owner=owner).callback
    shared.update(torch.tensor(8.0))
    buffer.begin("validate")
    buffer.log("shared", shared)
    if rank == 1:
        owner["part"].update(torch.tensor(9.0))
        buffer.log("part", owner["part"])
    second = buffer.flush_epoch(_gather, owner=owner).callback
    messages = [str(one.message) for one in caught if issubclass(one.category, TrainwrightWarning)]
    return first, second, messages


@pytest.mark.distributed
@pytest.mark.slow
def test_metric_objects_reduce_over_ranks_in_one_order_and_start_over() -> None:
    pytest.importorskip("torchmetrics")
    (first_0, second_0, messages_0), (first_1, second_1, messages_1) = run_distributed(_metric_objects_on_a_rank, 2)
    common = {"shared": 4.0, "all/mean": 4.0, "all/sum": 16.0, "part": 7.0}
    assert first_0 == {**common, "local": 6.0}
    assert first_1 == {**common, "local": 10.0, "alone": 5.0}
    assert second_0 == second_1 == {"shared": 8.0, "part": 9.0}
    assert messages_0 == []
    assert len(messages_1) == 1
    assert "'alone' was logged on 1 of 2 ranks" in messages_1[0]


def test_a_distributed_tensor_is_taken_when_every_rank_holds_it_whole() -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    buffer = MetricBuffer()
    buffer.begin("train")
    buffer.in_step = True
    whole = DTensor.from_local(torch.tensor(2.0), mesh, [Replicate()])
    buffer.log("loss", whole)
    assert buffer.flush_step().logged == {"loss": 2.0}
    with pytest.raises(TaskError, match=r"sharded over ranks.*full_tensor"):
        buffer.log("part", DTensor.from_local(torch.tensor(2.0), mesh, [Partial()]))
