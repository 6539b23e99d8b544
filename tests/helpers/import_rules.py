"""The circles of files: `python -m tests.helpers.import_rules` prints them, and ends with 1 if there is any.

Imports inside functions and under TYPE_CHECKING count. The lazy tables of public names do not.
"""

from __future__ import annotations

import sys

from tests.helpers.architecture_rules import import_cycles
from tests.helpers.sources import package_sources


def main() -> int:
    cycles = import_cycles(package_sources())
    for cycle in cycles:
        print(cycle)
    return 1 if cycles else 0


if __name__ == "__main__":
    sys.exit(main())
