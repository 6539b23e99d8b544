"""`python -m trainwright.commands.launch`: the same as `trainwright launch`, for debuggers that start a module.

`launch_command_parser` and `launch_command` are for programs that launch a script themselves, such as trl.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from trainwright.cli.main import main
from trainwright.launch.launch import launch, replaces_accelerate
from trainwright.launch.reading import ALIASES, SHORT, known_options

__all__ = ["launch_command", "launch_command_parser"]

_FURTHER = ("module", "no_python")  # of the launcher's command line, but not of its configuration


def launch_command_parser() -> argparse.ArgumentParser:
    """Return a parser of the options of `trainwright launch`, a script and its arguments, for `launch_command`."""
    parser = argparse.ArgumentParser("trainwright launch", allow_abbrev=False)
    short = {name: flag for flag, name in SHORT.items()}

    def add(name: str, **options: Any) -> None:
        names = [name, *(alias for alias, known in ALIASES.items() if known == name)]
        flags = {f"--{one}" for one in names} | {f"--{one.replace('_', '-')}" for one in names}
        if name in short:
            flags.add(short[name])
        parser.add_argument(*sorted(flags), dest=name, **options)

    for option in known_options().values():
        if option.takes_none_of([]):
            add(option.name, action="store_true")
        elif option.repeats:
            add(option.name, action="append")
        else:
            add(option.name, type=option.parse_argument)
    for name in _FURTHER:
        add(name, action="store_true")
    add("config_file")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run the script of `launch_command_parser().parse_args(…)`. The attributes of `args` may be changed before.

    A single process replaces the calling process. After `trainwright.as_accelerate()`, the script runs on Trainwright
    too: its processes start with `-m trainwright.as_accelerate`, except with `--no_python`.

    Raises:
        ConfigurationError: An option or the script is not valid. No process has been started.
        MissingPackageError: A package or program that an option needs is missing. No process has been started.
        SystemExit: A process failed.
    """
    words: list[str] = []
    for name in (*known_options(), "config_file"):
        value = getattr(args, name, None)
        if value is False:
            continue  # a flag that was not given: the configuration file may set it
        if isinstance(value, (list, tuple)):
            value = "\n".join(map(str, value))
        if isinstance(value, dict):
            value = json.dumps(value)
        if value is not None:
            words.append(f"--{name}={value}")
    is_module = bool(getattr(args, "module", None))
    no_python = bool(getattr(args, "no_python", None))
    program = [args.training_script, *args.training_script_args]
    if replaces_accelerate() and not no_python:
        # The replacement ends with this process. Without this, the started processes would import accelerate.
        if is_module:
            program.insert(0, "-m")
        program.insert(0, "trainwright.as_accelerate")
        is_module = True
    if is_module:
        words.append("--module")
    if no_python:
        words.append("--no_python")
    code = launch([*words, "--", *program])
    if code:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
