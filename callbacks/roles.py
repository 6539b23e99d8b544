"""Protocols of callbacks that a Trainer treats specially. A callback with these members implements the protocol."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Saver(Protocol):
    """Callback that decides when and where to save, such as `ModelCheckpoint`."""

    remote: str | None  # URL of the folder that checkpoints are uploaded to
    monitor: str | None
    mode: str  # "min" or "max": which values of `monitor` are better

    @property
    def local_dirpath(self) -> Path | None:
        """The local folder of the checkpoints; None before it is known."""

    @property
    def dirpath(self) -> str | Path | None:
        """The folder or URL of the checkpoints."""

    @property
    def best_model_path(self) -> str:
        """Path of the best checkpoint; empty if there is none."""

    @property
    def best_k_models(self) -> Mapping[str, float]:
        """Values of `monitor` of the best checkpoints, by path."""


@runtime_checkable
class Stopper(Protocol):
    """Callback that ends training by a metric, such as `EarlyStopping`."""

    stopped_epoch: int


@runtime_checkable
class ProgressDisplay(Protocol):
    """Callback that shows progress in the terminal. A run has at most one and prints through it."""

    is_progress_bar: bool

    def print(self, *values: Any, **options: Any) -> None:
        """Print without breaking the display."""
