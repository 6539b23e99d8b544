"""Callbacks: the base class, the table of its events and the built-in callbacks.

Names are imported when they are first used; `CALLBACKS` holds the short names that a configuration may use.
"""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
