"""`trainwright migrate FILE…`: rewrite programs of Lightning or Accelerate, and their launch commands."""

from __future__ import annotations

import argparse
import difflib
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence, Sized
from pathlib import Path

from trainwright.cli.migration.rewrite_config import rewrite_class_paths
from trainwright.cli.migration.rewrite_imports import Rewritten, rewrite
from trainwright.cli.migration.rewrite_launch import check_config, is_command_file, rewrite_launch
from trainwright.core.errors import ConfigurationError

_UNSETTLED = 1  # exit code: manual changes are needed, or with `--check` any changes


def migrate(argv: Sequence[str]) -> int:
    """Rewrite files in place, or print changes with `--diff`.

    Print added arguments and the remaining manual changes with file and line.

    Returns:
        0, or 1 if manual changes are needed, or with `--check` any changes.
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
    files: list[Path] = []
    for path in arguments.files:
        files.extend(_files_below(path) if path.is_dir() else [path])
    done = [(path, *_rewritten(path)) for path in dict.fromkeys(files)]
    changed = [path for path, before, after in done if before != after.code]
    writes = not arguments.diff and not arguments.check
    if writes:
        _check_writable(changed)
    for path, before, after in done:
        if arguments.diff:
            _print_diff(path, before, after.code)
        elif path in changed and arguments.check:
            print(f"{path}: would be rewritten")
        elif path in changed:
            try:
                _write(path, after.code)
            except OSError as error:
                raise ConfigurationError(
                    f"{path}: cannot be written ({error.strerror}) and is unchanged. The files named above are "
                    "rewritten."
                ) from None
            print(f"{path}: rewritten")
    for path, _, after in done:
        for each in after.added:
            print(f"{path}:{each.line}: {each.text}", file=sys.stderr)
    left = [(path, each) for path, _, after in done for each in after.unsettled]
    for path, each in left:
        print(f"{path}:{each.line}: {each.text}", file=sys.stderr)
    if len(done) > 1:
        verb = "rewritten" if writes else "to rewrite"
        by_hand = f"{_number(left, 'change')} to make by hand in {_number({path for path, _ in left}, 'file')}"
        print(f"trainwright migrate: {_number(changed, 'file')} of {len(done)} {verb}, {by_hand}.", file=sys.stderr)
    return _UNSETTLED if left or (arguments.check and changed) else 0


def _number(found: Sized, noun: str) -> str:
    return f"{len(found)} {noun}" + "s" * (len(found) != 1)


def _files_below(folder: Path) -> list[Path]:
    """Return the Python files and the files with commands below a folder, in the order of their paths."""
    found: list[Path] = []
    for parent, folders, names in os.walk(folder):
        above = Path(parent)
        folders[:] = [
            name for name in folders if not name.startswith(".") and not (above / name / "pyvenv.cfg").exists()
        ]
        for name in names:
            path = above / name
            if path.suffix == ".py" or (path.is_file() and is_command_file(path, path.read_bytes()[:200])):
                found.append(path)
    return sorted(found)


def _rewritten(path: Path) -> tuple[bytes, Rewritten]:
    try:
        before = path.read_bytes()
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read ({error.strerror}). No file has been changed.") from None
    if path.suffix != ".py":
        return before, _rewritten_commands(path, before)
    try:
        return before, rewrite(before)
    except (SyntaxError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path} is not Python: {error}. No file has been changed.") from None


def _rewritten_commands(path: Path, before: bytes) -> Rewritten:
    if path.suffix in (".yaml", ".yml", ".json") and (found := check_config(before, path)) is not None:
        return Rewritten(before, found)
    if not is_command_file(path, before):
        raise ConfigurationError(
            f"{path} is not a Python file, a shell file, a Makefile or a YAML file. No file has been changed."
        )
    try:
        commands = rewrite_launch(before)
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


def _print_diff(path: Path, before: bytes, after: bytes) -> None:
    old, new = (text.decode("utf-8", "replace").splitlines(keepends=True) for text in (before, after))
    sys.stdout.writelines(difflib.unified_diff(old, new, str(path), str(path)))


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
