"""Profilers: the time, calls and operators of a stage. `PROFILERS` holds the short names that a configuration may use.
Names are imported when they are first used.
"""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
