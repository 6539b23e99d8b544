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
from tests.helpers.sources import PARTS, ROOT

FACE = ROOT / "src/trainwright/__init__.py"


def _names_for_type_checkers() -> set[str]:
    for node in ast.parse(FACE.read_text()).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            imports = [statement for statement in node.body if isinstance(statement, ast.ImportFrom)]
            declared = [s.target for s in node.body if isinstance(s, ast.AnnAssign)]
            return {alias.asname or alias.name for entry in imports for alias in entry.names} | {
                target.id for target in declared if isinstance(target, ast.Name)
            }
    return set()


@pytest.mark.parametrize("name", trainwright.__all__)
def test_every_public_name_can_be_imported(name: str) -> None:
    assert getattr(trainwright, name) is not None


def test_a_public_name_is_the_object_of_its_home() -> None:
    assert trainwright.Duration is importlib.import_module("trainwright.core.duration").Duration
    assert trainwright.core is importlib.import_module("trainwright.core")


def test_editors_and_the_interpreter_are_told_the_same_names() -> None:
    assert set(trainwright.__all__) == set(trainwright._HOMES) | set(trainwright._SUBMODULES) | {"__version__"}
    assert _names_for_type_checkers() == set(trainwright.__all__)
    assert set(trainwright._SUBMODULES) == set(PARTS)


def test_dir_lists_names_that_were_not_touched_yet() -> None:
    assert set(trainwright.__all__) <= set(dir(trainwright))


def test_an_unknown_name_is_an_attribute_error_that_says_it() -> None:
    with pytest.raises(AttributeError, match="'trainwright' has no attribute 'Trianer'"):
        _ = trainwright.Trianer


def test_the_version_is_the_one_of_the_distribution() -> None:
    assert trainwright.__version__ == "0+unknown" or trainwright.__version__[0].isdigit()


def test_a_checkout_without_links_finds_the_top_level_folders(tmp_path: Path) -> None:
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    for part, folder in PARTS.items():
        if not folder.startswith("src/"):
            shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copytree(ROOT / folder, tmp_path / "src/trainwright" / part)
    shutil.copy(FACE, tmp_path / "src/trainwright")
    # What git leaves where it may not make links: a small file that holds the target.
    (tmp_path / "src/trainwright/loggers").write_text("../../loggers")
    code = "import trainwright.loggers as l, trainwright.core.errors as e; print(l.__file__); print(e.__file__)"
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
