"""`python -m trainwright.commands.to_fsdp2`: the same as `trainwright to-fsdp2`."""

from __future__ import annotations

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["to-fsdp2", *sys.argv[1:]]))
