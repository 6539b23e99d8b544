"""Reading older formats: what was read is turned from each version into the next, until it is today's.

What is written states the lowest version that describes it, so that older readers go on reading what they understand:
2 where tensors lie in pieces, 1 otherwise, indices of runs included.

A change of the format raises `FORMAT_VERSION` by one and adds the entry `UPGRADES[old]` here, together with a stored
checkpoint of the old version under `tests/checkpoint/data/`, which every later reader must go on reading.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from trainwright.core.errors import CheckpointError

FORMAT_VERSION = 2  # the newest that is read
PLAIN_VERSION = 1  # what checkpoints of whole tensors, and indices, are written as
PIECES_VERSION = 2  # those whose tensors lie in pieces

Trees = dict[str, Any]
Upgrade = Callable[[Trees], Trees]

# Version → what makes the next one of it. It is called with the trees that were read, and only those: a reader that
# wants the weights alone has no others. Under "manifest" the object of a manifest.json (before any part is read),
# under "index" that of a run's index.json, under "remote_index" that of its remote copy; under the name of a part the
# decoded part: "trainer" (a dict), "model" (name → value), "optimizer" and "rng" (lists of trees).
UPGRADES: dict[int, Upgrade] = {1: lambda trees: trees}  # 2 has added tensors in pieces, and changed nothing


class NewerFormatError(CheckpointError):
    """A file was written by a newer Trainwright than this one; it is not damaged."""


def upgraded(trees: Trees, version: int) -> Trees:
    """Return trees of the format `version` as today's format has them; those of today's come back as they are.

    Raises:
        CheckpointError: this Trainwright has no way from `version` on.
    """
    for number in range(version, FORMAT_VERSION):
        if number not in UPGRADES:
            raise CheckpointError(f"format_version={version} is older than this Trainwright can read.")
        trees = UPGRADES[number](trees)
    return trees


def check_format_version(version: object, origin: str) -> int:
    """Return the version that a file states, if this Trainwright knows it.

    Args:
        version: what stands in the file.
        origin: the file, for messages.

    Raises:
        NewerFormatError: it is newer than `FORMAT_VERSION`.
        CheckpointError: it is no version at all.
    """
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise CheckpointError(f"{origin}: format_version={version!r}, expected a whole number from 1 on.")
    if version > FORMAT_VERSION:
        raise NewerFormatError(
            f"{origin}: format_version={version} is newer than {FORMAT_VERSION}, the newest that this Trainwright "
            "reads. Upgrade it: pip install -U trainwright"
        )
    return version
