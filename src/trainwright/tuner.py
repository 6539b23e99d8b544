"""The names of `lightning.pytorch.tuner`, imported on first use."""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
