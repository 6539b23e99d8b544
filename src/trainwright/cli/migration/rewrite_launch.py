"""Rewriting of Accelerate's commands in shell files, Makefiles, batch scripts and YAML files.

Trainwright's commands take the same options and configuration files. Options that Trainwright lacks are reported.
"""

from __future__ import annotations

import re
from pathlib import Path

from trainwright.cli.migration.program import Unsettled
from trainwright.cli.migration.rewrite_imports import Rewritten
from trainwright.core.errors import ConfigurationError
from trainwright.core.yaml_text import parse_yaml
from trainwright.launch.launch_config import LaunchConfig, Option
from trainwright.launch.reading import check_supported, known_options, options_of

_NAMES = "launch|config|to-fsdp2|env|estimate-memory|merge-weights|tpu-config|test"
_OTHER_NAMES = {"test": "check"}  # the others are the same
# The name may follow a folder: `.venv/bin/accelerate launch`.
_START = r"(?<![\w/.-])(?P<before>(?:[\w.$(){}~-]*/)*)"
# The name ends here: not so in `accelerate-config.yaml`, `accelerate-test-suite` and the package `test-tube`.
_END = r"(?![\w/-]|\.\w)"
# `accelerate launch` and `accelerate-launch`
_COMMAND = re.compile(rf"{_START}accelerate(?:-|[ \t]+)(?P<name>{_NAMES}){_END}")
# `python -m accelerate.commands.launch` becomes `python -m trainwright launch`.
_MODULE = re.compile(rf"(?P<before>-m[ \t]+)accelerate\.commands\.(?:accelerate_cli[ \t]+)?(?P<name>{_NAMES}){_END}")
# Modules with other names than their commands. They exist in `trainwright.commands`, too.
_RENAMED_MODULE = re.compile(rf"-m([ \t]+)accelerate\.commands\.(?=(?:estimate|merge|to_fsdp2|tpu){_END})")
# Words of a list: `["accelerate", "launch"]`, or two items of YAML on two lines.
_LISTED = re.compile(rf"\baccelerate(?P<between>[\"']?(?:,\s*|\s*\n\s*-\s*)[\"']?)(?P<name>{_NAMES}){_END}")
_ENDINGS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".sub", ".job", ".mk", ".yaml", ".yml")
_CONFIG_KEYS = ("compute_environment", "distributed_type")


def rewrite_launch(code: bytes) -> Rewritten:
    """Rewrite the commands of a file. Lines with a comment only are not changed.

    Options after a `trainwright launch` that it does not support are reported, also on all later lines. Options after
    the words of a list, such as `["accelerate", "launch"]`, are not checked.

    Raises:
        UnicodeDecodeError: the file is not text.
    """
    unsettled: list[Unsettled] = []
    lines = code.decode().split("\n")
    launches = False  # whether this line or an earlier one has a launch command
    for number, line in enumerate(lines, 1):
        if line.lstrip().startswith("#"):
            continue
        line = _MODULE.sub(_renamed, line)
        line = _RENAMED_MODULE.sub(r"-m\1trainwright.commands.", line)
        line = _COMMAND.sub(_renamed, line)
        lines[number - 1] = line
        launches = launches or "trainwright launch" in line
        if not launches:
            continue
        # Options may be on the lines after the command.
        for flag, value in re.findall(r"--([\w-]+)(?:[ =]+([^\s-]\S*))?", line):
            option = known_options().get(flag.replace("-", "_"))
            if option is not None:
                unsettled.extend(Unsettled(number, text) for text in _problems(option, flag, value))
    text = _LISTED.sub(_renamed_in_list, "\n".join(lines))
    return Rewritten(text.encode(), unsettled)


def _renamed(command: re.Match[str]) -> str:
    """Return Trainwright's command. Words of a list keep what is between them."""
    groups = command.groupdict()  # each pattern has either `before` or `between`
    name = _OTHER_NAMES.get(groups["name"], groups["name"])
    before = groups.get("before", "")
    between = groups.get("between", " ")
    return f"{before}trainwright{between}{name}"


def _renamed_in_list(words: re.Match[str]) -> str:
    """Return Trainwright's words of a list, which may be on two lines. Words in a comment line are not changed."""
    start_of_line = words.string.rfind("\n", 0, words.start()) + 1
    if words.string[start_of_line:].lstrip().startswith("#"):
        return words[0]
    return _renamed(words)


def _problems(option: Option, flag: str, value: str) -> list[str]:
    """Return messages about an option in a command that `trainwright launch` does not support. Empty if it does."""
    reason = option.refusal(True if option.is_flag else value or True)
    if reason:
        return [f"--{flag} is not supported: {reason}."]
    if value and option.choices and "$" not in value:  # the shell replaces variables
        try:
            option.parse(value.strip("\"'"), f"--{flag}")
        except ConfigurationError as error:
            return [str(error)]
    return []


def is_command_file(path: Path, code: bytes) -> bool:
    """Return whether a file contains commands, according to its name or the first line of a shell script."""
    name = path.name.lower()
    if path.suffix in _ENDINGS or name in ("makefile", "gnumakefile") or name.startswith("dockerfile"):
        return True
    return not path.suffix and re.match(rb"#!.*\b(?:ba|z|k|da)?sh\b", code) is not None


def check_config(code: bytes, path: Path) -> list[Unsettled] | None:
    """Return the error of `trainwright launch` for an Accelerate configuration file, in a list.

    Returns:
        An empty list if the file is supported. None if it is not an Accelerate configuration.
    """
    try:
        content = parse_yaml(code.decode("utf-8", "replace"), str(path))
    except ConfigurationError:
        return None
    if not isinstance(content, dict) or not any(key in content for key in _CONFIG_KEYS):
        return None
    try:
        check_supported(LaunchConfig(**options_of(content, str(path))))
    except ConfigurationError as error:
        return [Unsettled(1, str(error))]
    return []
