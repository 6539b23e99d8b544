from __future__ import annotations

import itertools
import pickle
import warnings
from operator import itemgetter
from typing import Any

import pytest
from torch.utils.data import BatchSampler, DataLoader, Dataset

from tests.data.sources import Numbers, Resumable, flat, prepared
from trainwright.core.errors import ConfigurationError, TrainwrightWarning
from trainwright.data import CombinedLoader, LoaderOptions, iterate_groups, prepare_loader
from trainwright.data.combined import leaves_of


def pair(mode: Any, long: int = 64, short: int = 16) -> CombinedLoader:
    return CombinedLoader({"a": DataLoader(Numbers(long)), "b": DataLoader(Numbers(short))}, mode)


@pytest.mark.parametrize(
    ("mode", "batches"), [("min_size", 16), ("max_size", 64), ("max_size_cycle", 64), ("sequential", 80)]
)
def test_a_mode_makes_so_many_batches(mode: Any, batches: int) -> None:
    combined = pair(mode)
    assert prepare_loader(combined, LoaderOptions(stage="train")).num_batches == batches
    loader = prepared(combined)
    assert len(combined) == len(list(combined)) == batches
    assert loader.num_batches == len(list(loader.iterate())) == batches


@pytest.mark.parametrize("prepare", [False, True])
def test_max_size_gives_none_for_what_has_ended(prepare: bool) -> None:
    combined = CombinedLoader([range(1), range(3)], "max_size")
    assert list(prepared(combined).iterate() if prepare else map(itemgetter(0), combined)) == [
        [0, 0],
        [None, 1],
        [None, 2],
    ]


@pytest.mark.parametrize("prepare", [False, True])
@pytest.mark.parametrize("order", [[2, 5], [5, 2]])
def test_max_size_cycle_begins_the_short_one_anew(prepare: bool, order: list[int]) -> None:
    combined = CombinedLoader([range(n) for n in order], "max_size_cycle")
    got = list(prepared(combined).iterate() if prepare else map(itemgetter(0), combined))
    assert got == [[i % n for n in order] for i in range(5)]


def test_a_cycle_of_a_shuffled_member_has_an_order_of_its_own() -> None:
    source = CombinedLoader([DataLoader(Numbers(40), 1), DataLoader(Numbers(20), 1, shuffle=True)], "max_size_cycle")
    second = [batch[1].item() for batch in prepared(source).iterate()]
    assert sorted(second[:20]) == sorted(second[20:]) == list(range(20))
    assert second[:20] != second[20:]


@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_resuming_after_any_batch_gives_the_uninterrupted_list(mode: Any) -> None:
    def loader() -> Any:
        members = [DataLoader(Numbers(11), 2, shuffle=True), DataLoader(Numbers(5), 2, shuffle=True), range(3)]
        return prepared(CombinedLoader(members, mode), epoch=1)

    whole = list(map(str, loader().iterate()))
    for k in range(len(whole) + 1):
        assert whole[:k] + list(map(str, loader().iterate(k))) == whole


def test_members_are_dealt_to_the_ranks_each_by_itself() -> None:
    for rank in range(2):
        batches = list(prepared(pair("min_size", 8, 4), rank=rank, world=2).iterate())
        assert [flat([b["a"], b["b"]]) for b in batches] == [[rank, rank], [rank + 2, rank + 2]]


@pytest.mark.filterwarnings("ignore:train_dataloader. member . has")
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle", "sequential"])
def test_ranks_do_equal_rounds_in_every_mode(mode: Any) -> None:
    loaders = [prepared(pair(mode, 7, 3), rank=rank, world=2) for rank in range(2)]
    rounds = [len(list(loader.iterate())) for loader in loaders]
    assert rounds == [loaders[0].num_batches] * 2
    assert [sum(loader.has_batch(i) for i in range(rounds[0])) for loader in loaders] == loaders[0].counts


def test_a_list_or_dict_of_loaders_is_combined() -> None:
    loader = prepared({"a": DataLoader(Numbers(4)), "b": DataLoader(Numbers(2))})
    assert (loader.num_batches, list(next(loader.iterate()))) == (4, ["a", "b"])
    assert next(prepared((DataLoader(Numbers(4)), DataLoader(Numbers(2)))).iterate()) == (0, 0)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["min_size", "max_size", "max_size_cycle"])
@pytest.mark.parametrize("lengths", [(7, 3), (3, 7), (4, 4)])
@pytest.mark.parametrize("sized", [False, True])
def test_members_with_a_state_go_on_after_every_batch(mode: Any, lengths: tuple[int, int], sized: bool) -> None:
    def loader() -> Any:
        other: Any = DataLoader(Numbers(lengths[1])) if sized else Resumable(lengths[1])
        return prepared(CombinedLoader([Resumable(lengths[0]), other], mode))

    def numbers(groups: Any) -> list[list[int | None]]:
        return [[None if b is None else int(b) for b in group.batches[0]] for group in groups]

    whole = numbers(iterate_groups(loader()))
    for steps in range(1, len(whole)):
        begun, resumed = loader(), loader()
        assert begun.stateful
        before = numbers(itertools.islice(iterate_groups(begun), steps))
        resumed.load_state_dict(pickle.loads(pickle.dumps(begun.state_dict())))
        assert before + numbers(iterate_groups(resumed, start_batch=steps)) == whole


def test_a_member_that_can_neither_seek_nor_remember_is_refused() -> None:
    loader = prepared(CombinedLoader([Resumable(3), iter([1, 2, 3])], "min_size"))
    with pytest.raises(ConfigurationError, match="cannot begin at batch 2: list_iterator can neither seek"):
        loader.check_resume(2, has_state=True)


def test_a_combined_loader_yields_batches_with_their_indices() -> None:
    side_by_side = CombinedLoader({"a": range(2), "b": range(3)})
    assert list(side_by_side) == [({"a": 0, "b": 0}, 0, 0), ({"a": 1, "b": 1}, 1, 0)]
    one_by_one = CombinedLoader([range(1), range(2)], mode="sequential")
    batch, batch_idx, dataloader_idx = next(iter(one_by_one))
    assert (batch, batch_idx, dataloader_idx) == (0, 0, 0)
    assert list(one_by_one) == [(0, 0, 0), (0, 0, 1), (1, 1, 1)]


def test_a_member_that_ends_earlier_on_some_ranks_is_a_warning() -> None:
    members = {"a": DataLoader(Numbers(5)), "b": DataLoader(Numbers(6))}
    with pytest.warns(TrainwrightWarning, match=r"member 0 has 2 to 3 batches.*find_unused"):
        prepared(CombinedLoader(members, "max_size"), world=2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(CombinedLoader(members, "max_size"))
        prepared(CombinedLoader(members, "max_size_cycle"), world=2)


@pytest.mark.parametrize(("length", "world"), [(6, 2), (5, 2), (3, 2), (1, 2), (2, 3), (4, 3)])
def test_ranks_together_cycle_a_short_member_as_one_rank_does(length: int, world: int) -> None:
    def loader(rank: int) -> Any:
        members = [DataLoader(Numbers(12)), DataLoader(Numbers(length))]
        return prepared(CombinedLoader(members, "max_size_cycle"), rank=rank, world=world)

    for rank in range(world):
        whole = [flat(batch) for batch in loader(rank).iterate()]
        assert whole == [[m, m % length] for m in range(rank, 12, world)]
        for start in range(len(whole)):
            assert [flat(batch) for batch in loader(rank).iterate(start)] == whole[start:]


@pytest.mark.parametrize("start", [0, 3])
def test_a_cycled_member_with_divided_batches_begins_each_pass_at_its_first_batch(start: int) -> None:
    def divided_in_two(length: int) -> DataLoader[Any]:
        return DataLoader(Numbers(length), batch_sampler=BatchSampler(range(length), 2, drop_last=False))

    options = LoaderOptions(rank=1, world=2, split_batches=True)
    loader = prepare_loader(CombinedLoader([divided_in_two(6), divided_in_two(16)], "max_size_cycle"), options)
    loader.set_epoch(0)
    of_rank_1 = [short.tolist() for short, _ in loader.iterate(start)]
    assert of_rank_1 == [[1], [3], [5], [1], [3], [5], [1], [3]][start:]


def test_padding_of_a_rank_that_no_member_reaches_is_the_first_batch() -> None:
    for mode, padding in (("sequential", 0), ("min_size", [0, 0])):
        loader = prepared(CombinedLoader([range(1), range(1)], mode), rank=2, world=3)
        assert next(loader.iterate()) == padding


class _Table(Dataset[Any], dict[str, Any]):
    """A data set that is also a mapping."""


def test_a_data_set_that_is_also_a_mapping_is_one_leaf() -> None:
    table = _Table(inputs=[1, 2], targets=[3, 4])
    assert leaves_of([table]) == [table]
    assert leaves_of(table) == [table]


def test_no_member_or_no_loader_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="no member"):
        CombinedLoader([])
    with pytest.raises(ConfigurationError, match="int cannot be iterated over"):
        CombinedLoader([1])
