"""Data: the order of samples, sharding over ranks and workers, resuming at any position, and data modules. Names are
imported when they are first used.
"""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
