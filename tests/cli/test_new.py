"""`trainwright new`: what is written where, and what is refused before anything is written."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainwright.cli.main import main
from trainwright.cli.new import project_names, render, write_project
from trainwright.core.errors import ConfigurationError


def _files_below(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


def test_the_command_ends_with_three_commands_to_paste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "my digits"
    assert main(["new", str(target), "--template", "classifier", "--name", "my-digits"]) == 0
    printed = capsys.readouterr().out
    assert 'name = "my-digits"' in (target / "pyproject.toml").read_text()
    assert [line.strip() for line in printed.splitlines()[-3:]] == [
        f"cd '{target}' && trainwright fit --config config.yaml",
        "trainwright test --config config.yaml --ckpt_path best",
        "trainwright report runs",
    ]
    assert printed.count("\n  ") == 3


def test_an_empty_working_folder_is_filled_and_stays_the_same_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "project"
    target.mkdir()
    before = target.stat().st_ino
    monkeypatch.chdir(target)
    assert main(["new", "."]) == 0
    assert target.stat().st_ino == before
    assert (target / "train.py").is_file()


def test_a_folder_that_is_not_empty_is_refused_and_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert main(["new", str(tmp_path), "--name", "x"]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert main(["new", str(tmp_path / "thesis.txt")]) == 2
    assert "not an empty folder" in capsys.readouterr().err
    assert _files_below(tmp_path) == ["thesis.txt"]


def test_an_unknown_template_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigurationError, match=r"Did you mean 'classifier'\? Known: classifier, finetune, language-model"
    ):
        write_project(tmp_path / "project", template="clasifier")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("name", "package"),
    [("My-Digits.v2", "my_digits_v2"), ("3d", "project_3d"), ("class", "project_class"), ("torch", "project_torch")],
)
def test_the_package_s_name_is_an_identifier(name: str, package: str) -> None:
    assert project_names(name)["package"] == package
    assert package.isidentifier()


@pytest.fixture
def template(tmp_path: Path) -> Path:
    """A template with one of everything: a rendered file, a copied one, a dotfile, a folder named after the package."""
    folder = tmp_path / "template"
    (folder / "{{ package }}").mkdir(parents=True)
    (folder / "{{ package }}" / "__init__.py.jinja").write_text('"""{{ name }}."""\n')
    (folder / "{{ package }}_data.txt").write_text("{{ not rendered }}")
    (folder / "gitignore.jinja").write_text("runs/\n")
    (folder / "__pycache__").mkdir()
    (folder / "__pycache__" / "left_over.pyc").write_bytes(b"")
    return folder


def test_jinja_files_are_rendered_others_copied_and_names_filled_in(template: Path) -> None:
    files = render(template, project_names("My-Digits"))
    assert {path.as_posix(): content for path, content in files.items()} == {
        "my_digits/__init__.py": b'"""My-Digits."""\n',
        "my_digits_data.txt": b"{{ not rendered }}",
        ".gitignore": b"runs/\n",
    }
