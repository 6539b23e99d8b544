"""What a Trainer needs to know of callbacks with a part of their own to play: whoever has these members plays it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Saver(Protocol):
    """Decides when to save and where, as `ModelCheckpoint` does."""

    remote: str | None  # URL of the folder that checkpoints are uploaded to
    monitor: str | None
    mode: str  # "min" or "max": which values of `monitor` are better

    @property
    def local_dirpath(self) -> Path | None:
        """The folder that it writes into; None before it is known."""

    @property
    def dirpath(self) -> str | Path | None:
        """The folder or the address where its checkpoints are found."""

    @property
    def best_model_path(self) -> str:
        """The best checkpoint; empty before there is one."""

    @property
    def best_k_models(self) -> Mapping[str, float]:
        """The best checkpoints with the values of `monitor`."""


@runtime_checkable
class Stopper(Protocol):
    """Ends training by a metric, as `EarlyStopping` does."""

    stopped_epoch: int


@runtime_checkable
class ProgressDisplay(Protocol):
    """Shows progress in the terminal: one in a run is enough, and what is printed goes through it."""

    is_progress_bar: bool

    def print(self, *values: Any, **options: Any) -> None:
        """Print without breaking the display."""
