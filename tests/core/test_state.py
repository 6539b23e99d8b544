"""The one clock: what closing an epoch changes, and how it travels through a checkpoint."""

from __future__ import annotations

import json

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.optim.swa_utils import SWALR

from trainwright.core.state import TrainState, scheduler_state

counts = st.integers(0, 2**53)


@given(st.builds(TrainState, *[counts] * 8, st.floats(0, 1e9), st.booleans()))
def test_a_state_survives_json(state: TrainState) -> None:
    back = TrainState()
    back.load_dict(json.loads(json.dumps(state.to_dict())))
    assert back == state


def test_a_new_epoch_keeps_what_counts_the_whole_run() -> None:
    state = TrainState(
        step=7, batches=14, epoch=2, batch_in_epoch=4, step_in_epoch=2, samples=56, samples_in_epoch=16, tokens=900,
        seconds=3.5, epoch_done=True,
    )  # fmt: skip
    state.begin_next_epoch()
    assert state == TrainState(step=7, batches=14, epoch=3, samples=56, tokens=900, seconds=3.5)


def test_a_schedules_state_has_no_function() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    swa = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
    constant = torch.optim.lr_scheduler.ConstantLR(optimizer)
    both = torch.optim.lr_scheduler.SequentialLR(optimizer, [constant, swa], milestones=[2])
    for schedule, inner in ((swa, scheduler_state(swa)), (both, scheduler_state(both)["_schedulers"][1])):
        json.dumps(scheduler_state(schedule))
        assert inner["anneal_epochs"] == 2
        schedule.load_state_dict(scheduler_state(schedule))
    assert callable(swa.anneal_func)
