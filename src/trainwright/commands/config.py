"""`python -m trainwright.commands.config`: the same as `trainwright config`."""

from __future__ import annotations

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["config", *sys.argv[1:]]))
