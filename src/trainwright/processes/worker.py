"""Program of the processes that the Trainer or a launcher starts: `python -m trainwright.processes.worker WORK
PARENT`.
"""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path
from types import FunctionType, ModuleType

from trainwright.core.errors import PREEMPTED, Preempted
from trainwright.core.process import started_by_trainer, variable

_LOOK_S = 0.2


def end_with(parent: int, folder: Path) -> None:
    """End this process soon after `parent` (rank 0) has been killed, and remove `folder` instead of rank 0."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def define(definitions: list[type | FunctionType]) -> None:
    """Add classes and functions that were sent by value to their modules.

    Their instances can then be pickled, for workers of a DataLoader or for another rank.
    """
    sys.modules["__main__"] = ModuleType("__main__")  # that of the script, instead of this file
    for definition in definitions:
        module = sys.modules.setdefault(definition.__module__, ModuleType(definition.__module__))
        if "." not in definition.__qualname__:
            setattr(module, definition.__name__, definition)


def main(work_file: str) -> int:
    """Run the pickled work and return the exit code. If the work fails, write the traceback to `error-RANK.txt`.

    The file is trusted, because the parent process has written it, in a folder that only this user can access.
    """
    error_file = Path(work_file).with_name(f"error-{variable('RANK')}.txt")
    error_file.unlink(missing_ok=True)  # of an earlier attempt
    try:
        with open(work_file, "rb") as file:
            unpickler = pickle.Unpickler(file)
            before, work, sys.argv = unpickler.load()
            define(unpickler.load())
        if before is not None:
            before()
        work()
    except Preempted:  # agreed by all, including the parent
        return PREEMPTED
    except BaseException:  # noqa: BLE001  # any error belongs in the parent's message
        text = f"rank {variable('RANK')}:\n{traceback.format_exc()}"
        partial = error_file.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(error_file)  # atomic for readers
        return 1
    return 0


if __name__ == "__main__":
    watched = int(sys.argv[2]), Path(sys.argv[1]).parent
    threading.Thread(target=end_with, args=watched, name="trainwright-parent-watch", daemon=True).start()
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # A communication thread that still runs during interpreter shutdown would abort the process. A process of a
    # launcher has closed its group by then, and ends as a script does.
    if code or started_by_trainer():
        os._exit(code)
