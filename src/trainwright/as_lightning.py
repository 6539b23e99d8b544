"""Run a script with Trainwright instead of Lightning: `python -m trainwright.as_lightning script.py …`."""

from __future__ import annotations

import sys

from trainwright.core.names.lightning_stand_in import as_lightning
from trainwright.core.names.replacement import run_script

if __name__ == "__main__":
    run_script(sys.argv[1:], as_lightning, "Lightning")
else:  # `import trainwright.as_lightning` must not replace the function of this name
    sys.modules[__name__] = as_lightning  # type: ignore[assignment]
