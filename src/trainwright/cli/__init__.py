"""The command line: `trainwright new`, `trainwright fit --config config.yaml`, and the others that `--help` lists.

Each sub-command is a function `(arguments) -> exit code` in a module of its own, imported when the command is called.
`CLI` gives a script a command line of its own. Names are imported when they are first touched.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from trainwright.core.foreign_names import missing

if TYPE_CHECKING:
    from trainwright.cli.cli_parser import CLIParser, LRSchedulerCallable, OptimizerCallable, ReduceLROnPlateau
    from trainwright.cli.save_config_callback import SaveConfigCallback
    from trainwright.cli.script import CLI

_HOMES = {
    "CLI": "script",
    "CLIParser": "cli_parser",
    "LRSchedulerCallable": "cli_parser",
    "OptimizerCallable": "cli_parser",
    "ReduceLROnPlateau": "cli_parser",
    "SaveConfigCallback": "save_config_callback",
}

__all__ = ["CLI", "CLIParser", "LRSchedulerCallable", "OptimizerCallable", "ReduceLROnPlateau", "SaveConfigCallback"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise missing(__name__, name, __all__)
    value = getattr(import_module(f"trainwright.cli.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
