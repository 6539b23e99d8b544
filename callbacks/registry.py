"""Short names of callbacks for configurations and the command line."""

from __future__ import annotations

from trainwright.callbacks.callback import Callback
from trainwright.core.registry import Registry

CALLBACKS: Registry[type[Callback]] = Registry(
    "callback",
    {
        "backbone_finetuning": "trainwright.callbacks.finetuning:BackboneFinetuning",
        "batch_size_finder": "trainwright.callbacks.batch_size_finder:BatchSizeFinder",
        "device_stats_monitor": "trainwright.callbacks.device_stats_monitor:DeviceStatsMonitor",
        "early_stopping": "trainwright.callbacks.early_stopping:EarlyStopping",
        "ema_weight_averaging": "trainwright.callbacks.weight_averaging:EMAWeightAveraging",
        "garbage_collection": "trainwright.callbacks.garbage_collection:GarbageCollection",
        "gradient_accumulation_scheduler": (
            "trainwright.callbacks.gradient_accumulation_scheduler:GradientAccumulationScheduler"
        ),
        "lambda": "trainwright.callbacks.lambda_callback:LambdaCallback",
        "learning_rate_finder": "trainwright.callbacks.lr_finder:LearningRateFinder",
        "learning_rate_monitor": "trainwright.callbacks.learning_rate_monitor:LearningRateMonitor",
        "loss_spike_detector": "trainwright.callbacks.loss_spike_detector:LossSpikeDetector",
        "model_checkpoint": "trainwright.callbacks.model_checkpoint:ModelCheckpoint",
        "model_pruning": "trainwright.callbacks.model_pruning:ModelPruning",
        "model_summary": "trainwright.callbacks.model_summary:ModelSummary",
        "on_exception_checkpoint": "trainwright.callbacks.on_exception_checkpoint:OnExceptionCheckpoint",
        "quantization_aware_training": "trainwright.callbacks.quantization_aware_training:QuantizationAwareTraining",
        "rich_progress_bar": "trainwright.callbacks.rich_progress_bar:RichProgressBar",
        "slow_rank_detector": "trainwright.callbacks.slow_rank_detector:SlowRankDetector",
        "stochastic_weight_averaging": "trainwright.callbacks.stochastic_weight_averaging:StochasticWeightAveraging",
        "throughput": "trainwright.callbacks.throughput:Throughput",
        "timer": "trainwright.callbacks.timer:Timer",
        "tqdm_progress_bar": "trainwright.callbacks.tqdm_progress_bar:TQDMProgressBar",
        "weight_averaging": "trainwright.callbacks.weight_averaging:WeightAveraging",
    },
)
"""Short name → class; `CALLBACKS.register("mine", "my_package.module:MyCallback")` adds one."""
