"""`python -m trainwright`: the same as the command `trainwright`."""

from __future__ import annotations

import sys

from trainwright.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
