"""Loops that are drawn by chance: each optimizer step has the gradient that its group of micro-batches should have."""

from __future__ import annotations

import os
import random

import pytest

from tests.accelerator.loops_by_chance import Program, difference, differences
from tests.helpers.distributed import run_distributed

_PROGRAMS = int(os.environ.get("TRAINWRIGHT_TEST_PROGRAMS", "100"))


@pytest.mark.usefixtures("fresh_state")
def test_each_step_has_the_gradient_of_its_group() -> None:
    generator = random.Random(int(os.environ.get("TRAINWRIGHT_TEST_SEED", "0")))
    for _ in range(_PROGRAMS):
        assert not difference(Program.drawn(generator))


@pytest.mark.distributed
@pytest.mark.parametrize("strategy", ["ddp", "fsdp", pytest.param("deepspeed_stage_2", marks=pytest.mark.exhaustive)])
def test_each_step_of_two_ranks_has_the_gradient_of_its_group(strategy: str) -> None:
    found, _ = run_distributed(differences, 2, strategy, 1, _PROGRAMS // 4, init=False, timeout=240)
    assert not found, "\n".join(found[:3])
