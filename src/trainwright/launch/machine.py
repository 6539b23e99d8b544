"""First program of each machine that pdsh starts: `python machine.py PROGRAM ARGUMENTS`.

It runs the program until it ends, or until its standard input is closed with the connection to the machine that has
started it. It is run by its path and imports no other module of this package.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

ENDED = "trainwright launch: this machine ended with exit code"


def main(program: list[str]) -> int:
    """Run `program` and return its exit code."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # programs inherit from pdsh that it blocks SIGINT and SIGCHLD
    run = subprocess.Popen(program, stdin=subprocess.DEVNULL)
    threading.Thread(target=_watch, args=(run,), daemon=True).start()
    code = run.wait()
    code = code if code >= 0 else 128 - code
    if code:
        print(ENDED, code, file=sys.stderr, flush=True)
    return code


def _watch(run: subprocess.Popen[bytes]) -> None:
    while os.read(0, 4096):
        pass
    run.terminate()


if __name__ == "__main__":
    os._exit(main(sys.argv[1:]))  # without waiting for the thread, which reads
