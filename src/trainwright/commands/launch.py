"""`python -m trainwright.commands.launch`: the same as `trainwright launch`, for debuggers that start a module.

`launch_command_parser` and `launch_command` are for programs that launch a script themselves, such as trl.
"""

from __future__ import annotations

import argparse
import json
import sys

from trainwright.cli.main import main
from trainwright.launch.launch import launch
from trainwright.launch.reading import SHORT, known_options

_FURTHER = ("module", "no_python")


def launch_command_parser() -> argparse.ArgumentParser:
    """Return a parser of the options of `trainwright launch`, a script and its arguments, for `launch_command`."""
    parser = argparse.ArgumentParser("trainwright launch", allow_abbrev=False)
    short = {name: flag for flag, name in SHORT.items()}

    def add(name: str, **settings: object) -> None:
        flags = {f"--{name}", f"--{name.replace('_', '-')}"} | ({short[name]} if name in short else set())
        parser.add_argument(*sorted(flags), dest=name, default=None, **settings)  # type: ignore[arg-type]

    for option in known_options().values():
        if option.is_flag:
            add(option.name, action="store_true")
        else:
            add(option.name, action="append" if option.repeats else "store")
    for name in _FURTHER:
        add(name, action="store_true")
    add("config_file")
    parser.add_argument("training_script")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER)
    return parser


def launch_command(args: argparse.Namespace) -> None:
    """Run the script of `launch_command_parser().parse_args(…)`. The attributes of `args` may be changed before.

    A single process replaces the calling process.

    Raises:
        ConfigurationError: An option or the script is not valid. No process has been started.
        SystemExit: A process failed.
    """
    words: list[str] = []
    for name in (*known_options(), "config_file"):
        value = getattr(args, name, None)
        if isinstance(value, list):
            value = "\n".join(map(str, value))
        if isinstance(value, dict):
            value = json.dumps(value)
        if value is not None:
            words.append(f"--{name}={value}")
    words += [f"--{name}" for name in _FURTHER if getattr(args, name, None)]
    code = launch([*words, "--", args.training_script, *args.training_script_args])
    if code:
        sys.exit(code)


if __name__ == "__main__":
    sys.exit(main(["launch", *sys.argv[1:]]))
