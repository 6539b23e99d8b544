"""The Trainer: the loop on one page (trainer.py) and what it is made of; the Accelerator (accelerator/) beside it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainwright.trainer.accelerator.accelerator import Accelerator
    from trainwright.trainer.trainer import Trainer

__all__ = ["Accelerator", "Trainer"]


def __getattr__(name: str) -> Any:
    if name == "Trainer":
        from trainwright.trainer.trainer import Trainer

        return Trainer
    if name == "Accelerator":
        from trainwright.trainer.accelerator.accelerator import Accelerator

        return Accelerator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
