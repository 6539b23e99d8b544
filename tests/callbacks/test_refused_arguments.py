from __future__ import annotations

import datetime
from typing import Any

import pytest
from torch.nn.utils import prune

from trainwright import callbacks as public
from trainwright.core.errors import ConfigurationError


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "arguments", "text"),
    [
        ("EarlyStopping", {"monitor": "x", "mode": "auto"}, "mode='auto'"),
        ("EMAWeightAveraging", {"decay": 1.5}, "from 0 to 1"),
        ("EMAWeightAveraging", {"update_every_n_steps": -1}, r"0 \(never\)"),
        ("GarbageCollection", {"every_n_steps": 0}, "and generation 0, 1 or 2"),
        ("GradientAccumulationScheduler", {"scheduling": {-1: 2}}, "GradientAccumulationScheduler"),
        ("LambdaCallback", {"on_train_epoch_ends": print}, "Did you mean 'on_train_epoch_end'"),
        ("LambdaCallback", {"on_fit_end": 3}, "expected a function"),
        ("LearningRateMonitor", {"logging_interval": "batch"}, "logging_interval='batch'"),
        ("LossSpikeDetector", {"window": 3}, "LossSpikeDetector"),
        ("LossSpikeDetector", {"patience": 0}, "patience=0"),
        ("LossSpikeDetector", {"action": "rolback"}, "LossSpikeDetector"),
        ("ModelCheckpoint", {"save_top_k": -2}, "save_top_k=-2"),
        ("ModelCheckpoint", {"save_top_k": 2}, "nothing to rank by"),
        ("ModelCheckpoint", {"every_n_train_steps": -1}, "every_n_train_steps=-1"),
        ("ModelCheckpoint", {"every_n_epochs": 1, "train_time_interval": datetime.timedelta(1)}, "choose one"),
        ("ModelCheckpoint", {"save_last": "copy"}, "save_last='copy'"),
        ("ModelCheckpoint", {"keep_every": 0}, "keep_every"),
        ("ModelCheckpoint", {"keep_every": "soon"}, "soon"),
        ("ModelPruning", {"pruning_fn": "l1_unstructred"}, "Did you mean 'l1_unstructured'"),
        ("ModelPruning", {"pruning_fn": "l1_unstructured", "amount": 1.5}, r"amount=1\.5\): expected a fraction"),
        ("ModelPruning", {"pruning_fn": "ln_structured", "pruning_dim": 0}, "needs pruning_dim and pruning_norm"),
        ("ModelPruning", {"pruning_fn": "random_structured", "pruning_dim": 0}, "use_global_unstructured=False"),
        ("ModelPruning", {"pruning_fn": prune.RandomStructured}, "is not unstructured"),
        ("ModelSummary", {"max_depth": -2}, "max_depth=-2"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.0}, "above 0"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1, "swa_epoch_start": 1.5}, "from 0.0 to 1.0"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1, "annealing_epochs": -1}, "0 or more epochs"),
        ("StochasticWeightAveraging", {"swa_lrs": 0.1, "annealing_strategy": "sine"}, "'cos' or 'linear'"),
        ("Throughput", {"window_size": 0}, "window_size=0"),
        ("Throughput", {"flops_per_step": 1.0, "measure_flops": True}, "the same value"),
        ("Throughput", {"peak_flops": 1.0}, "requires flops_per_step"),
        ("Timer", {"duration": "12 epochs"}, "write a length of time"),
        ("Timer", {"interval": "batch"}, "interval='batch'"),
        ("TQDMProgressBar", {"refresh_rate": -1}, "refresh_rate=-1"),
        ("WeightAveraging", {"average": 1}, "unknown argument"),
        ("WeightAveraging", {"avg_fn": abs, "multi_avg_fn": abs}, "not both"),
    ],
)
def test_it_is_refused(name: str, arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        getattr(public, name)(**arguments)
