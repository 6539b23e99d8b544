from trainwright.accelerator.megatron.megatron_loop import (
    avg_losses_across_data_parallel_group as avg_losses_across_data_parallel_group,
)
from trainwright.accelerator.megatron.megatron_loop import (
    gather_across_data_parallel_groups as gather_across_data_parallel_groups,
)
from trainwright.accelerator.megatron.megatron_schedule import MegatronLMDummyDataLoader as MegatronLMDummyDataLoader
from trainwright.accelerator.megatron.megatron_schedule import MegatronLMDummyScheduler as MegatronLMDummyScheduler
from trainwright.accelerator.megatron.train_steps import AbstractTrainStep as AbstractTrainStep
from trainwright.accelerator.megatron.train_steps import BertTrainStep as BertTrainStep
from trainwright.accelerator.megatron.train_steps import GPTTrainStep as GPTTrainStep
from trainwright.accelerator.megatron.train_steps import T5TrainStep as T5TrainStep
