"""Training jobs of Amazon SageMaker: submission with the options of `trainwright launch`, and start of processes.

    python -m trainwright.launch.sagemaker SCRIPT ARGUMENTS      starts the processes of a container

Credentials come from boto3. They are neither stored nor printed.
"""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from trainwright.core.errors import ConfigurationError, MissingPackageError, nearest, require_package
from trainwright.core.process import variable
from trainwright.launch.launch_config import LaunchConfig
from trainwright.launch.reading import LaunchCommand

_NAME = "trainwright launch --sagemaker"  # what needs a package, in errors
_INSTALL = "'sagemaker>=2.257,<3'"
_ENTRY = "trainwright_sagemaker.py"
_PORT = "7777"  # of SageMaker's containers


def check_job(config: LaunchConfig) -> None:
    """Raise ConfigurationError if options of `--sagemaker` are missing or not supported."""
    kind = config.sagemaker_distributed_type or "NO"
    required = ["ec2_instance_type", "iam_role_name"]
    if config.image_uri is None:
        required += ["py_version", "pytorch_version"]  # which select an image
    for name in required:
        if getattr(config, name) is None:
            raise ConfigurationError(f"--sagemaker needs --{name} too, or a file with {name}.")
    if kind == "MODEL_PARALLEL":
        raise ConfigurationError(
            "--sagemaker_distributed_type MODEL_PARALLEL is not supported. Use DATA_PARALLEL, and --use_fsdp to shard "
            "models."
        )
    if kind == "NO" and (config.num_machines or 1) > 1 and not _starts_itself(config):
        raise ConfigurationError(
            f"--num_machines {config.num_machines} needs --sagemaker_distributed_type DATA_PARALLEL too."
        )


def start_job(command: LaunchCommand) -> int:
    """Submit a job, show its output until it ends, and return the exit code, which is 1 if the job failed.

    Raises:
        ConfigurationError: SageMaker does not accept the job, or cannot be reached.
        MissingPackageError: sagemaker 2 is not installed.
    """
    config = command.config
    arguments = estimator_arguments(command)
    if config.print:
        print(json.dumps(arguments, indent=2))
        return 0
    require_package("sagemaker", purpose=_NAME, install=_INSTALL)
    if int(version("sagemaker").partition(".")[0]) > 2:
        raise MissingPackageError(f"{_NAME} needs sagemaker 2, not {version('sagemaker')}. Run: pip install {_INSTALL}")
    inputs = dict(_table(config.sagemaker_inputs_file)) or None
    errors = require_package("botocore.exceptions", purpose=_NAME)
    try:
        session = _session(config)
        with TemporaryDirectory(prefix="trainwright-sagemaker-") as folder:
            if config.sagemaker_distributed_type == "DATA_PARALLEL" and not _starts_itself(config):
                arguments |= _with_entry(Path(command.script), Path(folder))
            estimator = _estimator_class(config, arguments)(**arguments, sagemaker_session=session)
            estimator.fit(inputs)
    except ConfigurationError:  # a ValueError too, which has its text already
        raise
    except require_package("sagemaker.exceptions", purpose=_NAME).UnexpectedStatusException as error:
        print(f"\ntrainwright launch: {error}.", file=sys.stderr)
        return 1
    except (errors.BotoCoreError, errors.ClientError, ValueError) as error:
        raise ConfigurationError(f"SageMaker: {error}") from error
    print(f"The model is at {estimator.model_data}")
    return 0


def estimator_arguments(command: LaunchCommand) -> dict[str, Any]:
    """Return the arguments of the estimator, without its session. `additional_args` override them."""
    config = command.config
    script = Path(command.script)
    if command.kind != "script" or script.suffix != ".py":
        raise ConfigurationError(f"--sagemaker runs a script whose name ends in .py, not {command.script!r}.")
    arguments: dict[str, Any] = {
        "entry_point": script.name,
        "source_dir": str(script.resolve().parent),
        "role": config.iam_role_name,
        "instance_type": config.ec2_instance_type,
        "instance_count": config.num_machines or 1,
        "image_uri": config.image_uri,
        "py_version": config.py_version,
        "base_job_name": config.base_job_name,
        "hyperparameters": hyperparameters(command.arguments),
        "environment": config.environment(),
        "metric_definitions": [{"Name": name, "Regex": regex} for name, regex in _table(config.sagemaker_metrics_file)],
        "debugger_hook_config": False,
    }
    if config.transformers_version is None:
        arguments["framework_version"] = config.pytorch_version
    else:
        arguments["transformers_version"] = config.transformers_version
        arguments["pytorch_version"] = config.pytorch_version
    for name, value in (config.additional_args or {}).items():
        if isinstance(value, dict) and isinstance(arguments.get(name), dict):
            arguments[name] |= value  # further variables or hyperparameters
        else:
            arguments[name] = value
    return arguments


def hyperparameters(arguments: Sequence[str]) -> dict[str, Any]:
    """Return the arguments of a script by name. Numbers and truth values are converted."""
    values: dict[str, Any] = {}
    words = list(arguments)
    while words:
        word = words.pop(0)
        flag, equals, text = word.partition("=")
        if not flag.startswith("-") or not flag.strip("-"):
            raise ConfigurationError(f"{word}: SageMaker passes named arguments only, such as --epochs 3.")
        if not equals:
            # "--lr -3" has a value, "--verbose --lr" has none.
            next_is_flag = bool(words) and words[0].startswith("-") and isinstance(_value(words[0]), str)
            if not words or next_is_flag:
                raise ConfigurationError(f"{flag} has no value, which SageMaker requires. Pass {flag} True.")
            text = words.pop(0)
        name = flag.lstrip("-")
        if name in values:
            raise ConfigurationError(f"{flag} is given twice. SageMaker passes an argument once. Remove one.")
        values[name] = _value(text)
    return values


def _value(text: str) -> bool | int | float | str:
    if text in ("True", "False"):
        return text == "True"
    with suppress(ValueError):
        return int(text)
    with suppress(ValueError):
        number = float(text)
        if math.isfinite(number):
            return int(number) if number.is_integer() else number
    return text


def _table(file: str | None) -> list[tuple[str, str]]:
    """Return the two columns of a TSV file without its heading. Empty without a file."""
    if file is None:
        return []
    try:
        lines = [line for line in Path(file).read_text(encoding="utf-8").splitlines()[1:] if line.strip()]
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}.") from error
    rows = []
    for line in lines:
        name, tab, text = line.partition("\t")
        if not tab:
            raise ConfigurationError(f"{file}: {line!r} has no tab. Expected a name, a tab and a value.")
        rows.append((name.strip(), text.strip()))
    return rows


def _starts_itself(config: LaunchConfig) -> bool:
    """Return whether SageMaker starts the processes itself, because `additional_args` has a `distribution`."""
    return bool((config.additional_args or {}).get("distribution"))


def _session(config: LaunchConfig) -> Any:
    """Return the session of an estimator. Raise an error if it has no region or credentials."""
    library = require_package("sagemaker", purpose=_NAME)
    boto = require_package("boto3", purpose=_NAME).Session(profile_name=config.profile, region_name=config.region)
    if boto.region_name is None:
        raise ConfigurationError("SageMaker needs a region. Pass --region us-east-1, or write region into the file.")
    if boto.get_credentials() is None:
        raise ConfigurationError(
            "no AWS credentials were found, and no job was submitted. Run `aws configure --profile NAME` and pass "
            "--profile NAME."
        )
    if str(config.ec2_instance_type).startswith("local"):
        return require_package("sagemaker.local", purpose=_NAME).LocalSession(boto)
    return library.Session(boto)


def _estimator_class(config: LaunchConfig, arguments: dict[str, Any]) -> Any:
    """Return the class of the estimator. Raise an error for unknown arguments, which the class would ignore."""
    if config.transformers_version is None:
        estimator = require_package("sagemaker.pytorch", purpose=_NAME).PyTorch
    else:
        estimator = require_package("sagemaker.huggingface", purpose=_NAME).HuggingFace
    known: set[str] = set()
    for base in estimator.__mro__:  # a class passes **kwargs on to its base
        known.update(inspect.signature(base.__init__).parameters)
    for argument in arguments.keys() - known:
        raise ConfigurationError(
            f"additional_args: an estimator has no argument {argument!r}.{nearest(argument, sorted(known))}"
        )
    return estimator


def _with_entry(script: Path, folder: Path) -> dict[str, str]:
    """Return arguments of an estimator whose containers start their processes with Trainwright.

    Args:
        script: The script.
        folder: An empty folder. It receives links to the files beside the script, and the program to start.
    """
    for file in script.resolve().parent.iterdir():
        (folder / file.name).symlink_to(file)
    text = f"import sys\n\nfrom {__name__} import start_processes\n\n"
    (folder / _ENTRY).write_text(f"{text}start_processes([{script.name!r}, *sys.argv[1:]])\n")
    return {"entry_point": _ENTRY, "source_dir": str(folder)}


def start_processes(words: Sequence[str]) -> None:
    """Become `trainwright launch` with the machines and GPUs of a job, in its container.

    Args:
        words: The script and its arguments.
    """
    program = [sys.executable, "-m", "trainwright", "launch", *container_options(), *words]
    os.execv(program[0], program)


def container_options() -> list[str]:
    """Return the options of `trainwright launch` for this container, from SageMaker's variables.

    `MASTER_ADDR` and `MASTER_PORT`, which SageMaker's images set, override the address of the first machine.
    """
    hosts = json.loads(variable("SM_HOSTS") or "[]")
    current = variable("SM_CURRENT_HOST")
    if current not in hosts:
        raise ConfigurationError(
            f"SM_CURRENT_HOST={current} is not among SM_HOSTS={hosts}. Start the program in a container of SageMaker."
        )
    gpus = int(variable("SM_NUM_GPUS") or 0)
    options = ["--num_processes", str(max(gpus, 1) * len(hosts))]
    if gpus == 0:
        options.append("--cpu")
    if len(hosts) > 1:
        options += ["--num_machines", str(len(hosts)), "--machine_rank", str(hosts.index(current))]
        options += ["--main_process_ip", variable("MASTER_ADDR") or str(hosts[0])]
        options += ["--main_process_port", variable("MASTER_PORT") or _PORT]
    return options


if __name__ == "__main__":
    start_processes(sys.argv[1:])
