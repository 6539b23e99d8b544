"""What a strategy cannot do is refused when the Trainer is made, or before a stage has touched anything."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import regression_loader
from tests.trainer.runs import Untouched
from trainwright.callbacks.batch_size_finder import BatchSizeFinder
from trainwright.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
from trainwright.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging
from trainwright.core.errors import ConfigurationError
from trainwright.loggers import CSVLogger
from trainwright.strategies import FSDPStrategy


class ByHand(Untouched):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


@pytest.mark.parametrize(
    ("strategy", "make", "said"),
    [
        ("fsdp", BatchSizeFinder, "BatchSizeFinder runs trial steps.*FSDPStrategy needs all ranks.*devices=1"),
        ("local_sgd", WeightAveraging, "WeightAveraging averages.*LocalSGDStrategy.*strategy='ddp'"),
        ("local_sgd", EMAWeightAveraging, "EMAWeightAveraging averages.*LocalSGDStrategy"),
        ("local_sgd", lambda: StochasticWeightAveraging(0.1), "StochasticWeightAveraging averages"),
    ],
)
def test_a_callback_that_asks_for_more_than_the_strategy_can_is_refused_at_construction(
    strategy: str, make: Any, said: str
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        quiet_trainer(devices=2, strategy=strategy, callbacks=[make()])


def test_a_graph_that_the_main_rank_would_wait_in_for_the_others_is_refused_at_construction() -> None:
    logger = CSVLogger("logs")
    logger.wants_graph = True
    with pytest.raises(ConfigurationError, match=r"log_graph=True.*FSDPStrategy needs all ranks"):
        quiet_trainer(devices=2, strategy="fsdp", logger=logger)
    quiet_trainer(devices=2, strategy="ddp", logger=logger)
    quiet_trainer(devices=1, strategy="fsdp", logger=logger)


def test_optimization_by_hand_is_refused_before_a_process_is_started() -> None:
    trainer = quiet_trainer(devices=2, strategy="fsdp", max_epochs=1)
    with pytest.raises(ConfigurationError, match=r"ByHand uses manual optimization.*FSDPStrategy.*strategy='ddp'"):
        trainer.fit(ByHand(), regression_loader(4))


@pytest.mark.parametrize(
    ("options", "arguments", "said"),
    [
        ({}, {"compile": True}, "compile= compiles each unit of a sharded model.*shard_units"),
        ({"auto_wrap_policy": "Linaer"}, {}, "Did you mean 'Linear'"),
    ],
)
def test_units_that_cannot_be_are_refused_before_a_process_is_started(
    options: dict[str, Any], arguments: dict[str, Any], said: str
) -> None:
    trainer = quiet_trainer(devices=2, strategy=FSDPStrategy(**options), max_epochs=1, **arguments)
    with pytest.raises(ConfigurationError, match=said):
        trainer.fit(Untouched(), regression_loader(4))


@pytest.mark.parametrize("strategy", ["single", "ddp", "local_sgd"])
def test_a_task_without_repeated_blocks_is_refused_before_a_process_is_started(strategy: str) -> None:
    trainer = quiet_trainer(
        devices=1 if strategy == "single" else 2, strategy=strategy, max_epochs=1, compile="regional"
    )
    with pytest.raises(ConfigurationError, match="Untouched has none"):
        trainer.fit(Untouched(), regression_loader(4))
