"""How a task is trained: the Strategy contract and one file or folder per engine.

`strategy.py` is the contract, the files beside it are what engines share, and `processes/` starts and watches the
processes that they train on.
"""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
