"""`python -m trainwright.commands.tpu`: the same as `trainwright tpu-config`."""

from __future__ import annotations

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["tpu-config", *sys.argv[1:]]))
