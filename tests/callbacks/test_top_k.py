"""The best k, against sorting everything."""

from __future__ import annotations

import math
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainwright.callbacks.top_k import TopK

SCORES = st.lists(st.one_of(st.floats(-10, 10), st.just(math.nan)), max_size=30)
MODES = st.sampled_from(["min", "max"])


def keep(scores: list[float], k: int, mode: Literal["min", "max"]) -> tuple[TopK, list[str]]:
    top, gone = TopK(k, mode), []
    for index, score in enumerate(scores):
        if top.accepts(score):
            left = top.add(str(index), score)
            gone += [left] if left is not None else []
    return top, gone


@given(SCORES, st.integers(1, 6), MODES)
def test_what_stays_are_the_k_best_scores(scores: list[float], k: int, mode: Literal["min", "max"]) -> None:
    top, _ = keep(scores, k, mode)
    comparable = [(math.inf if mode == "min" else -math.inf) if math.isnan(score) else score for score in scores]
    assert sorted(top.scores.values()) == sorted(sorted(comparable, reverse=mode == "max")[:k])


@given(SCORES, st.integers(1, 6), MODES)
def test_whatever_was_added_stays_or_was_displaced_once(
    scores: list[float], k: int, mode: Literal["min", "max"]
) -> None:
    top, gone = keep(scores, k, mode)
    assert len(gone) == len(set(gone))
    assert not set(gone) & set(top.scores)
    assert len(top.scores) == min(k, len(scores))


@given(SCORES, MODES)
def test_minus_one_keeps_all(scores: list[float], mode: Literal["min", "max"]) -> None:
    top, gone = keep(scores, -1, mode)
    assert (len(top.scores), gone) == (len(scores), [])


def test_zero_keeps_none() -> None:
    assert not TopK(0, "min").accepts(1.0)


@pytest.mark.parametrize(("mode", "best", "kth"), [("min", "b", "c"), ("max", "c", "b")])
def test_best_and_worst_follow_the_mode(mode: Literal["min", "max"], best: str, kth: str) -> None:
    top = TopK(3, mode)
    for name, score in (("a", 2.0), ("b", 1.0), ("c", 3.0)):
        top.add(name, score)
    assert (top.best, top.kth_best) == (best, kth)


def test_a_tie_does_not_replace_what_is_there() -> None:
    top = TopK(1, "min")
    top.add("a", 1.0)
    assert not top.accepts(1.0)
