"""Loops that are drawn by chance: each optimizer step has the gradient that its group of micro-batches should have."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

from tests.accelerator.loops_by_chance import Program, difference, differences
from tests.contracts.strategies import STRATEGIES
from tests.helpers.distributed import run_distributed

_PROGRAMS = int(os.environ.get("TRAINWRIGHT_TEST_PROGRAMS", "100"))
_SEED = int(os.environ.get("TRAINWRIGHT_TEST_SEED", "0"))
_QUICK = ("ddp", "fsdp")
_OTHERS = [name for name, case in STRATEGIES.items() if name not in (*_QUICK, "single") and not case.is_pipeline]


@pytest.mark.usefixtures("fresh_state")
def test_each_step_has_the_gradient_of_its_group(tmp_path: Path) -> None:
    generator = random.Random(_SEED)
    for _ in range(_PROGRAMS):
        assert not difference(Program.drawn(generator), tmp_path)


@pytest.mark.distributed
@pytest.mark.parametrize("name", [*_QUICK, *(pytest.param(name, marks=pytest.mark.exhaustive) for name in _OTHERS)])
def test_each_step_of_several_ranks_has_the_gradient_of_its_group(name: str, tmp_path: Path) -> None:
    number = _PROGRAMS // 4 if name in _QUICK else max(1, _PROGRAMS // 10)
    world = STRATEGIES[name].processes
    found, *_ = run_distributed(differences, world, name, tmp_path, _SEED + 1, number, init=False, timeout=560)
    assert not found, "\n".join(found[:3])
