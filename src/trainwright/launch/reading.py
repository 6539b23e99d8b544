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

# Flags of `trainwright launch` that are not options of `LaunchConfig` → True if the flag has a value.
_FURTHER_FLAGS = {"config_file": True, "module": False, "no_python": False, "help": False}
SHORT = {"-q": "quiet", "-t": "tee", "-m": "module", "-h": "help"}
FILE_NAMES = ("default_config.yaml", "default_config.yml", "default_config.json")
# Keys of Accelerate's files and flags that name an option of ours differently.
ALIASES = {
    "use_cpu": "cpu",
    "fsdp_backward_prefetch_policy": "fsdp_backward_prefetch",
    "tpu_vm": "vm",
    "tpu_env": "env",
    "fp8_amax_history_length": "fp8_amax_history_len",
    "fp8_amax_compute_algorithm": "fp8_amax_compute_algo",
    "fp8_optimization_level": "fp8_opt_level",
}
# Mappings within a file, each once, in the order of the options: "fsdp_config", "deepspeed_config", ...
_SECTIONS = (*dict.fromkeys(option.section for option in options() if option.section), "ipex_config")
_SECTION_PREFIXES = {"fsdp_config": "fsdp_", "fp8_config": "fp8_"}  # keys of these sections may leave it out
_SWITCHES = {table.section: table.switch for table in ENGINE_TABLES}  # such as "fsdp_config": "use_fsdp"
# Options of DeepSpeed's section that also have an effect without DeepSpeed.
_NEED_NO_SWITCH = (
    "gradient_accumulation_steps",
    *(option.flag for option in DEEPSPEED.options.values() if not option.needs_switch),
)
# Keys of `tpu-config`, without effect on `trainwright launch`.
SILENT = ("tpu_name", "tpu_zone", "commands", "command_file")
# Values of `distributed_type` in a file → the options that they set.
TYPES: dict[str, dict[str, bool]] = {
    "NO": {},
    "FSDP": {FSDP.switch: True},
    "DEEPSPEED": {DEEPSPEED.switch: True},
    "XLA": {"tpu": True},
    "TPU": {"tpu": True},
    "MEGATRON_LM": {MEGATRON_LM.switch: True},
}
# Further values of `distributed_type`, which name devices → the options that they set.
DEVICES: dict[str, dict[str, bool]] = {
    "MULTI_GPU": {},
    "MULTI_CPU": {"cpu": True},
    "MULTI_XPU": {},
    "MULTI_NPU": {},
    "MULTI_MLU": {},
    "MULTI_MUSA": {},
    "MULTI_HPU": {},
    "TP": {},
}
# Options of fp8_backend=AO, which is torchao. All other options of fp8 are those of other backends.
_FP8_OF_AO = ("fp8_enable_fsdp_float8_all_gather", "fp8_pad_inner_dim")


@dataclass(frozen=True, slots=True)
class LaunchCommand:
    """A parsed command line of `trainwright launch`.

    Attributes:
        config: The options.
        script: Path, module name or program.
        arguments: Arguments of the script.
        kind: `"script"`, `"module"` (`-m`) or `"program"` (`--no_python`).
        notes: A message for each option that a flag, an environment variable or the file set differently, and one that
            names ignored options of fp8.
    """

    config: LaunchConfig
    script: str
    arguments: list[str]
    kind: str
    notes: list[str]

    @property
    def program(self) -> list[str]:
        """The command line of a process."""
        if self.kind == "program":
            return [self.script, *self.arguments]
        python = [sys.executable, "-u"]
        if self.kind == "module":
            python.append("-m")
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

    Raises:
        ConfigurationError: The script is missing, or an option or the file is not valid.
    """
    flags, further, rest = split(argv)
    if not rest:
        raise ConfigurationError("name a script: trainwright launch [options] script.py [its arguments].")
    if "module" in further and "no_python" in further:
        raise ConfigurationError("-m and --no_python exclude each other. Pass one of them.")
    kind = "script"
    if "module" in further:
        kind = "module"
    if "no_python" in further:
        kind = "program"
    config, notes = read_config(flags, further.get("config_file"))
    return LaunchCommand(config, rest[0], list(rest[1:]), kind, notes)


def read_config(flags: Mapping[str, Any], file: str | None) -> tuple[LaunchConfig, list[str]]:
    """Return the options of flags, environment variables and a file, and the notes of a `LaunchCommand`.

    Args:
        flags: Values of the flags.
        file: Path of the configuration file. None selects the default file, if it exists.
    """
    values, notes = merged(flags, read_variables(), read_file(file))
    notes += _ignored_fp8(values)
    # Flags only: files of `accelerate config` may keep sections of engines that they do not select.
    for name in flags:
        if name in _NEED_NO_SWITCH:
            continue
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
    argv: Sequence[str], command: str = "launch", further_flags: Mapping[str, bool] = _FURTHER_FLAGS
) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return the options that flags set, the values of further flags, and the script with its arguments.

    `["--num_processes", "2", "-m", "tool", "--lr", "1"]` →
    `{"num_processes": 2}, {"module": "true"}, ["tool", "--lr", "1"]`

    Args:
        argv: The arguments after the command.
        command: Name of the command, for errors. Default: `"launch"`.
        further_flags: Flags of the command that are not options of `LaunchConfig` → True if the flag has a value.
    """
    flags: dict[str, Any] = {}
    further: dict[str, str] = {}
    words = list(argv)
    while words and words[0].startswith("-") and words[0] != "--":
        flag, equals, text = words.pop(0).partition("=")
        name = _name_of_flag(flag)
        option = known_options().get(name)
        if further_flags.get(name) is False:
            if equals:
                raise ConfigurationError(f"{flag}={text}: the flag takes no value. Write {flag}, or omit it.")
            further[name] = "true"
            continue
        if option is None and name not in further_flags:
            hint = nearest(name, (*known_options(), *further_flags))
            if command == "launch":
                hint += " Arguments of the script come after it."
            raise ConfigurationError(f"trainwright {command} has no option {flag}.{hint}")
        if not equals and option is not None and option.takes_none_of(words):
            text = "true"
        elif not equals:
            if not words:
                raise ConfigurationError(f"{flag} needs a value.")
            text = words.pop(0)
        if option is None:
            further[name] = text
            continue
        if option.repeats and name in flags:
            text = f"{flags[name]}\n{text}"
        flags[name] = option.parse(text, flag)
    if words[:1] == ["--"]:
        words = words[1:]
    return flags, further, words


def _name_of_flag(flag: str) -> str:
    """Return the name of an option: of `-q`, `--log-dir`, `--log_dir`, or of Accelerate's name of it."""
    name = flag
    if flag in SHORT:
        name = SHORT[flag]
    elif flag.startswith("--"):
        name = flag.removeprefix("--").replace("-", "_")
    return ALIASES.get(name, name)


def read_variables() -> dict[str, Any]:
    """Return the options that environment variables set."""
    values = {}
    for option in options():
        if option.variable is None:
            continue
        text = variable(option.variable)
        if text:
            values[option.name] = option.parse(text, f"the variable {option.variable}")
    return values


def merged(
    flags: Mapping[str, Any], variables: Mapping[str, Any], file: tuple[str, Mapping[str, Any]]
) -> tuple[dict[str, Any], list[str]]:
    """Return the values of options from all sources, and a note for each value that another value overrides."""
    path, file_values = file
    merged_values: dict[str, Any] = {}
    notes = []
    for name, option in known_options().items():
        used_place = ""
        # The first source that sets the option takes precedence.
        for place, source in (
            (f"--{name}", flags),
            (f"the variable {option.variable}", variables),
            (path, file_values),
        ):
            value = source.get(name)
            if value is None:
                continue
            if name not in merged_values:
                merged_values[name] = value
                used_place = place
            elif value != merged_values[name]:
                used = merged_values[name]
                notes.append(f"{name}={used} of {used_place} is used, not {value} of {place}.")
    return merged_values, notes


def config_folders() -> list[Path]:
    """Return the possible folders of the default file: Trainwright's, then Accelerate's."""
    cache_folder = Path(variable("XDG_CACHE_HOME") or Path.home() / ".cache")
    hub = Path(variable("HF_HOME") or cache_folder / "huggingface").expanduser()
    return [cache_folder.expanduser() / "trainwright", hub / "accelerate"]


def default_file() -> Path | None:
    """Return the default file, or None if it does not exist."""
    for folder in config_folders():
        for name in FILE_NAMES:
            file = folder / name
            if file.is_file():
                return file
    return None


def read_file(path: str | os.PathLike[str] | None) -> tuple[str, dict[str, Any]]:
    """Return the path of a configuration file and the options that it sets.

    Files of `accelerate config`, including old versions, are supported.

    Args:
        path: The file. None is the default file if it exists.
    """
    file = default_file() if path is None else Path(path)
    if file is None:
        return "", {}
    return str(file), options_of(read_content(file), str(file))


def read_content(path: Path) -> Any:
    """Return the content of a configuration file: JSON if its name ends in `.json`, else YAML.

    Raises:
        ConfigurationError: The file cannot be read, or is not valid.
    """
    origin = f"config_file={str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8")
        if path.suffix == ".json":
            return json.loads(text)
        return parse_yaml(text, origin)
    except ConfigurationError:  # also a ValueError; its message is complete
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"{origin} cannot be read: {error}.") from error


def options_of(content: object, origin: str) -> dict[str, Any]:
    """Return the options that the content of a configuration file sets.

    Args:
        content: Content of the YAML or JSON file.
        origin: Path of the file, for errors.
    """
    if not isinstance(content, dict):
        raise ConfigurationError(f"{origin} does not hold a mapping. Write one with `trainwright config`.")
    result = {}
    for key, value in _without_sections(content, origin).items():
        if key in SILENT:
            continue
        option = _known(ALIASES.get(key, key), origin, key)
        if isinstance(value, list):
            separator = "\n" if option.repeats else ","
            value = separator.join(map(str, value))
        place = f"{origin}: {key} (--{option.name})" if option.is_refused else origin
        parsed = option.parse(value, place)
        if parsed is not None:
            result[option.name] = parsed
    return result


def _without_sections(content: dict[Any, Any], origin: str) -> dict[str, Any]:
    """Return the values of a file by the names of options or their aliases, without sections and `distributed_type`.

    `{"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 2}}` → `{"use_fsdp": True, "fsdp_version": 2}`
    """
    top_level = dict(content)
    if top_level.get("distributed_type") is False:
        top_level["distributed_type"] = "NO"  # YAML reads NO without quotes as a truth value
    place = top_level.pop("compute_environment", "LOCAL_MACHINE")
    if place not in ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"):
        raise ConfigurationError(
            f"{origin}: compute_environment={place!r} is not supported. Use LOCAL_MACHINE or AMAZON_SAGEMAKER."
        )
    if place == "AMAZON_SAGEMAKER":
        # There, the key has other values: NO, DATA_PARALLEL or MODEL_PARALLEL.
        top_level["sagemaker"] = True
        top_level["sagemaker_distributed_type"] = top_level.pop("distributed_type", None)
    kind = str(top_level.pop("distributed_type", "NO")).upper()
    options_of_kind = TYPES | DEVICES
    if kind not in options_of_kind:
        raise ConfigurationError(
            f"{origin}: distributed_type={kind!r} is not supported. Use {', '.join(options_of_kind)}."
        )
    flat: dict[str, Any] = dict(options_of_kind[kind])
    if isinstance(top_level.get("dynamo_backend"), str):  # files of Accelerate 0.13
        top_level["dynamo_config"] = {"dynamo_backend": top_level.pop("dynamo_backend")}
    if top_level.pop("fp16", None) is True:  # files of Accelerate 0.9
        top_level.setdefault("mixed_precision", "fp16")
    for section in _SECTIONS:
        values = top_level.pop(section, None) or {}
        if not isinstance(values, dict):
            raise ConfigurationError(f"{origin}: {section}={values!r} is not a mapping. Write `key: value`.")
        if section == "parallelism_config" and values:
            flat["use_parallelism_config"] = True
        prefix = _SECTION_PREFIXES.get(section, "")
        for key, value in values.items():
            flat[f"{prefix}{str(key).removeprefix(prefix)}"] = value
    # Keys outside of sections override those of sections.
    return flat | top_level


def sets_nothing(key: str) -> bool:
    """Return whether a key of a file has no effect on `trainwright launch`, unless its value is refused."""
    option = known_options().get(ALIASES.get(key, key))
    if option is None:
        return key in SILENT
    return option.is_refused


def _ignored_fp8(values: Mapping[str, Any]) -> list[str]:
    """Return a list with one note that names ignored options of fp8, or an empty list.

    Options of another backend than the selected one are ignored.
    """
    if values.get("mixed_precision") != "fp8":
        return []
    backend = values.get("fp8_backend") or "AO"
    ignored = []
    for name in sorted(values):
        if not name.startswith("fp8_") or name == "fp8_backend":
            continue
        is_of_other_backend = (name in _FP8_OF_AO) != (backend == "AO")
        if is_of_other_backend or known_options()[name].is_refused:
            ignored.append(name)
    if not ignored:
        return []
    return [f"{', '.join(ignored)} without effect: the options are not those of fp8_backend={backend}."]


def _known(name: str, origin: str, key: object) -> Option:
    """Return the option of a name. Raise an error about `key` of the file `origin` if no option has the name."""
    option = known_options().get(name)
    if option is None:
        advice = nearest(str(key), known_options()) or " `trainwright config` writes such a file."
        raise ConfigurationError(f"{origin} has the unknown key {key!r}.{advice}")
    return option
