"""`python -m trainwright.commands.env`: the same as `trainwright env`."""

from __future__ import annotations

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["env", *sys.argv[1:]]))
