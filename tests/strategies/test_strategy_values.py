"""A strategy is a value: it can be compared, printed and pickled, and does not change."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import pytest

from trainwright.core.errors import ConfigurationError
from trainwright.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    LocalSGDStrategy,
    OffloadStrategy,
    SingleDeviceStrategy,
    Strategy,
    TensorParallelStrategy,
)

_CASES: list[tuple[Callable[[], Strategy], Callable[[], Strategy], str]] = [
    (SingleDeviceStrategy, DDPStrategy, "SingleDeviceStrategy()"),
    (lambda: DDPStrategy(static_graph=True, ddp_comm_hook="fp16"), DDPStrategy,
     "DDPStrategy(static_graph=True, ddp_comm_hook='fp16')"),
    (lambda: LocalSGDStrategy(4), LocalSGDStrategy, "LocalSGDStrategy(local_sgd_steps=4)"),
    (lambda: FSDPStrategy(timeout="1 min", tp=2), FSDPStrategy, "FSDPStrategy(tp=2, timeout='1 min')"),
    (lambda: TensorParallelStrategy(tp=2), TensorParallelStrategy, "TensorParallelStrategy(tp=2)"),
    (lambda: DeepSpeedStrategy(stage=3), lambda: DeepSpeedStrategy(stage=1), "DeepSpeedStrategy(stage=3)"),
    (lambda: OffloadStrategy("disk"), OffloadStrategy, "OffloadStrategy(parameters='disk')"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "make_other", "text"), _CASES)
def test_a_strategy_is_compared_printed_and_pickled(
    make: Callable[[], Strategy], make_other: Callable[[], Strategy], text: str
) -> None:
    assert make() == make()
    assert make() != make_other()
    assert repr(make()) == text
    again = pickle.loads(pickle.dumps(make()))
    assert again == make()
    assert vars(again).keys() == vars(make()).keys()


def test_a_strategy_does_not_change() -> None:
    strategy = DDPStrategy()
    with pytest.raises(AttributeError, match="Pass sync_batchnorm= to its constructor"):
        strategy.sync_batchnorm = True
    assert strategy.with_options(sync_batchnorm=True) == DDPStrategy(sync_batchnorm=True)
    assert strategy == DDPStrategy()


def test_a_method_of_lightnings_strategies_is_an_error_when_the_class_is_defined() -> None:
    with pytest.raises(ConfigurationError, match=r"Mine\.setup is never called.*Engine"):
        type("Mine", (DDPStrategy,), {"setup": lambda self, trainer: None})
