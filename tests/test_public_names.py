"""The package's public face: every name it promises is there, lazily, and the three lists of names agree."""

from __future__ import annotations

import ast
import importlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import trainwright
from tests.helpers.sources import PARTS, ROOT, Source, stub_sources

FACE = ROOT / "src/trainwright/__init__.py"


@pytest.mark.parametrize("name", trainwright.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(trainwright, name) is not None


def test_a_public_name_is_the_object_of_its_home() -> None:
    assert trainwright.Duration is importlib.import_module("trainwright.core.duration").Duration
    assert trainwright.core is importlib.import_module("trainwright.core")


@pytest.mark.parametrize("stub", stub_sources(), ids=lambda stub: stub.module)
def test_editors_and_the_interpreter_are_told_the_same_names(stub: Source) -> None:
    package = importlib.import_module(stub.module)
    aliases = [(node, alias) for node in stub.tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = {alias.name for _, alias in aliases if alias.name != "*"}
    assert names == {alias.asname for _, alias in aliases if alias.name != "*"}  # or it is not re-exported
    for node, alias in aliases:
        names |= set(importlib.import_module(str(node.module)).__all__) if alias.name == "*" else set()
    assert set(package.__all__) == names
    assert set(package.__all__) <= set(dir(package))
    assert all(getattr(package, name) is not None for name in package.__all__)


def test_a_checkout_without_links_finds_the_top_level_folders(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for part, folder in PARTS.items():
        if not folder.startswith("src/"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copytree(ROOT / folder, tmp_path / "src/trainwright" / part)
    for file in (FACE, FACE.with_suffix(".pyi")):
        shutil.copy(file, tmp_path / "src/trainwright")
    # What git leaves where it may not make links: a small file that holds the target.
    (tmp_path / "src/trainwright/loggers").write_text("../../loggers")
    code = "import trainwright as t, trainwright.core.errors as e; print(t.loggers.__file__); print(e.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(tmp_path / 'src')!r}); {code}"],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    loggers, errors = done.stdout.splitlines()
    assert Path(loggers) == tmp_path / "loggers/__init__.py"
    assert Path(errors) == tmp_path / "src/trainwright/core/errors.py"
