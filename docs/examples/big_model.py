"""Big model inference: build without memory, place layers on devices and the disk, and run."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
from torch import nn

from trainwright import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch, save_model
from trainwright.utils import set_seed


def make_model() -> nn.Sequential:
    """Return a model of eight layers of 256 KiB."""
    return nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))


def inference_function(config: dict[str, Any]) -> dict[str, Any]:
    """Save a model, load it with half of its layers on the disk, and compare the outputs."""
    set_seed(config["seed"])
    model, inputs = make_model(), torch.randn(2, 256)
    checkpoint = os.path.join(config["output_dir"], "model")
    save_model(model, checkpoint)
    with torch.no_grad():
        expected = model(inputs)

    with init_empty_weights():
        empty = make_model()  # parameters on the meta device
    device_map = infer_auto_device_map(empty, max_memory={"cpu": "1.2MB"})
    offload = os.path.join(config["output_dir"], "offload")
    large = load_checkpoint_and_dispatch(empty, checkpoint, device_map=device_map, offload_folder=offload)
    with torch.no_grad():
        outputs = large(inputs)  # weights on the disk are read when their layer runs
    print({name: str(device) for name, device in device_map.items()})
    return {"devices": list(map(str, device_map.values())), "equal": torch.equal(outputs, expected)}


if __name__ == "__main__":
    inference_function({"seed": 3, "output_dir": os.environ.get("RUN") or tempfile.mkdtemp()})
