"""Trainwright: a PyTorch training framework with two front doors, `Trainer` and `Accelerator`, over one engine.

Names are imported when they are first touched (PEP 562), so that `import trainwright` and the command line stay fast:
importing this package imports neither torch nor anything that is not part of Python.
"""

from __future__ import annotations

import os

from trainwright.core.names.lazy_names import lazy_names

# A checkout whose links to the top-level folders were not created (a clone without symlinks): find them at the root.
_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(_here))
if not os.path.isdir(os.path.join(_here, "trainer")) and os.path.isfile(os.path.join(_root, "pyproject.toml")):
    __path__.append(_root)

__getattr__, __dir__ = lazy_names(__name__, __file__)
