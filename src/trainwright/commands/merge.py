"""`python -m trainwright.commands.merge`: the same as `trainwright merge-weights`."""

from __future__ import annotations

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["merge-weights", *sys.argv[1:]]))
