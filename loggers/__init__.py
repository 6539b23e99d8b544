"""Logging of metrics: the buffer that `log` fills, the Logger contract and one file for each tracker. Names are
imported when they are first used; `LOGGERS` holds the short names that a configuration may use.
"""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
