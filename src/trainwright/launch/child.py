"""First programs of the processes and machines that `trainwright launch` starts.

They are run by the path of this file, and import no other module of this package, because they must start fast.

    python child.py LAUNCHER PROGRAM ARGUMENTS      becomes a program that is killed when its launcher ends
    python child.py parent PROGRAM ARGUMENTS        becomes a program that is killed when its parent process ends
    python child.py machine PROGRAM ARGUMENTS       runs a program on a machine that pdsh has started
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

ENDED = "trainwright launch: this machine ended with exit code"
PARENT = "parent"
_PR_SET_PDEATHSIG = 1


def command(first: object) -> list[str]:
    """Return the command line that runs this file. `first` is a process ID, "parent" or "machine". Append a program."""
    return [sys.executable, "-I", "-S", __file__, str(first)]


def become(launcher: int, program: list[str]) -> None:
    """Replace this process with `program`, and have Linux kill it when its parent process ends. Does not return.

    Args:
        launcher: Process ID of the parent.
        program: Command line of the program. On systems other than Linux it is not killed.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:  # it has ended already
            os._exit(1)
    os.execvp(program[0], program)


def run_machine(program: list[str]) -> int:
    """Run `program`. Return its exit code, or 128 + the number of the signal that ended it.

    The program is terminated when standard input is closed, which happens when the connection to the launching machine
    is lost.
    """
    import subprocess
    import threading

    def terminate_when_closed() -> None:
        while os.read(0, 4096):
            pass
        run.terminate()

    signal.pthread_sigmask(signal.SIG_SETMASK, [])  # programs inherit from pdsh that it blocks SIGINT and SIGCHLD
    run = subprocess.Popen(program, stdin=subprocess.DEVNULL)
    threading.Thread(target=terminate_when_closed, daemon=True).start()
    code = run.wait()
    if code < 0:
        code = 128 - code  # -9 of SIGKILL → 137, as in a shell
    if code:
        print(ENDED, code, file=sys.stderr, flush=True)
    return code


if __name__ == "__main__":
    if sys.argv[1] == "machine":
        os._exit(run_machine(sys.argv[2:]))  # does not wait for the thread, which may block in a read
    become(os.getppid() if sys.argv[1] == PARENT else int(sys.argv[1]), sys.argv[2:])
