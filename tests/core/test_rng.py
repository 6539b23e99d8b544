from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from trainwright.core.errors import ConfigurationError
from trainwright.core.rng import isolate_rng, rng_state, seed_everything, set_rng_state


def draw() -> tuple[float, float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(())), random.gauss(0, 1)


@pytest.mark.parametrize("seed", [-1, 2**32])
def test_a_seed_out_of_range_is_an_error(seed: int) -> None:
    with pytest.raises(ConfigurationError, match=f"seed={seed}"):
        seed_everything(seed)


def test_a_state_that_is_put_back_gives_the_same_again_also_in_the_middle_of_a_pair() -> None:
    seed_everything(6)
    random.gauss(0, 1)  # Python keeps the second of a pair of normal numbers
    np.random.randn()  # and so does NumPy
    torch.randn(3)
    state = rng_state()
    first = draw()
    draw()
    set_rng_state(state)
    assert draw() == first


def test_isolated_code_leaves_no_trace_even_when_it_fails() -> None:
    seed_everything(8)
    expected = draw()
    seed_everything(8)

    @isolate_rng()
    def fail() -> None:
        draw()
        seed_everything(1)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert draw() == expected
