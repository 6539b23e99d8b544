"""Models larger than the machine: empty construction, sizes, device maps, and weights that come when needed."""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
