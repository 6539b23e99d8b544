"""Accelerate's configuration file (`default_config.yaml`): its settings, and what to write for each of its keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trainwright.cli.migration.launch_options import find_option, variable_value
from trainwright.cli.migration.object_uses import Unsettled

_MARKS = ("compute_environment", "distributed_type")
_ENGINES = {"FSDP": "use_fsdp", "DEEPSPEED": "use_deepspeed", "MEGATRON_LM": "use_megatron_lm"}
_NAMES = {"deepspeed_config_file": "deepspeed_config_file", "use_cpu": "cpu"}
_SETS_NOTHING = ("", "no", "none", "null", "false", "{}", "[]", "all", "static", "auto")
_NOT_NEEDED = "is not needed"


def is_config(code: bytes) -> bool:
    """Return whether a YAML or JSON file is Accelerate's configuration."""
    values = _load(code.decode("utf-8", "replace"))
    return values is not None and any(mark in values for mark in _MARKS) and "num_processes" in values


def read_config(text: str) -> dict[str, str]:
    """Return the settings that differ from defaults, by the names of the options of `accelerate launch`."""
    found = {}
    for key, value in _flat(_load(text) or {}):
        said = _text(value)
        if key == "distributed_type":
            if said in _ENGINES:
                found[_ENGINES[said]] = "true"
            elif said == "NO":
                found["num_processes"] = "1"
        elif (
            said.lower() not in _SETS_NOTHING and find_option(key) is not None and (key, said) != ("machine_rank", "0")
        ):
            found[_NAMES.get(key, key)] = said
    if found.get("num_machines") == "1":
        del found["num_machines"]
    return found


def explain_config(code: bytes) -> list[Unsettled]:
    """Return what to write for each key of a configuration file, by line."""
    text = code.decode()
    values = dict(_flat(_load(text) or {}))
    lines = text.splitlines()
    found = [
        Unsettled(_line_of(lines, key), f"{key}: {_advice(key, _text(value), values)}.")
        for key, value in values.items()
    ]
    return sorted(found)


def _load(text: str) -> dict[str, Any] | None:
    import yaml

    try:
        values = yaml.safe_load(text)  # JSON too
    except yaml.YAMLError:
        return None
    return values if isinstance(values, dict) else None


def _flat(values: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield keys and values, those of sections such as `fsdp_config` too."""
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from _flat(value)
        else:
            yield str(key), value


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else str(value)


def _literal(value: str) -> str:
    """Return the Python literal of a setting."""
    if value in ("true", "false"):
        return value.title()
    return value if value.replace(".", "", 1).isdecimal() else repr(value)


def _line_of(lines: list[str], key: str) -> int:
    return next((i for i, line in enumerate(lines, 1) if line.strip().strip("\"'").startswith(key)), 1)


def _advice(key: str, value: str, values: Mapping[str, Any]) -> str:
    machines = _text(values.get("num_machines", 1))
    if key == "distributed_type":
        option = find_option(_ENGINES.get(value, ""))
        if option is None:
            known = value in ("NO", "MULTI_GPU", "MULTI_CPU", "MULTI_XPU", "MULTI_NPU")
            return f"{_NOT_NEEDED}" if known else f"{value} is not supported"
        return option.argument or option.text
    if key == "num_processes":
        if value == "1":
            return "python script.py"
        each = f"{int(value) // int(machines)}" if value.isdecimal() and machines.isdecimal() else f"{value}/{machines}"
        return f"torchrun --nproc-per-node {each} script.py"
    if key == "num_machines":
        return _NOT_NEEDED if value == "1" else f"torchrun --nnodes {value} on each machine"
    if key == "compute_environment":
        return _NOT_NEEDED if value == "LOCAL_MACHINE" else "start the script with torchrun in the job"
    if key == "gpu_ids":
        return _NOT_NEEDED if value.lower() in _SETS_NOTHING else f"CUDA_VISIBLE_DEVICES={value}"
    option = find_option(key)
    if option is None:
        return f"{_NOT_NEEDED}, or pass it to the script" if value.lower() in _SETS_NOTHING else "has no counterpart"
    if key == "machine_rank" and machines == "1":
        return _NOT_NEEDED
    if option.kind == "nothing" or (value.lower() in _SETS_NOTHING and value.lower() != "false"):
        return _NOT_NEEDED
    if value == "false" and (option.kind == "note" or not option.takes_value):
        return _NOT_NEEDED
    if option.kind == "torchrun":
        return f"torchrun {option.text} {value}"
    if option.kind == "variable":
        if key == "mixed_precision" and value == "fp8":
            return "training in 8 bits is not supported; use bf16"
        variable = f"{option.text}={variable_value(key, value)}"
        argument = option.argument.replace("…", _literal(value))
        return f"{argument} or {variable}" if argument else variable
    return option.text or _NOT_NEEDED
