"""`trainwright tpu-config`: run commands on all machines of a TPU pod by gcloud, to set it up."""

from __future__ import annotations

import argparse
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError, MissingPackageError
from trainwright.launch.reading import default_file, read_content


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
    parser.add_argument("--command", action="append", nargs="+", help="a command; may be repeated")
    parser.add_argument("--install_accelerate", "--install-accelerate", action="store_true", help="install accelerate")
    parser.add_argument("--accelerate_version", "--accelerate-version", default="latest", help="its version, or 'dev'")
    parser.add_argument("--debug", action="store_true", help="print the command of gcloud instead of running it")
    options = parser.parse_args(argv)
    file = options.config_file or default_file()
    content: Any = {} if file is None else read_content(file)
    found = content if isinstance(content, dict) else {}
    name, zone = options.tpu_name or found.get("tpu_name"), options.tpu_zone or found.get("tpu_zone")
    if not (name and zone):
        raise ConfigurationError("a TPU pod needs --tpu_name and --tpu_zone, as flags or keys of --config_file.")
    program = ["gcloud", *(["alpha"] if options.use_alpha else []), "compute", "tpus", "tpu-vm", "ssh", str(name)]
    program += ["--zone", str(zone), "--command", "; ".join(_commands(options, found)), "--worker", "all"]
    if options.debug:
        print(shlex.join(program))
        return 0
    if shutil.which("gcloud") is None:
        raise MissingPackageError("trainwright tpu-config: gcloud is missing. See https://cloud.google.com/sdk/docs.")
    return subprocess.run(program, check=False).returncode


def _commands(options: argparse.Namespace, content: dict[str, Any]) -> list[str]:
    given = [word for words in options.command or () for word in words]
    file = options.command_file or (None if given else content.get("command_file"))
    commands = given or content.get("commands") or []
    if file is not None:
        try:
            commands = Path(file).read_text().splitlines()
        except OSError as error:
            raise ConfigurationError(f"--command_file {file} cannot be read: {error}.") from error
    if not commands:
        raise ConfigurationError("name commands: --command 'pip install .', or --command_file with a file.")
    version = {"latest": "-U accelerate", "dev": "git+https://github.com/huggingface/accelerate.git"}.get(
        options.accelerate_version, f"accelerate=={options.accelerate_version}"
    )
    install = [f"pip install {shlex.join(version.split())}"] if options.install_accelerate else []
    return ["cd /usr/share", *install, *map(str, commands)]
