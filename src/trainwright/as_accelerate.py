"""Run a script with Trainwright instead of accelerate: `python -m trainwright.as_accelerate script.py …`."""

from __future__ import annotations

import sys

from trainwright.core.names.stand_in import as_accelerate, run_script

if __name__ == "__main__":
    run_script(sys.argv[1:])
else:  # `import trainwright.as_accelerate` must not replace the function of this name
    sys.modules[__name__] = as_accelerate  # type: ignore[assignment]
