"""`trainwright migrate FILE…`: rewrite programs of Lightning or Accelerate, and their launch commands."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence, Sized
from dataclasses import dataclass
from pathlib import Path

from trainwright.cli.migration.program import Unsettled
from trainwright.cli.migration.rewrite_config import rewrite_class_paths
from trainwright.cli.migration.rewrite_imports import Rewritten, rewrite
from trainwright.cli.migration.rewrite_launch import check_config, is_command_file, rewrite_launch
from trainwright.core.errors import ConfigurationError

_UNSETTLED = 1  # exit code: manual changes are needed, or with `--check` any changes


@dataclass(frozen=True)
class _File:
    """A file with its code before the rewrite, and the result of the rewrite, which is not written yet."""

    path: Path
    code: bytes
    result: Rewritten

    @property
    def is_changed(self) -> bool:
        """Whether the rewrite changes the file."""
        return self.code != self.result.code


def migrate(argv: Sequence[str]) -> int:
    """Rewrite files in place, or print changes with `--diff`.

    Print added arguments and the remaining manual changes with file and line.

    Returns:
        The exit code: 0, or 1 if manual changes are needed, or with `--check` any changes.

    Raises:
        ConfigurationError: a file cannot be read, rewritten or written. No file is changed before all are rewritten.
    """
    parser = argparse.ArgumentParser(
        prog="trainwright migrate",
        description=(
            "Rewrite, in place, the imports and names of Lightning and Accelerate in Python files, the commands of "
            "Accelerate in shell files, Makefiles, batch scripts and YAML files, and class paths (_target_ of Hydra, "
            "class_path of LightningCLI) in YAML files. Print what is not supported in "
            "Accelerate's configuration files, which `trainwright launch` reads as they are."
        ),
        epilog="Exit code: 0, or 1 if manual changes are needed (with --check: any changes), or 2 for a file that "
        "cannot be read.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "files",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="a Python, shell or YAML file, or a Makefile; or a folder, for all of these below it. Folders whose names "
        "begin with a dot, and virtual environments, are left out",
    )
    parser.add_argument("--diff", action="store_true", help="print what would change, and write nothing")
    parser.add_argument(
        "--check",
        action="store_true",
        help="print which files would change, and write nothing: for continuous integration",
    )
    arguments = parser.parse_args(list(argv))
    paths: list[Path] = []
    for path in arguments.files:
        paths.extend(_files_below(path) if path.is_dir() else [path])
    files = [_rewrite_file(path) for path in dict.fromkeys(paths)]
    changed = [file for file in files if file.is_changed]
    writes = not arguments.diff and not arguments.check
    if writes:
        _check_writable([file.path for file in changed])
    for file in files:
        if arguments.diff:
            _print_diff(file)
        elif file.is_changed and arguments.check:
            print(f"{file.path}: would be rewritten")
        elif file.is_changed:
            try:
                _write(file.path, file.result.code)
            except OSError as error:
                raise ConfigurationError(
                    f"{file.path}: cannot be written ({error.strerror}) and is unchanged. The files named above are "
                    "rewritten."
                ) from None
            print(f"{file.path}: rewritten")
    for file in files:
        for each in file.result.added:
            print(f"{file.path}:{each.line}: {each.text}", file=sys.stderr)
    manual: list[Unsettled] = []
    for file in files:
        for each in file.result.unsettled:
            manual.append(each)
            print(f"{file.path}:{each.line}: {each.text}", file=sys.stderr)
    if len(files) > 1:
        verb = "rewritten" if writes else "to rewrite"
        files_by_hand = [file for file in files if file.result.unsettled]
        by_hand = f"{_number(manual, 'change')} to make by hand in {_number(files_by_hand, 'file')}"
        print(f"trainwright migrate: {_number(changed, 'file')} of {len(files)} {verb}, {by_hand}.", file=sys.stderr)
    return _UNSETTLED if manual or (arguments.check and changed) else 0


def _number(items: Sized, noun: str) -> str:
    """Return `1 file`, or `2 files`."""
    ending = "" if len(items) == 1 else "s"
    return f"{len(items)} {noun}{ending}"


def _files_below(folder: Path) -> list[Path]:
    """Return the Python files and the files with commands below a folder, in the order of their paths."""
    paths: list[Path] = []
    for parent, folders, names in os.walk(folder):
        above = Path(parent)
        # `os.walk` enters the folders that are left in this list.
        folders[:] = [
            name for name in folders if not name.startswith(".") and not (above / name / "pyvenv.cfg").exists()
        ]
        for name in names:
            path = above / name
            if path.suffix == ".py" or (path.is_file() and is_command_file(path, path.read_bytes()[:200])):
                paths.append(path)
    return sorted(paths)


def _rewrite_file(path: Path) -> _File:
    """Read a file and rewrite its code, without writing it."""
    try:
        code = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror}). No file has been changed.") from None
    if path.suffix != ".py":
        return _File(path, code, _rewrite_commands(path, code))
    try:
        return _File(path, code, rewrite(code))
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not Python: {error}. No file has been changed.") from None


def _rewrite_commands(path: Path, code: bytes) -> Rewritten:
    if path.suffix in (".yaml", ".yml", ".json"):
        unsupported = check_config(code, path)
        if unsupported is not None:  # a configuration of Accelerate, which is read as it is
            return Rewritten(code, unsupported)
    if not is_command_file(path, code):
        raise ConfigurationError(
            f"{path} is not a Python file, a shell file, a Makefile or a YAML file. No file has been changed."
        )
    try:
        commands = rewrite_launch(code)
        if path.suffix not in (".yaml", ".yml"):
            return commands
        classes = rewrite_class_paths(commands.code)
        return Rewritten(classes.code, sorted([*commands.unsettled, *classes.unsettled]))
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"{path} is not text in UTF-8: {error}. No file has been changed.") from None


def _check_writable(paths: Sequence[Path]) -> None:
    for path in paths:
        if not path.stat().st_mode & 0o222 or not os.access(path, os.W_OK):
            raise ConfigurationError(f"{path} may not be written. No file has been changed.")


def _print_diff(file: _File) -> None:
    old = file.code.decode("utf-8", "replace").splitlines(keepends=True)
    new = file.result.code.decode("utf-8", "replace").splitlines(keepends=True)
    sys.stdout.writelines(difflib.unified_diff(old, new, str(file.path), str(file.path)))


def _write(path: Path, code: bytes) -> None:
    """Replace a file by one rename, and keep its permissions. For a link, replace the target."""
    target = path.resolve()
    handle, name = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(code)
            file.flush()
            os.fsync(file.fileno())
        shutil.copymode(target, name)
        Path(name).replace(target)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
