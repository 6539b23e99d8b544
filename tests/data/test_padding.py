from __future__ import annotations

from itertools import zip_longest

import pytest
import torch
from torch.utils.data import DataLoader

from tests.data.sources import Numbers, prepared
from trainwright.data import pad_to, trim


@pytest.mark.slow
@pytest.mark.parametrize("n", [1, 4, 7, 13, 33])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_shard_gather_and_trim_equal_a_single_process_in_order(n: int, world: int) -> None:
    size = 4
    results, counts, in_rounds = [], [], []
    for rank in range(world):
        loader = prepared(DataLoader(Numbers(n), size), stage="validate", rank=rank, world=world)
        batches = [batch.float() ** 2 for batch in loader.iterate()]
        counts.append([len(batch) for batch in batches])
        in_rounds.append(batches)
        results.append(torch.cat(batches) if batches else torch.zeros(0))
    longest = max(map(len, results))
    gathered = torch.stack([pad_to(result, longest)[0] for result in results])
    in_order = [batch for of_round in zip_longest(*in_rounds) for batch in of_round if batch is not None]
    assert torch.equal(torch.cat(in_order), torch.arange(n) ** 2.0)
    assert torch.equal(trim(gathered, [sum(own) for own in counts]), torch.cat(results))


@pytest.mark.parametrize("n", [1, 4, 7, 13, 33])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_evaluation_in_lock_step_marks_what_is_padding(n: int, world: int) -> None:
    seen: list[int] = []
    rounds = set()
    for rank in range(world):
        loader = prepared(DataLoader(Numbers(n), 4), stage="test", rank=rank, world=world, lockstep=True)
        batches = list(loader.iterate())
        rounds.add(len(batches))
        seen += [number for i, batch in enumerate(batches) if loader.has_batch(i) for number in batch.tolist()]
    assert sorted(seen) == list(range(n))
    assert len(rounds) == 1


def test_padding_appends_zero_rows_and_a_mask() -> None:
    padded, mask = pad_to(torch.ones(2, 3, dtype=torch.int64), 4)
    assert padded.tolist() == [[1, 1, 1], [1, 1, 1], [0, 0, 0], [0, 0, 0]]
    assert mask.tolist() == [True, True, False, False]
    assert padded.dtype == torch.int64


def test_wrong_shapes_are_value_errors() -> None:
    with pytest.raises(ValueError, match="4 rows, more than length=3"):
        pad_to(torch.ones(4), 3)
    with pytest.raises(ValueError, match="rank 1 gathered 2 rows, fewer than its count 3"):
        trim([torch.ones(2), torch.ones(2)], [2, 3])
    with pytest.raises(ValueError, match="the count of rank 1 is negative: -1"):
        trim([torch.ones(2), torch.ones(2)], [2, -1])
