"""First program of each process that `trainwright launch` starts: `python child.py LAUNCHER PROGRAM ARGUMENTS`.

It arranges that the process is killed when its launcher ends in any way, also by SIGKILL, and becomes the program. Only
Linux can do that; elsewhere it does nothing. It is run by its path and imports no other module of this package, because
it has to be fast.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(launcher: int, program: list[str]) -> None:
    """Become `program`, which is killed when the process `launcher`, this one's parent, ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has ended already
            os._exit(1)
    os.execvp(program[0], program)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
