"""The tables of the options of all engines."""

from __future__ import annotations

from trainwright.strategies.deepspeed.option_table import DEEPSPEED
from trainwright.strategies.fsdp.option_table import FSDP
from trainwright.strategies.megatron.option_table import MEGATRON_LM, PARALLELISM

ENGINE_TABLES = (FSDP, DEEPSPEED, MEGATRON_LM, PARALLELISM)
