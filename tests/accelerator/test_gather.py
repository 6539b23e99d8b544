"""Collectives over tensors that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, PartialState, broadcast, gather, gather_object, pad_across_processes, reduce
from trainwright.core.errors import ConfigurationError, DistributedOperationException

pytestmark = pytest.mark.distributed


def _raised(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


def _misuse() -> dict[str, str]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    ones = torch.ones(2)
    found = {
        "rows": _raised(lambda: gather(torch.ones(2 + rank))),
        "dtype": _raised(lambda: gather(ones if rank else ones.long())),
        "number": _raised(lambda: gather([ones] * (1 + rank))),
        "type on one": _raised(lambda: gather([ones, "text" if rank else ones])),
        "operation": _raised(lambda: (accelerator.gather, accelerator.reduce)[rank](ones)),
        "padded number": _raised(lambda: pad_across_processes([ones] * rank)),
        "object": _raised(lambda: gather_object(["a"] if rank else "a")),
        "kind": _raised(lambda: accelerator.gather_for_metrics(["a"] if rank else ones)),
        "metric dtype": _raised(lambda: accelerator.gather_for_metrics(ones if rank else ones.long())),
        "metric leaf": _raised(lambda: accelerator.gather_for_metrics([ones, "text" if rank else ones])),
    }
    for batch in accelerator.prepare(DataLoader(torch.arange(4), batch_size=2)):  # type: ignore[arg-type]
        found["dtype in a loop"] = _raised(lambda batch=batch: accelerator.gather(batch.float() if rank else batch))
        found["type in a loop"] = _raised(lambda batch=batch: accelerator.gather([batch, None if rank else batch]))
    PartialState().debug = True
    found["padded dtype in debug mode"] = _raised(lambda: pad_across_processes(ones if rank else ones.long()))
    assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]  # all are still there
    assert accelerator.gather_for_metrics(torch.ones(2, 0)).shape == (4, 0)
    return found


def test_calls_that_differ_between_ranks_are_errors_on_every_rank() -> None:
    for rank, raised in enumerate(run_distributed(_misuse, 2, init=False, timeout=120)):
        for name, text in raised.items():
            is_type_error = (rank == 1 and name in ("type on one", "type in a loop")) or name == "object"
            assert text.startswith(
                "TypeError" if is_type_error else ("ConfigurationError", "DistributedOperationException")
            ), (name, text)
        assert "gather_for_metrics" in raised["rows"]
        assert "process 1: gather of [((3,), 'float32')]" in raised["rows"]
        assert "dtype" in raised["metric dtype"]


def _different_calls() -> dict[str, str]:
    accelerator = Accelerator(cpu=True)
    rank, zeros = accelerator.process_index, torch.zeros
    assert accelerator.state.debug
    calls: dict[str, Callable[[], Any]] = {
        "shape": lambda: gather({"a": zeros(2), "b": [zeros(2), zeros(2 + rank)]}),
        "dimensions": lambda: broadcast({"x": zeros(1, 5) if rank == 0 else zeros(1, 2, 5)}),
        "key": lambda: gather({"a": zeros(2)} | ({"b": zeros(1)} if rank else {})),
        "order": lambda: gather({"a": zeros(2), "b": zeros(2)} if rank else {"b": zeros(2), "a": zeros(2)}),
        "length": lambda: reduce([zeros(1)] * (1 + rank), "sum"),
        "dtype": lambda: pad_across_processes({"x": zeros(3) if rank == 0 else zeros(3).long()}),
        "columns": lambda: accelerator.gather_for_metrics({"p": zeros(2, 3 + rank)}),
        "metric dtype": lambda: accelerator.gather_for_metrics({"p": zeros(2) if rank == 0 else zeros(2).long()}),
        "metric key": lambda: accelerator.gather_for_metrics({("p", "q")[rank]: zeros(2)}),
        "value": lambda: gather({"a": zeros(1) if rank == 0 else "text"}),
    }
    found = {}
    for name, call in calls.items():
        with pytest.raises((ConfigurationError, TypeError)) as caught:
            call()
        expected = TypeError if name == "value" and rank else DistributedOperationException
        assert isinstance(caught.value, expected), name
        found[name] = str(caught.value)
    assert gather_object([rank]) == [0, 1]  # the processes still meet
    return found


_TEXTS = {
    "shape": ["In gather, ['b'][1] is (2,), float32 on process 0, and (3,), float32 on process 1."],
    "dimensions": ["broadcast(…, 0)", "['x'] is (1, 5), float32 on process 0, and (1, 2, 5), float32 on process 1"],
    "key": ["In gather, process 1 has a tensor at ['b'], and process 0 has none."],
    "order": ["process 1 has the keys in another order than process 0"],
    "length": ["In reduce(…, 'sum'), process 1 has a tensor at [1], and process 0 has none."],
    "dtype": ["pad_across_processes", "['x'] is 1 dimensions, float32 on process 0, and 1 dimensions, int64 on"],
    "columns": ["gather_for_metrics: ['p'] has rows of different shapes: (3,) on process 0, (4,) on process 1."],
    "metric dtype": ["gather_for_metrics: ['p'] has different dtypes: torch.float32 on process 0, torch.int64 on"],
    "metric key": ["In gather_for_metrics, process 0 has a tensor at ['p'], and process 1 has none."],
    "value": [],
}


def test_calls_that_differ_are_named_with_rank_key_and_shape_in_debug_mode() -> None:
    for found in run_distributed(_different_calls, 2, init=False, env={"ACCELERATE_DEBUG_MODE": "1"}):
        assert found.keys() == _TEXTS.keys()
        for name, texts in _TEXTS.items():
            for text in texts:
                assert text in found[name], (name, found[name])
