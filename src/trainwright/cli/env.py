"""`trainwright env`: facts about this machine and its configuration for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainwright import __version__
from trainwright.core.errors import TrainwrightError
from trainwright.launch.config_commands import described

if TYPE_CHECKING:
    import torch

_PACKAGES = (
    *("torch", "numpy", "safetensors", "jsonargparse", "torchmetrics"),
    *("tensorboard", "wandb", "deepspeed", "torch_xla"),
)


def env(argv: Sequence[str]) -> int:
    """Print versions, devices, the detected launcher and its configuration; `--json` prints them as JSON."""
    parser = argparse.ArgumentParser(prog="trainwright env", description="Show versions, devices and configuration.")
    parser.add_argument("--config_file", "--config-file", metavar="FILE", help="configuration of `trainwright launch`")
    parser.add_argument("--json", action="store_true", help="print JSON")
    wanted = parser.parse_args(argv)
    facts = collect(wanted.config_file)
    if wanted.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0


def collect(config_file: str | None = None) -> dict[str, Any]:
    """Return the output of `trainwright env`, as JSON values by name; missing packages have None.

    Args:
        config_file: Configuration of `trainwright launch`. Default: None, the file that it reads by default.
    """
    import torch

    from trainwright.core.process import detect

    facts: dict[str, Any] = {
        "trainwright": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    facts |= {name: _version(name) for name in _PACKAGES}
    facts["cuda"] = torch.version.cuda
    facts["cpu threads"] = torch.get_num_threads()
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    facts["accelerator"] = None if accelerator is None else accelerator.type
    facts["devices"] = _device_names(accelerator)
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


def _device_names(accelerator: torch.device | None) -> list[str]:
    import torch

    if accelerator is None:
        return []
    count = torch.accelerator.device_count()
    if accelerator.type == "cuda":
        return [torch.cuda.get_device_name(index) for index in range(count)]
    return [f"{accelerator.type}:{index}" for index in range(count)]
