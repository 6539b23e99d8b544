"""The dispatcher: find and run the sub-command, and print a `TrainwrightError` as one line.

This module imports neither torch nor the modules of commands, so that `trainwright --help` is fast.
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from trainwright import __version__
from trainwright.core.errors import ConfigurationError, TrainwrightError, nearest, visible
from trainwright.core.registry import import_object

_PROG = "trainwright"
_ERROR_CODE = 2  # as in argparse
INTERRUPTED = 130  # 128 + SIGINT, as in shells


@dataclass(frozen=True, slots=True)
class Command:
    """One sub-command.

    Attributes:
        target: `"module:function"`. The function receives the arguments after the command's name, and returns an exit
            code. The module is imported when the command is called.
        help: description in the help of `trainwright`.
    """

    target: str
    help: str


# Title of a group in the help → its commands by name.
_GROUPS: dict[str, dict[str, Command]] = {
    "train": {
        "new": Command("trainwright.cli.new:new", "write a project that trains, from a template"),
        "plan": Command("trainwright.cli.show_plan:plan", "show what fit will do, without training"),
        "fit": Command("trainwright.cli.fit:fit", "train the task of a configuration file"),
        "validate": Command("trainwright.cli.fit:validate", "run the validation of a configuration file"),
        "test": Command("trainwright.cli.fit:test", "run the test of a configuration file"),
        "predict": Command("trainwright.cli.fit:predict", "run the prediction of a configuration file"),
    },
    "several processes": {
        "launch": Command("trainwright.launch.launch:launch", "run a script in several processes"),
        "config": Command("trainwright.launch.config_commands:config", "write, update or show the options of launch"),
        "check": Command("trainwright.launch.check:check", "check that the processes of launch can train"),
        "parity": Command("trainwright.cli.parity:parity", "compare strategies, step by step, on your task"),
        "to-fsdp2": Command("trainwright.launch.config_commands:to_fsdp2", "write options of FSDP1 as those of FSDP2"),
        "tpu-config": Command(
            "trainwright.launch.config_commands:tpu_config", "run commands on the machines of a TPU pod"
        ),
    },
    "runs": {
        "report": Command(
            "trainwright.cli.reports.report:report", "write the curves and events of a run as one HTML file"
        ),
        "diff": Command("trainwright.cli.reports.run_diff:diff", "show what differs between two runs"),
        "replay": Command("trainwright.cli.reports.step_replay:replay", "rerun a step of a run on one device"),
        "profile": Command("trainwright.cli.profile:profile", "train a few steps, and show where their time goes"),
    },
    "models and checkpoints": {
        "checkpoint": Command("trainwright.cli.checkpoint:checkpoint", "list, verify, compare or convert checkpoints"),
        "merge-weights": Command("trainwright.cli.checkpoint:merge_weights", "merge the shards of FSDP and DeepSpeed"),
        "estimate": Command("trainwright.cli.estimate:estimate", "estimate the memory of a model"),
        "estimate-memory": Command("trainwright.cli.estimate:estimate", "`estimate` under Accelerate's name"),
    },
    "data and programs": {
        "data": Command("trainwright.cli.token_data:data", "tokenize texts for language models"),
        "migrate": Command("trainwright.cli.migration.migrate:migrate", "rewrite programs of Lightning and Accelerate"),
        "env": Command("trainwright.cli.env:env", "show versions and devices, for a bug report"),
    },
}
COMMANDS: dict[str, Command] = {name: command for group in _GROUPS.values() for name, command in group.items()}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: the arguments. Default: None, which is `sys.argv[1:]`.

    Returns:
        The exit code of the command. 2 for an unknown command or a `TrainwrightError`, which is printed to stderr
        without a traceback unless `--traceback` is passed. 130 after Ctrl-C. 0 if the reader of a pipe has closed it.
        Other errors are raised.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    show_traceback, arguments = _take_traceback_option(arguments)
    try:
        return _dispatch(arguments)
    except SystemExit as stop:
        return _exit_code(stop)
    except TrainwrightError as error:
        if show_traceback:
            traceback.print_exc()
        else:
            print(visible(f"{_PROG}: error: {error}"), file=sys.stderr)
        return _ERROR_CODE
    except BrokenPipeError:  # the reader has closed the pipe, as in `trainwright … | head`
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  # the rest of the pipe is not flushed at exit
        return 0
    except KeyboardInterrupt:
        print(f"{_PROG}: interrupted", file=sys.stderr)
        return INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    """Run the command that the first argument names. Return its exit code: 0 for help, 2 for an unknown command."""
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    name = arguments[0]
    if name.startswith("-"):  # an option before the command
        parser.parse_args(arguments)  # --help and --version exit; anything else is reported
        return 0
    command = COMMANDS.get(name)
    if command is None:
        known = ", ".join(COMMANDS)
        print(f"{_PROG}: error: unknown command {name!r}.{nearest(name, COMMANDS)} Known: {known}.", file=sys.stderr)
        return _ERROR_CODE
    return int(import_object(command.target)(arguments[1:]))


def _parser() -> argparse.ArgumentParser:
    width = max(map(len, COMMANDS))
    lines: list[str] = []
    for title, group in _GROUPS.items():
        lines += ["", f"{title}:"]
        lines += [f"  {name:<{width}}  {command.help}" for name, command in group.items()]
    parser = argparse.ArgumentParser(
        prog=_PROG,
        usage=f"{_PROG} COMMAND [ARGUMENTS]",
        description="Train PyTorch models.",
        epilog="\n".join(lines).strip() + f"\n\n`{_PROG} COMMAND --help` describes one command.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"{_PROG} {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show where an error comes from")
    return parser


def check_subcommand(command: str, argv: Sequence[str], known: Sequence[str]) -> None:
    """Raise a ConfigurationError for an unknown sub-command of `command`. The message names the most similar one."""
    if argv and not argv[0].startswith("-") and argv[0] not in known:
        raise ConfigurationError(
            f"{command} has no command {argv[0]!r}.{nearest(argv[0], known)} Known: {', '.join(known)}."
        )


def _take_traceback_option(arguments: list[str]) -> tuple[bool, list[str]]:
    """Return whether `--traceback` is among the arguments, and the other arguments.

    Words after `--` do not count. With `launch`, the option counts only before the command or directly after it:
    further words may be arguments of the script.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    command = next((index for index, word in enumerate(arguments) if not word.startswith("-")), None)
    if command is not None and arguments[command] == "launch":
        end = min(end, command + 2)
    others = [word for word in arguments[:end] if word != "--traceback"]
    is_passed = len(others) < end  # a word was removed
    return is_passed, others + arguments[end:]


def _exit_code(stop: SystemExit) -> int:
    """Return the exit code of a SystemExit, after printing its message."""
    if stop.code is None:
        return 0
    if isinstance(stop.code, int):
        return stop.code
    print(stop.code, file=sys.stderr)
    return 1


def table_lines(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows of texts as lines with aligned columns. All rows have the same number of cells."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
