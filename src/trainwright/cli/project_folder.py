"""The folder of a project, whose modules a command imports."""

from __future__ import annotations

import os
import sys


def import_from_here() -> None:
    """Add the working folder to the import path, and its folder `src`, so that a project need not be installed."""
    here = os.getcwd()
    for folder in (os.path.join(here, "src"), here):
        if folder not in sys.path and os.path.isdir(folder):
            sys.path.insert(0, folder)
