from trainwright.accelerator.accelerator_state import get_active_deepspeed_plugin as get_active_deepspeed_plugin
from trainwright.accelerator.prepared.accelerated_optimizer import (
    DeepSpeedSchedulerWrapper as DeepSpeedSchedulerWrapper,
)
from trainwright.strategies.deepspeed.hf_config import HfDeepSpeedConfig as HfDeepSpeedConfig
from trainwright.strategies.deepspeed.placeholders import DummyOptim as DummyOptim
from trainwright.strategies.deepspeed.placeholders import DummyScheduler as DummyScheduler
