"""The projects that `trainwright new` writes: clean by their own rules, written against public names only."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from trainwright.cli.new import write_project

TEMPLATES = ["classifier", "finetune", "language-model"]


@pytest.fixture(params=TEMPLATES)
def project(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A project written from each template in turn."""
    write_project(tmp_path / "my-project", template=request.param)
    return tmp_path / "my-project"


def _imported_names(path: Path) -> list[tuple[str, str]]:
    """Return (module, name) of everything that a file imports from trainwright."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] == "trainwright":
            found += [(node.module, alias.name) for alias in node.names]
        elif isinstance(node, ast.Import):
            found += [(alias.name, "") for alias in node.names if alias.name.split(".")[0] == "trainwright"]
    return found


def test_a_project_imports_public_names_only(project: Path) -> None:
    imported = [found for path in project.rglob("*.py") for found in _imported_names(path)]
    assert ("trainwright", "Trainer") in imported
    for module, name in imported:
        assert name in importlib.import_module(module).__all__, f"{name} is not public in {module}"


def test_nothing_is_left_to_be_rendered(project: Path) -> None:
    for path in project.rglob("*"):
        if path.is_file():
            assert not re.search(r"{{ *(name|package|version)|{%-? *(end)?raw|{#", path.read_text()), path
            assert path.suffix != ".jinja"


def test_the_project_file_is_valid_and_names_what_the_code_imports(project: Path) -> None:
    settings = tomllib.loads((project / "pyproject.toml").read_text())
    assert settings["project"]["name"] == "my-project"
    required = {re.split(r"[>\[]", requirement)[0] for requirement in settings["project"]["dependencies"]}
    optional = {re.split(r"[>\[]", one)[0] for one in settings["project"]["optional-dependencies"]["sweep"]}
    sources = [*project.glob("*.py"), *project.glob("src/*/*.py")]
    modules = {path.stem for path in project.glob("*.py")} | {"my_project"}
    imported = set()
    for path in sources:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module is not None:
                imported.add(node.module.split(".")[0])
            elif isinstance(node, ast.Import):
                imported |= {alias.name.split(".")[0] for alias in node.names}
    outside = imported - modules - set(sys.stdlib_module_names)
    assert {name.replace("sklearn", "scikit-learn") for name in outside} - optional == required


@pytest.mark.distributed
@pytest.mark.parametrize("command", [["format", "--check", "--diff"], ["check"]])
def test_a_project_is_clean_by_its_own_rules(project: Path, command: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ruff", *command, "--no-cache", "."],
        cwd=project, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
