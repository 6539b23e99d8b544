"""`trainwright env`: facts about this machine for a bug report."""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import platform
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from trainwright import __version__

if TYPE_CHECKING:
    import torch

_PACKAGES = (
    *("torch", "numpy", "safetensors", "jsonargparse", "torchmetrics"),
    *("tensorboard", "wandb", "deepspeed", "torch_xla"),
)


def env(argv: Sequence[str]) -> int:
    """Print versions, devices and the detected launcher; `--json` prints them as JSON."""
    parser = argparse.ArgumentParser(prog="trainwright env", description="Show versions and devices.")
    parser.add_argument("--json", action="store_true", help="print JSON")
    wanted = parser.parse_args(argv)
    facts = collect()
    if wanted.json:
        print(json.dumps(facts, indent=2))
        return 0
    width = max(map(len, facts))
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
    return 0


def collect() -> dict[str, Any]:
    """Return the output of `trainwright env`, as JSON values by name; missing packages have None."""
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
    return facts


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
