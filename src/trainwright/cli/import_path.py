"""The import path of commands that read a project."""

from __future__ import annotations

import os
import sys


def add_project_to_import_path() -> None:
    """Add the working folder and its folder `src`, in this order, to the start of the import path.

    A project need not be installed then. A folder that is in the path already keeps its place.
    """
    here = os.getcwd()
    for folder in (os.path.join(here, "src"), here):
        if folder not in sys.path and os.path.isdir(folder):
            sys.path.insert(0, folder)
