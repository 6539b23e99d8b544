"""`trainwright config`, `trainwright to-fsdp2` and `trainwright tpu-config`.

They write, update and show the configuration of `trainwright launch`, and run commands on all machines of a TPU pod by
gcloud. A file that cannot be read or written raises ConfigurationError.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError, MissingPackageError
from trainwright.launch import config_file, questions, reading
from trainwright.launch.launch import check_options, device_count
from trainwright.launch.launch_config import LaunchConfig

_COMMANDS = {
    "default": "write one process for each device of this machine, without questions",
    "update": "rewrite a file in the current layout, with its values",
    "show": "print the options that are set, and by which file or variable",
}


def config(argv: Sequence[str]) -> int:
    """Ask questions and write a configuration file, or run the sub-command. Return 1 if an existing file is kept."""
    name = ""
    if argv and argv[0] in _COMMANDS:
        name = argv[0]
        argv = argv[1:]
    lines = "\n".join(f"  {command:<8} {text}" for command, text in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog=f"trainwright config {name}".strip(),
        description=_COMMANDS.get(name, "Ask questions and write a configuration file.").capitalize(),
        epilog="" if name else f"sub-commands:\n{lines}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    text = "the file. Default: default_config.yaml in the folder of `trainwright launch`"
    parser.add_argument("--config_file", "--config-file", type=Path, metavar="FILE", help=text)
    if name == "default":
        parser.add_argument("--mixed_precision", "--mixed-precision", default="no", help="no, fp16, bf16 or fp8")
    options = parser.parse_args(argv)
    path = options.config_file
    if name == "update":
        return _update(path or reading.default_file())
    if name == "show":
        print("\n".join(described(path)))
        return 0
    path = path or config_file.default_path()
    if name == "default":
        basic = config_file.basic_config(options.mixed_precision)
        if path.exists():
            raise ConfigurationError(f"{path} exists. Delete it, or pass --config_file with another path.")
        _write(basic, path)
        return 0
    questions.check_terminal()
    if path.exists() and not questions.confirm(f"{path} exists. Replace it?"):
        print("Nothing was written.")
        return 1
    answers = questions.ask(device_count())
    check_options(answers)
    _write(answers, path)
    return 0


def _update(path: Path | None) -> int:
    if path is None:
        raise ConfigurationError("there is no configuration file. Write one with `trainwright config`.")
    content = reading.read_content(path)
    values = reading.read_file(path)[1]
    # Options do not contain the type of the devices, such as MULTI_NPU: take it from the old file. They contain `cpu`,
    # which replaces MULTI_CPU. `read_file` has checked above that `content` is a mapping.
    devices = str(content.get("distributed_type")).upper()
    if devices not in reading.DEVICES or devices == "MULTI_CPU":
        devices = "MULTI_GPU"
    _write(LaunchConfig(**values), path, devices)
    unused = [key for key in content if reading.sets_nothing(key) and key not in values]
    if unused:
        print(f"Omitted, because they set nothing: {', '.join(unused)}")
    return 0


def described(path: str | Path | None = None) -> list[str]:
    """Return lines that name the configuration file and each option that is set, with its origin.

    Args:
        path: The file. Default: None, which is the file that `trainwright launch` reads by default.
    """
    variables = reading.read_variables()
    file, file_values = reading.read_file(path)
    values, notes = reading.merged({}, variables, (file, file_values))
    lines = [file or "no configuration file"]
    for name, value in values.items():
        origin = file
        if name in variables:
            origin = f"the variable {reading.known_options()[name].variable}"
        lines.append(f"{name}={value} ({origin})")
    return [*lines, *notes]


def to_fsdp2(argv: Sequence[str]) -> int:
    """Write a configuration file of FSDP1 as one of FSDP2. Return 0."""
    parser = argparse.ArgumentParser(
        prog="trainwright to-fsdp2", description="Write a configuration of FSDP1 as one of FSDP2.", allow_abbrev=False
    )
    parser.add_argument("--config_file", "--config-file", type=Path, required=True, metavar="FILE", help="of FSDP1")
    parser.add_argument("--output_file", "--output-file", type=Path, metavar="FILE", help="of FSDP2")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a file; without --output_file, replace --config_file"
    )
    options = parser.parse_args(argv)
    if options.output_file is None and not options.overwrite:
        raise ConfigurationError("pass --output_file with a path, or --overwrite to replace --config_file.")
    target = options.output_file or options.config_file
    if target.exists() and not options.overwrite:
        raise ConfigurationError(f"{target} exists. Pass --overwrite to replace it.")
    origin, values = reading.read_file(options.config_file)
    converted, removed = config_file.to_fsdp2(LaunchConfig(**values), origin)
    _write(converted, target)
    if removed:
        print(f"Omitted, because FSDP2 does not have them: {', '.join(removed)}")
    return 0


def _write(options: LaunchConfig, path: Path, devices: str = "MULTI_GPU") -> None:
    config_file.write_file(options, path, devices)
    option = "" if path == config_file.default_path() else f" --config_file {path}"
    print(f"{path} is written. Start a script with it: trainwright launch{option} script.py")


def tpu_config(argv: Sequence[str]) -> int:
    """Run commands on a TPU pod and return the exit code of gcloud."""
    parser = argparse.ArgumentParser(
        prog="trainwright tpu-config", description="Run commands on all machines of a TPU pod.", allow_abbrev=False
    )
    parser.add_argument("--config_file", "--config-file", type=Path, metavar="FILE", help="of `trainwright launch`")
    parser.add_argument("--tpu_name", "--tpu-name", help="name of the pod. Default: that of the file")
    parser.add_argument("--tpu_zone", "--tpu-zone", help="zone of the pod. Default: that of the file")
    parser.add_argument("--use_alpha", "--use-alpha", action="store_true", help="use `gcloud alpha`")
    parser.add_argument("--command_file", "--command-file", type=Path, help="a file with a command in each line")
    parser.add_argument("--command", action="append", nargs="+", help="commands, each in quotes; may be repeated")
    text = "not supported: pass --command 'pip install PATH'"
    parser.add_argument("--install_accelerate", "--install-accelerate", action="store_true", help=text)
    parser.add_argument("--accelerate_version", "--accelerate-version", help=text)
    parser.add_argument("--debug", action="store_true", help="print the command of gcloud instead of running it")
    options = parser.parse_args(argv)
    file = options.config_file or reading.default_file()
    content: Any = {}
    if file is not None:
        content = reading.read_content(file)
    if not isinstance(content, dict):  # an empty file, for example
        content = {}
    name = options.tpu_name or content.get("tpu_name")
    zone = options.tpu_zone or content.get("tpu_zone")
    if not (name and zone):
        raise ConfigurationError("a TPU pod needs --tpu_name and --tpu_zone, as flags or keys of --config_file.")
    program = ["gcloud"]
    if options.use_alpha:
        program.append("alpha")
    program += ["compute", "tpus", "tpu-vm", "ssh", str(name), "--zone", str(zone)]
    program += ["--command", "; ".join(_tpu_commands(options, content)), "--worker", "all"]
    if options.debug:
        print(shlex.join(program))
        return 0
    if shutil.which("gcloud") is None:
        raise MissingPackageError("trainwright tpu-config: gcloud is missing. See https://cloud.google.com/sdk/docs.")
    return subprocess.run(program, check=False).returncode


def _tpu_commands(options: argparse.Namespace, content: dict[str, Any]) -> list[str]:
    """Return the commands for the machines of the pod. `content` is that of the configuration file.

    `--command_file` replaces `--command`. Both replace the keys `command_file` and `commands` of `content`, of which
    the first replaces the second.
    """
    if options.install_accelerate or options.accelerate_version:
        # Trainwright is not on PyPI: a package of this name there would belong to other people.
        raise ConfigurationError(
            "--install_accelerate and --accelerate_version are not supported: trainwright is not on PyPI. Copy a clone "
            "to the pod and pass --command 'pip install PATH' before the other commands."
        )
    commands: list[Any] = []
    for words in options.command or ():  # a list for each --command
        commands += words
    file = options.command_file
    if not commands:
        file = file or content.get("command_file")
        commands = content.get("commands") or []
        if isinstance(commands, str):
            commands = [commands]
    if file is not None:
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(f"--command_file {file} cannot be read: {error}.") from error
        commands = [line for line in lines if line.strip()]
    if not commands:
        raise ConfigurationError("no command was given. Pass --command 'pip install .', or --command_file with a file.")
    # In the same folder as `accelerate tpu-config`.
    return ["cd /usr/share", *map(str, commands)]
