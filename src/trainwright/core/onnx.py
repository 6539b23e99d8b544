"""Write a module's forward as an ONNX file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainwright.core.errors import ConfigurationError, require_package
from trainwright.core.measures import evaluating
from trainwright.core.tree import move


def export_onnx(module: nn.Module, file_path: str | Path | None, sample: object, **options: Any) -> Any:
    """Export `module.forward` with torch's exporter, in evaluation mode and without gradients.

    Raises:
        ConfigurationError: there is no sample.
        MissingPackageError: onnxscript, which torch's exporter needs, is not installed.
    """
    if sample is None:
        raise ConfigurationError(
            f"{type(module).__name__}.to_onnx needs an example of forward's input: pass input_sample, or set "
            "self.example_input_array."
        )
    require_package("onnxscript", purpose="to_onnx", install="onnx onnxscript")
    device = next((tensor.device for tensor in module.parameters()), torch.device("cpu"))
    sample = move(sample, device)
    if isinstance(sample, dict):
        options["kwargs"] = sample
    positional = () if isinstance(sample, dict) else sample if isinstance(sample, tuple) else (sample,)
    with evaluating(module):
        return torch.onnx.export(module, positional, None if file_path is None else str(file_path), **options)
