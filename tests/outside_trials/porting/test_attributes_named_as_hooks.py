"""An attribute that happens to have the name of one of our hooks does no harm, or is an error that explains."""

from __future__ import annotations

from typing import Any

import pytest

from tests.helpers.runs import assert_equal_weights, quiet_trainer, weights_of
from tests.helpers.tasks import RegressionTask, regression_loader
from trainwright.core.errors import ConfigurationError


class _Recommender(RegressionTask):
    def __init__(self) -> None:
        super().__init__()
        self.num_items = 100  # type: ignore[method-assign, assignment]
        self.num_tokens = 7  # type: ignore[method-assign, assignment]


class _ByProperty(RegressionTask):
    @property
    def num_items(self) -> int:  # type: ignore[override]
        return 100


@pytest.mark.parametrize("make", [_Recommender, _ByProperty])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_number_of_items_of_the_user_s_own_changes_nothing(make: Any, accumulate: int) -> None:
    tasks = [make(), RegressionTask()]
    for task in tasks:
        quiet_trainer(max_epochs=1, accumulate_grad_batches=accumulate).fit(task, regression_loader(4))
    assert_equal_weights(weights_of(tasks[0]), weights_of(tasks[1]))


def test_a_number_where_tokens_are_to_be_counted_is_an_error_that_explains() -> None:
    with pytest.raises(ConfigurationError, match=r"_Recommender.num_tokens is a int"):
        quiet_trainer(max_epochs=1, max_tokens=100).fit(_Recommender(), regression_loader(4))
