"""`trainwright new`: write a training project from a template.

A template is a folder in `trainwright.templates`. Files that end in `.jinja` are rendered, and the suffix is removed.
Other files are copied unchanged. Names of files and folders may contain `{{ package }}`.
"""

from __future__ import annotations

import argparse
import keyword
import re
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources.abc import Traversable
from pathlib import Path, PurePosixPath

from trainwright import __version__
from trainwright.core.errors import ConfigurationError, nearest

TEMPLATES_PACKAGE = "trainwright.templates"
_SUFFIX = ".jinja"
_DEFAULT_TEMPLATE = "classifier"
# Packagers and version control treat files whose name begins with a dot specially, so templates spell it out.
_DOTFILES = {"gitignore": ".gitignore"}
# A project's package comes first in the import path: with one of these names it would hide what the project imports.
_IMPORTED_NAMES = {
    *sys.stdlib_module_names, "numpy", "optuna", "peft", "pytest", "safetensors", "sklearn", "tests", "tokenizers",
    "torch", "torchmetrics", "trainwright", "transformers", "export", "sweep", "train",
}  # fmt: skip


def new(argv: Sequence[str]) -> int:
    """Write a new project and print the next steps; see `trainwright new --help`.

    Returns:
        The exit code 0.

    Raises:
        ConfigurationError: see `write_project`.
    """
    parser = argparse.ArgumentParser(prog="trainwright new", description="Write a project that trains.")
    parser.add_argument("path", type=Path, metavar="PATH", help="the folder to write; new, or empty")
    parser.add_argument(
        "--template",
        default=_DEFAULT_TEMPLATE,
        metavar="NAME",
        help=f"one of: {', '.join(template_names())} (default: {_DEFAULT_TEMPLATE})",
    )
    parser.add_argument("--name", help="the project's name (default: the folder's)")
    wanted = parser.parse_args(argv)
    files = write_project(wanted.path, template=wanted.template, name=wanted.name)
    print(f"Wrote {len(files)} files to {wanted.path}. Next:\n")
    fit = "trainwright fit --config config.yaml"
    if wanted.path.resolve() != Path.cwd():
        fit = f"cd {shlex.quote(str(wanted.path))} && {fit}"
    print(f"  {fit}")
    print("  trainwright test --config config.yaml --ckpt_path best")
    print("  trainwright report runs")
    return 0


def template_names() -> list[str]:
    """Return the sorted names of the templates."""
    return sorted(entry.name for entry in _templates().iterdir() if entry.is_dir() and not entry.name.startswith("_"))


def write_project(path: Path, *, template: str = _DEFAULT_TEMPLATE, name: str | None = None) -> list[PurePosixPath]:
    """Render a template into a folder.

    All files are rendered first, then written to a temporary folder and renamed. An error leaves no partial project,
    except one while the parts of the project are moved into an existing empty folder.

    Args:
        path: the folder to write. It may be an existing empty folder. Missing parents are created.
        template: a name from `template_names()`.
        name: the project's name. Default: None, the last part of `path`.

    Returns:
        The written files, relative to `path`, sorted.

    Raises:
        ConfigurationError: the template is unknown, `path` is not a new or empty folder or cannot be created, or the
            name is not valid.
        OSError: a file cannot be written, for example because the disk is full.
    """
    known = template_names()
    if template not in known:
        raise ConfigurationError(
            f"--template {template!r} is unknown.{nearest(template, known)} Known: {', '.join(known)}."
        )
    try:
        path = path.resolve()
        path.exists()  # fails here, not in the checks below, if the path is a link to itself or too long
    except (OSError, RuntimeError) as error:
        raise ConfigurationError(
            f"PATH {str(path)!r} cannot be a folder: {_first_line(error)}. Choose another PATH."
        ) from None
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ConfigurationError(f"{path} exists and is not an empty folder. Choose another PATH or empty it first.")
    files = render(_templates() / template, project_names(name if name is not None else path.name))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix=f".{path.name}-", dir=path.parent))
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be created: {_first_line(error)}. Choose another PATH.") from None
    try:
        # One level further down: only the owner may enter a folder of mkdtemp, and the project is for all users.
        project = staging / path.name
        project.mkdir()
        for relative, content in files.items():
            target = project / relative
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
        _publish(project, path)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return sorted(files)


def project_names(name: str) -> dict[str, str]:
    """Return the variables of the templates: `name`, `package` (a Python identifier), `version` (of Trainwright).

    Raises:
        ConfigurationError: `name` has other characters than letters, digits, `.`, `-` and `_`, or does not begin and
            end with a letter or digit.
    """
    if not re.fullmatch(r"[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?", name):
        raise ConfigurationError(
            f"--name {name!r} is not a project's name. Pass --name with letters, digits, '.', '-' and '_', and with a "
            "letter or digit at both ends."
        )
    package = re.sub(r"[^a-z0-9]+", "_", name.lower())
    if package[0].isdigit() or keyword.iskeyword(package) or package in _IMPORTED_NAMES:
        package = f"project_{package}"
    return {"name": name, "package": package, "version": __version__}


def render(template: Traversable, names: Mapping[str, str]) -> dict[PurePosixPath, bytes]:
    """Return the rendered files of a template by their paths relative to the project."""
    import jinja2

    environment = jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True, autoescape=False)
    files: dict[PurePosixPath, bytes] = {}
    for parts, entry in _walk(template):
        content = entry.read_bytes()
        if entry.name.endswith(_SUFFIX):
            parts = (*parts[:-1], entry.name.removesuffix(_SUFFIX))
            content = environment.from_string(content.decode()).render(names).encode()
        parts = (*parts[:-1], _DOTFILES.get(parts[-1], parts[-1]))
        rendered_parts = [environment.from_string(part).render(names) for part in parts]
        files[PurePosixPath(*rendered_parts)] = content
    return files


def _first_line(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) else str(error)
    return (text or type(error).__name__).partition("\n")[0]


def _templates() -> Traversable:
    from importlib.resources import files

    return files(TEMPLATES_PACKAGE)


def _walk(folder: Traversable, above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    """Yield the path, as parts, and the entry of each file below a folder, without Python's caches."""
    for entry in folder.iterdir():
        if entry.name == "__pycache__" or entry.name.endswith(".pyc"):
            continue
        if entry.is_dir():
            yield from _walk(entry, (*above, entry.name))
        else:
            yield (*above, entry.name), entry


def _publish(project: Path, path: Path) -> None:
    """Move the written files to the project's folder, with one rename if the folder is new.

    An existing empty folder is not replaced, because it may be the working folder of a process.
    """
    if not path.exists():
        project.rename(path)
        return
    for entry in sorted(project.iterdir()):
        entry.rename(path / entry.name)
