"""`python -m trainwright.commands.estimate`: the same as `trainwright estimate-memory`."""

from __future__ import annotations

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["estimate-memory", *sys.argv[1:]]))
