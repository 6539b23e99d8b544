"""Notes on errors name the user's line."""

from __future__ import annotations

import json
from pathlib import Path

import trainwright
from trainwright.trainer.recovery.failure import _library_paths


def test_a_folder_named_like_a_library_has_user_code() -> None:
    package = str(Path(trainwright.__file__).parent)
    assert f"{package}/core/task.py".startswith(_library_paths())
    assert not f"{package}_demo/train.py".startswith(_library_paths())
    assert json.__file__.startswith(_library_paths())
