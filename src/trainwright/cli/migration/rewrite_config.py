"""Rewriting of class paths of Lightning and Accelerate in YAML files of Hydra and LightningCLI."""

from __future__ import annotations

import re

from trainwright.cli.migration.program import Unsettled
from trainwright.cli.migration.rewrite_imports import Rewritten, advice, counterpart
from trainwright.core.names.foreign_names import LIBRARIES

# A key whose value names a class, on one line: `_target_: lightning.pytorch.Trainer  # a comment`.
_CLASS_PATH = re.compile(
    r"(?P<key>[\"']?(?:_target_|class_path)[\"']?\s*:\s*[\"']?)"
    rf"(?P<path>(?:{'|'.join(LIBRARIES)})(?:\.\w+)+)"
)


def rewrite_class_paths(code: bytes) -> Rewritten:
    """Rewrite the class paths of a YAML file. Other text does not change.

    Raises:
        UnicodeDecodeError: the file is not text.
    """
    unsettled: list[Unsettled] = []
    lines = code.decode().split("\n")
    for number, line in enumerate(lines, 1):
        for found in reversed(list(_CLASS_PATH.finditer(line))):  # from the right, so that positions stay valid
            own = counterpart(found["path"])
            if "#" in line[: found.start()]:
                continue
            if own is None:
                unsettled.append(Unsettled(number, advice(found["path"])))
                continue
            line = line[: found.start("path")] + own + line[found.end("path") :]
        lines[number - 1] = line
    return Rewritten("\n".join(lines).encode(), unsettled)
