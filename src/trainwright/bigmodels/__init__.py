"""Models larger than a device: construction on the meta device, sizes, device maps, offloading and quantization."""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
