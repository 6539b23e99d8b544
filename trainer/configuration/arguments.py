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

    The defaults are those of `Trainer`. `Settings.given` has the values that the user passed. `Settings.arguments` has
    the values after environment variables, `fast_dev_run` and `barebones` have changed some of them.
    """

    accelerator: str = "auto"
    strategy: str | Strategy = "auto"
    devices: list[int] | str | int = "auto"
    num_nodes: int = 1
    precision: Precision | str | int | None = None
    logger: Logger | Iterable[Logger] | bool | str | None = None
    callbacks: Sequence[Callback] | Callback | None = None
    fast_dev_run: int | bool = False
    max_epochs: int | None = None
    min_epochs: int | None = None
    max_steps: int = -1
    min_steps: int | None = None
    max_time: str | datetime.timedelta | dict[str, int] | None = None
    max_samples: int | None = None
    max_tokens: int | None = None
    limit_train_batches: int | float | None = None
    limit_val_batches: int | float | None = None
    limit_test_batches: int | float | None = None
    limit_predict_batches: int | float | None = None
    overfit_batches: int | float = 0.0
    val_check_interval: int | float | str | Duration | datetime.timedelta | dict[str, int] | None = None
    check_val_every_n_epoch: int | None = 1
    num_sanity_val_steps: int | None = None
    log_every_n_steps: int | None = None
    enable_checkpointing: bool | None = None
    enable_progress_bar: bool | None = None
    enable_model_summary: bool | None = None
    accumulate_grad_batches: int = 1
    gradient_clip_val: int | float | None = None
    gradient_clip_algorithm: str | None = None
    deterministic: bool | Literal["warn"] | None = None
    benchmark: bool | None = None
    inference_mode: bool = True
    use_distributed_sampler: bool = True
    per_sample_rng: bool = False
    profiler: Profiler | str | None = None
    detect_anomaly: bool = False
    barebones: bool = False
    plugins: list[Any] | None = None
    sync_batchnorm: bool = False
    reload_dataloaders_every_n_epochs: int = 0
    default_root_dir: str | Path | None = None
    enable_autolog_hparams: bool = True
    model_registry: str | None = None
    compile: bool | str | dict[str, Any] = False
    launcher: str = "auto"
    uneven_batches: Literal["pad", "stop", "error"] = "pad"
    on_nonfinite: Literal["raise", "skip", "rollback"] | None = None
    max_rollbacks: int = 3
    max_skipped: int | None = 100
    seed: int | None = None
    async_save: bool = True
    on_save_error: Literal["raise", "warn"] = "raise"
    preemption_grace: float | str | None = 30.0
    auto_requeue: bool = True
    on_interrupt: Literal["return", "raise"] | None = None
