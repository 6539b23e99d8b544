from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from tests.pinned.module_paths import PATHS, files


def test_the_files_are_those_of_the_table() -> None:
    assert [file for file, text in files().items() if file.read_text() != text] == [], (
        "run python -m tests.pinned.module_paths"
    )


@pytest.mark.parametrize("path", PATHS)
def test_each_path_has_its_names(path: str) -> None:
    module = importlib.import_module(f"trainwright.{path}")
    assert all(getattr(module, name) is not None for name in PATHS[path].split())


def test_names_that_need_no_torch_import_none() -> None:
    program = (
        "import sys, trainwright.utils as u; u.WEIGHTS_NAME, u.is_wandb_available(); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
