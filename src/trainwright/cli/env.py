"""`trainwright env`: facts about this machine and its configuration for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainwright import __version__
from trainwright.cli.main import table_lines
from trainwright.core.errors import TrainwrightError
from trainwright.core.process import detect
from trainwright.launch.config_commands import described
from trainwright.launch.launch import has_no_devices

_PACKAGES = (
    *("torch", "numpy", "safetensors", "jsonargparse", "torchmetrics"),
    *("tensorboard", "wandb", "deepspeed", "torch_xla"),
    *("torchao", "bitsandbytes", "transformer_engine"),
)
_CPU_INSTRUCTIONS = ("amx_tile", "amx_bf16", "amx_fp16", "amx_int8", "avx512_bf16", "avx512_fp16", "avx512_vnni")


def env(argv: Sequence[str]) -> int:
    """Print versions, devices, the detected launcher and the launch configuration. Return the exit code 0."""
    parser = argparse.ArgumentParser(prog="trainwright env", description="Show versions, devices and configuration.")
    parser.add_argument("--config_file", "--config-file", metavar="FILE", help="configuration of `trainwright launch`")
    parser.add_argument("--json", action="store_true", help="print JSON")
    wanted = parser.parse_args(argv)
    facts = collect(wanted.config_file)
    if wanted.json:
        print(json.dumps(facts, indent=2))
        return 0
    rows: list[tuple[str, str]] = []
    for name, value in facts.items():
        if isinstance(value, list):
            value = ", ".join(value) or "none"
        rows.append((name, str(value)))
    print(*table_lines(rows), sep="\n")
    return 0


def collect(config_file: str | None = None) -> dict[str, Any]:
    """Return the output of `trainwright env` as JSON values by name. The value of a missing package is None.

    Args:
        config_file: configuration of `trainwright launch`. Default: None, its default file.
    """
    facts: dict[str, Any] = {
        "trainwright": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    facts |= {name: _version(name) for name in _PACKAGES}
    facts["cuda"] = _cuda_version()
    # In a container or a job, a process may use fewer cores than the machine has. Only Linux reports them.
    facts["cpu cores"] = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    facts["cpu instructions"] = _cpu_instructions()
    facts["accelerator"], facts["devices"] = _devices()
    facts["process"] = str(detect())
    facts["configuration"] = _configuration(config_file)
    return facts


def _configuration(config_file: str | None) -> list[str]:
    """Return the configuration file and the options that are set, or the error of reading them."""
    try:
        return described(config_file)
    except TrainwrightError as error:
        return [str(error)]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cuda_version() -> str | None:
    """Return torch's CUDA version from its file `version.py`, because importing torch takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    file = Path(spec.origin).with_name("version.py")
    if not file.is_file():
        return None
    # The line is `cuda: Optional[str] = '12.8'`, or None without CUDA.
    match = re.search(r"^cuda\b[^=\n]*=\s*['\"]([^'\"]+)", file.read_text(encoding="utf-8"), re.MULTILINE)
    return None if match is None else match[1]


def _devices() -> tuple[str | None, list[str]]:
    """Return the type and the names of this machine's accelerators. The type is None without any."""
    if "torch" not in sys.modules and has_no_devices():  # importing torch takes seconds
        return None, []
    import torch

    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return None, []
    name_of = getattr(torch.get_device_module(accelerator), "get_device_name", None)
    names: list[str] = []
    for i in range(torch.accelerator.device_count()):
        names.append(f"{accelerator.type}:{i}" if name_of is None else name_of(i))
    return accelerator.type, names


def _cpu_instructions() -> list[str]:
    """Return this CPU's instructions for low-precision matrix products. Empty except on Linux on x86."""
    file = Path("/proc/cpuinfo")
    if not file.is_file():
        return []
    # The flags of the first core stand for all.
    match = re.search(r"^flags\s*:(.*)$", file.read_text(errors="replace"), re.MULTILINE)
    if match is None:
        return []
    flags = match[1].split()
    return [name for name in _CPU_INSTRUCTIONS if name in flags]
