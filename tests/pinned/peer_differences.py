"""The differences between the interfaces of Lightning and Hugging Face Accelerate and ours, each with its reason.

    python -m tests.pinned.peer_differences

prints those that `peer_differences.txt` lacks, and those that it still lists although they are gone.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.helpers.runs import quiet_trainer
from tests.pinned.peer_interfaces import FILE as INTERFACES
from tests.pinned.peer_interfaces import MODULES, described
from trainwright import Accelerator
from trainwright.core.errors import TrainwrightError

FILE = Path(__file__).parent / "peer_differences.txt"
# Their class → the name of ours.
_OTHER_NAMES = {"LightningModule": "TaskModule", "LightningDataModule": "DataModule"}
# Their argument → ours. Hooks are called by position.
_OTHER_ARGUMENTS = {"pl_module": "task", "model": "task"}
# Classes whose members are read from an object, because some of them are found by `__getattr__`.
_OBJECTS = {"Accelerator": lambda: Accelerator(cpu=True), "Trainer": quiet_trainer}
# Of these modules only the arguments of the classes are compared: see the reviewed list.
_WITHOUT_MEMBERS = ("lightning.pytorch.strategies",)


def _own_name(name: str, ours: dict[str, str]) -> str:
    """Return our name of their argument."""
    other = _OTHER_ARGUMENTS.get(name, name)
    return other if other in ours else name


def _of_arguments(path: str, theirs: dict[str, str] | None, ours: dict[str, str] | None) -> Iterator[str]:
    """Yield the differences between the arguments of two functions."""
    if theirs is None or ours is None:
        return
    takes_any = any(name.startswith("**") for name in ours)
    takes_any_there = any(name.startswith("*") for name in theirs)
    theirs = {_own_name(name, ours): default for name, default in theirs.items()}
    for name, default in theirs.items():
        if name.startswith("*"):
            continue
        if name not in ours:
            if not takes_any:
                yield f"{path}({name}): not there"
        elif ours[name] != default:
            yield f"{path}({name}={default}): {ours[name]} here"
    for name, default in ours.items():
        if default == "required" and name not in theirs and not takes_any_there:
            yield f"{path}({name}): required here"
    shared = [name for name in theirs if name in ours]
    if [name for name in ours if name in theirs] != shared:
        yield f"{path}: another order of arguments"


def _has(cls: type, name: str) -> bool:
    if name in dir(cls) or name in getattr(cls, "__annotations__", {}):
        return True
    make = _OBJECTS.get(cls.__name__)
    try:
        return make is not None and hasattr(make(), name)
    except TrainwrightError:
        return False


def _of_classes(path: str, theirs: dict[str, Any], cls: type, ours: dict[str, Any]) -> Iterator[str]:
    """Yield the differences between two classes."""
    if ours["frozen"] and not theirs["frozen"]:
        yield f"{path}: frozen here"
    for name, arguments in theirs["members"].items():
        if name in ours["members"]:
            yield from _of_arguments(f"{path}.{name}", arguments, ours["members"][name])
        elif not _has(cls, name):
            yield f"{path}.{name}: not there"


def differences() -> list[str]:
    """Return every difference, a line each."""
    found: list[str] = []
    for peer, entries in json.loads(INTERFACES.read_text()).items():
        module = importlib.import_module(MODULES[peer])
        for name, theirs in entries.items():
            path = f"{peer}.{name}"
            value = getattr(module, _OTHER_NAMES.get(name, name), None)
            if value is None:
                found.append(f"{path}: not there")
                continue
            ours = described(value, "trainwright", inherited=True)
            found.extend(_of_arguments(path, theirs["arguments"], ours["arguments"]))
            if "members" in theirs and "members" in ours and peer not in _WITHOUT_MEMBERS:
                found.extend(_of_classes(path, theirs, value, ours))
    return found


def reviewed() -> list[str]:
    """Return the lines of the reviewed list, without the reasons that stand above them."""
    lines: list[str] = []
    for line in FILE.read_text().splitlines():
        if line and not line.startswith("#"):
            lines.append(line)
    return lines


if __name__ == "__main__":
    known, current = set(reviewed()), differences()
    sys.stdout.write("".join(f"new: {line}\n" for line in current if line not in known))
    sys.stdout.write("".join(f"gone: {line}\n" for line in sorted(known - set(current))))
