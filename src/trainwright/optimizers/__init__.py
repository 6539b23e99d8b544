"""Optimizers by name, including memory-saving optimizers: `create_optimizer("adamw_8bit", model.parameters(),
lr=1e-3)`. Names are imported when they are first used.
"""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
