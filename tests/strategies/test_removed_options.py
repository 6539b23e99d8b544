"""Arguments of Lightning's strategies that there are none of here."""

from __future__ import annotations

from typing import Any

import pytest

from trainwright.core.errors import ConfigurationError
from trainwright.strategies import DDPStrategy, DeepSpeedStrategy, FSDPStrategy


@pytest.mark.parametrize(
    ("strategy", "name", "said"),
    [
        (DDPStrategy, "start_method", "in one way, which works in scripts"),
        (DDPStrategy, "model_averaging_period", "LocalSGDStrategy"),
        (DDPStrategy, "find_unused_parameter", "Did you mean 'find_unused_parameters'"),
        (DeepSpeedStrategy, "remote_device", "offload_parameters=True"),
        (DeepSpeedStrategy, "load_full_weights", "every strategy loads full weights"),
        (DeepSpeedStrategy, "stages", "Did you mean 'stage'"),
        (FSDPStrategy, "cluster_environment", "detected automatically"),
        (FSDPStrategy, "use_orig_params", "original parameters"),
    ],
)
def test_an_argument_that_there_is_none_of_says_who_does_what_it_did(strategy: Any, name: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        strategy(**{name: "auto"})
