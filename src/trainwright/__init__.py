"""Trainwright: a PyTorch training framework with two entry points, `Trainer` and `Accelerator`.

Names are imported on first use (PEP 562), so that `import trainwright` and the command line are fast: importing this
package imports only the standard library.
"""

from __future__ import annotations

import os

from trainwright.core.names.lazy_names import lazy_names

# In a checkout without the links to the top-level folders (a clone without symlinks), find the folders at the root.
_here = os.path.dirname(os.path.abspath(__file__))
_root = os.path.dirname(os.path.dirname(_here))
if not os.path.isdir(os.path.join(_here, "trainer")) and os.path.isfile(os.path.join(_root, "pyproject.toml")):
    __path__.append(_root)

__getattr__, __dir__ = lazy_names(__name__, __file__)
