"""Types of Lightning's `utilities.types`, for annotations of hooks."""

from __future__ import annotations

from typing import Any, TypeAlias

STEP_OUTPUT: TypeAlias = Any
EVAL_DATALOADERS: TypeAlias = Any
TRAIN_DATALOADERS: TypeAlias = Any
OptimizerLRScheduler: TypeAlias = Any
OptimizerConfig: TypeAlias = Any
OptimizerLRSchedulerConfig: TypeAlias = Any
LRSchedulerConfigType: TypeAlias = Any
LRSchedulerTypeUnion: TypeAlias = Any
