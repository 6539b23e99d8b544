"""What happens besides training: the Callback base, the table of its events and the ready-made callbacks.

Names are imported when they are first touched; `CALLBACKS` holds the short names that a configuration may use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainwright.core.foreign_names import missing

if TYPE_CHECKING:
    from trainwright.callbacks.batch_size_finder import BatchSizeFinder
    from trainwright.callbacks.callback import Callback, Order
    from trainwright.callbacks.device_stats_monitor import DeviceStatsMonitor
    from trainwright.callbacks.early_stopping import EarlyStopping
    from trainwright.callbacks.gradient_accumulation_scheduler import GradientAccumulationScheduler
    from trainwright.callbacks.lambda_callback import LambdaCallback
    from trainwright.callbacks.learning_rate_monitor import LearningRateMonitor
    from trainwright.callbacks.loss_spike_detector import LossSpikeDetector
    from trainwright.callbacks.lr_finder import LearningRateFinder
    from trainwright.callbacks.model_checkpoint import ModelCheckpoint
    from trainwright.callbacks.model_summary import ModelSummary
    from trainwright.callbacks.on_exception_checkpoint import OnExceptionCheckpoint
    from trainwright.callbacks.prediction_writer import BasePredictionWriter
    from trainwright.callbacks.progress_bar import ProgressBar
    from trainwright.callbacks.registry import CALLBACKS
    from trainwright.callbacks.rich_progress_bar import RichProgressBar
    from trainwright.callbacks.stochastic_weight_averaging import StochasticWeightAveraging
    from trainwright.callbacks.throughput import Throughput
    from trainwright.callbacks.timer import Timer
    from trainwright.callbacks.tqdm_progress_bar import TQDMProgressBar
    from trainwright.callbacks.weight_averaging import EMAWeightAveraging, WeightAveraging

# Where each public name lives; the block above says the same to editors and type checkers, and a test compares them.
_HOMES = {
    "BasePredictionWriter": "prediction_writer",
    "BatchSizeFinder": "batch_size_finder",
    "CALLBACKS": "registry",
    "Callback": "callback",
    "DeviceStatsMonitor": "device_stats_monitor",
    "EMAWeightAveraging": "weight_averaging",
    "EarlyStopping": "early_stopping",
    "GradientAccumulationScheduler": "gradient_accumulation_scheduler",
    "LambdaCallback": "lambda_callback",
    "LearningRateFinder": "lr_finder",
    "LearningRateMonitor": "learning_rate_monitor",
    "LossSpikeDetector": "loss_spike_detector",
    "ModelCheckpoint": "model_checkpoint",
    "ModelSummary": "model_summary",
    "OnExceptionCheckpoint": "on_exception_checkpoint",
    "Order": "callback",
    "ProgressBar": "progress_bar",
    "RichProgressBar": "rich_progress_bar",
    "StochasticWeightAveraging": "stochastic_weight_averaging",
    "TQDMProgressBar": "tqdm_progress_bar",
    "Throughput": "throughput",
    "Timer": "timer",
    "WeightAveraging": "weight_averaging",
}

__all__ = [
    "CALLBACKS",
    "BasePredictionWriter",
    "BatchSizeFinder",
    "Callback",
    "DeviceStatsMonitor",
    "EMAWeightAveraging",
    "EarlyStopping",
    "GradientAccumulationScheduler",
    "LambdaCallback",
    "LearningRateFinder",
    "LearningRateMonitor",
    "LossSpikeDetector",
    "ModelCheckpoint",
    "ModelSummary",
    "OnExceptionCheckpoint",
    "Order",
    "ProgressBar",
    "RichProgressBar",
    "StochasticWeightAveraging",
    "TQDMProgressBar",
    "Throughput",
    "Timer",
    "WeightAveraging",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise missing(__name__, name, __all__)
    value = getattr(import_module(f"trainwright.callbacks.{_HOMES[name]}"), name)
    globals()[name] = value  # the next access does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
