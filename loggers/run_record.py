"""The record of a run: `run.jsonl`, with the events of the run and their times."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.metadata
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TextIO

from trainwright.core.errors import TrainwrightWarning
from trainwright.core.names.version import __version__
from trainwright.loggers.hyperparams import json_safe, plain
from trainwright.loggers.versioned import cut_torn_line

RECORD_FILE = "run.jsonl"
_GIT_TIMEOUT_S = 5.0
_PACKAGES = ("torch", "numpy", "safetensors", "deepspeed", "transformers", "peft", "torchao", "datasets")


class RunRecord:
    """The file `run.jsonl`, to which a run appends one JSON object per event.

    Each line is `{"event": …, "step": …, "time": <seconds since 1970>, …}` and is complete when `add` returns. A failed
    write causes a warning and does not end training. An existing record in the folder is continued.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._path = folder / RECORD_FILE
        self._file: TextIO | None = None

    def add(self, event: str, step: int, facts: Mapping[str, Any]) -> None:
        """Append an event after `step` completed optimizer steps. `facts` that JSON does not support become text."""
        line = {"event": event, "step": step, "time": time.time(), **json_safe(plain(facts))}
        try:
            if self._file is None:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                cut_torn_line(self._path)
                self._file = open(self._path, "a", buffering=1, encoding="utf-8")  # noqa: SIM115  # until `close`
            self._file.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            warnings.warn(
                f"the record {self._path} cannot be written: {error}. `trainwright report` will lack the events from "
                f"step {step} on; training continues.",
                TrainwrightWarning,
                stacklevel=2,
            )

    def close(self) -> None:
        """Close the file. A later event opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def package_versions() -> dict[str, str]:
    """Return the versions of the imported packages that may change the results of a run."""
    versions = {"trainwright": __version__}
    for name in _PACKAGES:
        if name in sys.modules:
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):  # a checkout on the path
                versions[name] = importlib.metadata.version(name)
    return versions


@functools.cache
def code_version(folder: Path) -> dict[str, str] | None:
    """Return the commit that is checked out around a folder, and a hash of the uncommitted changes if there are any.

    For example, `{"commit": "7d79…", "changes": "<16 hex digits>"}`. Untracked files are not included.
    The result is cached per folder. It is None outside of a repository, in a repository without commits, without git,
    or if a git command takes 5 seconds.
    """
    try:
        commit = _git(folder, "rev-parse", "HEAD").decode().strip()
        changes = _git(folder, "diff", "HEAD")
    except (OSError, subprocess.SubprocessError):
        return None
    version = {"commit": commit}
    if changes:
        version["changes"] = hashlib.sha256(changes).hexdigest()[:16]
    return version


def _git(folder: Path, *arguments: str) -> bytes:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, check=True, timeout=_GIT_TIMEOUT_S).stdout
