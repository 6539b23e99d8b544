from trainwright.strategies.steps.transformer_engine import apply_fp8_autowrap as apply_fp8_autowrap
from trainwright.strategies.steps.transformer_engine import contextual_fp8_autocast as contextual_fp8_autocast
from trainwright.strategies.steps.transformer_engine import convert_model as convert_model
from trainwright.strategies.steps.transformer_engine import (
    has_transformer_engine_layers as has_transformer_engine_layers,
)
