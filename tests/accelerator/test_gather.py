"""Collectives over tensors that differ between ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from tests.helpers.distributed import run_distributed
from trainwright import Accelerator, PartialState, gather, gather_object, pad_across_processes, reduce

pytestmark = pytest.mark.distributed


def _raised(call: Callable[[], Any]) -> str:
    with pytest.raises(Exception) as caught:
        call()
    return f"{caught.type.__name__}: {caught.value}"


def _evaluate_in_the_older_idiom() -> dict[int, list[int]]:
    """Gather, then truncate in the last round."""
    accelerator = Accelerator(cpu=True)
    found = {}
    for num in (1, 3, 7, 8, 9):
        loader = accelerator.prepare(DataLoader(torch.arange(num), batch_size=2))  # type: ignore[arg-type]
        seen: list[int] = []
        for number, batch in enumerate(loader):
            rows, twice = accelerator.gather((batch, 2 * batch))
            assert torch.equal(twice, 2 * rows)
            if number == len(loader) - 1:
                rows = rows[: num - len(seen)]
            seen += rows.tolist()
        found[num] = seen
    return found


def _misuse() -> dict[str, str]:
    accelerator = Accelerator(cpu=True)
    rank = accelerator.process_index
    ones = torch.ones(2)
    found = {
        "rows": _raised(lambda: gather(torch.ones(2 + rank))),
        "ndim": _raised(lambda: gather(torch.ones(*[2] * (1 + rank)))),
        "dtype": _raised(lambda: gather(ones if rank else ones.long())),
        "number": _raised(lambda: gather([ones] * (1 + rank))),
        "type on one": _raised(lambda: gather([ones, "text" if rank else ones])),
        "operation": _raised(lambda: (accelerator.gather, accelerator.reduce)[rank](ones)),
        "reduction": _raised(lambda: reduce(ones, ("mean", "sum")[rank])),
        "reduced": _raised(lambda: accelerator.reduce(torch.ones(2 + rank))),
        "padded number": _raised(lambda: pad_across_processes([ones] * rank)),
        "padded ndim": _raised(lambda: pad_across_processes(torch.ones(*[2] * (1 + rank)))),
        "padded dim": _raised(lambda: pad_across_processes(torch.ones(2, 2), dim=rank)),
        "object": _raised(lambda: gather_object(["a"] if rank else "a")),
        "kind": _raised(lambda: accelerator.gather_for_metrics(["a"] if rank else ones)),
        "metric dtype": _raised(lambda: accelerator.gather_for_metrics(ones if rank else ones.long())),
        "metric ndim": _raised(lambda: accelerator.gather_for_metrics(torch.ones(*[2] * (1 + rank)))),
        "metric leaf": _raised(lambda: accelerator.gather_for_metrics([ones, "text" if rank else ones])),
    }
    for batch in accelerator.prepare(DataLoader(torch.arange(4), batch_size=2)):  # type: ignore[arg-type]
        found["dtype in a loop"] = _raised(lambda batch=batch: accelerator.gather(batch.float() if rank else batch))
        found["type in a loop"] = _raised(lambda batch=batch: accelerator.gather([batch, None if rank else batch]))
    PartialState().debug = True
    found["padded dtype in debug mode"] = _raised(lambda: pad_across_processes(ones if rank else ones.long()))
    assert accelerator.gather(torch.tensor([rank])).tolist() == [0, 1]  # all are still there
    return found


def _everything() -> tuple[dict[int, list[int]], dict[str, str]]:
    return _evaluate_in_the_older_idiom(), _misuse()


@pytest.fixture(scope="module")
def ranks() -> list[tuple[dict[int, list[int]], dict[str, str]]]:
    """What both ranks found."""
    return run_distributed(_everything, 2, init=False, timeout=120)


def test_gather_then_truncate_sees_each_sample_once(ranks: list[Any]) -> None:
    for seen, _ in ranks:
        assert seen == {num: list(range(num)) for num in (1, 3, 7, 8, 9)}


def test_calls_that_differ_between_ranks_are_errors_on_every_rank(ranks: list[Any]) -> None:
    for rank, (_, raised) in enumerate(ranks):
        for name, text in raised.items():
            is_type_error = (rank == 1 and name in ("type on one", "type in a loop")) or name == "object"
            assert text.startswith(
                "TypeError" if is_type_error else ("ConfigurationError", "DistributedOperationException")
            ), (name, text)
        assert "gather_for_metrics" in raised["rows"]
        assert "process 1: gather of [((3,), 'float32')]" in raised["rows"]
        assert "dtype" in raised["metric dtype"]
