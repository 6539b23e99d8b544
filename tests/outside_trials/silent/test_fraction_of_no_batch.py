"""A fraction that leaves no batch is an error that proposes a value, in every stage."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import quiet_trainer
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError
from trainwright.data import resolve_limit


def _run(stage: str, arguments: dict[str, Any]) -> None:
    trainer, task = quiet_trainer(max_epochs=1, num_sanity_val_steps=0, **arguments), RegressionTask()
    if stage == "fit":
        trainer.fit(task, regression_loader(10), regression_loader(10))
    else:
        getattr(trainer, stage)(task, regression_loader(10))


@pytest.mark.parametrize(
    ("stage", "argument"),
    [
        ("fit", "limit_train_batches"),
        ("fit", "limit_val_batches"),
        ("fit", "overfit_batches"),
        ("validate", "limit_val_batches"),
        ("test", "limit_test_batches"),
    ],
)
def test_a_fraction_of_less_than_one_batch_is_an_error(stage: str, argument: str) -> None:
    with pytest.raises(
        ConfigurationError, match=rf"{argument}=0\.05 of 10 batches is less than one\. Use at least 0\.1"
    ):
        _run(stage, {argument: 0.05})


def test_the_least_fraction_that_it_proposes_works_for_every_length() -> None:
    for length in range(1, 400):
        with pytest.raises(ConfigurationError, match="Use at least") as caught:
            resolve_limit(1e-9, length, "limit_train_batches")
        proposed = float(str(caught.value).split("at least ")[1].split(",")[0])
        assert resolve_limit(proposed, length, "limit_train_batches") >= 1  # type: ignore[operator]  # length is known


@pytest.mark.parametrize("none", [0, 0.0])
def test_zero_still_means_none(none: float) -> None:
    _run("fit", {"limit_val_batches": none})
