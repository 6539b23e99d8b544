"""Strategies and engines, which determine how a task is trained.

`strategy.py` defines the contract. The other files are shared by engines, and each folder contains one engine or
technique.
"""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
