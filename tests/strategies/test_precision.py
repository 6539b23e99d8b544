"""Number formats by name, and the contexts that they put a forward pass into."""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.engine_settings import EngineSettings
from trainwright.strategies.precision import Precision
from trainwright.strategies.strategy import SingleDeviceStrategy


@pytest.mark.parametrize(
    ("spec", "name", "param_dtype", "autocast_dtype", "scaled"),
    [
        ("32-true", "32-true", None, None, False),
        (32, "32-true", None, None, False),
        ("no", "32-true", None, None, False),
        ("64-true", "64-true", torch.float64, None, False),
        ("16-true", "16-true", torch.float16, None, False),
        ("bf16-true", "bf16-true", torch.bfloat16, None, False),
        ("16-mixed", "16-mixed", None, torch.float16, True),
        ("fp16", "16-mixed", None, torch.float16, True),
        ("bf16-mixed", "bf16-mixed", None, torch.bfloat16, False),
        ("bf16", "bf16-mixed", None, torch.bfloat16, False),
    ],
)
def test_each_name_means_its_formats(spec: Any, name: str, param_dtype: Any, autocast_dtype: Any, scaled: bool) -> None:
    found = Precision.parse(spec)
    assert dataclasses.astuple(found) == (name, param_dtype, autocast_dtype, scaled)


_TE_OF_LIGHTNING = "transformer-engine-float16"


@pytest.mark.parametrize(
    ("spec", "near"),
    [("bf16-mixd", "bf16-mixed"), (17, ""), (_TE_OF_LIGHTNING, "'transformer-engine'?")],
)
def test_an_unknown_name_is_an_error_with_the_nearest_and_all_others(spec: Any, near: str) -> None:
    with pytest.raises(ConfigurationError, match=r"Known: 32-true, 64-true, 16-true") as caught:
        Precision.parse(spec)
    assert near in str(caught.value)
    assert f"precision={spec!r}" in str(caught.value)


def test_a_format_that_a_device_lacks_is_refused_with_one_that_it_has() -> None:
    strategy = SingleDeviceStrategy()
    with pytest.raises(
        ConfigurationError, match=r"precision='64-true'.*'mps' has no float64\. Use precision='32-true'"
    ):
        strategy.check(EngineSettings("mps", [0], 1, Precision.parse("64-true")))
    for name in ("32-true", "16-true", "bf16-true", "16-mixed", "bf16-mixed"):
        strategy.check(EngineSettings("mps", [0], 1, Precision.parse(name)))


@pytest.mark.filterwarnings("ignore:cpu has no float8 matrix products")
@pytest.mark.parametrize(
    "name", ["bf16-mixed", pytest.param("fp8", marks=pytest.mark.requires("torchao", reason="fp8"))]
)
def test_an_evaluation_of_torchs_encoder_computes_as_training_does(name: str) -> None:
    precision, fast = Precision.parse(name), torch.backends.mha.get_fastpath_enabled()
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), 2)
    model, x = nn.Sequential(nn.Linear(32, 32), encoder, nn.Linear(32, 32)), torch.randn(2, 4, 32)
    with ExitStack() as undo, torch.no_grad():
        precision.convert([model], x.device, undo)
        with precision.autocast("cpu"):
            expected, found = model(x), model.eval()(x)
    assert torch.equal(found, expected)
    assert torch.backends.mha.get_fastpath_enabled() == fast
