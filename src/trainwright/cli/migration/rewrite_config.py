"""Rewriting of class paths of Lightning and Accelerate in YAML files of Hydra and LightningCLI."""

from __future__ import annotations

import re

from trainwright.cli.migration.counterparts import advice, counterpart
from trainwright.cli.migration.program import Unsettled
from trainwright.cli.migration.rewrite_imports import Rewritten
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
        for match in reversed(list(_CLASS_PATH.finditer(line))):  # from the right, so that positions stay valid
            if "#" in line[: match.start()]:  # in a comment
                continue
            new_path = counterpart(match["path"])
            if new_path is None:
                unsettled.append(Unsettled(number, advice(match["path"])))
                continue
            line = line[: match.start("path")] + new_path + line[match.end("path") :]
        lines[number - 1] = line
    return Rewritten("\n".join(lines).encode(), unsettled)
