from __future__ import annotations

import pytest
from torch import nn

from trainwright.core.errors import ConfigurationError
from trainwright.strategies.megatron.core_model import find_model

transformers = pytest.importorskip("transformers")


def test_one_frozen_parameter_is_named_without_others() -> None:
    config = transformers.GPT2Config(vocab_size=8, n_embd=4, n_layer=1, n_head=1, n_positions=4)
    model = transformers.GPT2LMHeadModel(config)
    model.transformer.wpe.weight.requires_grad = False
    with pytest.raises(ConfigurationError) as caught:
        find_model(nn.Sequential(model))
    message = str(caught.value)
    assert "such as '0.transformer.wpe.weight' (1 in total)" in message
    assert "0 others" not in message
