"""Reading the options of `trainwright launch`: from flags, environment variables and a YAML file.

An invalid option or file raises a ConfigurationError that names the source of the value.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trainwright.core.errors import ConfigurationError, nearest
from trainwright.core.process import variable
from trainwright.core.yaml_text import parse_yaml
from trainwright.launch.launch_config import LaunchConfig, Option, options, refused_options
from trainwright.strategies.deepspeed.option_table import DEEPSPEED
from trainwright.strategies.engine_tables import ENGINE_TABLES
from trainwright.strategies.fsdp.option_table import FSDP
from trainwright.strategies.megatron.option_table import MEGATRON_LM

_FURTHER = {"config_file": True, "module": False, "no_python": False, "help": False}  # flags; True: with a value
SHORT = {"-q": "quiet", "-t": "tee", "-m": "module", "-h": "help"}
FILE_NAMES = ("default_config.yaml", "default_config.yml", "default_config.json")
# Keys of Accelerate's files and flags that name an option of ours differently.
ALIASES = {
    "use_cpu": "cpu",
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "tpu_vm": "vm",
    "tpu_env": "env",
}
ALIASES |= {"fp8_amax_history_length": "fp8_amax_history_len", "fp8_amax_compute_algorithm": "fp8_amax_compute_algo"}
ALIASES |= {"fp8_optimization_level": "fp8_opt_level"}
_SECTIONS = (*dict.fromkeys(option.section for option in options() if option.section), "ipex_config")
_SWITCHES = {table.section: table.switch for table in ENGINE_TABLES}
# Of DeepSpeed's section, but of use without it.
_ALONE = (
    "gradient_accumulation_steps",
    *(option.flag for option in DEEPSPEED.options.values() if not option.needs_switch),
)
# Keys of `tpu-config`, which request nothing of `trainwright launch`.
SILENT = ("tpu_name", "tpu_zone", "commands", "command_file")
TYPES: dict[str, dict[str, bool]] = {
    "NO": {},
    "FSDP": {FSDP.switch: True},
    "DEEPSPEED": {DEEPSPEED.switch: True},
    "XLA": {"tpu": True},
    "TPU": {"tpu": True},
    "MEGATRON_LM": {MEGATRON_LM.switch: True},
}
_FP8_OF_AO = ("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim")
DEVICES = ("MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU", "MULTI_MLU", "MULTI_MUSA", "MULTI_HPU", "TP")


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A parsed command line of `trainwright launch`.

    Attributes:
        config: The options.
        script: Path, module name or program.
        arguments: Arguments of the script.
        kind: `"script"`, `"module"` (`-m`) or `"program"` (`--no_python`).
        notes: A message for each option that a flag, an environment variable or the file set differently.
    """

    config: LaunchConfig
    script: str
    arguments: list[str]
    kind: str
    notes: list[str]

    @property
    def program(self) -> list[str]:
        """The command line of a process."""
        module = ["-m"] if self.kind == "module" else []
        python = [] if self.kind == "program" else [sys.executable, "-u", *module]
        return [*python, self.script, *self.arguments]


@cache
def known_options() -> dict[str, Option]:
    """Return all options by their names, including `refused_options`."""
    return {option.name: option for option in (*options(), *refused_options())}


def read_command(argv: Sequence[str]) -> LaunchCommand:
    """Read the command line of `trainwright launch`.

    Flags take precedence over environment variables. Environment variables take precedence over the file.

    Args:
        argv: The arguments after `launch`.
    """
    flags, further, rest = split(argv)
    if not rest:
        raise ConfigurationError("name a script: trainwright launch [options] script.py [its arguments].")
    if "module" in further and "no_python" in further:
        raise ConfigurationError("-m and --no_python exclude each other. Pass one of them.")
    kind = "module" if "module" in further else "program" if "no_python" in further else "script"
    config, notes = read_config(flags, further.get("config_file"))
    return LaunchCommand(config, rest[0], list(rest[1:]), kind, notes)


def read_config(flags: Mapping[str, Any], file: str | None) -> tuple[LaunchConfig, list[str]]:
    """Return the options of flags, environment variables and a file, and a note for each overridden value.

    Args:
        flags: Values of the flags.
        file: Path of the configuration file. None: the default file, if there is one.
    """
    path, given = read_file(file)
    values, notes = merged(flags, read_variables(), (path, given))
    notes += _ignored_fp8({**flags, **values})
    for name in flags.keys() - set(_ALONE):
        switch = _SWITCHES.get(known_options()[name].section)
        if switch is not None and not values.get(switch):
            raise ConfigurationError(f"--{name} needs --{switch} too.")
    return LaunchConfig(**values), notes


def check_supported(config: LaunchConfig) -> None:
    """Check that no option has a value that is not supported yet."""
    for option in options():
        reason = option.refusal(getattr(config, option.name))
        if reason:
            raise ConfigurationError(f"--{option.name} is not supported: {reason}.")


def split(
    argv: Sequence[str], command: str = "launch", further_flags: Mapping[str, bool] = _FURTHER
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the options that flags set, the values of further flags, and the script with its arguments.

    Args:
        argv: The arguments after the command.
        command: Name of the command, for errors. Default: `"launch"`.
        further_flags: Flags of the command that are not options of `LaunchConfig` → True if the flag has a value.
    """
    flags: dict[str, Any] = {}
    further: dict[str, str] = {}
    left = list(argv)
    while left and left[0].startswith("-") and left[0] != "--":
        flag, equals, text = left.pop(0).partition("=")
        name = SHORT.get(flag, flag.removeprefix("--").replace("-", "_") if flag.startswith("--") else flag)
        name = ALIASES.get(name, name)
        option = known_options().get(name)
        if further_flags.get(name) is False:
            further[name] = "true"
            continue
        if option is None and name not in further_flags:
            hint = nearest(name, (*known_options(), *further_flags))
            hint += " Arguments of the script come after it." if command == "launch" else ""
            raise ConfigurationError(f"trainwright {command} has no option {flag}.{hint}")
        if not equals and option is not None and option.takes_none_of(left):
            text = "true"
        elif not equals:
            if not left:
                raise ConfigurationError(f"{flag} needs a value.")
            text = left.pop(0)
        if option is None:
            further[name] = text
        else:
            text = f"{flags[name]}\n{text}" if option.repeats and name in flags else text
            flags[name] = option.parse(text, flag)
    return flags, further, left[1:] if left[:1] == ["--"] else left


def read_variables() -> dict[str, Any]:
    """Return the options that environment variables set."""
    found = {}
    for option in options():
        text = None if option.variable is None else variable(option.variable)
        if text:
            found[option.name] = option.parse(text, f"the variable {option.variable}")
    return found


def merged(
    flags: Mapping[str, Any], variables: Mapping[str, Any], file: tuple[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of options from all sources, and a note for each value that another value overrides."""
    path, values = file
    found: dict[str, Any] = {}
    notes = []
    for name, option in known_options().items():
        places = [
            (f"--{name}", flags.get(name)),
            (f"the variable {option.variable}", variables.get(name)),
            (path, values.get(name)),
        ]
        given = [(place, value) for place, value in places if value is not None]
        if given:
            found[name] = given[0][1]
            notes += [
                f"{name}={given[0][1]} of {given[0][0]} is used, not {value} of {place}."
                for place, value in given[1:]
                if value != given[0][1]
            ]
    return found, notes


def config_folders() -> list[Path]:
    """Return the possible folders of the default file: Trainwright's, then Accelerate's."""
    cache_folder = Path(variable("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = Path(variable("HF_HOME") or cache_folder / "huggingface").expanduser()
    return [cache_folder.expanduser() / "trainwright", hub / "accelerate"]


def default_file() -> Path | None:
    """Return the default file, or None if it does not exist."""
    files = (folder / name for folder in config_folders() for name in FILE_NAMES)
    return next((file for file in files if file.is_file()), None)


def read_file(path: str | os.PathLike[str] | None) -> tuple[str, dict[str, Any]]:
    """Return the path of a configuration file and the options that it sets.

    Files of `accelerate config`, including old versions, are supported.

    Args:
        path: The file. Default: None, which is the default file if it exists.
    """
    found = default_file() if path is None else Path(path)
    return ("", {}) if found is None else (str(found), options_of(read_content(found), str(found)))


def read_content(path: Path) -> Any:
    """Return the content of a configuration file, as YAML reads it."""
    origin = f"config_file={str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else parse_yaml(text, origin)
    except ConfigurationError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{origin} cannot be read: {error}.") from error


def options_of(content: object, origin: str) -> dict[str, Any]:
    """Return the options that the content of a configuration file sets.

    Args:
        content: Content of the YAML file.
        origin: Path of the file, for errors.
    """
    if not isinstance(content, dict):
        raise ConfigurationError(f"{origin} does not hold a mapping. Write one with `trainwright config`.")
    left = dict(content)
    if left.get("distributed_type") is False:
        left["distributed_type"] = "NO"  # YAML reads NO without quotes as a truth value
    where = left.pop("compute_environment", "LOCAL_MACHINE")
    if where not in ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"):
        raise ConfigurationError(
            f"{origin}: compute_environment={where!r} is not supported. Use LOCAL_MACHINE or AMAZON_SAGEMAKER."
        )
    if where == "AMAZON_SAGEMAKER":
        left |= {"sagemaker": True, "sagemaker_distributed_type": left.pop("distributed_type", None)}
    kind = str(left.pop("distributed_type", "NO")).upper()
    if kind not in TYPES and kind not in DEVICES:
        raise ConfigurationError(
            f"{origin}: distributed_type={kind!r} is not supported. Use {', '.join((*TYPES, *DEVICES))}."
        )
    flat: dict[str, Any] = dict(TYPES.get(kind, {}))
    if kind == "MULTI_CPU":
        flat["cpu"] = True
    if isinstance(left.get("dynamo_backend"), str):  # version 0.13
        left["dynamo_config"] = {"dynamo_backend": left.pop("dynamo_backend")}
    if left.pop("fp16", None) is True:  # version 0.9
        left.setdefault("mixed_precision", "fp16")
    for section in _SECTIONS:
        values = left.pop(section, None) or {}
        if not isinstance(values, dict):
            raise ConfigurationError(f"{origin}: {section}={values!r} is not a mapping. Write `key: value`.")
        if section == "parallelism_config" and values:
            flat["use_parallelism_config"] = True
        beginning = {"fsdp_config": "fsdp_", "fp8_config": "fp8_"}.get(section, "")  # which keys may leave out
        values = {str(key).removeprefix(beginning): value for key, value in values.items()}
        values = {f"{beginning}{key}": value for key, value in values.items()}
        flat |= values
    flat |= left
    found = {}
    for key, value in flat.items():
        if key in SILENT:
            continue
        option = _known(ALIASES.get(key, key), origin, key)
        separator = "\n" if option.repeats else ","
        text = separator.join(map(str, value)) if isinstance(value, list) else value
        value = option.parse(text, f"{origin}: {key} (--{option.name})" if option.is_refused else origin)
        if value is not None:
            found[option.name] = value
    return found


def sets_nothing(key: str) -> bool:
    """Return whether a key of a file has no effect on `trainwright launch`, unless its value is refused."""
    option = known_options().get(ALIASES.get(key, key))
    return key in SILENT if option is None else option.is_refused


def _ignored_fp8(values: Mapping[str, Any]) -> list[str]:
    """Return a note that names options of another backend of fp8 than the selected one."""
    backend = values.get("fp8_backend") or "AO"
    given = [name for name in values if name.startswith("fp8_") and name != "fp8_backend"]
    names = []
    for name in sorted(given):
        of_other = (name in _FP8_OF_AO) != (backend == "AO")
        if of_other or known_options()[name].is_refused:
            names.append(name)
    if not names or values.get("mixed_precision") != "fp8":
        return []
    return [f"{', '.join(names)} without effect: the options are not those of fp8_backend={backend}."]


def _known(name: str, origin: str, key: object) -> Option:
    option = known_options().get(name)
    if option is None:
        advice = nearest(str(key), known_options()) or " `trainwright config` writes such a file."
        raise ConfigurationError(f"{origin} has the unknown key {key!r}.{advice}")
    return option
