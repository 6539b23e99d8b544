"""Program of started processes: `python -m trainwright.processes.worker WORK_FILE PARENT_PROCESS_ID`."""

from __future__ import annotations

import os
import pickle
import shutil
import sys
import threading
import time
import traceback
from functools import cache
from multiprocessing.reduction import ForkingPickler
from operator import attrgetter
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

from trainwright.core import unraised
from trainwright.core.errors import PREEMPTED, Preempted
from trainwright.core.names.replacement import repeat
from trainwright.core.process import started_by_trainer, variable
from trainwright.processes.loop_watch import report_error

_POLL_S = 0.2


def end_with(parent: int, folder: Path) -> None:
    """Wait until `parent` (rank 0) has ended. Then remove `folder`, as rank 0 would, and end this process."""
    while os.getppid() == parent:
        time.sleep(_POLL_S)
    shutil.rmtree(folder, ignore_errors=True)
    os._exit(1)


def define(definitions: list[type | FunctionType]) -> None:
    """Add classes and functions that were sent by value to their modules.

    Their instances can then be pickled for workers of a DataLoader and for other ranks.
    """
    for definition in definitions:
        module = sys.modules.setdefault(definition.__module__, ModuleType(definition.__module__))
        if "." not in definition.__qualname__:
            setattr(module, definition.__name__, definition)


def send_to_spawned(definitions: list[type | FunctionType]) -> None:
    """Let processes that this process spawns receive classes and functions by value, as they cannot import them."""
    modules = {definition.__module__ for definition in definitions}
    from trainwright.processes.worker import find_sent  # spawned processes can import this name of the module

    @cache
    def content() -> bytes:
        import cloudpickle

        for name in modules:
            cloudpickle.register_pickle_by_value(sys.modules[name])
        try:
            pickled: bytes = cloudpickle.dumps(definitions)
            return pickled
        finally:
            for name in modules:
                cloudpickle.unregister_pickle_by_value(sys.modules[name])

    def reduce(_: object, obj: object) -> object:
        if isinstance(obj, (type, FunctionType)) and obj.__module__ in modules and "<locals>" not in obj.__qualname__:
            return find_sent, (obj.__module__, obj.__qualname__, content())
        return NotImplemented

    if definitions:
        type.__setattr__(ForkingPickler, "reducer_override", reduce)  # a hook of pickle.Pickler


def find_sent(module: str, name: str, content: bytes) -> Any:
    """Return a class or function of a module. If it is missing, first add the pickled definitions in `content`."""
    if not hasattr(sys.modules.get(module), name.partition(".")[0]):
        define(pickle.loads(content))
    return attrgetter(name)(sys.modules[module])


def main(work_file: str) -> int:
    """Run the pickled work and return the exit code. If the work fails, write the traceback to `error-RANK.txt`.

    The file is trusted, because the parent process has written it, in a folder that only this user can access.
    """
    error_file = Path(work_file).with_name(f"error-{variable('RANK')}.txt")
    error_file.unlink(missing_ok=True)  # of an earlier attempt
    try:
        with open(work_file, "rb") as file:
            # The three pickles of `launcher.serialize`. Libraries are replaced before the work is unpickled, because
            # modules that the work needs may import them.
            unpickler = pickle.Unpickler(file)
            repeat(unpickler.load())
            before, work, sys.argv = unpickler.load()
            definitions = unpickler.load()
        sys.modules["__main__"] = ModuleType("__main__")  # that of the script, instead of this file
        define(definitions)
        send_to_spawned(definitions)
        if before is not None:
            before()
        work()
        for error in unraised.take():  # this process ends without the functions of atexit
            raise error
    except Preempted:  # all ranks stop, including the parent, which raises the same error
        return PREEMPTED
    except BaseException as error:  # noqa: BLE001  # any error belongs in the parent's message
        report_error(error)
        text = f"rank {variable('RANK')}:\n{traceback.format_exc()}"
        partial = error_file.with_suffix(".partial")
        partial.write_text(text)
        partial.rename(error_file)  # atomic for readers
        return 1
    return 0


if __name__ == "__main__":
    parent_and_folder = int(sys.argv[2]), Path(sys.argv[1]).parent
    threading.Thread(target=end_with, args=parent_and_folder, name="trainwright-parent-watch", daemon=True).start()
    code = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    # A communication thread that still runs during interpreter shutdown would abort the process. A process of a
    # launcher has closed its group by then, and ends as a script does.
    if code or started_by_trainer():
        os._exit(code)
