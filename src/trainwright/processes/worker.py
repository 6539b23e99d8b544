"""Process that the Trainer started: `python -m trainwright.processes.worker WORK ERROR PARENT`."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import time
import traceback
from pathlib import Path

from trainwright.core.errors import PREEMPTED, Preempted
from trainwright.core.process import variable

_LOOK_S = 0.2


def end_with(parent: int, folder: Path) -> None:
    """End this process soon after `parent` (rank 0) has been killed, and remove `folder` instead of rank 0."""
    while os.getppid() == parent:
        time.sleep(_LOOK_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def main(work_file: str, error_file: str) -> int:
    """Run the pickled work; write the traceback to `error_file` if it fails. Return the exit code. The file was just
    written by the parent process, in a folder that only this user can read.
    """
    try:
        before, work, sys.argv = pickle.loads(Path(work_file).read_bytes())
        if before is not None:
            before()
        work()
    except Preempted:  # agreed by all, including the parent
        return PREEMPTED
    except BaseException:  # noqa: BLE001  # any error belongs in the parent's message
        text = f"rank {variable('RANK')}:\n{traceback.format_exc()}"
        partial = Path(error_file + ".partial")
        partial.write_text(text)
        partial.rename(error_file)  # atomic for readers
        return 1
    return 0


if __name__ == "__main__":
    watched = int(sys.argv[3]), Path(sys.argv[1]).parent
    threading.Thread(target=end_with, args=watched, name="trainwright-parent-watch", daemon=True).start()
    code = main(sys.argv[1], sys.argv[2])
    sys.stdout.flush()
    sys.stderr.flush()
    # A communication thread that still runs during interpreter shutdown would abort the process.
    os._exit(code)
