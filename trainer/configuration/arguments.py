"""The arguments of a Trainer as a dataclass."""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from trainwright.callbacks.callback import Callback
from trainwright.core.duration import Duration
from trainwright.loggers.logger import Logger
from trainwright.profilers.profiler import Profiler
from trainwright.strategies.precision import Precision
from trainwright.strategies.strategy import Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerArguments:
    """The arguments of a Trainer; see `Trainer`.

    The values are those that the user passed, except those that `fast_dev_run` and `barebones` override.
    """

    accelerator: str
    strategy: str | Strategy
    devices: list[int] | str | int
    num_nodes: int
    precision: Precision | str | int | None
    logger: Logger | Iterable[Logger] | bool | str | None
    callbacks: Sequence[Callback] | Callback | None
    fast_dev_run: int | bool
    max_epochs: int | None
    min_epochs: int | None
    max_steps: int
    min_steps: int | None
    max_time: str | datetime.timedelta | dict[str, int] | None
    max_samples: int | None
    max_tokens: int | None
    limit_train_batches: int | float | None
    limit_val_batches: int | float | None
    limit_test_batches: int | float | None
    limit_predict_batches: int | float | None
    overfit_batches: int | float
    val_check_interval: int | float | str | Duration | datetime.timedelta | dict[str, int] | None
    check_val_every_n_epoch: int | None
    num_sanity_val_steps: int | None
    log_every_n_steps: int | None
    enable_checkpointing: bool | None
    enable_progress_bar: bool | None
    enable_model_summary: bool | None
    accumulate_grad_batches: int
    gradient_clip_val: int | float | None
    gradient_clip_algorithm: str | None
    deterministic: bool | Literal["warn"] | None
    benchmark: bool | None
    inference_mode: bool
    use_distributed_sampler: bool
    per_sample_rng: bool
    profiler: Profiler | str | None
    detect_anomaly: bool
    barebones: bool
    plugins: list[Any] | None
    sync_batchnorm: bool
    reload_dataloaders_every_n_epochs: int
    default_root_dir: str | Path | None
    enable_autolog_hparams: bool
    model_registry: str | None
    compile: bool | str | dict[str, Any]
    launcher: str
    uneven_batches: Literal["pad", "stop", "error"]
    on_nonfinite: Literal["raise", "skip", "rollback"] | None
    max_rollbacks: int
    max_skipped: int | None
    seed: int | None
    async_save: bool
    on_save_error: Literal["raise", "warn"]
    preemption_grace: float | str | None
    auto_requeue: bool
    on_interrupt: Literal["return", "raise"] | None
