from __future__ import annotations

import datetime
import json
import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.callbacks.fake_run import FakeRun
from trainwright.callbacks.keep_every import KeepEvery
from trainwright.callbacks.model_checkpoint import ModelCheckpoint
from trainwright.core.duration import Duration


def steps_of(run: FakeRun) -> list[int]:
    return sorted(int(name.rpartition("step=")[2]) for name in run.saved_names() if "step=" in name)


def train(callback: ModelCheckpoint, root: Path, *, epochs: int = 2, scores: Any = None) -> FakeRun:
    """Run epochs of 10 steps; `scores` gives `loss` of each step."""
    run = FakeRun([callback], root)

    def log(run: FakeRun) -> None:
        run.state.seconds += 60.0
        run.callback_metrics["loss"] = 0.0 if scores is None else scores(run.state.step)

    run.fit(epochs=epochs, batches=10, on_step=log)
    return run


@pytest.mark.parametrize("length", [6, Duration(6, "steps"), "0.6 epoch", datetime.timedelta(minutes=6)])
def test_the_first_checkpoint_after_each_stretch_stays_beside_the_latest(length: Any, tmp_path: Path) -> None:
    run = train(ModelCheckpoint(every_n_train_steps=2, keep_every=length), tmp_path)
    assert steps_of(run) == [6, 12, 18, 20]


def test_a_name_that_is_kept_is_never_replaced(tmp_path: Path) -> None:
    callback = ModelCheckpoint(filename="same", enable_version_counter=False, every_n_train_steps=5, keep_every=10)
    run = train(callback, tmp_path)
    assert run.saved_names() == ["same", "same-v1"]
    assert [(step, request.name) for step, request in run.written] == [
        (5, "same"), (10, "same"), (15, "same-v1"), (20, "same-v1")
    ]  # fmt: skip


@pytest.mark.slow
@settings(max_examples=200)
@given(span=st.integers(1, 30), saves=st.lists(st.integers(1, 200), min_size=1, unique=True), stop=st.integers(0, 20))
def test_each_stretch_that_has_a_checkpoint_behind_it_keeps_exactly_the_first(
    span: int, saves: list[int], stop: int
) -> None:
    saves.sort()
    run: Any = SimpleNamespace(state=SimpleNamespace(step=0))
    keeping = KeepEvery(span)
    keeping.begin(run)
    for number, step in enumerate(saves):
        if number == stop:  # a resume from the last checkpoint
            state, keeping = keeping.state_dict(), KeepEvery(span)
            keeping.load_state_dict(json.loads(json.dumps(state)))
            keeping.begin(run)
        run.state.step = step
        at = keeping.due_progress(run)
        if at is not None:
            keeping.add(str(step), at)
    first_of: dict[int, int] = {}
    for step in saves:
        first_of.setdefault(math.floor(step / span), step)
    assert keeping.names == [str(step) for stretch, step in first_of.items() if stretch > 0]
