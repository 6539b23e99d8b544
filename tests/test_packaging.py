"""The distribution: what is built from the tree holds all of it, and works from outside it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.helpers.sources import PARTS, ROOT

pytestmark = pytest.mark.slow

# Left behind by tools; a fresh clone has none of them.
_NOT_SOURCE = {"__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", ".hypothesis"}


def _run(command: Sequence[str], cwd: Path, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=250)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def _files_of_the_tree() -> set[str]:
    """Return every file of the import package, as it should stand in a wheel."""
    files = {f"trainwright/{path.name}" for path in (ROOT / "src/trainwright").iterdir() if path.is_file()}
    for part, folder in PARTS.items():
        base = ROOT / folder
        for path in base.rglob("*"):
            if path.is_file() and not _NOT_SOURCE & set(path.relative_to(base).parts):
                files.add(f"trainwright/{part}/{path.relative_to(base).as_posix()}")
    return files


@pytest.fixture(scope="module")
def tree_files() -> set[str]:
    return _files_of_the_tree()


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory, tree_files: set[str]) -> Path:
    """Build the sdist, and the wheel from that sdist, into a folder of their own."""
    folder = tmp_path_factory.mktemp("dist")
    _run([sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(ROOT)], cwd=folder)
    return folder


@pytest.fixture(scope="module")
def wheel_files(built: Path) -> set[str]:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name for name in archive.namelist() if not name.endswith("/")}


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("installed")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", "--no-index"]
    _run([*pip, "--target", str(target), str(wheel)], cwd=target)
    return target


def _environment(installed: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(installed)}


def test_the_wheel_holds_every_file_of_the_tree_and_no_other(wheel_files: set[str], tree_files: set[str]) -> None:
    packaged = {name for name in wheel_files if not name.partition("/")[0].endswith(".dist-info")}
    assert packaged == tree_files


def test_the_sdist_carries_the_tests(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "LICENSE", "README.md", "tests/conftest.py", "tests/helpers/distributed.py"} <= names


def test_the_installed_package_is_imported_from_outside_the_tree(installed: Path, tmp_path: Path) -> None:
    code = "import trainwright, trainwright.core.task as t; print(trainwright.__file__); print(t.__file__)"
    shown = _run([sys.executable, "-c", code], cwd=tmp_path, env=_environment(installed))
    assert [Path(line).is_relative_to(installed) for line in shown.splitlines()] == [True, True]


def test_the_installed_command_writes_projects(installed: Path, tmp_path: Path) -> None:
    new = [sys.executable, str(installed / "bin/trainwright"), "new", "digits"]
    _run(new, cwd=tmp_path, env=_environment(installed))
    assert (tmp_path / "digits" / "src" / "digits" / "task.py").is_file()


@pytest.mark.parametrize("command", [["-m", "trainwright"], [None]])
def test_the_installed_command_shows_its_help(installed: Path, tmp_path: Path, command: list[str | None]) -> None:
    start = [str(installed / "bin/trainwright")] if command == [None] else [str(word) for word in command]
    shown = _run([sys.executable, *start, "--help"], cwd=tmp_path, env=_environment(installed))
    assert "fit" in shown
