"""The command line: `trainwright new`, `trainwright fit --config config.yaml`, and other sub-commands (`--help`).

Each sub-command is a function `(arguments) -> exit code` in a separate module, imported when the command is called.
`CLI` adds a command line to a script. Names are imported when they are first used.
"""

from __future__ import annotations

from trainwright.core.names.lazy_names import lazy_names

__getattr__, __dir__ = lazy_names(__name__, __file__)
