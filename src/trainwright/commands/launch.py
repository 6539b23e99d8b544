"""`python -m trainwright.commands.launch`: the same as `trainwright launch`, for debuggers that start a module."""

from __future__ import annotations

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
