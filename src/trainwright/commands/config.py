"""`python -m trainwright.commands.config`: the same as `trainwright config`.

`default_config_file` and `load_config_from_file` are for programs that show the settings of a machine, such as
`transformers env`.
"""

from __future__ import annotations

import os
import sys

from trainwright.cli.main import main
from trainwright.launch.config_file import default_path
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import default_file, read_file

__all__ = ["default_config_file", "load_config_from_file"]

default_config_file = str(default_file() or default_path())
"""Path of the configuration file that `launch` reads by default, at the time of the import.

If it does not exist, the path at which `trainwright config` writes it.
"""


def load_config_from_file(config_file: str | os.PathLike[str] | None = None) -> LaunchConfig:
    """Return the options of a configuration file. `to_dict()` of the result has those that are set.

    Args:
        config_file: A file of `trainwright config` or `accelerate config`. Default: None, which is
            `default_config_file`.

    Raises:
        ConfigurationError: The file does not exist or cannot be read, or sets an unknown option or an invalid value.
    """
    _, options = read_file(default_config_file if config_file is None else config_file)
    return LaunchConfig(**options)


if __name__ == "__main__":
    sys.exit(main(["config", *sys.argv[1:]]))
